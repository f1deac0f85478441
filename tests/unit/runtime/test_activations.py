"""What waits between forward and backward: kept graphs whose weights have left their slots, and inputs on host."""

from __future__ import annotations

from dataclasses import replace

import models
import pytest
import torch
from torch import nn
from unit.runtime.steps import Twins, train_step, twins

from hightide.ir.plan import Activation, Plan
from hightide.ir.tier import Tier
from hightide.runtime.performer import Performer
from hightide.runtime.slots import SlotTable


def streamed(activation: Activation, inputs: Tier = Tier.GPU, num_slots: int = 2):
    def edit(plan: Plan) -> Plan:
        blocks = [
            replace(block, params=Tier.HOST, states=Tier.HOST, inputs=inputs, activation=activation)
            if block.name
            else block
            for block in plan.blocks
        ]
        return replace(
            plan, blocks=tuple(blocks), num_slots=num_slots, num_grad_slots=num_slots, gpu_limit_bytes=2**23
        )

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


@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "vit", "plain", "hand_written", "t5"])
@pytest.mark.parametrize("activation", list(Activation))
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


def test_the_poison_would_be_seen_without_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: a kept graph that saves plain views of its slot reads NaN."""
    model, batch = models.hand_written(num_layers=4)
    pair = twins(model, batch, edit=streamed(Activation.KEEP))
    monkeypatch.setattr(pair.run.chunks, "slot_offset", lambda tensor: None)
    poison_free_slots(pair, monkeypatch)
    train_step(pair.model, pair.optimizer, batch)
    values = torch.cat([value.flatten() for value in pair.model.state_dict().values()])
    assert values.isnan().any()
    monkeypatch.undo()
    pair.close()


def test_a_kept_graph_finds_its_weights_in_another_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = models.hand_written(num_layers=4)
    pair = twins(model, batch, edit=streamed(Activation.KEEP, num_slots=3))
    slots: dict[int, set[int]] = {}
    fetch = Performer.fetch_param

    def fetching(performer: Performer, chunk: int, slot: int) -> object:
        slots.setdefault(chunk, set()).add(slot)
        return fetch(performer, chunk, slot)

    monkeypatch.setattr(Performer, "fetch_param", fetching)
    pair.assert_equal(*pair.step())
    assert any(len(places) > 1 for places in slots.values())
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
        pair.run.lanes.wait(_idle(pair), lane=_d2h())
        used.append((pair.run.gpu.used_bytes, pair.run.host.used_bytes))
    assert len(set(used[1:])) == 1
    pair.assert_equal(*pair.step())
    pair.close()


def _d2h():
    from hightide.ir.tier import Lane

    return Lane.D2H


def _idle(pair: Twins):
    """A ticket that is done when everything queued towards the host is."""
    return pair.run.lanes.submit("idle", _d2h(), 0, [], lambda: None)


def test_inputs_on_host_leave_the_gpu_and_come_back_whole() -> None:
    """Without graphs, what the GPU holds after forward is less by the inputs of all blocks."""
    held: dict[Tier, int] = {}
    for inputs in (Tier.GPU, Tier.HOST):
        model, batch = models.hand_written(num_layers=6)
        pair = twins(model, batch, edit=streamed(Activation.RECOMPUTE, inputs))
        pair.step()
        loss = models.loss_of(pair.model, batch)
        pair.run.lanes.wait(_idle(pair), _d2h())
        held[inputs] = pair.run.gpu.breakdown()["activations"]
        loss.backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        train_step(pair.plain, pair.plain_optimizer, batch)
        pair.assert_equal(*pair.step())
        pair.close()
    one_input_bytes = models.NUM_SAMPLES * models.HIDDEN * 4
    assert held[Tier.GPU] - held[Tier.HOST] >= 5 * one_input_bytes


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
