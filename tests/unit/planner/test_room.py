"""What activations take, added up for a choice, is what its schedule takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hightide.ir.action import Mode
from hightide.ir.plan import GradientDtype, Update
from hightide.ir.tier import Tier
from hightide.planner import room as room_module
from hightide.planner.choice import Choice, Problem
from hightide.planner.lower import lower
from hightide.planner.memory import peaks
from hightide.planner.moves import Moves
from hightide.planner.room import Room
from unit.planner.profiles import UNLIMITED, Sketch, build, call, param, profiles, stack
from unit.planner.test_base import choices


def problems(data: st.DataObject) -> Problem:
    profile = data.draw(profiles())
    update, gradients = data.draw(st.sampled_from(Update)), data.draw(st.sampled_from(GradientDtype))
    return Problem(profile, UNLIMITED, UNLIMITED, update, gradients=gradients, disk_bytes=UNLIMITED)


def filled(data: st.DataObject, problem: Problem, inputs: Tier) -> Choice:
    """With activations of all kinds, and updates on the GPU of any blocks."""
    choice = replace(
        data.draw(choices(problem)), micro_batch=data.draw(st.integers(1, problem.profile.num_samples)), inputs=inputs
    )
    movable = frozenset(problem.movable)
    keep, near = (
        data.draw(st.frozensets(st.sampled_from(some))) if some else frozenset[int]()
        for some in (problem.keepable, problem.movable)
    )
    return replace(
        choice,
        whole=choice.whole & movable,
        params=choice.params & movable,
        keep=keep,
        near=near - keep,
        loss_kept_tokens=data.draw(st.sampled_from([0, *problem.keepable_tokens])),
    )


@given(st.data())
def test_room_on_the_gpu_is_that_of_the_schedule(data: st.DataObject) -> None:
    problem = problems(data)
    room = Room(problem)
    for _ in range(3):
        choice = filled(data, problem, Tier.GPU)
        schedule = lower(problem.profile, problem.build(choice), Mode.TRAIN)
        assert room.gpu_bytes(choice) == peaks(schedule).gpu_peak_bytes - schedule.gpu_base_bytes
        assert room.host_bytes(choice) == 0


@given(st.data())
def test_room_on_the_host_is_that_of_the_inputs_that_wait_there(data: st.DataObject) -> None:
    problem = problems(data)
    room = Room(problem)
    for _ in range(3):
        choice = filled(data, problem, Tier.HOST)
        schedule = lower(problem.profile, problem.build(choice), Mode.TRAIN)
        assert room.host_bytes(choice) == peaks(schedule).host_peak_bytes - schedule.host_base_bytes


@pytest.mark.parametrize("update", Update)
def test_every_update_on_the_gpu_counts_at_its_own_moment(update: Update) -> None:
    """In backward the first one to be updated, the last block, meets most of what the others keep."""
    profile = stack(6, dtype="bfloat16")
    profile = replace(profile, blocks=tuple(replace(block, lazy_head=False) for block in profile.blocks))
    problem = Problem(profile, UNLIMITED, UNLIMITED, update)
    room = Room(problem)
    for whole in ([1], [4], [1, 4], list(problem.movable)):
        for keep in ([], [4], problem.keepable):
            choice = Choice(1, whole=frozenset(whole), keep=frozenset(keep))
            schedule = lower(profile, problem.build(choice), Mode.TRAIN)
            assert room.gpu_bytes(choice) == peaks(schedule).gpu_peak_bytes - schedule.gpu_base_bytes


def test_updates_copy_no_more_than_a_chunk() -> None:
    specs = [param(f"p{number}", 4096) for number in range(3)]
    profile = build(specs, [Sketch("block", [spec.name for spec in specs])], [call(0, width=1)], num_samples=1)
    problem = Problem(profile, UNLIMITED, UNLIMITED, Update.DEFERRED)
    room = Room(problem)
    sizes = []
    for slot_numel in problem.slot_sizes:
        choice = Choice(1, whole=frozenset({0}), slot_numel=slot_numel)
        schedule = lower(profile, problem.build(choice), Mode.TRAIN)
        sizes.append(room.gpu_bytes(choice))
        assert sizes[-1] == peaks(schedule).gpu_peak_bytes - schedule.gpu_base_bytes
    assert min(sizes) < max(sizes)


def test_looking_at_every_choice_lowers_few_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = []
    monkeypatch.setattr(room_module, "lower", lambda *args: lowered.append(args) or lower(*args))
    problem = Problem(stack(20), UNLIMITED, UNLIMITED, Update.DEFERRED)
    room = Room(problem)
    looked_at = [room.gpu_bytes(choice) for choice in Moves(problem, lambda _: True, (1,)).last_resorts()]
    assert len(looked_at) > 100 and len(lowered) == 2  # inputs on the GPU and on the host
