"""A problem with other facts: those that a run has measured, in the place of what was forecast for it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any

from hightide.ir.action import TICK_OPS, Mode, Op, Schedule
from hightide.ir.block import Affine, CallSpec, ModelProfile
from hightide.ir.costs import CallCost, Costs, Curve, Point
from hightide.ir.machine import CollectiveRates, Disk, Links, Machine, Speeds
from hightide.ir.plan import Plan
from hightide.ir.tier import Lane
from hightide.planner.lower import lower
from hightide.planner.predict.peaks import needed_bytes, peaks
from hightide.planner.problem import Problem
from hightide.planner.solution import Solution

MARGIN = 1.05  # on what blocks were seen to take: the moment that was seen need not be the worst
MOST_FACTOR = 8.0  # beyond it, something else than blocks takes the memory

Factors = Mapping[int, float]  # by kind of call: what it takes on the GPU, over what it was said to take


@dataclass(frozen=True)
class MemoryShortage:
    """The GPU was seen to need more than was forecast."""

    needed_bytes: int  # at least
    num_ticks: int  # of the pass, that had begun by then
    factors: Factors = field(default_factory=dict)  # above 1, of the kinds of calls that were looked at
    supposed: Factors = field(default_factory=dict)  # of the others: see Widths.supposed


@dataclass(frozen=True)
class Corrected:
    problem: Problem
    kept_free_bytes: int = 0  # for what blocks do not explain; the problem counts it as always there


def with_slower_lanes(problem: Problem, factors: Mapping[Lane, float]) -> Problem:
    """`factors`: how much longer each lane was busy than forecast."""
    machine, compute = problem.machine, factors.get(Lane.COMPUTE, 1.0)
    return replace(problem, costs=_scaled_costs(problem.costs, compute), machine=_scaled_machine(machine, factors))


def with_wider_blocks(problem: Problem, factors: Factors) -> Problem:
    """Calls of these kinds take so many times the memory that they were said to take."""
    return replace(problem, profile=_scaled_profile(problem.profile, factors))


def with_more_memory(problem: Problem, plan: Plan, shortage: MemoryShortage) -> Corrected:
    """For a shortage that is explained by the blocks that were looked at, and as far as it is not, by all of them
    alike. What they do not explain either is kept free on the GPU."""
    known = {**shortage.supposed, **shortage.factors}
    seen = with_wider_blocks(problem, known)
    forecast, without = (
        _lowered_bytes(one, plan, shortage.num_ticks)
        for one in (seen, with_wider_blocks(problem, _nothing(problem.profile)))
    )
    inside = forecast - without
    common = max(1.0, min(MOST_FACTOR, (shortage.needed_bytes - without) / inside)) if inside else 1.0
    factors = {kind: common * known.get(kind, 1.0) for kind in _nothing(problem.profile)}
    margined = {kind: factor * MARGIN for kind, factor in factors.items() if factor > 1}
    wider = with_wider_blocks(problem, margined)
    rest = max(0, shortage.needed_bytes - _lowered_bytes(wider, plan, shortage.num_ticks))
    profile = replace(wider.profile, buffer_bytes=wider.profile.buffer_bytes + rest)
    return Corrected(replace(wider, profile=profile), rest)


@dataclass(frozen=True)
class ForwardNeed:
    """What one call's forward takes on the GPU, and how much of that is the block's own affair, beside what enters and
    leaves it: this is not known for sure."""

    kind: int  # of the call
    peak_bytes: int  # at most, while it runs
    inside_bytes: int  # of these
    left_bytes: int  # when it has ended
    kept_bytes: int  # of these

    def factor(self, peak_bytes: int, left_bytes: int, least_bytes: int) -> float | None:
        """How many times what was forecast the block took. None: there is not enough of it to tell."""
        pairs = ((peak_bytes, self.peak_bytes, self.inside_bytes), (left_bytes, self.left_bytes, self.kept_bytes))
        return max((1 + (seen - whole) / part for seen, whole, part in pairs if part >= least_bytes), default=None)


class Widths:
    """What calls were seen to take in one forward, over what they were said to take. Equal calls take equal memory, but
    the first one may meet what is taken once (workspaces of libraries): the middle one counts, and of two the lower."""

    def __init__(self, solution: Solution, least_bytes: int) -> None:
        """`least_bytes` of a block's own, below which it is not looked at."""
        self._needs = forward_needs(solution)
        self._least_bytes = least_bytes
        self._seen: defaultdict[tuple[int, bool], list[float]] = defaultdict(list)  # by kind, and whether it keeps

    def clear(self) -> None:
        self._seen.clear()

    def see(self, call: int, peak_bytes: int, left_bytes: int) -> None:
        need = self._needs[call]
        factor = need.factor(peak_bytes, left_bytes, self._least_bytes)
        if factor is not None:
            self._seen[need.kind, need.kept_bytes > 0].append(factor)

    def above(self, most: float) -> Factors:
        """Of the kinds that took more than `most` times what was forecast for them."""
        return {kind: factor for kind, factor in self._factors().items() if factor > most}

    def supposed(self, most: float) -> Factors:
        """Of the kinds that nobody has looked at, because the pass has ended before them: what the narrowest of the
        others took. A forecast that is wrong for everything so far is hardly right for what comes."""
        factors = self._factors()
        least = min(factors.values(), default=1.0)
        kinds = {need.kind for need in self._needs.values()}
        return dict.fromkeys(kinds - factors.keys(), least) if least > most else {}

    def _factors(self) -> dict[int, float]:
        factors: dict[int, float] = {}
        for (kind, _), seen in self._seen.items():
            factors[kind] = max(factors.get(kind, 0.0), median_low(seen))
        return factors


def forward_needs(solution: Solution) -> dict[int, ForwardNeed]:
    """By call."""
    profile = solution.profile
    last = solution.passes.last
    empty = lower(_scaled_profile(profile, _nothing(profile)), solution.plan, last.mode, solution.placement)
    ticks, without = (
        {tick.call: tick for tick in schedule.ticks if tick.op is Op.FORWARD} for schedule in (last, empty)
    )
    needs: dict[int, ForwardNeed] = {}
    for call, tick in ticks.items():
        assert call is not None
        peak_bytes = tick.gpu_takes + tick.gpu_transient
        known_bytes = without[call].gpu_takes + without[call].gpu_transient
        kept_bytes = tick.gpu_kept - without[call].gpu_kept
        kind = profile.calls[call].kind
        needs[call] = ForwardNeed(kind, peak_bytes, peak_bytes - known_bytes, tick.gpu_takes, kept_bytes)
    return needs


def expected_bytes(problem: Problem, plan: Plan, factors: Factors, left_bytes: int) -> int:
    """What the pass will take on the GPU, whose forward has left so much there, and in whose forward calls took
    `factors` of what was forecast. A forecast is an upper bound: what it has too much when the forward has ended, it
    has too much in backward."""
    wider = with_wider_blocks(problem, factors)
    schedule = lower(wider.profile, plan, Mode.TRAIN)
    forward = (action for action in schedule.actions if action.op in (Op.FORWARD, Op.STASH))
    forecast_left_bytes = schedule.gpu_base_bytes + sum(action.gpu_takes - action.gpu_gives for action in forward)
    forecast_needed_bytes = needed_bytes(schedule, peaks(schedule), problem.machine)
    return forecast_needed_bytes - max(0, forecast_left_bytes - left_bytes)


def begun_bytes(schedule: Schedule, machine: Machine, num_ticks: int) -> int:
    """That the GPU will have given at most when so many ticks have begun: on a real one what torch reserves."""
    begun = _beginning(schedule, num_ticks)
    return needed_bytes(begun, peaks(begun), machine)


def _lowered_bytes(problem: Problem, plan: Plan, num_ticks: int) -> int:
    return begun_bytes(lower(problem.profile, plan, Mode.TRAIN), problem.machine, num_ticks)


def _beginning(schedule: Schedule, num_ticks: int) -> Schedule:
    ticks = [at for at, action in enumerate(schedule.actions) if action.op in TICK_OPS]
    end = ticks[num_ticks] if num_ticks < len(ticks) else len(schedule.actions)
    return replace(schedule, actions=schedule.actions[:end])


def _nothing(profile: ModelProfile) -> Factors:
    """Calls of every kind take nothing."""
    return dict.fromkeys((call.kind for call in profile.calls), 0.0)


def _scaled_profile(profile: ModelProfile, factors: Factors) -> ModelProfile:
    """What calls take inside, times the factor of their kind. What enters and leaves them is known."""
    calls = (_scaled_call(call, factors[call.kind]) if call.kind in factors else call for call in profile.calls)
    return replace(profile, calls=tuple(calls))


def _scaled_call(call: CallSpec, factor: float) -> CallSpec:
    names = ("forward_peak", "kept", "lasting", "left", "backward_peak")
    lines: dict[str, Any] = {name: _scaled(getattr(call, name), factor) for name in names}
    selective = call.selective and replace(call.selective, kept=_scaled(call.selective.kept, factor))
    return replace(call, **lines, selective=selective)


def _scaled(line: Affine, factor: float) -> Affine:
    return Affine(math.ceil(line.fixed * factor), math.ceil(line.per_sample * factor))


def _scaled_costs(costs: Costs, factor: float) -> Costs:
    def slower(curve: Curve) -> Curve:
        return Curve(tuple(Point(point.num_samples, point.value * factor) for point in curve.points))

    def slower_call(cost: CallCost) -> CallCost:
        names = ("forward_s", "forward_kept_s", "recompute_s", "backward_s")
        curves: dict[str, Any] = {name: slower(getattr(cost, name)) for name in names}
        if (part := cost.selective) is not None:
            curves["selective"] = replace(part, forward_s=slower(part.forward_s), recompute_s=slower(part.recompute_s))
        return replace(cost, **curves)

    loss = costs.loss
    if loss is not None:
        seconds = {name: factor * getattr(loss, name) for name in ("forward_s", "backward_s", "project_s")}
        loss = replace(loss, **seconds)
    return replace(
        costs,
        source=f"{costs.source}, corrected by the first steps",
        calls=tuple(map(slower_call, costs.calls)),
        loss=loss,
        memory_bytes_per_s=costs.memory_bytes_per_s / factor,
        update_bytes_per_s=costs.update_bytes_per_s / factor,
        glue_s=costs.glue_s * factor,
    )


def _scaled_machine(machine: Machine, factors: Mapping[Lane, float]) -> Machine:
    def slower(speeds: Speeds) -> Speeds:
        pairs = zip(speeds.busy, speeds.bytes_per_s, strict=True)
        return Speeds(speeds.busy, tuple(value / factors.get(lane, 1.0) for lane, value in pairs))

    disk = None if machine.disk is None else _scaled_disk(machine.disk, factors)
    links = None if machine.links is None else _scaled_links(machine.links, factors)
    return replace(machine, speeds=tuple(map(slower, machine.speeds)), disk=disk, links=links)


def _scaled_links(links: Links, factors: Mapping[Lane, float]) -> Links:
    gathers, reduces = (factors.get(lane, 1.0) for lane in (Lane.GATHER, Lane.REDUCE))

    def slower(rates: CollectiveRates) -> CollectiveRates:
        return CollectiveRates(
            rates.gather_bytes_per_s / gathers,
            rates.reduce_bytes_per_s / reduces,
            rates.all_reduce_bytes_per_s / reduces,
        )

    return replace(links, inside=slower(links.inside), across=None if links.across is None else slower(links.across))


def _scaled_disk(disk: Disk, factors: Mapping[Lane, float]) -> Disk:
    """Each way alone, and beside the other."""
    read, written = (factors.get(lane, 1.0) for lane in (Lane.DISK_READ, Lane.DISK_WRITE))
    reads = ("read_bytes_per_s", "read_while_writing_bytes_per_s")
    writes = ("write_bytes_per_s", "sustained_write_bytes_per_s", "write_while_reading_bytes_per_s")
    slower: dict[str, Any] = {name: getattr(disk, name) / read for name in reads}
    return replace(disk, **slower, **{name: getattr(disk, name) / written for name in writes})
