"""Pass 1: the compute actions in the model's order."""

from __future__ import annotations

from hightide.ir.action import Action, ActionKey, Op
from hightide.ir.tier import Lane
from hightide.planner.lower.draft import Draft


def lay_ticks(draft: Draft) -> None:
    calls = draft.profile.calls
    for index, call in enumerate(calls):
        _lay(draft, Op.FORWARD, call.block, index)
    if not draft.mode.trains:
        return
    for index, call in reversed(list(enumerate(calls))):
        if call.needs_backward:
            _lay(draft, Op.BACKWARD, call.block, index)
    _lay(draft, Op.STEP, None, None)


def _lay(draft: Draft, op: Op, block: int | None, call: int | None) -> None:
    tick = len(draft.ticks)
    key = ActionKey(op, call)
    draft.ticks.append(Action(key, op, Lane.COMPUTE, tick=tick, opens=tick - 1, block=block, call=call))
