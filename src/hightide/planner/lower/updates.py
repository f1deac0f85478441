"""Pass 5: the optimizer's update of each chunk that got a gradient, where its states are."""

from __future__ import annotations

from hightide.ir.action import Action, ActionKey, Op
from hightide.ir.chunk import ChunkSpec
from hightide.ir.plan import Update
from hightide.ir.tier import ChunkKind, Lane
from hightide.planner.lower.draft import Draft
from hightide.planner.place import is_used_up, states_on_gpu, update_bytes


def add_updates(draft: Draft) -> None:
    for chunk in draft.plan.layout.chunks:
        if chunk.optimised_numel == 0:
            continue
        if draft.profile.blocks[chunk.block].loose:
            draft.actions.append(_at_step(draft, chunk, _last_backward(draft)))
        elif draft.backward_uses.get(chunk.index) and not is_used_up(draft.plan, chunk):  # those left grad slots by it
            on_gpu = states_on_gpu(draft.plan, chunk)
            draft.actions.append(update_on_gpu(draft, chunk) if on_gpu else _on_host(draft, chunk))


def update_on_gpu(draft: Draft, chunk: ChunkSpec) -> Action:
    last = draft.ticks[draft.backward_uses[chunk.index][-1]]
    if draft.plan.update is Update.DEFERRED:
        return _at_step(draft, chunk, last)
    return _action(draft, chunk, Lane.COMPUTE, tick=_due(draft, chunk), opens=last.tick, after=(last.id,))


def _on_host(draft: Draft, chunk: ChunkSpec) -> Action:
    due = _due(draft, chunk)
    home = draft.last_write_back[chunk.index]
    if draft.plan.update is Update.IN_BACKWARD:
        return _action(draft, chunk, Lane.CPU, tick=due, opens=home.opens, after=(home.id,))
    step = draft.ticks[-1]
    return _action(draft, chunk, Lane.CPU, tick=due, opens=step.tick, after=(step.id, home.id))


def _due(draft: Draft, chunk: ChunkSpec) -> int:
    """When the next pass uses the chunk first: that is the order in which the cpu lane takes updates."""
    return len(draft.ticks) + draft.uses[chunk.index][0]


def _at_step(draft: Draft, chunk: ChunkSpec, last: Action | None) -> Action:
    """Inline on entry of the STEP tick, in the user's thread."""
    step = draft.ticks[-1]
    return _action(draft, chunk, Lane.COMPUTE, tick=step.tick, opens=step.tick - 1, after=(last.id,) if last else ())


def _last_backward(draft: Draft) -> Action | None:
    last = draft.ticks[-2] if len(draft.ticks) > 1 else None
    return last if last is not None and last.op is Op.BACKWARD else None


def _action(draft: Draft, chunk: ChunkSpec, lane: Lane, tick: int, opens: int, after: tuple[ActionKey, ...]) -> Action:
    return Action(
        id=ActionKey(Op.UPDATE, chunk.index),
        op=Op.UPDATE,
        lane=lane,
        tick=tick,
        opens=opens,
        block=chunk.block,
        chunk=chunk.index,
        kind=ChunkKind.STATE,
        num_bytes=update_bytes(draft.plan, chunk),
        after=after,
    )
