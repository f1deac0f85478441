"""Every registered rule on ranges: equal to torch's own optimizer, however cut, scaled and computed.

`OPTIONS` has at least one set of options for each rule: a rule without any fails here. Tiers and state dicts of every
rule are in tests/parity/test_optimizers.py."""

from __future__ import annotations

import copy
import itertools
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hightide.ir.chunk import ALIGN_NUMEL
from hightide.optim.adam import AdamHyper, AdamRule, AdamWHyper
from hightide.optim.host_update import HostUpdate
from hightide.optim.operands import Operands
from hightide.optim.registry import RULES, rule_for
from hightide.optim.rule import Rule
from hightide.optim.sgd import SGDRule
from hightide.runtime.lanes.lanes import Lanes

OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "adamw": {
        "default": {"lr": 1e-3},
        "all": {"lr": 3e-2, "betas": (0.3, 0.95), "eps": 1e-4, "weight_decay": 0.3, "maximize": True},
        "tensors": {"lr": torch.tensor(2e-3), "foreach": False},
        "fused": {"lr": 1e-3, "fused": True},
    },
    "adam": {
        "default": {"lr": 1e-3},
        "decay": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.3},
        "decoupled": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.3, "decoupled_weight_decay": True},
        "all": {"lr": 3e-2, "betas": (0.3, 0.95), "eps": 1e-4, "weight_decay": 0.3, "maximize": True},
        "tensors": {"lr": torch.tensor(2e-3), "foreach": False},
    },
    "sgd": {
        "plain": {"lr": 1e-2},
        "decay": {"lr": 1e-2, "weight_decay": 0.3, "maximize": True},
        "momentum": {"lr": 1e-2, "momentum": 0.9},
        "dampening": {"lr": 3e-2, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
        "nesterov": {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "foreach": True},
        "all": {"lr": 1e-2, "momentum": 0.7, "dampening": 0.2, "weight_decay": 0.1, "maximize": True, "fused": True},
        "tensors": {"lr": torch.tensor(1e-2), "momentum": 0.9, "foreach": False},
    },
}
CASES = [(kind, name) for kind in RULES for name in OPTIONS.get(kind.name, {"no options in this test": {}})]
every = pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{kind.name} {name}" for kind, name in CASES])
KINDS = {
    "fp32": (torch.float32, None),
    "bf16 from fp32": (torch.float32, torch.bfloat16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
}
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def made(kind: type[Rule], name: str, *params: nn.Parameter) -> torch.optim.Optimizer:
    options = copy.deepcopy(OPTIONS[kind.name][name])  # a learning rate that is a tensor may be changed in place
    return kind.optimizer(params or [nn.Parameter(torch.zeros(1))], **options)  # type: ignore[arg-type]


def operands(rule: Rule, dtypes: str, numel: int, seed: int = 0) -> Operands:
    grad, param = KINDS[dtypes]
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(numel, generator=generator)
    gradient = torch.randn(numel, generator=generator).mul_(0.1).to(grad)
    out = None if param is None else torch.zeros(numel, dtype=param)
    return Operands(master, gradient, tuple(torch.zeros(numel) for _ in rule.states), out)


def written(ops: Operands) -> list[Tensor]:
    return [ops.master, *ops.states, *([] if ops.param is None else [ops.param])]


def test_every_rule_is_tested() -> None:
    assert {kind.name for kind in RULES} == set(OPTIONS)


@every
@pytest.mark.parametrize("numel", [7, 4097])
@pytest.mark.parametrize("kernel", ["torch", pytest.param("c", marks=needs_compiler)])
def test_ten_steps_equal_torch(lanes: Lanes, kind: type[Rule], name: str, numel: int, kernel: str) -> None:
    """With a scheduler and gradients that are scaled, as clipping scales them. Tolerance: two roundings of a weight of
    size one, for torch.optim's default is not the fused kernel."""
    reference = nn.Parameter(torch.zeros(numel))
    optimizer = made(kind, name, reference)
    rule = rule_for(optimizer)
    ops = operands(rule, "fp32", numel)
    reference.data.copy_(ops.master)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    if kernel == "c" and rule.kernel() is None:
        pytest.skip("this rule has no kernel in C")
    update, generator = (
        HostUpdate(rule, lanes.update_threads, kernel, 4 * ALIGN_NUMEL),
        torch.Generator().manual_seed(1),
    )
    for step in range(1, 11):
        ops.grad.copy_(torch.randn(numel, generator=generator))
        kept = ops.grad.clone()
        reference.grad = ops.grad * 0.5
        hyper = rule.read(optimizer.param_groups[0])
        optimizer.step()
        scheduler.step()
        update.update(ops, step, hyper, 0.5)
        assert torch.equal(ops.grad, kept)
        torch.testing.assert_close(ops.master, reference.detach(), rtol=3e-7, atol=2e-7)
    for moment, name_there in zip(ops.states, [state.name for state in rule.states], strict=True):
        torch.testing.assert_close(moment, optimizer.state[reference][name_there], rtol=1e-6, atol=1e-7)


@needs_compiler
@every
@pytest.mark.parametrize("dtypes", KINDS)
def test_c_and_torch_give_the_same_bits(lanes: Lanes, kind: type[Rule], name: str, dtypes: str) -> None:
    """On processors with fused multiply-add, which torch's kernels are compiled for; else to rounding."""
    optimizer = made(kind, name)
    rule, results = rule_for(optimizer), []
    hyper = rule.read(optimizer.param_groups[0])
    if rule.kernel() is None:
        pytest.skip("this rule has no kernel in C")
    for kernel in ("c", "torch"):
        ops = operands(rule, dtypes, 40 * ALIGN_NUMEL)
        for step, scale in enumerate([1.0, 0.37, 0.0, 1.0], 1):
            HostUpdate(rule, lanes.update_threads, kernel, 8 * ALIGN_NUMEL).update(ops, step, hyper, scale)
        results.append(ops)
    assert not torch.equal(results[0].master, operands(rule, dtypes, 40 * ALIGN_NUMEL).master)
    exact = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    for one, other in zip(*map(written, results), strict=True):
        assert torch.equal(one, other) if exact else torch.allclose(one, other)


@every
def test_cuts_at_aligned_elements_do_not_change_a_bit(kind: type[Rule], name: str) -> None:
    numel = 40 * ALIGN_NUMEL + 13
    optimizer = made(kind, name)
    rule = rule_for(optimizer)
    hyper = rule.read(optimizer.param_groups[0])
    whole, parts = operands(rule, "fp32", numel), operands(rule, "fp32", numel)
    scratch = torch.empty(3 * ALIGN_NUMEL)
    for step in range(1, 4):
        rule.update(whole, step, hyper, 0.3)
        for start, stop in itertools.pairwise([0, ALIGN_NUMEL, 5 * ALIGN_NUMEL, 38 * ALIGN_NUMEL, numel]):
            rule.update(parts[start:stop], step, hyper, 0.3, scratch)
    for one, other in zip(written(whole), written(parts), strict=True):
        assert torch.equal(one, other)


@every
def test_hyper_parameters_are_copied_by_value(kind: type[Rule], name: str) -> None:
    optimizer = made(kind, name)
    rule = rule_for(optimizer)
    hyper = rule.read(optimizer.param_groups[0])
    before = repr(hyper)
    group = optimizer.param_groups[0]
    for option, value in list(group.items()):
        if isinstance(value, Tensor):
            value.fill_(0.123)
        elif isinstance(value, float) and option != "momentum":
            group[option] = 0.123
    assert repr(hyper) == before and rule.read(group) != hyper


@pytest.mark.parametrize("option", ["differentiable", "amsgrad", "capturable"])
@pytest.mark.parametrize("kind", RULES, ids=[kind.name for kind in RULES])
def test_options_that_matter_are_refused_by_name(kind: type[Rule], option: str) -> None:
    optimizer = kind.optimizer([nn.Parameter(torch.zeros(2))], lr=0.1)  # type: ignore[call-arg]
    if option not in optimizer.param_groups[0]:
        pytest.skip(f"torch's {kind.name} has no such option")
    optimizer.param_groups[0][option] = True
    with pytest.raises(ValueError, match=rf"{kind.optimizer.__name__}\({option}=True\).*{option}=False"):
        rule_for(optimizer)


def test_other_optimizers_are_refused_with_the_list_and_the_way_to_add_one() -> None:
    class Mine(torch.optim.AdamW):
        pass

    params = [nn.Parameter(torch.zeros(2))]
    for optimizer in (torch.optim.RMSprop(params), torch.optim.Adagrad(params), Mine(params)):
        with pytest.raises(ValueError, match=rf"{type(optimizer).__name__} is not supported") as raised:
            rule_for(optimizer)
        for words in ("torch.optim.AdamW", "torch.optim.Adam", "torch.optim.SGD", "docs/optimizers.md"):
            assert words in str(raised.value)


def test_sgd_has_a_moment_only_with_momentum() -> None:
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))]
    one_of_two = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:], "momentum": 0.9}], lr=0.1)
    assert rule_for(torch.optim.SGD(params, lr=0.1)).states == ()
    assert [state.name for state in rule_for(one_of_two).states] == ["momentum_buffer"]
    params[1].grad = torch.ones(2)
    one_of_two.step()
    one_of_two.param_groups[1]["momentum"] = 0
    assert len(rule_for(one_of_two).states) == 1, "its buffer is still a state"


def test_momentum_that_comes_later_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    rule = rule_for(optimizer)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ValueError, match=r"momentum=0\.9.*wrap again with momentum"):
        rule.check(optimizer.param_groups[0])
    assert isinstance(rule, SGDRule) and not rule.keeps_states(rule.read({**optimizer.param_groups[0], "momentum": 0}))


def test_the_decay_of_adam_is_part_of_the_gradient_and_that_of_adamw_is_not() -> None:
    numbers = (1e-2, 0.9, 0.999, 1e-8, 0.5, False)
    assert not AdamHyper(*numbers).decoupled and AdamWHyper(*numbers).decoupled
    rule, ops = AdamRule(), operands(AdamRule(), "fp32", 8)
    ops.grad.zero_()
    rule.update(ops, 1, AdamHyper(*numbers))
    assert (ops.states[0] != 0).all()
    ops = operands(AdamRule(), "fp32", 8)
    ops.grad.zero_()
    rule.update(ops, 1, AdamWHyper(*numbers))
    assert (ops.states[0] == 0).all()
