"""Bytes of activations over a step, for many candidates at once.

Searches ask for the room of thousands of candidates; lowering each would take minutes. What a call keeps, or leaves
near, adds the same bytes at the same moments whatever others do, and so does an update on the GPU. So it is enough to
lower one schedule per micro-batch size, tier of inputs, slot size (updates go chunk by chunk) and tile of the loss, in
which nothing moves, and to add up differences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import add, attrgetter
from typing import NamedTuple

from hightide.ir.action import TICK_OPS, Action, Mode, Op, Schedule
from hightide.ir.activation import Activation
from hightide.ir.block import ModelProfile
from hightide.ir.chunk import REGION_BYTES, region_bytes
from hightide.ir.plan import Plan
from hightide.ir.tier import Lane, Tier
from hightide.planner.lower import lower, lower_ticks
from hightide.planner.lower.move_inputs import away_between
from hightide.planner.placement import Placement
from hightide.planner.predict.peaks import stash_holes
from hightide.planner.search.candidate import Candidate
from hightide.planner.search.space import Space
from hightide.planner.waiting import held_bytes, num_away

# Moments of each tick: in it; right after it, when blocks are updated in backward; and while what it opened is on its
# way, up to the next tick.
IN, AFTER, BETWEEN = range(3)
NUM_MOMENTS = 3


class _Rise(NamedTuple):
    """So many bytes more from one moment through another, and so many more in the last one."""

    first: int
    last: int
    num_bytes: int
    last_bytes: int = 0


class _Inputs(NamedTuple):
    """That wait on the host, by block."""

    host_bytes: dict[int, int]
    widest_bytes: dict[int, int]  # of one call


@dataclass(frozen=True)
class _Waiting:
    """Inputs of one call, on the host."""

    block: int
    backward: int  # its tick
    away: _Rise  # what they would add if they stayed


class _Return(NamedTuple):
    """Of inputs to the GPU, at the end of a tick that still holds its own if these have never left."""

    block: int
    opener: int  # the block of that tick
    beside: _Rise


class _Held(NamedTuple):
    """What blocks have computed, wherever their inputs wait, and whatever the size of slots."""

    rises: dict[Activation, dict[int, list[_Rise]]]  # by block
    swapped_bytes: dict[int, int]  # by block: on the host


@dataclass(frozen=True)
class _Levels:
    """Of one micro-batch size, tier of inputs, slot size and tile of the loss."""

    gpu_bytes: list[int]  # at most, by moment, with everything recomputed and no block updated on the GPU
    updates: dict[int, dict[int, int]]  # by block: the same at the moments at which it is updated there
    last_forward: int  # tick
    held: _Held
    near: dict[int, list[_Rise]]
    waiting: dict[int, _Waiting]  # by the tick of their forward
    returns: list[_Return]


class _Filled(NamedTuple):
    """What is the same for all candidates that differ in nothing but chunks."""

    added: list[int]  # by moment, to the levels
    gpu_bytes: int  # at most, with no block updated on the GPU


_FILLED_BY = attrgetter(
    *("micro_batch", "inputs", "slot_numel", "loss_tile_tokens", "looked_up", "loss_kept_tokens"),
    *("keep", "selective", "swapped", "near"),
)


class ActivationBytes:
    def __init__(self, space: Space) -> None:
        self._space = space
        self._levels: dict[tuple[int, Tier, int, int | None, frozenset[int]], _Levels] = {}
        self._held: dict[tuple[int, int | None, frozenset[int]], _Held] = {}
        self._filled: dict[tuple[object, ...], _Filled] = {}
        self._logits: dict[int, list[_Rise]] = {}
        self._holes: dict[tuple[int, frozenset[int]], int] = {}  # by micro-batch, and what is looked up on the host

    def gpu_bytes(self, candidate: Candidate) -> int:
        """At most at once, beside what is always there."""
        levels, filled = self._levels_of(candidate), self._filled_by(candidate)
        most = filled.gpu_bytes
        for block in candidate.whole | candidate.trained:
            for moment, num_bytes in levels.updates.get(block, {}).items():
                most = max(most, num_bytes + filled.added[moment])
        return most

    def _filled_by(self, candidate: Candidate) -> _Filled:
        key = _FILLED_BY(candidate)
        if key not in self._filled:
            levels = self._levels_of(candidate)
            added = _added(len(levels.gpu_bytes), self._rises_of(levels, candidate))
            self._filled[key] = _Filled(added, max(map(add, levels.gpu_bytes, added)))
        return self._filled[key]

    def _rises_of(self, levels: _Levels, candidate: Candidate) -> Iterator[_Rise]:
        for activation, blocks in ((Activation.KEEP, candidate.keep), (Activation.SELECTIVE, candidate.selective)):
            for block in blocks:
                yield from levels.held.rises[activation].get(block, ())
        yield from _swapped(levels, candidate)
        stays = candidate.keep | candidate.near
        for block in stays:
            yield from levels.near.get(block, ())
        yield from (one.beside for one in levels.returns if one.opener in stays and one.block not in stays)
        if candidate.loss_kept_tokens:
            yield from self._logits_of(candidate)

    def host_bytes(self, candidate: Candidate, parked_bytes: Sequence[int] = ()) -> int:
        """At most at once. `parked_bytes`: of gradients, by block. While a block's inputs wait on the host its gradient
        does not: forward and backward both have inputs of the blocks before, and gradients of those behind."""
        away: dict[int, int] = {}
        if candidate.inputs is Tier.HOST:
            elsewhere = candidate.keep | candidate.near | self._space.far(candidate)  # or in buffers always there
            away = {block: size for block, size in self._inputs.host_bytes.items() if block not in elsewhere}
        for block in candidate.swapped:
            away[block] = away.get(block, 0) + self._held_of(candidate).swapped_bytes.get(block, 0)
        if not parked_bytes:
            return sum(away.values())
        now = most = sum(parked_bytes)
        for block in self._blocks:
            now += away.get(block, 0) - parked_bytes[block]
            most = max(most, now)
        return most

    @cached_property
    def _blocks(self) -> tuple[int, ...]:
        """As they are called first."""
        return tuple(dict.fromkeys(call.block for call in self._space.profile.calls))

    @cached_property
    def _inputs(self) -> _Inputs:
        profile, found = self._space.profile, _Inputs({}, {})
        for call in profile.calls:
            size = call.saved_inputs.at(profile.num_samples) if call.needs_backward else 0
            if size and not profile.blocks[call.block].loose:
                region = region_bytes(size) + max(0, call.num_saved - 1) * REGION_BYTES
                found.host_bytes[call.block] = found.host_bytes.get(call.block, 0) + region
                found.widest_bytes[call.block] = max(found.widest_bytes.get(call.block, 0), size)
        return found

    def holes_bytes(self, candidate: Candidate) -> int:
        """Left by the copies of the block that has most to move, and inside of the block that has most of them."""
        near = candidate.keep | candidate.near
        widest = self._inputs.widest_bytes if candidate.inputs is Tier.HOST else {}
        inputs = {block: size for block, size in widest.items() if block not in near}
        held = {block: self._held_of(candidate).swapped_bytes.get(block, 0) for block in candidate.swapped}
        left = (stash_holes(inputs.get(block, 0), held.get(block, 0)) for block in inputs.keys() | held)
        return max(left, default=0) + self._holes_inside(candidate)

    def _holes_inside(self, candidate: Candidate) -> int:
        key = candidate.micro_batch, candidate.looked_up
        if key not in self._holes:
            micro_batch, profile = candidate.micro_batch, self._space.profile
            calls = [call for call in profile.calls if call.needs_backward and call.block not in candidate.looked_up]
            calls = [call for call in calls if not profile.blocks[call.block].lazy_head]
            sizes = ((call, micro_batch if call.splittable else profile.num_samples) for call in calls)
            self._holes[key] = max((call.holes.at(size) for call, size in sizes), default=0)
        return self._holes[key]

    def _levels_of(self, candidate: Candidate) -> _Levels:
        slot_numel = candidate.slot_numel or self._space.slot_numel
        tables = candidate.looked_up
        key = (candidate.micro_batch, candidate.inputs, slot_numel, candidate.loss_tile_tokens, tables)
        if key not in self._levels:
            profile, placement = self._space.profile, self._placed(*key)
            plain = lower(profile, placement.plan, Mode.TRAIN, placement)
            stashes = {action.call: action for action in plain.actions if action.op is Op.STASH}
            returns = {action.call: action for action in plain.actions if action.op is Op.UNSTASH}
            near: dict[int, list[_Rise]] = {}
            waiting: dict[int, _Waiting] = {}
            for call, stash in stashes.items():
                assert stash.block is not None
                last = NUM_MOMENTS * returns[call].opens + AFTER
                rise = _Rise(NUM_MOMENTS * stash.tick + IN, last, stash.gpu_gives)
                near.setdefault(stash.block, []).append(rise)
                waiting[stash.opens] = _Waiting(stash.block, returns[call].tick, rise)
            self._levels[key] = _Levels(
                *_gpu_levels(plain, self._space),
                len(profile.calls) - 1,
                self._held_of(candidate),
                near,
                waiting,
                _returns(profile, plain),
            )
        return self._levels[key]

    def _held_of(self, candidate: Candidate) -> _Held:
        key = (candidate.micro_batch, candidate.loss_tile_tokens, candidate.looked_up)
        if key not in self._held:
            size = (candidate.micro_batch, Tier.GPU, None, candidate.loss_tile_tokens, candidate.looked_up)
            selective = self._placed(*size, selective=self._space.selectable)
            plain, kept = self._placed(*size), self._placed(*size, keep=self._space.keepable)
            before = self._ticks(plain)
            rises = {
                Activation.KEEP: _rises(before, self._ticks(kept)),
                Activation.SELECTIVE: _rises(before, self._ticks(selective)),
            }
            self._held[key] = _Held(rises, _swapped_bytes(self._space.profile, selective.plan))
        return self._held[key]

    def _logits_of(self, candidate: Candidate) -> list[_Rise]:
        tokens = candidate.loss_kept_tokens
        if tokens not in self._logits:
            kept = self._ticks(self._placed(1, Tier.GPU, loss_kept_tokens=tokens))
            self._logits[tokens] = [rise for rises in _rises(self._plain_ticks, kept).values() for rise in rises]
        return self._logits[tokens]

    @cached_property
    def _plain_ticks(self) -> tuple[Action, ...]:
        return self._ticks(self._placed(1, Tier.GPU))

    def _ticks(self, placement: Placement) -> tuple[Action, ...]:
        return lower_ticks(self._space.profile, placement)

    def _placed(
        self,
        micro_batch: int,
        inputs: Tier,
        slot_numel: int | None = None,
        loss_tile_tokens: int | None = None,
        looked_up: frozenset[int] = frozenset(),
        keep: Sequence[int] = (),
        selective: Sequence[int] = (),
        loss_kept_tokens: int = 0,
    ) -> Placement:
        """With everything on the GPU."""
        candidate = Candidate(
            micro_batch,
            inputs,
            whole=frozenset(self._space.movable),
            keep=frozenset(keep),
            selective=frozenset(selective),
            looked_up=looked_up,
            loss_kept_tokens=loss_kept_tokens,
            slot_numel=slot_numel,
            loss_tile_tokens=loss_tile_tokens,
        )
        return self._space.placed(candidate)


def _gpu_levels(schedule: Schedule, space: Space) -> tuple[list[int], dict[int, dict[int, int]]]:
    """At each moment, beside what is always there; and by block, at those of its updates. Copies count as in
    memory.peaks, taking each stash for done at the tick that waits for it."""
    levels = [0] * (NUM_MOMENTS * len(schedule.ticks))
    updates: dict[int, dict[int, int]] = defaultdict(dict)
    leaving: dict[int, int] = {}
    movable = set(space.movable)
    now = at = 0
    for action in schedule.actions:
        if action.op in TICK_OPS:
            at = NUM_MOMENTS * action.tick + IN
            now -= leaving.pop(action.tick, 0)
        elif action.lane is Lane.COMPUTE and action.runs_when_open:
            at = NUM_MOMENTS * action.opens + AFTER
        else:
            at = at - at % NUM_MOMENTS + BETWEEN
        now += action.gpu_takes
        reached = now + action.gpu_transient
        if action.op is Op.UPDATE and action.lane is Lane.COMPUTE and action.block in movable:
            of_block = updates[action.block]
            of_block[at] = max(of_block.get(at, 0), reached)
        else:
            levels[at] = max(levels[at], reached)
        if action.lane is Lane.COMPUTE:
            now -= action.gpu_gives
        else:
            leaving[action.tick] = leaving.get(action.tick, 0) + action.gpu_gives
    return levels, dict(updates)


def _returns(profile: ModelProfile, schedule: Schedule) -> list[_Return]:
    """As lower/count_effects.py counts them."""
    found: list[_Return] = []
    for action in schedule.actions:
        tick = schedule.ticks[action.opens]
        if action.op is Op.UNSTASH and tick.call is not None:
            at, held = NUM_MOMENTS * action.opens + BETWEEN, max(0, tick.gpu_gives - tick.gpu_kept)
            assert action.block is not None
            beside = _Rise(at, at, 0, held - action.gpu_transient)
            found.append(_Return(action.block, profile.calls[tick.call].block, beside))
    return found


def _rises(plain: Sequence[Action], kept: Sequence[Action]) -> dict[int, list[_Rise]]:
    """By block, what keeping adds to the ticks of a step."""
    before: dict[str, Action] = {tick.id: tick for tick in plain}
    forward = {tick.call: tick for tick in kept if tick.op is Op.FORWARD}
    rises: dict[int, list[_Rise]] = {}
    for backward in kept:
        if backward.op is not Op.BACKWARD:
            continue
        first = forward[backward.call]
        more = first.gpu_kept - before[first.id].gpu_kept
        assert backward.block is not None
        start, end = (NUM_MOMENTS * tick.tick + IN for tick in (first, backward))
        inside = [_Rise(at, at, 0, _more_inside(before, tick)) for at, tick in ((start, first), (end, backward))]
        rise = _Rise(start, end, more)
        rises.setdefault(backward.block, []).extend([rise, *(one for one in inside if one.last_bytes)])
    return {block: found for block, found in rises.items() if any(rise.num_bytes or rise.last_bytes for rise in found)}


def _swapped(levels: _Levels, candidate: Candidate) -> list[_Rise]:
    """Of what blocks hold that swap, until it has left, and from when it is back; as in lower/move_inputs.py. Inputs
    leave and come with it, or behind it."""
    if not candidate.swapped:
        return []
    rises = [rise for block in candidate.swapped for rise in levels.held.rises[Activation.SELECTIVE].get(block, ())]
    held = {rise.first // NUM_MOMENTS: rise for rise in rises if rise.num_bytes}
    stays = candidate.keep | candidate.near
    inputs = {forward: one for forward, one in levels.waiting.items() if one.block not in stays}
    ticks = {forward: (forward, rise.last // NUM_MOMENTS) for forward, rise in held.items()}
    following = dict(pairwise(sorted(held)))
    found = [rise for rise in rises if not rise.num_bytes]
    lane_is_free = 0
    for forward in sorted({*held, *inputs}):
        call = ticks[forward] if forward in held else (forward, inputs[forward].backward)
        after = ticks.get(following.get(forward, -1))
        gone_by, opens = away_between(call, levels.last_forward, forward in held, after)
        gone_by = lane_is_free = min(max(gone_by, lane_is_free), call[1])
        leaving, back = NUM_MOMENTS * gone_by + IN - 1, NUM_MOMENTS * opens + BETWEEN
        if forward in held:
            rise, is_away = held[forward], leaving < back - 1
            left = _Rise(rise.first, leaving, rise.num_bytes)
            found += [left, _Rise(back, *rise[1:])] if is_away else [rise]
        if forward in inputs:
            away = inputs[forward].away
            found.append(_Rise(away.first, min(leaving, away.last), away.num_bytes, away.last_bytes))
            found.append(_Rise(max(back, away.first), *away[1:]))
    return found


def _swapped_bytes(profile: ModelProfile, plan: Plan) -> dict[int, int]:
    """By block, of all its calls, on the host."""
    found: dict[int, int] = {}
    away = replace(plan, blocks=tuple(replace(block, inputs=Tier.GPU, held=Tier.HOST) for block in plan.blocks))
    for call in profile.calls:
        if call.needs_backward and (num_bytes := held_bytes(plan, call)):
            rounded = region_bytes(num_bytes) + num_away(away, call) * REGION_BYTES
            found[call.block] = found.get(call.block, 0) + rounded
    return found


def _more_inside(before: dict[str, Action], tick: Action) -> int:
    return tick.gpu_transient - before[tick.id].gpu_transient


def _added(num_moments: int, rises: Iterable[_Rise]) -> list[int]:
    slopes, found = [0] * (num_moments + 1), [0] * num_moments
    for first, last, num_bytes, last_bytes in rises:
        if first <= last:
            slopes[first] += num_bytes
            slopes[last + 1] -= num_bytes
            found[last] += last_bytes
    return list(map(add, found, accumulate(slopes)))
