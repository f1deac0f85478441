"""Blocks run alone on the simulated accelerator: their bytes are those of the profile, their times those of a run."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import hightide
import models
from hightide.ir.activation import Activation
from hightide.ir.block import Affine, CallSpec, ModelProfile
from hightide.ir.costs import Costs
from hightide.ir.machine import Machine, Speeds, subsets
from hightide.profiler.model.model_profile import profile_calls
from hightide.rehearsal.stage import Stage, _plan
from hightide.runtime.blocks import compiled
from hightide.runtime.run import Run
from unit.planner.profiles import forecast_of
from unit.rehearsal.rehearsals import rehearse
from waiting import OwnThreads

CPU = torch.device("cpu")

FAST = Machine("fast", "made up", tuple(Speeds(busy, (1e12,) * len(busy)) for busy in subsets()), latency_s=0.0)


def rehearsed(model: nn.Module, batch: Any, **options: Any) -> tuple[list[CallSpec], Costs]:
    profile, costs = _rehearsed(model, batch, **options)
    return _kinds(profile), costs


def _rehearsed(model: nn.Module, batch: Any, **options: Any) -> tuple[ModelProfile, Costs]:
    return rehearse(model, torch.optim.AdamW(model.parameters()), batch, device=CPU, **options)


def _kinds(profile: ModelProfile) -> list[CallSpec]:
    first = {call.kind: call for call in reversed(profile.calls)}
    return [first[kind] for kind in range(len(first))]


def _heads(profile: ModelProfile) -> list[int]:
    """The kinds of call that are measured with the fused loss, and not for themselves."""
    return [call.kind for call in _kinds(profile) if profile.blocks[call.block].lazy_head]


@pytest.mark.parametrize("name, num_heads", [("llama_tied", 1), ("gpt2", 1), ("sequential", 0)])
def test_every_kind_of_call_is_measured_and_its_bytes_are_the_profiles(name: str, num_heads: int) -> None:
    """The profile's bytes come from tensors without values, by another way. A head is measured with the fused loss."""
    model, batch = models.ZOO[name]()
    profile, costs = _rehearsed(model, batch, sizes=[2, 6])
    calls, heads = _kinds(profile), _heads(profile)
    assert len(costs.calls) == len(costs.peaks) == len(calls)
    assert len(heads) == num_heads and (costs.loss is not None) == bool(heads)
    if costs.loss is not None:
        assert costs.loss.forward_s > 0 and costs.loss.backward_s > 0
    for call, cost, peaks in zip(calls, costs.calls, costs.peaks, strict=True):
        if call.kind in heads:
            assert not cost.forward_s.points
            continue
        assert [point.num_samples for point in cost.forward_s.points] == ([2, 6] if call.splittable else [6])
        assert min(cost.forward_s.values) > 0
        assert bool(cost.backward_s.points) == call.needs_backward
        for point in peaks.forward_bytes.points:
            assert point.value == call.forward_peak.at(point.num_samples)
        for point in peaks.kept_bytes.points:
            assert point.value == call.kept.at(point.num_samples)
        for point in peaks.backward_bytes.points:
            assert 0 < point.value <= call.backward_peak.at(point.num_samples)
        assert (cost.selective is None) == (call.selective is None)
        if call.selective is not None:
            assert cost.selective is not None and cost.selective.is_measured and peaks.selective_bytes.points
            for point in peaks.selective_bytes.points:
                assert point.value == call.selective.kept.at(point.num_samples)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(models.ZOO))
def test_every_model_is_rehearsed(name: str) -> None:
    profile, costs = _rehearsed(*models.ZOO[name]())
    heads = _heads(profile)
    assert (costs.loss is not None) == bool(heads)
    for call, cost in zip(_kinds(profile), costs.calls, strict=True):
        assert bool(cost.forward_s.points) == (call.kind not in heads)
        assert bool(cost.backward_s.points) == (call.needs_backward and call.kind not in heads)


def test_the_forecast_of_a_step_is_near_the_step() -> None:
    model, batch = models.llama(num_layers=6)
    optimizer = torch.optim.AdamW(model.parameters())
    profile, costs = rehearse(model, optimizer, batch, device=CPU)
    limits = hightide.Limits(gpu="64MiB", host="64MiB")
    model, optimizer = hightide.wrap(model, optimizer, batch, limits=limits, device="cpu", micro_batch=2)
    seconds = []
    for _ in range(5):
        started_s = time.perf_counter()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started_s)
    told = forecast_of(profile, hightide.stats(model).plan, costs, FAST).simulated.step_s
    assert told / 4 < min(seconds) < 4 * told  # other work shares the cores


def test_the_model_is_not_touched() -> None:
    model, batch = models.llama()
    seen: list[torch.Tensor] = []
    model.model.layers[0].register_forward_hook(lambda _, args, result: None)
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda _, args, result: seen.append(result.detach()))
    before = {name: (id(param), param.clone()) for name, param in model.named_parameters()}
    classes = [type(module) for module in model.modules()]
    seed = torch.get_rng_state()
    rehearsed(model, batch)
    assert all(isinstance(value, torch._subclasses.FakeTensor) for value in seen), "only the profile runs its hooks"
    assert [type(module) for module in model.modules()] == classes
    for name, param in model.named_parameters():
        assert id(param) == before[name][0] and torch.equal(param, before[name][1]) and param.grad is None
    assert torch.equal(torch.get_rng_state(), seed)


class Doubles:
    """A pre-hook that is an object, and part of the computation: without it the shapes do not match."""

    def __init__(self, calls: Counter[str]) -> None:
        self.calls = calls

    def __call__(self, _module: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
        self.calls["object"] += 1
        return torch.cat([args[0], args[0]], -1)


def test_the_probe_is_the_only_one_to_run_the_users_hooks() -> None:
    def counted(run: Callable[[nn.Module], Any]) -> Counter[str]:
        """By kind, how often hooks run."""
        calls: Counter[str] = Counter()

        def count(kind: str) -> Callable[..., None]:
            return lambda *_: calls.update([kind])

        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)))
        for block in model:
            block.register_forward_pre_hook(lambda _, args: (calls.update(["block"]), args[0].relu())[1])
            block[0].register_forward_pre_hook(count("inside"))
            block[0].register_full_backward_hook(count("backward"))
            block[2].register_forward_pre_hook(Doubles(calls))
            block[2].register_forward_hook(count("output"))
        handle = nn.modules.module.register_module_forward_pre_hook(count("global"))
        try:
            run(model)
            before = calls.copy()
            model(torch.ones(6, 8)).sum().backward()
        finally:
            handle.remove()
        assert set(calls - before) == {"block", "inside", "backward", "object", "output", "global"}, "all stay in place"
        return before

    batch = torch.ones(6, 8)
    probe = counted(lambda model: profile_calls(model, torch.optim.AdamW(model.parameters()), batch, None))
    assert counted(lambda model: rehearsed(model, batch)) == probe


class _Hook:
    """Holds what cannot be copied, as loggers do."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def look(self, _module: nn.Module, args: Any) -> None:
        pass


def test_what_hooks_refer_to_is_not_copied() -> None:
    model, batch = models.llama()
    model.model.layers[0].mlp.register_forward_pre_hook(_Hook().look)
    _, costs = rehearsed(model, batch)
    assert costs.calls[1].forward_s.at(6) > 0


def test_a_model_without_values_is_rehearsed() -> None:
    with torch.device("meta"):
        model, _ = models.llama()
    _, costs = rehearsed(model, models.token_batch())
    assert all(param.is_meta for param in model.parameters())
    assert costs.calls[1].forward_s.at(6) > 0


def test_nothing_stays_behind() -> None:
    def alive() -> set[int]:
        gc.collect()
        return {id(kept) for kept in gc.get_objects() if type(kept) in (Stage, Run)}

    threads, others = OwnThreads(prefix=""), alive()
    rehearsed(*models.llama())
    assert not alive() - others
    assert not threads.alive()


def test_blocks_are_compiled_as_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[torch.Size] = []
    compile = torch.compile

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        shapes.append(max((value.shape for value in inputs if value.dim() == 3 and len(value) > 1), default=None))
        return graph.forward

    monkeypatch.setattr(compiled.torch, "compile", lambda fn, **options: compile(fn, backend=backend, **options))
    _, costs = rehearsed(*models.llama(), compile=True, sizes=[3, 6])
    torch._dynamo.reset()
    assert costs.source == "measured on the simulated accelerator, compiled"
    assert [shape[0] for shape in shapes] == [3, 6, 3, 6]  # recomputed and kept; norms and embeddings are not compiled


def test_a_tile_of_the_loss_of_very_long_sequences() -> None:
    """It is planned as so many samples, of which each would be a whole sequence: terabytes that nobody takes."""
    model, batch = models.llama()
    profile, costs = _rehearsed(model, batch)
    head = next(call for call in profile.calls if profile.blocks[call.block].lazy_head)
    long = replace(head, block=0, kind=0, input_grads=Affine(0, 800 * 2**20), outputs=Affine(0, 2**35))
    block = replace(profile.blocks[head.block], index=0)
    params = tuple(spec for spec in profile.params if spec.name in block.params)
    alone = replace(profile, num_samples=8192, params=params, blocks=(block,), calls=(long,))
    assert _plan(alone, 8192, Activation.RECOMPUTE).gpu_limit_bytes > 2**40
    assert costs.loss is not None
