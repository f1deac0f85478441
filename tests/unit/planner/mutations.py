"""Schedules with one planted error each, made from right ones systematically: every action, every dependency."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from hightide.ir.action import TICK_OPS, Action, Mode, Op, Place, Schedule
from hightide.ir.tier import Lane

Mutants = Iterator[tuple[str, Schedule]]  # what was done, and the result

EXTRA_BYTES = 512


def edited(schedule: Schedule, action: Action, **changes: object) -> Schedule:
    actions = tuple(replace(a, **changes) if a is action else a for a in schedule.actions)  # type: ignore[arg-type]
    return replace(schedule, actions=actions)


def missing_action(schedule: Schedule) -> Mutants:
    """Nobody waits for it either: a dependency on nothing would give the error away."""
    for gone in schedule.actions:
        kept = [replace(a, after=tuple(n for n in a.after if n != gone.id)) for a in schedule.actions if a is not gone]
        yield f"without {gone.id}", replace(schedule, actions=tuple(kept))


def duplicated_action(schedule: Schedule) -> Mutants:
    for place, action in enumerate(schedule.actions):
        twin = replace(action, id=f"{action.id}.again", after=(*action.after, action.id))
        actions = (*schedule.actions[: place + 1], twin, *schedule.actions[place + 1 :])
        yield f"{action.id} twice", replace(schedule, actions=actions)


def repeated_id(schedule: Schedule) -> Mutants:
    for place, action in enumerate(schedule.actions):
        actions = (*schedule.actions[: place + 1], action, *schedule.actions[place + 1 :])
        yield f"{action.id} listed twice", replace(schedule, actions=actions)


def wrong_bytes(schedule: Schedule) -> Mutants:
    for action in schedule.actions:
        if action.op not in TICK_OPS and action.op is not Op.EVICT:
            yield f"{action.id} moves too much", edited(schedule, action, num_bytes=action.num_bytes + EXTRA_BYTES)
            if action.num_bytes:
                yield f"{action.id} moves too little", edited(schedule, action, num_bytes=action.num_bytes - 1)


def unbalanced_memory(schedule: Schedule) -> Mutants:
    if schedule.mode is Mode.EVAL:  # its outputs belong to the user, who gives them back
        return
    for action in schedule.actions:
        for name in ("gpu_takes", "gpu_gives", "host_takes", "host_gives"):
            yield f"{action.id} {name} more", edited(schedule, action, **{name: getattr(action, name) + EXTRA_BYTES})


def too_much_memory(schedule: Schedule, limit_bytes: int) -> Mutants:
    """For a moment, on one tier."""
    for action in schedule.actions:
        yield f"{action.id} has all the GPU", edited(schedule, action, gpu_transient=limit_bytes + 1)
        both = {"host_takes": action.host_takes + limit_bytes + 1, "host_gives": action.host_gives + limit_bytes + 1}
        yield f"{action.id} has all the host", edited(schedule, action, **both)


def forgotten_earlier_pass(schedule: Schedule) -> Mutants:
    for action in schedule.actions:
        for name in action.after_prev:
            rest = tuple(other for other in action.after_prev if other != name)
            yield f"{action.id} ignores the last {name}", edited(schedule, action, after_prev=rest)


def wrong_lane(schedule: Schedule) -> Mutants:
    for action in schedule.actions:
        for lane in Lane:
            if lane is not action.lane:
                yield f"{action.id} on {lane}", edited(schedule, action, lane=lane)


def wrong_exit(schedule: Schedule) -> Mutants:
    """It says that it leaves another place than the one it stands in."""
    for action in schedule.actions:
        if action.source is not None and action.source.slot is not None:
            place = Place(action.source.tier, action.source.slot + 1)
            yield f"{action.id} leaves {place}", edited(schedule, action, source=place)


def wrong_moment(schedule: Schedule) -> Mutants:
    """What runs in the user's thread runs at another tick than where it is listed."""
    for action in schedule.actions:
        if action.lane is Lane.COMPUTE and action.op not in TICK_OPS:
            field = "opens" if action.runs_when_open else "tick"
            for step in (-1, 1):
                moment = getattr(action, field) + step
                yield f"{action.id} {field}={moment}", edited(schedule, action, **{field: moment})


# -- not always errors: an order may be enforced twice, another slot may be free ---------------------------------------


def forgotten_dependency(schedule: Schedule) -> Mutants:
    for action in schedule.actions:
        for name in action.after:
            rest = tuple(other for other in action.after if other != name)
            yield f"{action.id} does not wait for {name}", edited(schedule, action, after=rest)


def other_slot(schedule: Schedule) -> Mutants:
    slots = {a.target.slot for a in schedule.actions if a.target is not None and a.target.slot is not None}
    for action in schedule.actions:
        if action.target is not None and action.target.slot is not None:
            for slot in slots - {action.target.slot}:
                place = Place(action.target.tier, slot)
                yield f"{action.id} to {place}", edited(schedule, action, target=place)


def other_order(schedule: Schedule) -> Mutants:
    """Two neighbours of one lane change places, in the list and so on the lane."""
    for lane in Lane:
        places = [place for place, action in enumerate(schedule.actions) if action.lane is lane]
        for first, second in pairwise(places):
            actions = list(schedule.actions)
            actions[first], actions[second] = actions[second], actions[first]
            yield f"{actions[first].id} before {actions[second].id}", replace(schedule, actions=tuple(actions))


def other_opening(schedule: Schedule) -> Mutants:
    for action in schedule.actions:
        if action.op not in TICK_OPS:
            for opens in {-1, action.opens - 1, action.opens + 1, len(schedule.ticks) - 1} - {action.opens}:
                yield f"{action.id} opens={opens}", edited(schedule, action, opens=opens)


ERRORS = (
    missing_action,
    duplicated_action,
    repeated_id,
    wrong_bytes,
    unbalanced_memory,
    forgotten_earlier_pass,
    wrong_lane,
    wrong_exit,
    wrong_moment,
)
CHANGES = (forgotten_dependency, other_slot, other_order, other_opening)
