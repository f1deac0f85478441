"""The update on the host, in C or by torch, however shared and cut: the same bits, and what torch.optim gives."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hightide.ir.chunk import ALIGN_NUMEL
from hightide.optim import build
from hightide.optim.adam import AdamRule, AdamWHyper, AdamWRule
from hightide.optim.host_update import HostUpdate
from hightide.optim.operands import Operands, Part
from hightide.optim.sgd import SGDRule
from hightide.runtime.chunks.remainder import split

RULE = AdamWRule()
HYPER = AdamWHyper(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, maximize=False)
HYPERS = {
    "plain": HYPER,
    "no decay, maximize": AdamWHyper(3e-3, 0.8, 0.95, 1e-4, 0.0, True),
    "lerp from the gradient": AdamWHyper(3e-3, 0.3, 0.95, 1e-4, 0.01, False),
}
KINDS = {
    "fp32": (torch.float32, None),
    "bf16 from fp32": (torch.float32, torch.bfloat16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16 in parts": (torch.bfloat16, torch.bfloat16),
    "bf16 in parts, from fp32": (torch.float32, torch.bfloat16),
    "fp16 from fp32": (torch.float32, torch.float16),
    "fp16": (torch.float16, torch.float16),
}
IN_PARTS = {"bf16 in parts", "bf16 in parts, from fp32"}
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def operands(kind: str, numel: int, seed: int = 0) -> Operands:
    grad, param = KINDS[kind]
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(numel, generator=generator)
    gradient = torch.randn(numel, generator=generator).mul_(0.1).to(grad)
    out = None if param is None else torch.zeros(numel, dtype=param)
    moments = torch.zeros(numel), torch.zeros(numel)
    if kind in IN_PARTS:
        remainder = torch.zeros(numel, dtype=torch.int16)
        split(master, out, remainder)
        return Operands(None, gradient, moments, out, remainder)
    return Operands(master, gradient, moments, out)


def written(ops: Operands) -> list[Tensor]:
    every = (ops.master, *ops.states, ops.param, ops.remainder)
    return [tensor for tensor in every if tensor is not None]


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def num_different(one: Operands, other: Operands) -> list[int]:
    return [int((bits(a) != bits(b)).sum()) for a, b in zip(written(one), written(other), strict=True)]


@needs_compiler
@pytest.mark.parametrize("scale", [1.0, 0.37, 0.0])
@pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS)
@pytest.mark.parametrize("kind", KINDS)
def test_c_and_torch_give_the_same_bits(lanes, kind, hyper, scale):
    """On processors with fused multiply-add, which torch's kernel is compiled for; else to rounding."""
    numel = 40 * ALIGN_NUMEL  # no tail: torch's rounds differently
    results = []
    for kernel in ("c", "torch"):
        ops = operands(kind, numel)
        for step in range(1, 6):
            HostUpdate(RULE, lanes.update_threads, kernel, 8 * ALIGN_NUMEL).update(ops, step, hyper, scale)
        results.append(ops)
    same = torch.equal(results[0].master_values(), operands(kind, numel).master_values())
    assert not same or (scale == 0.0 and not hyper.weight_decay)
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert num_different(*results) == [0] * len(written(results[0]))
    for one, other in zip(*map(written, results), strict=True):
        torch.testing.assert_close(one, other)


@needs_compiler
def test_twenty_steps_equal_torch_optim(lanes):
    """Not the fused kernel but AdamW as users make it, with the tolerance of the rule's own test."""
    numel = 4097
    ops, update = operands("fp32", numel), HostUpdate(RULE, lanes.update_threads, "c", 4 * ALIGN_NUMEL)
    reference = nn.Parameter(ops.master.clone())
    optimizer = torch.optim.AdamW([reference], lr=1e-2, weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 21):
        reference.grad = torch.randn(numel, generator=generator)
        ops.grad.copy_(reference.grad)
        optimizer.step()
        update.update(ops, step, HYPER)
    torch.testing.assert_close(ops.master, reference.detach(), rtol=3e-7, atol=2e-7)
    torch.testing.assert_close(ops.states[0], optimizer.state[reference]["exp_avg"], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ops.states[1], optimizer.state[reference]["exp_avg_sq"], rtol=1e-6, atol=1e-7)


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_c_gives_the_same_bits_however_a_range_is_cut(lanes, kind):
    """Anywhere, not only at aligned elements: vectors' bodies and tails round alike."""
    numel = 5000
    whole, parts = operands(kind, numel), operands(kind, numel)
    one, many = (
        HostUpdate(RULE, lanes.update_threads, "c", 1 << 20),
        HostUpdate(RULE, lanes.update_threads, "c", ALIGN_NUMEL),
    )
    for step in range(1, 4):
        one.update(whole, step, HYPER, 0.7)
        for start, stop in itertools.pairwise([0, 1, 8, 23, 1000, 1001, 4990, numel]):
            many.update(parts[start:stop], step, HYPER, 0.7)
    assert not any(num_different(whole, parts))


@needs_compiler
@pytest.mark.parametrize("scale", [0.37, 0.0])
@pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS)
@pytest.mark.parametrize("kind", KINDS)
def test_in_two_parts_it_gives_the_same_bits(lanes, kind, hyper, scale):
    """The first leaves the states as they are; the second, everything else."""
    numel = 3001
    whole, parts = operands(kind, numel), operands(kind, numel)
    update = HostUpdate(RULE, lanes.update_threads, "c", 8 * ALIGN_NUMEL)
    assert update.has_parts(parts, hyper)
    for step in range(1, 5):
        update.update(whole, step, hyper, scale)
        states, params = [state.clone() for state in parts.states], parts.master_values().clone()
        update.update(parts, step, hyper, scale, Part.PARAMS)
        assert all(map(torch.equal, states, parts.states))
        assert torch.equal(bits(parts.master_values()), bits(whole.master_values()))
        assert scale == 0.0 or not torch.equal(parts.master_values(), params)
        written_first = [
            tensor.clone() for tensor in (parts.master, parts.param, parts.remainder) if tensor is not None
        ]
        update.update(parts, step, hyper, scale, Part.STATES)
        others = [tensor for tensor in (parts.master, parts.param, parts.remainder) if tensor is not None]
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(written_first, others, strict=True))
        assert not any(num_different(whole, parts))


def test_what_cannot_be_done_in_parts(lanes):
    """A decay by way of the gradient reads the parameter of before; torch's operations do all of it at once."""
    coupled = replace(HYPER, decoupled=False)
    ops = operands("fp32", 8)
    assert not HostUpdate(RULE, lanes.update_threads, "torch").has_parts(ops, HYPER)
    assert not AdamRule().has_parts(coupled) and AdamRule().has_parts(replace(coupled, weight_decay=0.0))
    assert not SGDRule().has_parts(SGDRule().read(torch.optim.SGD([nn.Parameter(torch.zeros(1))]).param_groups[0]))


@pytest.mark.parametrize("kernel", ["torch", pytest.param("c", marks=needs_compiler)])
@pytest.mark.parametrize("kind", KINDS)
def test_infinities_and_nans_are_what_torch_makes_of_them(lanes, kind, kernel):
    values = [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3e38, 1e-40, 65519.0, 65520.0, 6e-8, 3e-8]
    ops = operands(kind, ALIGN_NUMEL)
    ops.grad[: len(values)] = torch.tensor(values).to(ops.grad.dtype)
    if ops.master is None:
        split(torch.tensor(values), ops.param[20:31], ops.remainder[20:31])
    else:
        ops.master[20:31] = torch.tensor(values)
    reference = nn.Parameter(ops.master_values().clone())
    reference.grad = ops.grad.float()
    torch.optim.AdamW([reference], lr=1e-2, weight_decay=0.1).step()
    HostUpdate(RULE, lanes.update_threads, kernel).update(ops, 1, HYPER)
    expected = reference.detach()
    found = ops.master_values()
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=3e-7, atol=2e-7)
    assert torch.isnan(found[:3]).all() and torch.isnan(found[22])
    if ops.param is not None:
        rounded = found.to(ops.param.dtype)
        torch.testing.assert_close(ops.param, rounded, equal_nan=True, rtol=0, atol=0)


@needs_compiler
def test_conversions_of_every_half_and_of_the_halves_between():
    """The kernel converts in integers. With no gradient, no decay and scale 0 it only rounds the master."""
    idle = AdamWHyper(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, maximize=False)
    kernel = RULE.kernel()
    assert kernel is not None
    for dtype in (torch.bfloat16, torch.float16):
        every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
        exact = every.float()
        steps = (exact.view(torch.int32)[:, None] + torch.tensor([0, 1, -1])).view(torch.float32).reshape(-1)
        between = exact.double().add(exact.double().roll(1)).div(2).float()  # ties
        master = torch.cat([steps, between, torch.randn(4096)]).contiguous()
        zeros = torch.zeros_like(master)
        ops = Operands(master.clone(), zeros, (zeros.clone(), zeros.clone()), torch.zeros(len(master), dtype=dtype))
        kernel.share(ops, 1, idle, 0.0, 4096)(0)
        assert torch.equal(ops.master.isnan(), master.isnan())
        torch.testing.assert_close(ops.param, master.to(dtype), equal_nan=True, rtol=0, atol=0)
        # And as gradients: the first moment of a first step is (1 - beta1) times the gradient.
        read = Operands(torch.zeros(len(every)), every, tuple(torch.zeros(2, len(every))), torch.zeros_like(every))
        kernel.share(read, 1, idle, 1.0, 4096)(0)
        torch.testing.assert_close(read.states[0], torch.zeros(len(every)).lerp(exact, 0.1), equal_nan=True)


@pytest.mark.parametrize("kernel", ["torch", pytest.param("c", marks=needs_compiler)])
def test_threads_leave_the_gradient_and_what_lies_beside_the_range_alone(lanes, kernel):
    ops, kept = operands("bf16", 20 * ALIGN_NUMEL), operands("bf16", 20 * ALIGN_NUMEL)
    part = slice(3 * ALIGN_NUMEL, 17 * ALIGN_NUMEL)
    HostUpdate(RULE, lanes.update_threads, kernel, ALIGN_NUMEL).update(ops[part], 1, HYPER)
    assert torch.equal(ops.grad, kept.grad)
    for new, old in zip(written(ops), written(kept), strict=True):
        assert torch.equal(new[: part.start], old[: part.start]) and torch.equal(new[part.stop :], old[part.stop :])
        assert (new[part] != old[part]).float().mean() > 0.9


def test_a_failing_tile_stops_the_update_with_its_own_error(lanes):
    class Broken(AdamWRule):
        def update(self, *args, **kwargs):
            raise ZeroDivisionError("a tile")

    with pytest.raises(ZeroDivisionError, match="a tile"):
        HostUpdate(Broken(), lanes.update_threads, "torch", ALIGN_NUMEL).update(operands("fp32", 1000), 1, HYPER)


def test_dtypes_that_the_kernel_does_not_know_run_on_torch(lanes):
    master = torch.randn(300)
    expected, out = master.clone(), torch.zeros(300, dtype=torch.float64)
    grad = torch.randn(300)
    HostUpdate(RULE, lanes.update_threads).update(Operands(master, grad, tuple(torch.zeros(2, 300)), out), 1, HYPER)
    RULE.update(Operands(expected, grad, tuple(torch.zeros(2, 300))), 1, HYPER)
    assert torch.equal(master, expected) and torch.equal(out, expected.double())


# ---- building


@pytest.fixture
def unloaded() -> Iterator[None]:
    build.load.cache_clear()
    yield
    build.load.cache_clear()


def test_without_a_compiler_torch_does_it_and_says_so_once(lanes, unloaded, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "/nowhere/cc")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(RuntimeWarning, match=r"no C compiler '/nowhere/cc'.*torch's operations.*HIGHTIDE_KERNELS=0"):
        update = HostUpdate(RULE, lanes.update_threads)
    assert update.kernel == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert HostUpdate(RULE, lanes.update_threads).kernel == "torch"
    with pytest.raises(RuntimeError, match="no compiled kernel"):
        HostUpdate(RULE, lanes.update_threads, "c")


def test_the_environment_switches_the_kernel_off(lanes, unloaded, monkeypatch):
    monkeypatch.setenv("HIGHTIDE_KERNELS", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert HostUpdate(RULE, lanes.update_threads).kernel == "torch"


@needs_compiler
@pytest.mark.long  # with a smaller source: test_two_processes_at_once_both_get_it in test_build.py
def test_processes_that_build_at_once_all_get_the_kernel(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    code = "from hightide.optim.adam import AdamWRule; print(AdamWRule().kernel() is not None)"
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=100)[0].strip() for process in both] == ["True", "True"]
    kept = Path(tmp_path, "hightide", "kernels").iterdir()
    assert sorted(path.suffix for path in kept) == [".sha256", ".so"]
