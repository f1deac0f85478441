"""A rule whose states are neither fp32 nor of the parameter's shape: it is declared in one place, and layouts, plans,
updates, state dicts and moves follow."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import hightide
from hightide.ir.chunk import ALIGN_NUMEL
from hightide.ir.plan import Plan
from hightide.ir.state_spec import StateSpec, StateSpecs
from hightide.ir.tier import Tier
from hightide.optim import registry
from hightide.optim.rule import Rule
from hightide.planner.layout import pack
from hightide.planner.placement import Placement
from hightide.planner.solution import Solution
from hightide.planner.verify.check_plan import check_plan
from hightide.runtime.surgery import run_of
from unit.planner.profiles import Sketch, build, call, param

TILE = 128  # elements with one scale
STEPS = 4


def momentum_step(master: Tensor, grad: Tensor, codes: Tensor, scales: Tensor, lr: float, momentum: float) -> None:
    """SGD with momentum, whose buffer is kept as 8-bit codes with a scale per tile. Any number of whole tiles. The code
    of zero is zero: so the space between parameters stays zero, whatever is loaded beside it."""
    codes = codes.view(torch.int8)
    buffer = codes.float().view(-1, TILE).mul_(scales[:, None])
    buffer.mul_(momentum).add_(grad.view(-1, TILE))
    master.add_(buffer.view(-1), alpha=-lr)
    scales.copy_(torch.maximum(buffer.amax(1), -buffer.amin(1)).div_(127))
    buffer.div_(scales.clamp(min=1e-30)[:, None]).round_()
    codes.copy_(buffer.view(-1))


class NarrowSGD(torch.optim.Optimizer):
    """The plain reference, parameter by parameter; what is left of the last tile is zero."""

    def __init__(self, params: Any, lr: float = 0.05, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                self._update(one, group)

    def _update(self, one: Tensor, group: Mapping[str, Any]) -> None:
        state, numel = self.state[one], one.numel()
        num_tiles = -(-numel // TILE)
        if not state:
            state["codes"] = torch.zeros(one.shape, dtype=torch.uint8)
            state["scales"] = torch.zeros(num_tiles)

        def padded(value: Tensor) -> Tensor:
            return torch.cat([value.flatten(), value.new_zeros(num_tiles * TILE - numel)])

        master, codes = padded(one), padded(state["codes"])
        momentum_step(master, padded(one.grad), codes, state["scales"], group["lr"], group["momentum"])
        one.copy_(master[:numel].view_as(one))
        state["codes"].copy_(codes[:numel].view_as(one))


@dataclass(frozen=True)
class NarrowHyper:
    lr: float
    momentum: float


@dataclass(frozen=True)
class NarrowRule(Rule):
    name: ClassVar = "narrow"
    optimizer: ClassVar[type[torch.optim.Optimizer]] = NarrowSGD
    step_name: ClassVar[str | None] = None

    @property
    def states(self) -> StateSpecs:
        return StateSpec("codes", "uint8"), StateSpec("scales", "float32", per_numel=TILE)

    def read(self, group: Mapping[str, Any]) -> NarrowHyper:
        return NarrowHyper(float(group["lr"]), float(group["momentum"]))

    def apply(self, master: Tensor, grad: Tensor, states: tuple[Tensor, ...], step: int, hyper: NarrowHyper) -> None:
        momentum_step(master, grad, *states, hyper.lr, hyper.momentum)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "RULES", (*registry.RULES, NarrowRule))


WIDTH = 20  # a weight of 400 elements: three tiles and a tail
LIMITS = hightide.Limits(gpu="1GiB", host="1GiB")
HOMES = {"streamed": (Tier.HOST, Tier.HOST), "refreshed": (Tier.GPU, Tier.HOST), "resident": (Tier.GPU, Tier.GPU)}


def made(dtype: torch.dtype) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))).to(dtype)
    return model, [(torch.randn(6, WIDTH).to(dtype), torch.randn(6, WIDTH).to(dtype)) for _ in range(2 * STEPS)]


def wrapped(model: nn.Module, batch: Tensor, where: str, update: str = "deferred") -> tuple[nn.Module, Any]:
    optimizer = NarrowSGD(model.parameters())
    plan: Plan = hightide.plan(model, optimizer, batch, limits=LIMITS, update=update, micro_batch=6)
    params, states = HOMES[where]
    plan = replace(plan, blocks=tuple(replace(block, params=params, states=states) for block in plan.blocks))
    assert plan.profile is not None
    slots, grad_slots = Placement(plan).widest_tick({one.block for one in plan.profile.calls})
    plan = replace(plan, num_slots=slots and slots + 1, num_grad_slots=grad_slots and grad_slots + 1)
    return hightide.wrap(model, optimizer, batch, plan=plan)


def train(model: nn.Module, optimizer: Any, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    losses = []
    for inputs, targets in batches:
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same_states(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["state"].keys() == other["state"].keys()
    for number, state in other["state"].items():
        for name, value in state.items():
            assert value.dtype == one["state"][number][name].dtype
            assert torch.equal(value, one["state"][number][name]), (number, name)


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
@pytest.mark.parametrize("where", HOMES)
def test_it_equals_its_plain_reference(where: str, update: str) -> None:
    model, batches = made(torch.float32)
    reference = copy.deepcopy(model)
    plain = NarrowSGD(reference.parameters())
    expected = train(reference, plain, batches)
    model, optimizer = wrapped(model, batches[0][0], where, update)
    assert train(model, optimizer, batches) == expected
    assert_same_states(optimizer.state_dict(), plain.state_dict())
    for key, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[key], value)
    run = run_of(model)
    for place in run.chunks.placed:
        numel = place.chunk.optimised_numel
        assert place.chunk.state_bytes == -(-numel // 256) * 256 + 4 * numel // TILE
    hightide.unwrap(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_state_dict_resumes_with_the_same_bits_on_another_plan(dtype: torch.dtype) -> None:
    model, batches = made(dtype)
    model, optimizer = wrapped(model, batches[0][0], "streamed")
    train(model, optimizer, batches[:STEPS])
    saved = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    expected = train(model, optimizer, batches[STEPS:])
    ended = optimizer.state_dict(), copy.deepcopy(model.state_dict())
    hightide.unwrap(model)
    for where in HOMES:
        model, _ = made(dtype)
        model, optimizer = wrapped(model, batches[0][0], where)
        model.load_state_dict(saved[1])
        optimizer.load_state_dict(saved[0])
        assert_same_states(optimizer.state_dict(), saved[0])
        assert train(model, optimizer, batches[STEPS:]) == expected
        assert_same_states(optimizer.state_dict(), ended[0])
        assert all(torch.equal(model.state_dict()[key], value) for key, value in ended[1].items())
        hightide.unwrap(model)


def test_a_checkpoint_resumes_on_another_plan(tmp_path: Path) -> None:
    model, batches = made(torch.float32)
    model, optimizer = wrapped(model, batches[0][0], "streamed")
    train(model, optimizer, batches[:STEPS])
    saved = copy.deepcopy(optimizer.state_dict())
    path = hightide.save(model, optimizer, tmp_path, step=STEPS, wait=True).path
    expected = train(model, optimizer, batches[STEPS:])
    hightide.unwrap(model)
    for where in ("refreshed", "resident"):
        model, _ = made(torch.float32)
        model, optimizer = wrapped(model, batches[0][0], where)
        train(model, optimizer, batches[:1])
        hightide.load(model, optimizer, path)
        assert_same_states(optimizer.state_dict(), saved)
        assert train(model, optimizer, batches[STEPS:]) == expected
        hightide.unwrap(model)


def test_states_of_another_shape_or_dtype_are_refused() -> None:
    model, batches = made(torch.float32)
    model, optimizer = wrapped(model, batches[0][0], "streamed")
    train(model, optimizer, batches[:1])
    saved = optimizer.state_dict()
    for name, value, words in (
        ("codes", saved["state"][0]["codes"].float(), "keeps codes in torch.uint8"),
        ("scales", torch.zeros(1), r"has the shape \(1,\)"),
    ):
        broken = copy.deepcopy(saved)
        broken["state"][0][name] = value
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict(broken)
    assert_same_states(optimizer.state_dict(), saved)
    hightide.unwrap(model)


def test_states_move_to_another_plan() -> None:
    model, batches = made(torch.bfloat16)
    model, optimizer = wrapped(model, batches[0][0], "streamed")
    train(model, optimizer, batches[:STEPS])
    before, run = optimizer.state_dict(), run_of(model)
    blocks = tuple(replace(block, params=Tier.GPU, states=Tier.GPU) for block in run.plan.blocks)
    plan = replace(run.plan, blocks=blocks, num_slots=0, num_grad_slots=0)
    assert plan.profile is not None
    check_plan(plan.profile, plan)
    run.move_to(Solution.of(plan.profile, plan))
    assert_same_states(optimizer.state_dict(), before)
    train(model, optimizer, batches[STEPS:])
    hightide.unwrap(model)


def test_a_plan_says_what_is_kept_and_is_for_no_other_optimizer() -> None:
    model, batches = made(torch.float32)
    plan: Plan = hightide.plan(model, NarrowSGD(model.parameters()), batches[0][0], limits=LIMITS)
    assert "1 in uint8, 1 in float32 per 128" in plan.explain()
    with pytest.raises(ValueError, match=r"codes \(uint8\), scales \(float32, one per 128\) of each parameter"):
        hightide.wrap(model, torch.optim.AdamW(model.parameters()), batches[0][0], plan=plan)


def test_scales_must_divide_what_updates_are_cut_at() -> None:
    profile = build([param("a", 100)], [Sketch("x", ["a"])], [call(0)])
    with pytest.raises(ValueError, match=f"multiples of {ALIGN_NUMEL}"):
        pack(profile, 4096, (StateSpec("scales", "float32", per_numel=96),))
    with pytest.raises(ValueError, match="float4"):
        StateSpec("codes", "float4")
    with pytest.raises(ValueError, match="'master'"):
        pack(profile, 4096, (StateSpec("master", "float32"),))
