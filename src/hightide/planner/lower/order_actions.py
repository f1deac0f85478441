"""Pass 7: one sequential order, in which the order on each lane is the one that the executor will follow.

[Note: why no lane can lock up] A lane that works in order must never hold an action whose dependencies are issued
after it. Here each action is issued when the tick `opens` has been left, and depends only on ticks up to that one and
on actions issued up to that moment. On h2d the order is that of need, so an action may stand behind one that opens
later; its `opens` is then raised to the same tick. That tick still lies before the one that needs it, because whoever
stands before it is needed no later and opened before its need.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby

from hightide.ir.action import TICK_OPS, Action
from hightide.ir.tier import ChunkKind, Lane
from hightide.planner.lower.draft import Draft
from hightide.planner.lower.pass_through_disk import move_through_disk
from hightide.planner.verify.precedence import waiting_order


def order_actions(draft: Draft) -> list[Action]:
    ticks = [
        tick.changed(after=tuple(dict.fromkeys((*tick.after, *draft.awaited[tick.tick]))))
        if tick.tick in draft.awaited
        else tick
        for tick in draft.ticks
    ]
    by_lane: dict[Lane, list[Action]] = {lane: [] for lane in Lane}
    for action in draft.actions:
        by_lane[action.lane].append(action)
    fetches = _order_fetches(draft, sorted(by_lane[Lane.H2D], key=lambda action: (action.tick, action.opens)))
    exits = sorted(by_lane[Lane.D2H], key=lambda action: (action.opens, action.tick))
    updates = sorted(by_lane[Lane.CPU], key=lambda action: (action.opens, action.tick))
    gathers = _order_gathers(draft, by_lane[Lane.GATHER], fetches)
    # Right after their ticks, as inline ones; those of plain autograd, which wait for the end of backward, last.
    is_loose = [block.loose for block in draft.profile.blocks]
    reduces = sorted(by_lane[Lane.REDUCE], key=lambda action: (action.opens, is_loose[action.block or 0]))
    inline = [*ticks, *by_lane[Lane.COMPUTE], *reduces]
    if not any(draft.placement.num_buffers.values()) and not draft.plan.num_input_buffers:
        return sorted([*inline, *exits, *fetches, *gathers, *updates], key=_moment)
    moved = [*move_through_disk(draft, fetches, exits, updates), *gathers]
    issued: dict[int, list[Action]] = defaultdict(list)
    for action in sorted(moved, key=_moment):
        issued[action.opens].append(action)
    return _merged(sorted(inline, key=_moment), issued)


def _merged(inline: list[Action], issued: dict[int, list[Action]]) -> list[Action]:
    """After each tick what is issued then, that first which others wait for."""
    at = {moment: [*group] for moment, group in groupby(inline, key=lambda action: _moment(action)[0])}
    found = []
    for moment in sorted({-1, *at}):
        found += [*at.get(moment, ()), *_sorted_by_waiting(issued[moment])]
    return found


def _sorted_by_waiting(actions: list[Action]) -> list[Action]:
    """Lanes that work in order keep theirs."""
    place = {action.id: at for at, action in enumerate(actions)}
    waits_for: list[list[int]] = []
    latest: dict[Lane, int] = {}
    for at, action in enumerate(actions):
        before = [place[name] for name in action.after if name in place]
        if action.lane.is_in_order:
            before += [latest[action.lane]] if action.lane in latest else []
            latest[action.lane] = at
        waits_for.append(before)
    found = [actions[at] for at in waiting_order(waits_for)]
    assert len(found) == len(actions), f"actions wait for each other: {sorted(place)}"
    return found


def _order_fetches(draft: Draft, by_need: list[Action]) -> list[Action]:
    """Only when backward begins does the executor learn that it adds to gradients; up to then it has followed the TRAIN
    schedule. What TRAIN issues in forward therefore stands before all gradients that continue an earlier pass."""
    if draft.mode.starts_sums or not draft.mode.trains:
        return _raise_opens(by_need)
    last_forward = len(draft.profile.calls) - 1
    continued: dict[int | None, Action] = {}
    for action in by_need:
        if action.kind is ChunkKind.GRAD:
            continued.setdefault(action.chunk, action)
    as_in_train = _raise_opens([action for action in by_need if continued.get(action.chunk) is not action])
    early = [action for action in as_in_train if action.opens <= last_forward]
    names = {action.id for action in early}
    late = [_opened(action, last_forward) for action in by_need if action.id not in names]
    return early + _raise_opens(late)


def _order_gathers(draft: Draft, gathers: list[Action], fetches: list[Action]) -> list[Action]:
    """Before the ticks that need them, in that order, as fetches; those after an update as they come."""
    opens = {fetch.id: fetch.opens for fetch in fetches}
    ready = [_opened(one, max((opens.get(name, -1) for name in one.after), default=-1)) for one in gathers]
    needed, updated = ([one for one in ready if (one.tick >= len(draft.ticks)) is late] for late in (False, True))
    raised = _raise_opens(sorted(needed, key=lambda action: (action.tick, action.opens)))
    return sorted([*raised, *updated], key=lambda action: (action.opens, action.tick))


def _raise_opens(actions: list[Action]) -> list[Action]:
    opens = -1
    raised = []
    for action in actions:
        raised.append(_opened(action, opens))
        opens = raised[-1].opens
    return raised


def _opened(action: Action, least: int) -> Action:
    """By that tick at the earliest."""
    return action if action.opens >= least else action.changed(opens=least)


def _moment(action: Action) -> tuple[int, int]:
    """When the executor comes to it: on entry of a tick, in it, or after it, and then what others wait for first."""
    if action.op in TICK_OPS:
        return action.tick, 1
    if action.lane is Lane.COMPUTE:
        return (action.opens, 3) if action.runs_when_open else (action.tick, 0)
    return action.opens, _RANKS[action.lane]


_RANKS = {
    lane: rank
    for rank, lane in enumerate(
        (Lane.REDUCE, Lane.COMPUTE, Lane.D2H, Lane.H2D, Lane.GATHER, Lane.CPU, Lane.DISK_WRITE, Lane.DISK_READ), start=2
    )
}
