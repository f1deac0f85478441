"""What activations take, added up for a candidate, is what its schedule takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hightide.ir.action import Mode
from hightide.ir.block import Affine
from hightide.ir.plan import GradientDtype, Update
from hightide.ir.tier import Tier
from hightide.planner.lower import lower
from hightide.planner.predict.peaks import peaks
from hightide.planner.problem import Terms
from hightide.planner.search import activation_bytes as room_module
from hightide.planner.search.activation_bytes import ActivationBytes
from hightide.planner.search.candidate import Candidate
from hightide.planner.search.moves import Moves
from hightide.planner.search.space import Space
from hightide.planner.search.standing_bytes import StandingBytes
from hightide.planner.verify.check_plan import check_plan
from unit.planner.profiles import UNLIMITED, Sketch, build, call, param, profiles, stack
from unit.planner.search.test_standing_bytes import choices


def problems(data: st.DataObject) -> Space:
    profile = data.draw(profiles())
    update, gradients = data.draw(st.sampled_from(Update)), data.draw(st.sampled_from(GradientDtype))
    return Space(profile, Terms(UNLIMITED, UNLIMITED, update, gradients=gradients, disk_bytes=UNLIMITED))


def filled(data: st.DataObject, space: Space, inputs: Tier) -> Candidate:
    """With activations of all kinds on the GPU, and updates there of any blocks."""
    candidate = replace(
        data.draw(choices(space)), micro_batch=data.draw(st.integers(1, space.profile.num_samples)), inputs=inputs
    )
    movable = frozenset(space.movable)
    keep, near, selective = (
        data.draw(st.frozensets(st.sampled_from(some))) if some else frozenset[int]()
        for some in (space.keepable, space.movable, space.selectable)
    )
    return replace(
        candidate,
        whole=candidate.whole & movable,
        params=candidate.params & movable,
        keep=keep,
        selective=selective - keep,
        near=near - keep,
        loss_kept_tokens=data.draw(st.sampled_from([0, *space.keepable_tokens])),
    )


@given(st.data())
def test_room_on_the_gpu_is_that_of_the_schedule(data: st.DataObject) -> None:
    space = problems(data)
    room = ActivationBytes(space)
    for _ in range(3):
        candidate = filled(data, space, Tier.GPU)
        schedule = lower(space.profile, space.build(candidate), Mode.TRAIN)
        assert room.gpu_bytes(candidate) == peaks(schedule).gpu_peak_bytes - schedule.gpu_base_bytes
        assert room.host_bytes(candidate) == 0


@given(st.data())
def test_room_on_the_host_is_that_of_the_inputs_that_wait_there(data: st.DataObject) -> None:
    space = problems(data)
    room = ActivationBytes(space)
    for _ in range(3):
        candidate = filled(data, space, Tier.HOST)
        schedule = lower(space.profile, space.build(candidate), Mode.TRAIN)
        parked = StandingBytes(space).of(candidate).parked_bytes
        needed = peaks(schedule).host_peak_bytes - schedule.host_base_bytes
        assert room.host_bytes(candidate, parked) >= needed
        assert parked or room.host_bytes(candidate) == needed


def test_gradients_park_where_inputs_have_been() -> None:
    """While inputs wait, the gradients of the blocks before do not, and the other way round."""
    for num_samples in (1, 4096):
        profile = stack(6, num_samples=num_samples)
        space = Space(profile, Terms(UNLIMITED, UNLIMITED, Update.IN_BACKWARD))
        candidate = Candidate(1, Tier.HOST)
        parked = StandingBytes(space).of(candidate).parked_bytes
        inputs = ActivationBytes(space).host_bytes(candidate)
        found = peaks(schedule := lower(profile, space.build(candidate), Mode.TRAIN))
        needed = found.host_peak_bytes - schedule.host_base_bytes
        assert 0 <= needed - max(inputs, sum(parked)) <= max(parked)
        assert ActivationBytes(space).host_bytes(candidate, parked) == needed


@given(st.data())
def test_what_blocks_swap_is_never_more_in_the_schedule(data: st.DataObject) -> None:
    """And not much less: what is on its way is counted as if it were always slow."""
    space = problems(data)
    room = ActivationBytes(space)
    for _ in range(3):
        candidate = filled(data, space, data.draw(st.sampled_from([Tier.GPU, Tier.HOST])))
        swapped = frozenset(block for block in candidate.selective if data.draw(st.booleans()))
        candidate = replace(candidate, selective=candidate.selective - swapped, swapped=swapped)
        schedule = lower(space.profile, space.build(candidate), Mode.TRAIN)
        peak = peaks(schedule)
        assert room.gpu_bytes(candidate) >= peak.gpu_peak_bytes - schedule.gpu_base_bytes
        parked = StandingBytes(space).of(candidate).parked_bytes
        assert room.host_bytes(candidate, parked) >= peak.host_peak_bytes - schedule.host_base_bytes


@given(st.data())
def test_inputs_on_disk_are_counted_as_in_the_schedule(data: st.DataObject) -> None:
    """On the GPU as those on the host, on the host their buffers, and a place on disk for those that go there."""
    space = problems(data)
    room = ActivationBytes(space)
    for _ in range(3):
        candidate = filled(data, space, Tier.HOST)
        swapped = frozenset(block for block in candidate.selective if data.draw(st.booleans()))
        blocks = [block.index for block in space.profile.blocks]
        candidate = replace(
            candidate,
            selective=candidate.selective - swapped,
            swapped=swapped,
            far=frozenset(data.draw(st.sets(st.sampled_from(blocks)))),
            input_buffers=data.draw(st.integers(1, 3)),
        )
        plan = space.build(candidate)
        check_plan(space.profile, plan)
        schedule = lower(space.profile, plan, Mode.TRAIN)
        peak, standing = peaks(schedule), StandingBytes(space).of(candidate)
        assert room.gpu_bytes(candidate) >= peak.gpu_peak_bytes - schedule.gpu_base_bytes
        buffers, stored = space.input_bytes(candidate)
        assert standing.host_bytes + buffers == schedule.host_base_bytes
        assert standing.disk_bytes + stored == schedule.disk_base_bytes
        assert room.host_bytes(candidate, standing.parked_bytes) >= peak.host_peak_bytes - schedule.host_base_bytes


@pytest.mark.parametrize("micro_batch", [1, 2, 64])
def test_what_comes_back_beside_inputs_that_stayed_is_never_more_in_the_schedule(micro_batch: int) -> None:
    """It comes while the backward before still holds its own, which are there as long if they have never left."""
    profile, wide = stack(12, num_samples=64), Affine(0, 1 << 16)
    calls = [replace(one, saved_inputs=wide, outputs=wide, input_grads=wide) for one in profile.calls[1:]]
    profile = replace(profile, calls=(replace(profile.calls[0], outputs=wide), *calls))
    space = Space(profile, Terms(UNLIMITED, UNLIMITED, Update.IN_BACKWARD))
    room, last = ActivationBytes(space), max(space.movable)
    for count in range(6):
        candidate = Candidate(micro_batch, Tier.HOST, near=frozenset(range(last - count, last + 1)))
        schedule = lower(profile, space.build(candidate), Mode.TRAIN)
        needed = peaks(schedule).gpu_peak_bytes - schedule.gpu_base_bytes
        assert room.gpu_bytes(candidate) >= needed
        assert count != 1 or room.gpu_bytes(candidate) == needed


@pytest.mark.parametrize("update", Update)
def test_every_update_on_the_gpu_counts_at_its_own_moment(update: Update) -> None:
    """In backward the first one to be updated, the last block, meets most of what the others keep."""
    profile = stack(6, dtype="bfloat16")
    profile = replace(profile, blocks=tuple(replace(block, lazy_head=False) for block in profile.blocks))
    space = Space(profile, Terms(UNLIMITED, UNLIMITED, update))
    room = ActivationBytes(space)
    for whole in ([1], [4], [1, 4], list(space.movable)):
        for keep in ([], [4], space.keepable):
            candidate = Candidate(1, whole=frozenset(whole), keep=frozenset(keep))
            schedule = lower(profile, space.build(candidate), Mode.TRAIN)
            assert room.gpu_bytes(candidate) == peaks(schedule).gpu_peak_bytes - schedule.gpu_base_bytes


def test_updates_copy_no_more_than_a_chunk() -> None:
    specs = [param(f"p{number}", 4096) for number in range(3)]
    profile = build(specs, [Sketch("block", [spec.name for spec in specs])], [call(0, width=1)], num_samples=1)
    space = Space(profile, Terms(UNLIMITED, UNLIMITED))
    room = ActivationBytes(space)
    sizes = []
    for slot_numel in space.slot_sizes:
        candidate = Candidate(1, whole=frozenset({0}), slot_numel=slot_numel)
        schedule = lower(profile, space.build(candidate), Mode.TRAIN)
        sizes.append(room.gpu_bytes(candidate))
        assert sizes[-1] == peaks(schedule).gpu_peak_bytes - schedule.gpu_base_bytes
    assert min(sizes) < max(sizes)


def test_looking_at_every_choice_lowers_few_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = []
    monkeypatch.setattr(room_module, "lower", lambda *args: lowered.append(args) or lower(*args))
    space = Space(stack(20), Terms(UNLIMITED, UNLIMITED))
    room = ActivationBytes(space)
    looked_at = [room.gpu_bytes(candidate) for candidate in Moves(space, lambda _: True, (1,)).last_resorts()]
    assert len(looked_at) > 100 and len(lowered) == 2  # inputs on the GPU and on the host
