"""Plan to Schedule, by small passes over a draft. Read the pipeline in `lower`; each pass has a file."""

from __future__ import annotations

from hightide.ir.action import Action, ActionKey, Mode, Schedule
from hightide.ir.block import ModelProfile
from hightide.ir.passes import Passes
from hightide.ir.plan import Plan, Update
from hightide.ir.tier import Tier
from hightide.planner.lower.add_updates import add_updates
from hightide.planner.lower.count_effects import add_effects, base_bytes
from hightide.planner.lower.draft import Draft, emptied_before
from hightide.planner.lower.fetch_params import fetch_params
from hightide.planner.lower.lay_ticks import lay_ticks
from hightide.planner.lower.look_up_rows import look_up_rows, sum_rows
from hightide.planner.lower.move_gradients import move_gradients
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
    draft = _drafted(profile, plan, mode, placement or Placement(plan), without)
    return _finished(draft, order_actions(draft), emptied_before([draft]))


def _drafted(profile: ModelProfile, plan: Plan, mode: Mode, placement: Placement, without: Mechanisms) -> Draft:
    draft = Draft(profile, plan, mode, placement)
    lay_ticks(draft)
    fetch_params(draft, reuses_slots=Mechanism.SLOT_REUSE not in without)
    look_up_rows(draft)
    if mode.trains:
        move_gradients(draft)
        sum_rows(draft)
        move_inputs(draft)
    if mode.ends_step:
        add_updates(draft)
    return draft


def _finished(draft: Draft, ordered: list[Action], emptied: list[dict[ActionKey, ActionKey]]) -> Schedule:
    """`emptied`: before the first entry of each buffer of a ring, for each pass that may come before this one."""
    for exits in emptied:
        ordered = [
            one.changed(after_prev=tuple(dict.fromkeys((*one.after_prev, exits[one.id])))) if one.id in exits else one
            for one in ordered
        ]
    actions = add_effects(draft, ordered)
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
    drafts = {mode: _drafted(profile, plan, mode, placement, without) for mode, count in runs.items() if count}
    ordered = {mode: order_actions(draft) for mode, draft in drafts.items()}
    order = [draft for mode, draft in drafts.items() for _ in range(min(2, runs[mode]))]
    emptied: dict[Mode, list[dict[ActionKey, ActionKey]]] = {mode: [] for mode in drafts}
    for draft, exits in zip(order, emptied_before(order), strict=True):
        emptied[draft.mode].append(exits)
    return Passes(tuple((_finished(draft, ordered[mode], emptied[mode]), runs[mode]) for mode, draft in drafts.items()))


def lower_ticks(profile: ModelProfile, plan: Plan) -> tuple[Action, ...]:
    """The ticks of a step alone, with what they take and give, for those who ask about memory and not about time."""
    draft = Draft(profile, plan, Mode.TRAIN)
    lay_ticks(draft)
    return tuple(add_effects(draft, draft.ticks))


def modes_beside(plan: Plan) -> tuple[Mode, ...]:
    """In which it may run, beside those of its step. A step of several passes adds to what there is by its last."""
    adds = plan.update is Update.DEFERRED and plan.accumulate == 1
    return (Mode.EVAL, Mode.ACCUMULATE) if adds else (Mode.EVAL,)


__all__ = ["lower", "lower_step", "lower_ticks", "modes_beside"]
