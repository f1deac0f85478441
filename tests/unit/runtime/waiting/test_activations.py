"""What waits between forward and backward: kept graphs whose weights have left their slots, and inputs on host."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

import models
from hightide.ir.action import Mode, Op
from hightide.ir.activation import Activation
from hightide.ir.plan import Plan
from hightide.ir.tier import ChunkKind, Lane, Tier
from hightide.runtime.chunks.slot_table import SlotTable
from hightide.runtime.schedule.program import Program
from hightide.runtime.waiting.activations import Stashes
from hightide.stores.host_arena import HostArena
from hightide.stores.simulated import SimulatedAccelerator
from hightide.stores.ticket import Ticket
from unit.runtime.steps import Twins, train_step, twins


def streamed(activation: Activation, inputs: Tier = Tier.GPU, num_slots: int = 2):
    def edit(plan: Plan) -> Plan:
        blocks = [
            replace(block, params=Tier.HOST, states=Tier.HOST, inputs=inputs, activation=activation)
            if block.name
            else block
            for block in plan.blocks
        ]
        return replace(plan, blocks=tuple(blocks), num_slots=num_slots, num_grad_slots=num_slots, gpu_limit_bytes=2**23)

    return edit


def poison_free_slots(pair: Twins, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Whatever leaves a slot leaves NaN behind, whoever drops it. Returns a list that grows with every poisoning."""
    poisoned: list[int] = []
    chunks = pair.run.chunks
    places = {
        id(chunks.param_slots): (chunks._slots, chunks.slot_bytes),
        id(chunks.grad_slots): (chunks._grad_slots, chunks.grad_slot_bytes),
    }
    drop = SlotTable.drop

    def dropping(table: SlotTable, chunk: int) -> None:
        first = table.first(chunk)
        if first is not None and id(table) in places:
            region, slot_bytes = places[id(table)]
            width = table._widths[chunk] * slot_bytes // 4
            chunks.gpu.view(region, torch.float32, first * slot_bytes, width).fill_(torch.nan)
            poisoned.append(chunk)
        drop(table, chunk)

    monkeypatch.setattr(SlotTable, "drop", dropping)
    return poisoned


POISONED = ["llama_tied", "gpt2", "vit", "plain", "hand_written", "t5"]


@pytest.mark.parametrize(
    ("name", "activation"),
    [  # every activation with tied weights; every model with one, by turns
        pytest.param(name, activation, marks=() if name == "llama_tied" or (at + turn) % 3 == 0 else pytest.mark.long)
        for at, name in enumerate(POISONED)
        for turn, activation in enumerate(Activation)
    ],
)
def test_slots_poisoned_on_release_change_nothing(
    name: str, activation: Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = models.ZOO[name]()
    pair = twins(model, batch, edit=streamed(activation))
    poisoned = poison_free_slots(pair, monkeypatch)
    for _ in range(2):
        pair.assert_equal(*pair.step())
    assert len(poisoned) > 2 * len(pair.run.chunks.specs)
    assert pair.run.performer.num_evictions >= 4
    monkeypatch.undo()
    pair.close()


def to_other_slots(pair: Twins) -> None:
    """The planner brings a chunk back to the slot it was in; this schedule does not."""
    program = pair.run.executor.programs[Mode.TRAIN]
    actions = [
        replace(action, target=replace(action.target, slot=(action.target.slot + 1) % pair.run.plan.num_slots))
        if action.op is Op.FETCH and action.kind is ChunkKind.PARAM and "@bwd" in action.id
        else action
        for action in program.schedule.actions
    ]
    pair.run.executor.programs[Mode.TRAIN] = Program(replace(program.schedule, actions=tuple(actions)))


def slots_of_fetches(pair: Twins, monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    slots: dict[int, set[int]] = {}
    fetch = pair.run.performer.fetch_param

    def fetching(chunk: int, slot: int) -> object:
        slots.setdefault(chunk, set()).add(slot)
        return fetch(chunk, slot)

    monkeypatch.setattr(pair.run.performer, "fetch_param", fetching)
    return slots


def test_a_kept_graph_finds_its_weights_in_another_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = twins(*models.hand_written(num_layers=4), edit=streamed(Activation.KEEP, num_slots=3))
    to_other_slots(pair)
    slots = slots_of_fetches(pair, monkeypatch)
    poison_free_slots(pair, monkeypatch)
    pair.assert_equal(*pair.step())
    assert any(len(places) > 1 for places in slots.values())
    pair.close()


def test_without_packing_a_kept_graph_would_read_another_blocks_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    pair = twins(*models.hand_written(num_layers=4), edit=streamed(Activation.KEEP, num_slots=3))
    to_other_slots(pair)
    monkeypatch.setattr(pair.run.chunks, "slot_offset", lambda tensor: None)
    poison_free_slots(pair, monkeypatch)
    with pytest.raises(AssertionError):
        pair.assert_equal(*pair.step())
    pair.close()


@pytest.mark.parametrize("inputs", [Tier.GPU, Tier.HOST])
def test_graphs_that_are_dropped_leave_nothing_behind(inputs: Tier) -> None:
    """A forward without backward, many times: memory on both tiers stays where it was."""
    model, batch = models.hand_written(num_layers=4)
    pair = twins(model, batch, edit=streamed(Activation.RECOMPUTE, inputs))
    pair.step()
    used: list[tuple[int, int]] = []
    for _ in range(4):
        models.loss_of(pair.model, batch)
        wait_for_exits(pair)
        used.append((pair.run.gpu.used_bytes, pair.run.host.used_bytes))
    assert len(set(used[1:])) == 1
    pair.assert_equal(*pair.step())
    pair.close()


def wait_for_exits(pair: Twins) -> None:
    """Until everything queued towards the host is there."""
    pair.run.lanes.wait(pair.run.lanes.submit("exits", Lane.D2H, 0, [], lambda: None), Lane.D2H)


def test_inputs_on_host_leave_the_gpu_and_come_back_whole() -> None:
    """Without graphs, what the GPU holds after forward is less by the inputs of all blocks."""
    held: dict[Tier, int] = {}
    for inputs in (Tier.GPU, Tier.HOST):
        model, batch = models.hand_written(num_layers=6)
        pair = twins(model, batch, edit=streamed(Activation.RECOMPUTE, inputs))
        pair.step()
        loss = models.loss_of(pair.model, batch)
        wait_for_exits(pair)
        held[inputs] = pair.run.gpu.breakdown()["activations"]
        loss.backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        train_step(pair.plain, pair.plain_optimizer, batch)
        pair.assert_equal(*pair.step())
        pair.close()
    one_input_bytes = models.NUM_SAMPLES * models.HIDDEN * 4
    assert held[Tier.GPU] - held[Tier.HOST] >= 4 * one_input_bytes  # the last ones are on their way back already


class Squaring(nn.Module):
    """Saves its input for backward: y = x * x."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square()


@pytest.mark.parametrize("activation", list(Activation))
def test_a_kept_graph_is_gone_after_its_backward(activation: Activation) -> None:
    model = nn.Sequential(*(Squaring() for _ in range(3)))
    batch = torch.randn(6, 32)
    pair = twins(model, batch, edit=streamed(activation))
    for _ in range(3):
        pair.step()
    before = pair.run.gpu.used_bytes
    loss = models.loss_of(pair.model, batch)
    during = pair.run.gpu.used_bytes
    loss.backward()
    pair.optimizer.zero_grad()
    assert pair.run.gpu.used_bytes < during and pair.run.gpu.used_bytes <= before + 4
    pair.close()


def test_a_shared_input_is_whole_for_each_of_its_readers_over_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate is an input of every layer and has a gradient: one layer's backward must not read what was only ordered
    back for the next."""
    model, batch = models.hand_written(num_layers=6)
    pair = twins(model, batch, edit=streamed(Activation.RECOMPUTE, Tier.HOST))
    copy = pair.run.host._copy

    def slowly(target: torch.Tensor, source: torch.Tensor) -> None:
        if target.numel() == models.HIDDEN and threading.current_thread().name == "hightide-h2d":
            time.sleep(0.02)
        copy(target, source)

    monkeypatch.setattr(pair.run.host, "_copy", slowly)
    for _ in range(3):
        pair.assert_equal(*pair.step())
    pair.close()


@pytest.mark.parametrize("strided", [False, True])
def test_what_a_dead_graph_was_copying_lives_until_the_copy_is_through(strided: bool) -> None:
    """On a GPU a lane's copy is under way when its closure is gone. The next pass takes memory in its own stream: what
    the copy reads must not be free before that stream has joined it."""
    stashes = Stashes(SimulatedAccelerator(1 << 16), HostArena(1 << 16))
    tensor = torch.randn(16, 8).t() if strided else torch.randn(8, 16)
    stash = stashes.register(0, [tensor])
    stashes.prepare_store(stash)
    (entry,) = stash.entries
    source = weakref.ref(entry.leaving)  # what the lane reads: a contiguous copy, or the same memory
    ticket = Ticket("copy to host")
    stashes.is_moved_by(stash, ticket)
    del tensor, stash, entry  # the graph dies without backward

    next_pass = threading.Thread(target=stashes.begin_pass, daemon=True)
    next_pass.start()
    next_pass.join(0.2)
    assert next_pass.is_alive() and source() is not None
    ticket.set_result()
    next_pass.join(10)
    assert not next_pass.is_alive() and source() is None


def test_a_graph_that_is_dropped_after_the_next_forward_leaves_nothing_to_its_backward() -> None:
    """A loss that was not finite is skipped, and its name is given to the next one: in its backward the GPU is as full
    as ever."""
    stashes = Stashes(SimulatedAccelerator(1 << 16), HostArena(1 << 16))
    skipped = stashes.register(0, [torch.randn(8, 16)])
    stashes.prepare_store(skipped)
    source, ticket = weakref.ref(skipped.entries[0].leaving), Ticket("copy to host")
    ticket.set_result()
    stashes.is_moved_by(skipped, ticket)
    stashes.begin_pass()
    stash = stashes.register(0, [torch.randn(4, 16)])
    del skipped
    stashes.consume(stash)
    assert source() is None
