"""Pass 1: the compute actions in the model's order."""

from __future__ import annotations

from functools import lru_cache

from hightide.ir.action import Action, ActionKey, Op
from hightide.ir.tier import Lane
from hightide.planner.lower.draft import Draft


def lay_ticks(draft: Draft) -> None:
    calls = tuple((call.block, call.needs_backward) for call in draft.profile.calls)
    draft.ticks = [*_ticks(calls, draft.mode.trains)]


@lru_cache(maxsize=16)
def _ticks(calls: tuple[tuple[int, bool], ...], trains: bool) -> tuple[Action, ...]:
    """`calls`: of which block, and whether it needs a backward. The same for all plans of a model, so the latest are
    kept."""
    ticks: list[Action] = []

    def lay(op: Op, block: int | None, call: int | None) -> None:
        tick = len(ticks)
        ticks.append(Action(ActionKey(op, call), op, Lane.COMPUTE, tick=tick, opens=tick - 1, block=block, call=call))

    for index, (block, _) in enumerate(calls):
        lay(Op.FORWARD, block, index)
    if trains:
        for index, (block, needs_backward) in reversed(list(enumerate(calls))):
            if needs_backward:
                lay(Op.BACKWARD, block, index)
        lay(Op.STEP, None, None)
    return tuple(ticks)
