"""Plan to Schedule, by small passes over a draft. Read the pipeline in `lower`; each pass has a file."""

from __future__ import annotations

from hightide.ir.action import Action, Mode, Schedule
from hightide.ir.block import ModelProfile
from hightide.ir.passes import Passes
from hightide.ir.plan import Plan, Update
from hightide.ir.tier import Tier
from hightide.planner.lower.add_updates import add_updates
from hightide.planner.lower.count_effects import add_effects, base_bytes
from hightide.planner.lower.draft import Draft
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
    actions = add_effects(draft, order_actions(draft))
    base = base_bytes(profile, draft.placement)
    return Schedule(mode, base[Tier.GPU], base[Tier.HOST], tuple(actions), base[Tier.DISK], draft.standing)


def lower_step(
    profile: ModelProfile, plan: Plan, placement: Placement | None = None, without: Mechanisms = NONE
) -> Passes:
    """All passes of one step."""
    placement = placement or Placement(plan)
    runs = {Mode.FIRST: 1, Mode.MIDDLE: plan.accumulate - 2, Mode.LAST: 1} if plan.accumulate > 1 else {Mode.TRAIN: 1}
    return Passes(
        tuple((lower(profile, plan, mode, placement, without), count) for mode, count in runs.items() if count)
    )


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
