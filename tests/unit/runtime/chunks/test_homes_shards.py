"""Of several ranks each has shards at home, and takes no other first values; whole chunks come together again."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

import hightide
import models
from hightide.ir.plan import Plan, Sharing
from hightide.ir.state_spec import MASTER
from hightide.ir.tier import Tier
from hightide.planner.layout import pack
from hightide.planner.placement import Placement
from hightide.runtime.chunks.chunks import Chunks
from hightide.stores.host_arena import HostArena
from hightide.stores.simulated import SimulatedAccelerator
from unit.runtime.steps import adamw

LIMIT_BYTES = 2**26
RANKS = 3


@dataclass
class Counted:
    """First values that tell how many elements of them were read."""

    value: Tensor
    numels: Counter[str]
    name: str

    def fill(self, target: Tensor) -> None:
        self.fill_part(target.view(-1), 0)

    def fill_part(self, target: Tensor, start: int) -> None:
        self.numels[self.name] += target.numel()
        target.copy_(self.value.reshape(-1)[start : start + target.numel()])


def plan_of(model: nn.Module, batch: dict[str, Tensor], tier: Tier) -> Plan:
    limits = hightide.Limits(gpu="64MiB", host="64MiB")
    plan = hightide.plan(model, adamw(model), batch, limits=limits, micro_batch=2)
    assert plan.profile is not None
    loose = [block.loose for block in plan.profile.blocks]
    blocks = tuple(
        replace(block, params=Tier.GPU, states=Tier.GPU, sharing=Sharing.REPLICATED)
        if is_loose
        else replace(block, params=tier, states=tier)
        for block, is_loose in zip(plan.blocks, loose, strict=True)
    )
    layout = pack(plan.profile, plan.layout.slot_numel, num_shards=RANKS)
    plan = replace(plan, blocks=blocks, layout=layout, ranks=RANKS)
    slots, grad_slots = Placement(plan).widest_tick({call.block for call in plan.profile.calls})
    return replace(plan, num_slots=slots, num_grad_slots=grad_slots)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.GPU])
@pytest.mark.parametrize("from_files", [False, True])
def test_each_rank_takes_its_own_elements_and_no_others(tier: Tier, from_files: bool) -> None:
    model, batch = models.hand_written(num_layers=3)
    model = model.to(torch.bfloat16)
    plan = plan_of(model, {name: value.to(torch.bfloat16) for name, value in batch.items()}, tier)
    assert plan.profile is not None
    numels: Counter[str] = Counter()
    parts: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    masters: dict[str, list[Tensor]] = {name: [] for name in parts}
    used_bytes = []
    for rank in range(RANKS):
        own = copy.deepcopy(model)
        origins = {
            name: Counted(param.detach().clone(), numels, name) for name, param in own.named_parameters() if from_files
        }
        stores = {Tier.GPU: SimulatedAccelerator(LIMIT_BYTES), Tier.HOST: HostArena(LIMIT_BYTES)}
        chunks = Chunks(plan.profile, Placement(plan), stores, dict(own.named_parameters()), rank)
        chunks.load(origins)
        used_bytes.append(stores[Tier.HOST].used_bytes)
        for name in parts:
            chunk, _ = chunks.places[name]
            if not chunks.is_cut(chunk):
                parts[name] = [chunks.value(name).get().view(-1)]
            elif (value := chunks.own_value(name)) is not None:
                entry = chunks.own_entry(name)
                assert entry is not None
                parts[name].append(value.get())
                if MASTER in chunks.states(chunk):
                    master = chunks.states(chunk)[MASTER].view[entry.within()]
                    masters[name].append(master.clone())
                    assert torch.equal(master.to(torch.bfloat16), value.get())
        chunks.close()
        for store in stores.values():
            store.close()
    for name, param in model.named_parameters():
        assert torch.equal(torch.cat(parts[name]), param.detach().reshape(-1)), name
    is_cut = [name for name in parts if len(parts[name]) > 1]
    assert len(is_cut) > 3 and len(set(used_bytes)) == 1
    if from_files:
        for name in is_cut:
            assert numels[name] == model.get_parameter(name).numel()


def test_values_that_are_stored_go_to_their_shards() -> None:
    model, batch = models.hand_written(num_layers=3)
    plan = plan_of(model, batch, Tier.HOST)
    assert plan.profile is not None
    new = {name: torch.randn_like(param) for name, param in model.named_parameters()}
    found: dict[str, list[Tensor]] = {name: [] for name in new}
    for rank in range(RANKS):
        own = copy.deepcopy(model)
        stores = {Tier.GPU: SimulatedAccelerator(LIMIT_BYTES), Tier.HOST: HostArena(LIMIT_BYTES)}
        chunks = Chunks(plan.profile, Placement(plan), stores, dict(own.named_parameters()), rank)
        chunks.load({})
        for name, value in new.items():
            chunks.store(name, value)
            place = chunks.own_value(name)
            if place is not None and (chunks.is_cut(chunks.places[name][0]) or rank == 0):
                found[name].append(place.get())
        chunks.close()
        for store in stores.values():
            store.close()
    for name, value in new.items():
        assert torch.equal(torch.cat(found[name]), value.reshape(-1)), name
