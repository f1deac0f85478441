"""What a checkpoint costs a run, told beforehand."""

from __future__ import annotations

from hightide.ir.action import Op, Schedule


def update_order(schedule: Schedule, num_chunks: int) -> list[int]:
    """All chunks, in the order in which a pass that ends a step updates them; those that it does not update are
    last."""
    updates = [action for action in schedule.actions if action.op is Op.UPDATE]
    updates.sort(key=lambda action: (action.opens, action.tick))
    found = dict.fromkeys(action.chunk for action in updates if action.chunk is not None)
    return [*found, *(chunk for chunk in range(num_chunks) if chunk not in found)]
