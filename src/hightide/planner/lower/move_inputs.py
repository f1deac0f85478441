"""Pass 4: block inputs, and what blocks have computed, that wait for backward on the host."""

from __future__ import annotations

from itertools import pairwise

from hightide.ir.action import Action, ActionKey, Op, Place
from hightide.ir.tier import Lane, Tier
from hightide.planner.lower.draft import Draft
from hightide.planner.waiting import away

UNSTASH_AHEAD = 2  # ticks before its own after which a call's inputs come back: one to hide the copy, one in reserve
HELD_BEHIND = 6  # likewise, of what the last block holds that swaps: copies of that take as long as several blocks
STASH_BEHIND = 2  # ticks after its own by which a call's inputs have left: bounds how many wait on the GPU for the link

Ticks = tuple[int, int]  # of a call: its forward and its backward


def away_between(call: Ticks, last_forward: int, swaps: bool = False, following: Ticks | None = None) -> Ticks:
    """The tick by which what a call leaves has left, and that after which it comes back. What a block holds (`swaps`)
    may take as long as up to the next one that swaps (`following`): so the copies of some blocks hide behind those
    between them, and of what is on its way there is no more than where all of them swap."""
    forward, backward = call
    gone_by, opens = forward + STASH_BEHIND, backward - UNSTASH_AHEAD
    if following is not None:
        gone_by, opens = max(gone_by, following[0]), min(opens, following[1])
    elif swaps:  # before the turn, where memory is short
        behind = max(STASH_BEHIND, min(HELD_BEHIND, last_forward - forward))
        gone_by, opens = forward + behind, backward - behind
    return min(gone_by, backward), max(opens, last_forward)


def move_inputs(draft: Draft) -> None:
    last_forward = len(draft.profile.calls) - 1
    leaving = {index: away(draft.plan, call) for index, call in enumerate(draft.profile.calls)}
    ticks = {
        index: (draft.tick_index[Op.FORWARD, index], draft.tick_index[Op.BACKWARD, index])
        for index, one in leaving.items()
        if one.num_bytes
    }
    swapping = [index for index, one in leaving.items() if one.held_bytes]
    following = dict(pairwise(swapping))
    lane_is_free = 0  # d2h works in order: what leaves later has left later
    for index, (forward, backward) in ticks.items():
        call, num_bytes = draft.profile.calls[index], leaving[index].num_bytes
        after = ticks[following[index]] if index in following else None
        swaps = bool(leaving[index].held_bytes)
        gone_by, opens = away_between((forward, backward), last_forward, swaps, after)
        gone_by = lane_is_free = min(max(gone_by, lane_is_free), backward)
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
        unstash = stash.changed(
            id=ActionKey(Op.UNSTASH, index),
            op=Op.UNSTASH,
            lane=Lane.H2D,
            tick=backward,
            opens=opens,
            source=stash.target,
            target=stash.source,
            after=(stash.id,),
        )
        draft.actions += [stash, unstash]
        draft.awaited[gone_by].append(stash.id)
        draft.awaited[backward].append(unstash.id)
