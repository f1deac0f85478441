"""Pass 4: block inputs, and what blocks have computed, that wait for backward on the host."""

from __future__ import annotations

from hightide.ir.action import Action, ActionKey, Op, Place
from hightide.ir.tier import Lane, Tier
from hightide.planner.lower.draft import Draft
from hightide.planner.waiting import away

UNSTASH_AHEAD = 2  # ticks before its own after which a call's inputs come back: one to hide the copy, one in reserve
STASH_BEHIND = 2  # ticks after its own by which a call's inputs have left: bounds how many wait on the GPU for the link


def away_between(forward: int, backward: int, last_forward: int) -> tuple[int, int]:
    """The tick by which what a call leaves has left, and that after which it comes back."""
    return min(forward + STASH_BEHIND, backward), max(backward - UNSTASH_AHEAD, last_forward)


def move_inputs(draft: Draft) -> None:
    last_forward = len(draft.profile.calls) - 1
    for index, call in enumerate(draft.profile.calls):
        num_bytes = away(draft.plan, call).num_bytes
        if not num_bytes:
            continue
        forward, backward = draft.tick_index[Op.FORWARD, index], draft.tick_index[Op.BACKWARD, index]
        gone_by, opens = away_between(forward, backward, last_forward)
        stash = Action(
            id=ActionKey(Op.STASH, index),
            op=Op.STASH,
            lane=Lane.D2H,
            tick=gone_by,
            opens=forward,
            block=call.block,
            call=index,
            source=Place(Tier.GPU),
            target=Place(Tier.HOST),
            num_bytes=num_bytes,
            after=(draft.ticks[forward].id,),
        )
        unstash = Action(
            id=ActionKey(Op.UNSTASH, index),
            op=Op.UNSTASH,
            lane=Lane.H2D,
            tick=backward,
            opens=opens,
            block=call.block,
            call=index,
            source=Place(Tier.HOST),
            target=Place(Tier.GPU),
            num_bytes=num_bytes,
            after=(stash.id,),
        )
        draft.actions += [stash, unstash]
        draft.awaited[gone_by].append(stash.id)
        draft.awaited[backward].append(unstash.id)
