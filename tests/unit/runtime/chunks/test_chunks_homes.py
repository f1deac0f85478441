"""Chunks have their homes in whatever store the plan names, also in one that is no memory: a file."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import hightide
import models
from file_store import FileStore
from hightide.ir.plan import GradientDtype, Plan, Update
from hightide.ir.tier import Tier
from hightide.planner.placement import Placement
from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.chunks.moving import StatesOnTheMove
from hightide.runtime.gradients.gradients import Gradients
from hightide.runtime.schedule.in_flight import Tickets
from hightide.stores.host_arena import HostArena
from hightide.stores.simulated import SimulatedAccelerator
from hightide.stores.store import Store
from unit.runtime.steps import adamw

LIMIT_BYTES = 2**26
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass
class Subject:
    plain: nn.Module
    model: nn.Module
    plan: Plan
    stores: dict[Tier, Store]

    def chunks(self, tier: Tier) -> Chunks:
        """All parameters, gradients and states of blocks on this tier; the model's values move in."""
        blocks = tuple(replace(block, params=tier, states=tier) if block.name else block for block in self.plan.blocks)
        plan = replace(self.plan, blocks=blocks, gradients=GradientDtype.PARAM)
        assert plan.profile is not None
        slots, grad_slots = Placement(plan).widest_tick({call.block for call in plan.profile.calls})
        self.plan = replace(plan, num_slots=slots, num_grad_slots=grad_slots)
        return Chunks(plan.profile, Placement(self.plan), self.stores, dict(self.model.named_parameters()))


@pytest.fixture(params=DTYPES)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    model, batch = models.hand_written(num_layers=3)
    model = model.to(request.param)
    batch = {name: value.to(request.param) if value.is_floating_point() else value for name, value in batch.items()}
    limits = hightide.Limits(gpu="64MiB", host="64MiB")
    plan = hightide.plan(model, adamw(model), batch, limits=limits, micro_batch=2)
    stores = {
        Tier.GPU: SimulatedAccelerator(LIMIT_BYTES),
        Tier.HOST: HostArena(LIMIT_BYTES),
        Tier.DISK: FileStore(LIMIT_BYTES),
    }
    yield Subject(copy.deepcopy(model), model, plan, stores)
    for store in stores.values():
        store.close()


def streamed_keys(chunks: Chunks) -> list[str]:
    keys = [key for key, (chunk, _) in chunks.places.items() if chunks.placed[chunk].is_streamed]
    assert keys
    return keys


def test_parameters_go_into_a_file_and_come_back(subject: Subject) -> None:
    chunks = subject.chunks(Tier.DISK)
    chunks.load({})
    assert subject.stores[Tier.HOST].used_bytes == 0 < subject.stores[Tier.DISK].used_bytes
    plain = dict(subject.plain.named_parameters())
    for key in chunks.places:
        assert torch.equal(chunks.value(key).get(), plain[key])
    for key in streamed_keys(chunks):
        chunk, _ = chunks.places[key]
        assert not chunks.value(key).is_memory
        chunks.param_slots.take(0, chunk)
        assert chunks.bring_param(chunk) == chunks.specs[chunk].param_bytes
        chunks.binding.bind(chunk)
        assert torch.equal(chunks.parameters[key].data, plain[key])
        chunks.binding.unbind(chunk)
        chunks.param_slots.drop(chunk)


def test_a_tensor_in_a_slot_is_told_by_the_chunk_and_its_place_there(subject: Subject) -> None:
    chunks = subject.chunks(Tier.HOST)
    chunks.load({})
    chunk = max(chunks.places[key][0] for key in streamed_keys(chunks))
    for first in (0, subject.plan.num_slots - chunks.param_slots.width(chunk)):
        chunks.param_slots.take(first, chunk)
        flat = chunks.param_on_gpu(chunk)
        begin, end = chunks.around_slots
        assert begin <= flat.untyped_storage().data_ptr() < end
        assert chunks.slot_offset(flat) == (chunk, 0)
        assert chunks.slot_offset(flat[-1:]) == (chunk, chunks.specs[chunk].param_bytes - flat.element_size())
        assert chunks.slot_offset(torch.zeros(4)) is None
        chunks.param_slots.drop(chunk)
        assert chunks.slot_offset(flat) is None


def test_new_values_and_masters_are_stored_in_a_file(subject: Subject) -> None:
    chunks = subject.chunks(Tier.DISK)
    chunks.load({})
    for key in streamed_keys(chunks):
        exact = torch.randn(chunks.shapes[key])
        value = exact.to(chunks.parameters[key].dtype)
        chunks.store(key, value)
        assert torch.equal(chunks.value(key).get(), value)
        has_master = value.dtype != torch.float32
        assert chunks.fits_master(key, exact) == has_master
        chunks.restore_master(key, exact)
        master = chunks.master_of(key)
        assert torch.equal(master, exact) if master is not None else not has_master
        chunks.store(key, value)
        assert master is None or torch.equal(chunks.master_of(key), exact), "it rounds to these very values"


def test_gradients_wait_in_a_file(subject: Subject) -> None:
    chunks = subject.chunks(Tier.DISK)
    chunks.load({})
    assert subject.plan.profile is not None
    gradients = Gradients(subject.plan.profile, chunks, Update.DEFERRED, Tickets())
    key = streamed_keys(chunks)[0]
    chunk, entry = chunks.places[key]
    chunks.grad_slots.take(0, chunk)
    summed = chunks.grad_on_gpu(chunk).normal_()
    rounded = summed.to(chunks.grad(chunk).dtype).float()
    chunks.send_gradient(chunk)
    summed.zero_()
    chunks.bring_gradient(chunk)
    assert torch.equal(summed, rounded)
    assert torch.equal(gradients.read(key).float(), chunks.view_of(rounded, entry))
    gradients.scale(key, 0.5)
    gradients.add(key, torch.ones(chunks.shapes[key]))
    expected = (chunks.view_of(rounded, entry) * 0.5).to(chunks.grad(chunk).dtype).add(1.0)
    assert torch.equal(gradients.read(key), expected.to(gradients.read(key).dtype))
    chunks.parameters[key].grad = torch.full(chunks.shapes[key], 0.25, dtype=chunks.parameters[key].dtype)
    assert gradients.any_valid()
    assert bool((gradients.read(key) == 0.25).all())


@pytest.mark.parametrize(("before", "after"), [(Tier.DISK, Tier.GPU), (Tier.HOST, Tier.DISK), (Tier.GPU, Tier.DISK)])
def test_values_and_states_move_from_and_to_a_file(subject: Subject, before: Tier, after: Tier) -> None:
    old = subject.chunks(before)
    old.load({})
    assert subject.plan.profile is not None
    gradients = Gradients(subject.plan.profile, old, Update.DEFERRED, Tickets())
    states = {}
    for key in old.places:
        for state in old.states_of(key):
            state.put(torch.randint(-100, 100, state.shape))
        states[key] = [state.get() for state in old.states_of(key)]
    carried = StatesOnTheMove(old, gradients)
    old.binding.let_go()
    new = subject.chunks(after)
    new.load(carried.origins(), begins=False)
    gradients.move_to(new)
    carried.unpack(new, gradients)
    plain = dict(subject.plain.named_parameters())
    for key in new.places:
        assert torch.equal(new.value(key).get(), plain[key])
        for state, expected in zip(new.states_of(key), states[key], strict=True):
            assert torch.equal(state.get(), expected)
