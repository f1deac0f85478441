"""Updates on the host that write parameters first, and states when nobody waits: the same bits as in one part, and what
plain PyTorch gives, whatever the loop reads or changes in between."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hightide
import models
from each_value import each_value
from hightide.ir.action import Op
from hightide.ir.activation import Activation
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier
from hightide.optim.chunk_updates import ChunkUpdates
from hightide.runtime.lanes import thread_lives
from hightide.runtime.surgery import run_of

NUM_STEPS = 4
Pair = tuple[nn.Module, torch.optim.Optimizer]
Between = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def on_host(plan: Plan, settles: bool) -> Plan:
    way = {"params": Tier.HOST, "states": Tier.HOST, "activation": Activation.RECOMPUTE, "inputs": Tier.GPU}
    blocks = [replace(block, **way, settles=settles) if block.name else block for block in plan.blocks]
    blocks[1] = replace(blocks[1], params=Tier.GPU)  # refreshed
    widest = max(plan.layout.num_slots(chunk) for chunk in plan.layout.chunks)
    return replace(plan, blocks=tuple(blocks), num_slots=2 * widest + 1, num_grad_slots=2 * widest + 1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    return torch.optim.AdamW([{"params": params[::2]}, {"params": params[1::2], "lr": 3e-3}], lr=1e-2, eps=1e-4)


def half_coupled(model: nn.Module) -> torch.optim.Optimizer:
    """Of one group the update has one part, whatever the plan says."""
    params = list(model.parameters())
    groups = [{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.1}]
    return torch.optim.Adam(groups, lr=1e-2, eps=1e-4)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def built(make: Any, optimizer: Any = adamw, dtype: torch.dtype = torch.float32) -> tuple[Pair, Any]:
    torch.manual_seed(0)
    model, batch = make()
    model = model.to(dtype)
    return (model, optimizer(model)), batch


def wrapped(pair: Pair, batch: Any, settles: bool, **options: Any) -> Pair:
    limits = hightide.Limits(gpu="64MiB", host="64MiB")
    plan = on_host(hightide.plan(*pair, batch, limits=limits, micro_batch=2, **options), settles)
    model, optimizer = hightide.wrap(*pair, batch, plan=plan)
    return model, optimizer


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    pass


def train(
    pair: Pair, batch: Any, between: Between = nothing, backwards: int = 1, none: bool = True
) -> tuple[list[float], dict[str, Tensor], list[Tensor]]:
    """Losses, weights and moments. `between`: called right after each step, while states are still being written."""
    model, optimizer = pair
    losses = []
    for step in range(NUM_STEPS):
        for _ in range(backwards):
            loss = models.loss_of(model, batch) / backwards
            loss.backward()
            losses.append(loss.item())
        if step != 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        between(model, optimizer, step)
        optimizer.zero_grad(set_to_none=none)
    states = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    moments = [value.clone() for value in states if isinstance(value, Tensor)]
    return losses, {key: value.clone() for key, value in model.state_dict().items()}, moments


def settled(pair: Pair) -> int:
    """Chunks whose plan says so."""
    run = run_of(pair[0])
    assert run is not None
    return sum(place.settles for place in run.chunks.placed)


@pytest.fixture(autouse=True)
def _late_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second part begins late, so that who does not wait for it is seen."""
    run = thread_lives._run

    def late(task: Any, *rest: Any) -> None:
        if getattr(task.id, "op", None) is Op.SETTLE:
            time.sleep(0.004)
        run(task, *rest)

    monkeypatch.setattr(thread_lives, "_run", late)


def assert_same_bits(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(value, other[1][key]) for key, value in one[1].items())
    assert all(map(torch.equal, one[2], other[2]))


@pytest.mark.parametrize(
    ("optimizer", "dtype"), each_value((adamw, half_coupled, sgd), (torch.float32, torch.bfloat16, torch.float16))
)
def test_the_same_bits_as_in_one_part(optimizer: Any, dtype: torch.dtype) -> None:
    pair, batch = built(models.llama_tied, optimizer, dtype)
    options = {"gradients": "param"} if dtype is not torch.float32 else {}
    later = wrapped(pair, batch, True, **options)
    assert settled(later) >= 3
    found = train(later, batch)
    hightide.unwrap(later[0])
    pair, batch = built(models.llama_tied, optimizer, dtype)
    at_once = wrapped(pair, batch, False, **options)
    assert not settled(at_once)
    assert_same_bits(found, train(at_once, batch))
    hightide.unwrap(at_once[0])


def reads_moments(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Those of after this step; plain PyTorch has their sum here too."""
    total = sum(float(state["exp_avg"].abs().sum()) for state in optimizer.state.values())
    assert total > 0
    model.totals = [*getattr(model, "totals", []), total]  # type: ignore[assignment]


def halves_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """They are read for the states still."""
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)


def replaces_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for param in model.parameters():
        param.grad = torch.full(param.shape, 7.0)


def writes_moments(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def evaluates(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.arange(6).view(1, 6))
    model.train()


def loads_its_own_states(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def writes_parameters(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    values = {key: value * 0.99 for key, value in model.state_dict().items()}
    model.load_state_dict(values)


def decays_by_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """From the second step on."""
    for group in optimizer.param_groups:
        group["decoupled_weight_decay"] = False


WAYS = [
    reads_moments,
    halves_gradients,
    replaces_gradients,
    writes_moments,
    evaluates,
    loads_its_own_states,
    writes_parameters,
    decays_by_gradients,
]


@pytest.mark.parametrize("between", WAYS)
def test_who_looks_in_between_finds_what_plain_pytorch_has(between: Between) -> None:
    pair, batch = built(models.llama)
    plain = copy.deepcopy(pair[0])
    later = wrapped(pair, batch, True)
    none = between not in (halves_gradients, replaces_gradients)
    found = train(later, batch, between, none=none)
    expected = train((plain, adamw(plain)), batch, between, none=none)
    assert found[0] == pytest.approx(expected[0], rel=2e-6, abs=1e-6)
    for key, value in expected[1].items():
        assert (found[1][key] - value).abs().max() <= 1e-5 * value.abs().max() + 1e-6, key
    assert getattr(later[0], "totals", []) == pytest.approx(getattr(plain, "totals", []), rel=1e-5)
    hightide.unwrap(later[0])


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_that_are_added_to(accumulate: int) -> None:
    """In passes off the promise, and in planned ones."""
    pair, batch = built(models.llama_tied)
    plain = copy.deepcopy(pair[0])
    later = wrapped(pair, batch, True, accumulate=accumulate)
    assert settled(later)
    found, expected = (train(one, batch, backwards=3) for one in (later, (plain, adamw(plain))))
    assert found[0] == pytest.approx(expected[0], rel=2e-6, abs=1e-6)
    for key, value in expected[1].items():
        assert (found[1][key] - value).abs().max() <= 1e-5 * value.abs().max() + 1e-6, key
    hightide.unwrap(later[0])


def test_a_step_that_is_skipped_and_one_without_gradients() -> None:
    pair, batch = built(models.llama)
    plain = copy.deepcopy(pair[0])
    later = wrapped(pair, batch, True)
    for model, optimizer in (later, (plain, adamw(plain))):
        optimizer.step()
        for step in range(NUM_STEPS):
            models.loss_of(model, batch).backward()
            if step == 1:
                optimizer.zero_grad()  # as GradScaler does when gradients overflow
                continue
            optimizer.step()
            optimizer.step()  # with the same gradients
            optimizer.zero_grad()
    for (key, value), expected in zip(later[0].state_dict().items(), plain.state_dict().values(), strict=True):
        assert (value - expected).abs().max() <= 1e-5 * expected.abs().max() + 1e-6, key
    hightide.unwrap(later[0])


def test_a_step_that_is_refused_in_the_middle_leaves_no_states_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has updated by then is what it is without parts."""
    prepare = ChunkUpdates.prepare

    def refused(settles: bool) -> Any:
        pair, batch = built(models.llama)
        pair = wrapped(pair, batch, settles)
        calls = []

        def third(self: ChunkUpdates, *args: Any, **options: Any) -> Any:
            calls.append(args)
            if len(calls) == 3:
                raise ValueError("not this one")
            return prepare(self, *args, **options)

        models.loss_of(pair[0], batch).backward()
        with monkeypatch.context() as patch:
            patch.setattr(ChunkUpdates, "prepare", third)
            with pytest.raises(ValueError, match="not this one"):
                pair[1].step()
        pair[1].zero_grad()
        found = train(pair, batch)
        hightide.unwrap(pair[0])
        return found

    assert_same_bits(refused(True), refused(False))


def test_a_save_beside_training_has_the_states_of_its_step(tmp_path: Path) -> None:
    pair, batch = built(models.llama)
    later = wrapped(pair, batch, True)
    train(later, batch)
    models.loss_of(later[0], batch).backward()
    later[1].step()
    saving = hightide.save(*later, tmp_path, step=1)
    later[1].zero_grad()
    expected = {key: value.clone() for key, value in later[0].state_dict().items()}
    moments = [state["exp_avg"].clone() for state in later[1].state_dict()["state"].values()]
    train(later, batch)
    saving.wait()
    hightide.unwrap(later[0])
    pair, batch = built(models.llama)
    hightide.load(*pair, tmp_path)
    assert all(torch.equal(value, expected[key]) for key, value in pair[0].state_dict().items())
    loaded = [state["exp_avg"] for state in pair[1].state_dict()["state"].values()]
    assert all(map(torch.equal, loaded, moments))


@pytest.mark.parametrize(("which", "settles"), each_value(("optimizer", "model"), (True, False)))
def test_a_save_has_the_values_of_its_step_although_others_are_loaded_at_once(
    settles: bool, which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that is saved is still making them: of its values none may be missing, whatever is slow."""
    run = thread_lives._run

    def late(task: Any, *rest: Any) -> None:
        if getattr(task.id, "op", None) in (Op.UPDATE, Op.SETTLE):
            time.sleep(0.02)
        run(task, *rest)

    saved = []
    for waits in (True, False):
        pair, batch = built(models.llama)
        model, optimizer = wrapped(pair, batch, settles)
        train((model, optimizer), batch)
        before = copy.deepcopy(optimizer.state_dict()), {key: one.clone() for key, one in model.state_dict().items()}
        with monkeypatch.context() as patch:
            patch.setattr(thread_lives, "_run", late)
            models.loss_of(model, batch).backward()
            optimizer.step()
            if waits:
                optimizer.state_dict()
            saving = hightide.save(model, optimizer, tmp_path / str(waits), step=1)
            if not waits:
                optimizer.load_state_dict(before[0]) if which == "optimizer" else model.load_state_dict(before[1])
            saving.wait()
        hightide.unwrap(model)
        pair, _ = built(models.llama)
        hightide.load(*pair, tmp_path / str(waits))
        moments = [state["exp_avg"] for state in pair[1].state_dict()["state"].values()]
        saved.append([*pair[0].state_dict().values(), *moments])
    assert all(map(torch.equal, *saved))


def test_states_are_written_after_their_parameters_and_before_their_next_gradient_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunk by chunk, in the order in which the lanes begin them; that none overtakes another, streams' tests see."""
    seen: dict[int, list[Op]] = {}
    run = thread_lives._run

    def noted(task: Any, *rest: Any) -> None:
        if getattr(task.id, "op", None) in (Op.WRITE_BACK, Op.UPDATE, Op.SETTLE):
            seen.setdefault(task.id.number, []).append(task.id.op)
        run(task, *rest)

    monkeypatch.setattr(thread_lives, "_run", noted)
    pair, batch = built(models.llama)
    later = wrapped(pair, batch, True)
    train(later, batch)
    in_parts = [ops for ops in seen.values() if Op.SETTLE in ops]
    assert len(in_parts) == settled(later) and hightide.stats(later[0]).deviations == 0
    hightide.unwrap(later[0])
    assert all(ops == [Op.WRITE_BACK, Op.UPDATE, Op.SETTLE] * NUM_STEPS for ops in in_parts)


def test_the_explanation_tells() -> None:
    for settles in (True, False):
        pair, batch = built(models.llama)
        model, _ = wrapped(pair, batch, settles)
        assert ("parameters are written first" in hightide.stats(model).plan.explain()) is settles
        hightide.unwrap(model)
