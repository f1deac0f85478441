"""What activations take over a step, for many choices at once.

Searches ask for the room of thousands of choices; lowering each would take minutes. What a call keeps, or leaves near,
adds the same bytes at the same ticks whatever others do, so it is enough to lower a few schedules in which nothing
moves and to add up their differences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hightide.ir.action import TICK_OPS, Action, Mode, Op, Schedule
from hightide.ir.chunk import UPDATE_TILE_NUMEL
from hightide.ir.plan import Plan
from hightide.ir.tier import Lane, Tier
from hightide.planner.choice import Choice, Problem
from hightide.planner.lower import lower, lower_ticks


@dataclass(frozen=True)
class _Rise:
    """So many bytes more from one tick through another, and so many more while the last one runs."""

    first: int
    last: int
    num_bytes: int
    last_bytes: int = 0


@dataclass(frozen=True)
class _Levels:
    """Of one micro-batch size and tier of inputs, with one block's update on the GPU or none."""

    gpu_bytes: list[int]  # at most, by tick, with everything recomputed
    keep: dict[int, list[_Rise]]  # by block
    near: dict[int, list[_Rise]]
    host_bytes: dict[int, int]  # by block: its inputs on the host
    stashed_bytes: dict[int, int]  # by block: the widest of them


class Room:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._levels: dict[tuple[int, Tier, int | None], _Levels] = {}
        self._logits: dict[int, list[_Rise]] = {}

    def gpu_bytes(self, choice: Choice) -> int:
        """At most at once, beside what is always there."""
        levels = self._levels_of(choice)
        rises = [rise for block in choice.keep for rise in levels.keep.get(block, ())]
        rises += [rise for block in choice.keep | choice.near for rise in levels.near.get(block, ())]
        if choice.loss_kept_tokens:
            rises += self._logits_of(choice)
        return max(_added(levels.gpu_bytes, rises))

    def host_bytes(self, choice: Choice) -> int:
        near = choice.keep | choice.near
        return sum(size for block, size in self._levels_of(choice).host_bytes.items() if block not in near)

    def stashed_bytes(self, choice: Choice) -> int:
        """The widest inputs of a block that wait on the host."""
        near = choice.keep | choice.near
        levels = self._levels_of(choice)
        return max((size for block, size in levels.stashed_bytes.items() if block not in near), default=0)

    def _levels_of(self, choice: Choice) -> _Levels:
        key = (choice.micro_batch, choice.inputs, self._widest_update(choice))
        if key not in self._levels:
            plain = lower(self._problem.profile, self._plan(*key), Mode.TRAIN)
            kept = lower_ticks(self._problem.profile, self._plan(*key, keep=self._problem.keepable))
            stashes = {action.call: action for action in plain.actions if action.op is Op.STASH}
            returns = {action.call: action for action in plain.actions if action.op is Op.UNSTASH}
            near: dict[int, list[_Rise]] = {}
            host_bytes: dict[int, int] = {}
            stashed_bytes: dict[int, int] = {}
            for call, stash in stashes.items():
                assert stash.block is not None
                rise = _Rise(stash.tick, returns[call].opens, stash.gpu_gives)
                near.setdefault(stash.block, []).append(rise)
                host_bytes[stash.block] = host_bytes.get(stash.block, 0) + stash.host_takes
                stashed_bytes[stash.block] = max(stashed_bytes.get(stash.block, 0), stash.gpu_gives)
            self._levels[key] = _Levels(_gpu_levels(plain), _rises(plain.ticks, kept), near, host_bytes, stashed_bytes)
        return self._levels[key]

    def _logits_of(self, choice: Choice) -> list[_Rise]:
        tokens = choice.loss_kept_tokens
        if tokens not in self._logits:
            kept = lower_ticks(self._problem.profile, self._plan(1, Tier.GPU, None, loss_kept_tokens=tokens))
            self._logits[tokens] = [rise for rises in _rises(self._plain_ticks, kept).values() for rise in rises]
        return self._logits[tokens]

    def _widest_update(self, choice: Choice) -> int | None:
        """The block whose update on the GPU takes most room; of equals the first."""
        widths = {block: min(self._problem.block_numel(block), UPDATE_TILE_NUMEL) for block in choice.whole}
        return max(sorted(widths), key=widths.__getitem__, default=None)

    @cached_property
    def _plain_ticks(self) -> tuple[Action, ...]:
        return lower_ticks(self._problem.profile, self._plan(1, Tier.GPU, None))

    def _plan(
        self, micro_batch: int, inputs: Tier, updated: int | None, keep: Sequence[int] = (), loss_kept_tokens: int = 0
    ) -> Plan:
        """With all parameters on the GPU, and one block's states."""
        whole = frozenset[int]() if updated is None else frozenset([updated])
        choice = Choice(
            micro_batch,
            inputs,
            whole=whole,
            params=frozenset(self._problem.movable) - whole,
            keep=frozenset(keep),
            loss_kept_tokens=loss_kept_tokens,
        )
        return self._problem.build(choice)


def _gpu_levels(schedule: Schedule) -> list[int]:
    """At each tick or since the one before, beside what is always there. Copies count as in memory.peaks, taking each
    stash for done at the tick that waits for it."""
    levels = [0] * len(schedule.ticks)
    leaving: dict[int, int] = {}
    now = at = 0
    for action in schedule.actions:
        if action.op in TICK_OPS:
            at = action.tick
            now -= leaving.pop(at, 0)
        now += action.gpu_takes
        levels[at] = max(levels[at], now + action.gpu_transient)
        if action.lane is Lane.COMPUTE:
            now -= action.gpu_gives
        else:
            leaving[action.tick] = leaving.get(action.tick, 0) + action.gpu_gives
    return levels


def _rises(plain: Sequence[Action], kept: Sequence[Action]) -> dict[int, list[_Rise]]:
    """By block, what keeping adds to the ticks of a step."""
    before = {tick.id: tick for tick in plain}
    forward = {tick.call: tick for tick in kept if tick.op is Op.FORWARD}
    rises: dict[int, list[_Rise]] = {}
    for backward in kept:
        if backward.op is not Op.BACKWARD:
            continue
        first = forward[backward.call]
        more = first.gpu_kept - before[first.id].gpu_kept
        assert backward.block is not None
        inside = [_Rise(tick.tick, tick.tick, 0, _more_inside(before, tick)) for tick in (first, backward)]
        rise = _Rise(first.tick, backward.tick, more)
        rises.setdefault(backward.block, []).extend([rise, *(one for one in inside if one.last_bytes)])
    return {block: found for block, found in rises.items() if any(rise.num_bytes or rise.last_bytes for rise in found)}


def _more_inside(before: dict[str, Action], tick: Action) -> int:
    return tick.gpu_transient - before[tick.id].gpu_transient


def _added(levels: list[int], rises: Iterable[_Rise]) -> list[int]:
    slopes = [0] * (len(levels) + 1)
    found = list(levels)
    for rise in rises:
        if rise.first <= rise.last:
            slopes[rise.first] += rise.num_bytes
            slopes[rise.last + 1] -= rise.num_bytes
            found[rise.last] += rise.last_bytes
    more = 0
    for tick, slope in enumerate(slopes[:-1]):
        more += slope
        found[tick] += more
    return found
