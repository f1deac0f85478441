"""Plan to Schedule, by small passes over a draft. Read the pipeline in `lower`; each pass has a file."""

from __future__ import annotations

from hightide.ir.action import Action, ActionKey, Mode, Schedule
from hightide.ir.block import ModelProfile
from hightide.ir.passes import Passes
from hightide.ir.plan import Plan, Update
from hightide.ir.tier import Tier
from hightide.planner.lower.add_updates import add_updates
from hightide.planner.lower.count_effects import Effects, add_effects, base_bytes, count_calls
from hightide.planner.lower.draft import Draft, emptied_before
from hightide.planner.lower.fetch_params import fetch_params, fetch_params_again
from hightide.planner.lower.lay_ticks import lay_ticks
from hightide.planner.lower.look_up_rows import look_up_rows, sum_rows
from hightide.planner.lower.move_gradients import finish_gradients, move_gradients
from hightide.planner.lower.move_inputs import move_inputs
from hightide.planner.lower.order_actions import order_actions
from hightide.planner.mechanism import NONE, Mechanism, Mechanisms
from hightide.planner.placement import Placement


def lower(
    profile: ModelProfile, plan: Plan, mode: Mode, placement: Placement | None = None, without: Mechanisms = NONE
) -> Schedule:
    """The schedule of one pass over the model in this mode. Pure; the same arguments give the same text. `placement`:
    the plan's, if it is known already."""
    if mode is Mode.ACCUMULATE and plan.update is Update.IN_BACKWARD:
        raise ValueError(
            "update='in_backward' has updated the parameters when a second backward begins, so gradients cannot be "
            "accumulated; wrap with update='deferred', or call step() after each backward"
        )
    draft = _laid(profile, plan, mode, placement or Placement(plan))
    fetch_params(draft, _reuses_slots(without))
    _move(draft)
    if mode.ends_step:
        _end_step(draft)
    return _finished(draft, order_actions(draft), emptied_before([draft]), count_calls(draft))


def _laid(profile: ModelProfile, plan: Plan, mode: Mode, placement: Placement) -> Draft:
    draft = Draft(profile, plan, mode, placement)
    lay_ticks(draft)
    return draft


def _reuses_slots(without: Mechanisms) -> bool:
    return Mechanism.SLOT_REUSE not in without


def _move(draft: Draft) -> None:
    look_up_rows(draft)
    if draft.mode.trains:
        move_gradients(draft)
        sum_rows(draft)
        move_inputs(draft)


def _end_step(draft: Draft) -> None:
    finish_gradients(draft)
    add_updates(draft)


def _drafts_of_step(profile: ModelProfile, plan: Plan, placement: Placement, without: Mechanisms) -> dict[Mode, Draft]:
    """Of a step of several passes. The last is like one in the middle up to its end."""
    first, later = (_laid(profile, plan, mode, placement) for mode in (Mode.FIRST, Mode.MIDDLE))
    left = fetch_params(first, _reuses_slots(without))
    later = fetch_params_again(later, left, _reuses_slots(without))
    for draft in (first, later):
        _move(draft)
    last = later.copied(Mode.LAST)
    _end_step(last)
    return {Mode.FIRST: first, Mode.MIDDLE: later, Mode.LAST: last}


def _finished(
    draft: Draft, ordered: list[Action], emptied: list[dict[ActionKey, ActionKey]], of_calls: Effects
) -> Schedule:
    """`emptied`: before the first entry of each buffer of a ring, for each pass that may come before this one."""
    for exits in emptied:
        ordered = [
            one.changed(after_prev=tuple(dict.fromkeys((*one.after_prev, exits[one.id])))) if one.id in exits else one
            for one in ordered
        ]
    actions = add_effects(draft, ordered, of_calls)
    base = base_bytes(draft.profile, draft.placement)
    return Schedule(draft.mode, base[Tier.GPU], base[Tier.HOST], tuple(actions), base[Tier.DISK], draft.standing)


def lower_step(
    profile: ModelProfile, plan: Plan, placement: Placement | None = None, without: Mechanisms = NONE
) -> Passes:
    """All passes of one step."""
    placement = placement or Placement(plan)
    if plan.accumulate == 1:
        return Passes(((lower(profile, plan, Mode.TRAIN, placement, without), 1),))
    runs = {Mode.FIRST: 1, Mode.MIDDLE: plan.accumulate - 2, Mode.LAST: 1}
    made = _drafts_of_step(profile, plan, placement, without)
    drafts = {mode: made[mode] for mode, count in runs.items() if count}
    ordered = {mode: order_actions(draft) for mode, draft in drafts.items()}
    order = [draft for mode, draft in drafts.items() for _ in range(min(2, runs[mode]))]
    emptied: dict[Mode, list[dict[ActionKey, ActionKey]]] = {mode: [] for mode in drafts}
    for draft, exits in zip(order, emptied_before(order), strict=True):
        emptied[draft.mode].append(exits)
    of_calls = count_calls(order[0])
    finished = {mode: _finished(draft, ordered[mode], emptied[mode], of_calls) for mode, draft in drafts.items()}
    return Passes(tuple((schedule, runs[mode]) for mode, schedule in finished.items()))


def lower_ticks(profile: ModelProfile, placement: Placement) -> tuple[Action, ...]:
    """The ticks of a step alone, with what they take and give, for those who ask about memory and not about time."""
    draft = _laid(profile, placement.plan, Mode.TRAIN, placement)
    return tuple(add_effects(draft, draft.ticks, count_calls(draft)))


def modes_beside(plan: Plan) -> tuple[Mode, ...]:
    """In which it may run, beside those of its step. A step of several passes adds to what there is by its last."""
    adds = plan.update is Update.DEFERRED and plan.accumulate == 1
    return (Mode.EVAL, Mode.ACCUMULATE) if adds else (Mode.EVAL,)


__all__ = ["lower", "lower_step", "lower_ticks", "modes_beside"]
