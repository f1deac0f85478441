"""A run goes on under another plan: to the bit as if it had begun under it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import hightide
import models
from each_value import each_value
from hightide.ir.activation import Activation
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier
from hightide.planner.chunk_place import ChunkPlace
from hightide.planner.placement import Placement
from hightide.planner.solution import Solution
from hightide.runtime.chunks import moving
from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.head.lazy_logits import LazyLogits
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of
from hightide.stores.simulated import SimulatedAccelerator
from hightide.stores.store import OutOfMemory
from unit.runtime.steps import adamw, train_step
from whole.test_unwrap import WithBuffers

ROOMY = hightide.Limits(gpu="64MiB", host="64MiB")
LIMITS = {"cpu": ROOMY, "cuda": hightide.Limits(gpu="1GiB", host="512MiB")}
KINDS = {
    "resident": (Tier.GPU, Tier.GPU),
    "streamed": (Tier.HOST, Tier.HOST),
    "updated on host": (Tier.GPU, Tier.HOST),
}


def placed(plan: Plan, kind: str) -> Plan:
    params, states = KINDS[kind]
    blocks = tuple(
        replace(block, params=params, states=states, activation=Activation.RECOMPUTE, inputs=params)
        if block.name
        else block
        for block in plan.blocks
    )
    plan = replace(plan, blocks=blocks, loss_kept_tokens=0, loss_in_forward=False)
    slots, grad_slots = Placement(plan).widest_tick({call.block for call in profile_of(plan).calls})
    return replace(plan, num_slots=slots + (slots > 0), num_grad_slots=grad_slots)


def profile_of(plan: Plan) -> Any:
    assert plan.profile is not None
    return plan.profile


def move(run: Run, plan: Plan) -> None:
    run.move_to(Solution.of(run.profile, plan))


def wrapped(
    kind: str, dtype: torch.dtype, device: str = "cpu", pair: models.Pair | None = None, **options: Any
) -> tuple[Any, Any, Run, Any]:
    model, batch = pair or models.hand_written(num_layers=3)
    model = model.to(dtype)
    batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
    optimizer = adamw(model)
    plan = hightide.plan(model, optimizer, batch, limits=LIMITS[device], micro_batch=2, device=device, **options)
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=placed(plan, kind), device=device)
    run = run_of(model)
    assert run is not None
    return model, optimizer, run, batch


def states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    masters = optimizer.state_dict().get("hightide_masters", {})
    return [*model.state_dict().values(), *moments, *masters.values()]


@pytest.mark.parametrize(
    ("before", "after", "update", "dtype"),
    [
        ("resident", "streamed", "deferred", torch.float32),
        ("resident", "streamed", "in_backward", torch.bfloat16),
        ("streamed", "resident", "deferred", torch.bfloat16),
        ("streamed", "resident", "in_backward", torch.float32),
        ("updated on host", "resident", "deferred", torch.float16),
        ("streamed", "updated on host", "in_backward", torch.float16),
        ("resident", "updated on host", "deferred", torch.bfloat16),
        ("updated on host", "streamed", "deferred", torch.float32),
    ],
)
def test_values_states_and_counters_move(before: str, after: str, update: str, dtype: torch.dtype) -> None:
    check_moving(before, after, update, dtype, "cpu")


def check_moving(before: str, after: str, update: str, dtype: torch.dtype, device: str) -> None:
    ours = wrapped(before, dtype, device, update=update)
    theirs = wrapped(after, dtype, device, update=update)
    for step in range(4):
        if step == 2:
            move(ours[2], placed(ours[2].plan, after))
            assert (ours[2].plan.blocks, ours[2].num_steps) == (theirs[2].plan.blocks, 2)
        assert torch.equal(train_step(*ours[:2], ours[3]), train_step(*theirs[:2], theirs[3]))
    for mine, other in zip(states(*ours[:2]), states(*theirs[:2]), strict=True):
        assert torch.equal(mine, other)
    assert hightide.stats(ours[0]).deviations == 0
    hightide.unwrap(ours[0])
    hightide.unwrap(theirs[0])


@pytest.mark.parametrize("after", KINDS)
def test_gradients_that_wait_for_more_move_too(after: str) -> None:
    outcomes = []
    for moves in (False, True):
        model, optimizer, run, batch = wrapped("streamed", torch.float32)
        models.loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # a factor that is not applied yet
        first = {name: param.grad.norm().item() for name, param in model.named_parameters()}
        if moves:
            move(run, placed(run.plan, after))
            assert {name: param.grad.norm().item() for name, param in model.named_parameters()} == first
        models.loss_of(model, batch).backward()
        optimizer.step()
        outcomes.append(states(model, optimizer))
        hightide.unwrap(model)
    assert all(torch.equal(plain, moved) for plain, moved in zip(*outcomes, strict=True))


def test_loose_parameters_keep_their_gradients() -> None:
    outcomes = []
    for moves in (False, True):
        torch.manual_seed(0)
        model, batch = WithBuffers(), torch.randn(4, 8)
        optimizer = adamw(model)
        model, optimizer = hightide.wrap(model, optimizer, batch, limits=ROOMY, micro_batch=2)
        run = run_of(model)
        assert run is not None and any(block.loose for block in run.profile.blocks)
        model(batch).backward()
        if moves:
            move(run, placed(run.plan, "streamed"))
        optimizer.step()
        model(batch).backward()
        optimizer.step()
        outcomes.append(states(model, optimizer))
        hightide.unwrap(model)
    assert all(torch.equal(plain, moved) for plain, moved in zip(*outcomes, strict=True))


@pytest.mark.parametrize(  # every pair of a way, a timing and a dtype
    ("way", "update", "dtype"),
    [
        (("resident", "streamed", "resident"), "deferred", torch.float32),
        (("resident", "streamed", "resident"), "in_backward", torch.bfloat16),
        (("resident", "streamed", "resident"), "deferred", torch.float16),
        (("streamed", "updated on host", "streamed"), "in_backward", torch.float32),
        (("streamed", "updated on host", "streamed"), "deferred", torch.bfloat16),
        (("streamed", "updated on host", "streamed"), "in_backward", torch.float16),
    ],
)
def test_there_and_back_between_backward_and_step(way: tuple[str, ...], update: str, dtype: torch.dtype) -> None:
    outcomes = []
    for moves in (False, True):
        model, optimizer, run, batch = wrapped(way[0], dtype, update=update)
        for kind in (*way, *way[1:]):
            models.loss_of(model, batch).backward()
            if moves:
                move(run, placed(run.plan, kind))
            optimizer.step()
            if moves:
                move(run, placed(run.plan, way[0]))
            optimizer.zero_grad()
        outcomes.append(states(model, optimizer))
        assert run.num_steps == 5 and hightide.stats(model).deviations == 0
        hightide.unwrap(model)
    assert all(torch.equal(plain, moved) for plain, moved in zip(*outcomes, strict=True))


def test_what_was_kept_of_a_gradient_stays_good() -> None:
    model, _, run, batch = wrapped("streamed", torch.float32)
    models.loss_of(model, batch).backward()
    param = next(model.parameters())
    kept = param.grad
    values = kept.clone()
    move(run, placed(run.plan, "resident"))
    assert param.grad is kept and torch.equal(kept.clone(), values)
    kept.mul_(0.5)
    assert torch.equal(param.grad.clone(), values * 0.5)
    hightide.unwrap(model)


# -- what is left of before ---------------------------------------------------------------------------------------


def test_a_graph_of_before_says_that_its_plan_is_gone_and_holds_no_memory() -> None:
    model, _, run, batch = wrapped("resident", torch.float32)
    loss = models.loss_of(model, batch)
    flats = [run.chunks.home(spec.index).view for spec in run.chunks.specs]
    assert all(flat.count_nonzero() > 0 for flat in flats)
    move(run, placed(run.plan, "streamed"))
    assert all(flat.count_nonzero() == 0 for flat in flats), "given back, though somebody still has views of it"
    models.loss_of(model, batch)
    with pytest.raises(RuntimeError, match="plan was changed"):
        loss.backward()
    hightide.unwrap(model)


class ScaledLast(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.scale = torch.nn.Parameter(torch.ones(8))  # loose: plain autograd saves it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x @ self.scale.view(8, 1)).mean()


def test_what_plain_autograd_has_saved_is_not_read_any_more() -> None:
    model, batch = ScaledLast(), torch.randn(4, 8)
    model, _ = hightide.wrap(model, adamw(model), batch, limits=ROOMY, micro_batch=2)
    run = run_of(model)
    assert run is not None and any(block.loose for block in run.profile.blocks)
    loss = model(batch)
    move(run, placed(run.plan, "streamed"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model(batch).backward()
    hightide.unwrap(model)


def test_logits_of_before_are_not_computed_with_weights_of_after() -> None:
    model, optimizer, run, batch = wrapped("streamed", torch.float32, pair=models.llama(num_layers=2))
    train_step(model, optimizer, batch)
    output = model(**batch)
    assert isinstance(output.logits, LazyLogits)
    move(run, placed(run.plan, "resident"))
    train_step(model, optimizer, batch)  # as many updates as before the logits: only the plan tells them apart
    for use in (output.loss.backward, output.logits.sum, lambda: cross_entropy(output.logits, batch["labels"])):
        with pytest.raises(RuntimeError, match="plan was changed"):
            use()
    train_step(model, optimizer, batch)
    hightide.unwrap(model)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


# -- moves that fail ----------------------------------------------------------------------------------------------

TOO_MUCH = 2**62  # no system maps it
Planted = Callable[[Plan, pytest.MonkeyPatch], Plan]


def no_room_to_wait(plan: Plan, patch: pytest.MonkeyPatch) -> Plan:
    patch.setattr(moving, "waiting_bytes", lambda _: TOO_MUCH)
    return plan


def no_accelerator(plan: Plan, patch: pytest.MonkeyPatch) -> Plan:
    return replace(plan, gpu_limit_bytes=TOO_MUCH)


def no_host_arena(plan: Plan, patch: pytest.MonkeyPatch) -> Plan:
    return replace(plan, host_limit_bytes=TOO_MUCH)


def no_first_region(plan: Plan, patch: pytest.MonkeyPatch) -> Plan:
    return replace(plan, gpu_limit_bytes=4096)


def no_last_region(plan: Plan, patch: pytest.MonkeyPatch) -> Plan:
    def refuse(chunks: Chunks, place: ChunkPlace, stores: Any) -> None:
        if place is chunks.placed[-1]:
            chunks.gpu.allocate(TOO_MUCH, "planted")
        allocate(chunks, place, stores)

    allocate = Chunks._allocate
    patch.setattr(Chunks, "_allocate", refuse)
    return plan


def no_room_for_buffers(plan: Plan, patch: pytest.MonkeyPatch) -> Plan:
    def refuse(gpu: SimulatedAccelerator, tensor: torch.Tensor, label: str) -> None:
        raise OutOfMemory(Tier.GPU, label, tensor.nbytes, 0, 0, {})

    patch.setattr(SimulatedAccelerator, "adopt", refuse)
    return plan


FAILURES: list[Planted] = [
    no_room_to_wait,
    no_accelerator,
    no_host_arena,
    no_first_region,
    no_last_region,
    no_room_for_buffers,
]


def fail_to_move(run: Run, plan: Plan, planted: Planted) -> None:
    """The move is tried, and everything is as it was."""
    before = (run.plan, run.gpu, run.host, run.chunks, run.executor, dict(run.runners))
    used_bytes = run.gpu.used_bytes, run.host.used_bytes
    with pytest.MonkeyPatch.context() as patch:
        plan = planted(plan, patch)
        solution = Solution.of(run.profile, plan)
        with pytest.raises((OutOfMemory, MemoryError)) as caught:
            run.move_to(solution)
    assert any("the old plan stays" in note for note in caught.value.__notes__)
    assert before == (run.plan, run.gpu, run.host, run.chunks, run.executor, dict(run.runners))
    assert used_bytes == (run.gpu.used_bytes, run.host.used_bytes)


@pytest.mark.parametrize(
    ("way", "planted"),
    each_value(
        (
            ("resident", "streamed", torch.bfloat16),
            ("streamed", "resident", torch.float32),
            ("updated on host", "resident", torch.float16),
        ),
        FAILURES,
    ),
    ids=lambda value: value.__name__ if callable(value) else " ".join(map(str, value)),
)
def test_after_a_move_that_fails_training_goes_on(way: tuple[str, str, torch.dtype], planted: Planted) -> None:
    before, after, dtype = way
    outcomes = []
    for fails in (False, True):
        pair = with_buffer(*models.hand_written(num_layers=3))
        model, optimizer, run, batch = wrapped(before, dtype, pair=pair)
        losses = [train_step(model, optimizer, batch)]
        models.loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # a factor that is not applied yet
        if fails:
            fail_to_move(run, placed(run.plan, after), planted)
        models.loss_of(model, batch).backward()
        optimizer.step()
        if fails:
            fail_to_move(run, placed(run.plan, after), planted)
        optimizer.zero_grad()
        losses.append(train_step(model, optimizer, batch))
        outcomes.append([*losses, *states(model, optimizer)])
        assert run.num_steps == 3 and hightide.stats(model).deviations == 0
        if fails:  # and may be moved
            move(run, placed(run.plan, after))
            train_step(model, optimizer, batch)
        hightide.unwrap(model)
    assert all(torch.equal(plain, stayed) for plain, stayed in zip(*outcomes, strict=True))


def with_buffer(model: torch.nn.Module, batch: dict[str, Any]) -> models.Pair:
    model.register_buffer("unused", torch.ones(4))
    return model, batch


def test_loose_parameters_and_their_gradients_survive_a_move_that_fails() -> None:
    outcomes = []
    for fails in (False, True):
        torch.manual_seed(0)
        model, batch = WithBuffers(), torch.randn(4, 8)
        model, optimizer = hightide.wrap(model, adamw(model), batch, limits=ROOMY, micro_batch=2)
        run = run_of(model)
        assert run is not None
        for step in range(3):  # without zero_grad: gradients lie where the update has put them
            model(batch).backward()
            if fails:
                fail_to_move(run, placed(run.plan, "streamed"), no_accelerator)
            optimizer.step()
            if fails and step != 1:
                fail_to_move(run, placed(run.plan, "streamed"), no_last_region)
            elif fails:
                move(run, placed(run.plan, "streamed"))
        outcomes.append([*states(model, optimizer), model.scale.grad])
        hightide.unwrap(model)
    assert all(torch.equal(plain, stayed) for plain, stayed in zip(*outcomes, strict=True))


def test_a_run_whose_old_memory_is_gone_too_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(gpu: SimulatedAccelerator) -> None:
        raise OutOfMemory(Tier.GPU, "planted", 1, 0, 0, {})

    model, _, run, batch = wrapped("resident", torch.float32)
    monkeypatch.setattr(SimulatedAccelerator, "reoccupy", refuse)
    plan = no_accelerator(placed(run.plan, "streamed"), monkeypatch)
    with pytest.raises(RuntimeError, match="another process took GPU memory"):
        move(run, plan)
    with pytest.raises(OutOfMemory, match="planted"):
        models.loss_of(model, batch)
    run.discard()


def in_the_middle(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Of a move: when some values are at their new places and others are not."""
    hand_over, count = moving.StatesOnTheMove.hand_over, 0

    def planted(self: moving.StatesOnTheMove, *args: Any) -> None:
        nonlocal count
        count += 1
        if count == 5:
            happens()
        hand_over(self, *args)

    monkeypatch.setattr(moving.StatesOnTheMove, "hand_over", planted)


def test_an_interruption_waits_until_the_move_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, run, batch = wrapped("streamed", torch.float32)
    train_step(model, optimizer, batch)
    there = states(model, optimizer)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs without it
    in_the_middle(monkeypatch, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        move(run, placed(run.plan, "resident"))
    assert all(torch.equal(old, new) for old, new in zip(there, states(model, optimizer), strict=True))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    hightide.unwrap(model)


def test_values_that_are_lost_are_nobodys_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, run, batch = wrapped("streamed", torch.float32)
    train_step(model, optimizer, batch)

    def fail() -> None:
        raise ZeroDivisionError("planted")

    in_the_middle(monkeypatch, fail)
    with pytest.raises(RuntimeError, match="its values are lost"):
        move(run, placed(run.plan, "resident"))
    for use in (model.state_dict, optimizer.state_dict, lambda: hightide.unwrap(model)):
        with pytest.raises(RuntimeError, match="its values are lost"):
            use()
    with pytest.raises(ZeroDivisionError):
        train_step(model, optimizer, batch)
    run.discard()
