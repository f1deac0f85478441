"""A simulated step as a timeline: the lanes' bars, what they waited for, and GPU memory by what it is used for.

`step_timeline` takes spans from anywhere: the simulator's, or what the lanes of a run recorded."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hightide.ir.action import TICK_OPS, Action, Op, Schedule
from hightide.ir.activation import Activation
from hightide.ir.block import ModelProfile
from hightide.ir.machine import Machine
from hightide.ir.plan import Plan
from hightide.ir.tier import Lane, Tier
from hightide.ir.timeline import PART, Bar, LaneTime, Level, MemoryPart, Timeline
from hightide.planner.chunk_place import Buffer
from hightide.planner.lookup import standing_bytes
from hightide.planner.placement import Placement
from hightide.planner.predict.light import light_s
from hightide.planner.predict.peaks import bytes_forecast
from hightide.planner.predict.simulator import Simulated, Span
from hightide.planner.solution import Solution

SIMULATED_PARTS = tuple(part for part in MemoryPart if part is not MemoryPart.REST)


def simulated_timeline(solution: Solution, simulated: Simulated, machine: Machine) -> Timeline:
    """Where many passes of a step are alike, some of them are shown."""
    profile, plan, schedules = solution.profile, solution.plan, {one.index: one.schedule for one in simulated.passes}
    window_s = (simulated.begin_s, simulated.passes[-1].end_s)
    levels = tide(profile, solution.placement, schedules, simulated.spans, simulated.begin_s)
    peak_bytes = max(sum(level.num_bytes) for level in levels)
    held_bytes = (peak_bytes, bytes_forecast(solution.passes, solution.peaks, machine).gpu_reserved_bytes)
    source = f"simulated on {machine.name}"
    if len(schedules) < plan.accumulate:
        source += f"; {len(schedules)} of the {plan.accumulate} {PART}"
    spans = (*simulated.beside, *simulated.spans)
    timeline = step_timeline(plan, schedules, spans, window_s, SIMULATED_PARTS, levels, held_bytes, source)
    return replace(timeline, light_s=light_s(profile, len(schedules) * plan.num_samples, machine))


Schedules = Mapping[int, Schedule]  # of the passes of one step, by their index


def step_timeline(
    plan: Plan,
    schedules: Schedules,
    spans: Iterable[Span],
    window_s: tuple[float, float],
    parts: tuple[MemoryPart, ...],
    levels: tuple[Level, ...],
    peak_bytes: tuple[int, int | None],
    source: str,
) -> Timeline:
    """Of the step whose passes these are; spans of other passes are of the step before. Those that do not touch the
    window are left out. `peak_bytes`: of tensors, and reserved."""
    begin_s, end_s = window_s
    shown = [span for span in spans if span.end_s >= begin_s and span.start_s <= end_s]
    bars = _bars(schedules, sorted(shown, key=lambda span: span.start_s), begin_s)
    step_s = end_s - begin_s
    return Timeline(
        source=source,
        fingerprint=plan.fingerprint,
        step_s=step_s,
        gpu_peak_bytes=peak_bytes[0],
        gpu_reserved_bytes=peak_bytes[1],
        gpu_limit_bytes=plan.gpu_limit_bytes,
        lanes=_lane_times(bars, step_s),
        parts=parts,
        levels=levels,
        bars=bars,
    )


# -- memory -----------------------------------------------------------------------------------------------------------


def tide(
    profile: ModelProfile, placement: Placement, schedules: Schedules, spans: Sequence[Span], begin_s: float
) -> tuple[Level, ...]:
    """GPU bytes by part, as a step function. Its peak is at most that of `predict.peaks.peaks`: there transfers may be
    as slow as they like, here they give what they hold as soon as they are through. The two are equal where no transfer
    gives (no block inputs on the host)."""
    held = _held_parts(profile, placement.plan)
    now = Counter(base_parts(placement, next(iter(schedules.values())).gpu_base_bytes))
    levels = [_level(0.0, now)]
    ends: list[tuple[float, int, Action]] = []
    for order, span in enumerate(sorted(spans, key=lambda span: (span.start_s, span.end_s))):
        action = schedules[span.pass_index].by_id[span.id]
        if not (action.gpu_takes or action.gpu_gives or _inside(action)):
            continue
        while ends and ends[0][0] <= span.start_s:
            levels.append(_end(ends, now, held, begin_s))
        now.update(_taken(held[action.block], action))
        now[MemoryPart.TRANSIENTS] += _inside(action)
        levels.append(_level(span.start_s - begin_s, now))
        heapq.heappush(ends, (span.end_s, order, action))
    while ends:
        levels.append(_end(ends, now, held, begin_s))
    return tuple(levels)


def base_parts(placement: Placement, base_bytes: int) -> dict[MemoryPart, int]:
    """What is on the GPU during the whole step."""
    plan, sizes = placement.plan, placement.buffer_bytes
    rows = standing_bytes(plan.profile, plan)[Tier.GPU] if plan.profile is not None else 0
    parts = {
        MemoryPart.PERSISTENT: placement.bytes_on[Tier.GPU],
        MemoryPart.SLOTS: plan.num_slots * sizes[Buffer.SLOT],
        MemoryPart.GRADIENTS: plan.num_grad_slots * sizes[Buffer.GRAD_SLOT] + placement.staging_bytes + rows,
    }
    return {**parts, MemoryPart.BATCH: base_bytes - sum(parts.values())}


def _taken(part: MemoryPart, action: Action) -> dict[MemoryPart, int]:
    kept = action.gpu_kept if action.op in (Op.FORWARD, Op.UNSTASH) else 0
    return {MemoryPart.INPUTS: action.gpu_takes - kept, part: kept}


def _inside(action: Action) -> int:
    """While it runs. Of a transfer it is what is there for the moment in which it is issued."""
    return action.gpu_transient if action.lane is Lane.COMPUTE else 0


def _held_parts(profile: ModelProfile, plan: Plan) -> dict[int | None, MemoryPart]:
    """What a block holds for backward, by its level. A head with a fused loss holds logits, whatever its level."""
    found: dict[int | None, MemoryPart] = {None: MemoryPart.KEPT}
    for spec, block in zip(profile.blocks, plan.blocks, strict=True):
        if spec.lazy_head or block.activation is Activation.RECOMPUTE:
            found[spec.index] = MemoryPart.KEPT
        elif block.held is not Tier.GPU:
            found[spec.index] = MemoryPart.SWAPPED
        else:
            is_part = block.activation is Activation.SELECTIVE
            found[spec.index] = MemoryPart.SELECTIVE if is_part else MemoryPart.KEPT
    return found


def _end(
    ends: list[tuple[float, int, Action]],
    now: Counter[MemoryPart],
    held: Mapping[int | None, MemoryPart],
    begin_s: float,
) -> Level:
    """Of the action that ends next."""
    end_s, _, action = heapq.heappop(ends)
    kept = action.gpu_kept if action.op in (Op.BACKWARD, Op.STASH) else 0
    now.subtract(
        {
            MemoryPart.INPUTS: action.gpu_gives - kept,
            held[action.block]: kept,
            MemoryPart.TRANSIENTS: _inside(action),
        }
    )
    return _level(end_s - begin_s, now)


def _level(at_s: float, now: Counter[MemoryPart]) -> Level:
    return Level(at_s, tuple(now[part] for part in SIMULATED_PARTS))


# -- lanes ------------------------------------------------------------------------------------------------------------


def _bars(schedules: Schedules, spans: Sequence[Span], begin_s: float) -> tuple[Bar, ...]:
    ended_s: dict[str, dict[int, float]] = defaultdict(dict)  # by id and pass
    for span in spans:
        ended_s[span.id][span.pass_index] = span.end_s
    free_s: dict[Lane, float] = defaultdict(lambda: begin_s)
    any_schedule = next(iter(schedules.values()))
    bars = []
    for span in spans:
        schedule = schedules.get(span.pass_index)
        action = (schedule or any_schedule).by_id.get(span.id)
        cause, cause_s = "", free_s[span.lane]
        if action is not None and schedule is not None:
            for back, name in _causes(schedule, action):
                latest = max((one for one in ended_s[name] if one <= span.pass_index - back), default=None)
                until_s = begin_s if latest is None else min(ended_s[name][latest], span.start_s)
                if until_s > cause_s:
                    cause, cause_s = name, until_s
        bars.append(
            Bar(
                lane=span.lane,
                id=span.id,
                start_s=span.start_s - begin_s,
                end_s=span.end_s - begin_s,
                op=action.op if action is not None else None,
                kind=action.kind if action is not None else None,
                num_bytes=action.num_bytes if action is not None else 0,
                waited_for=cause,
                waited_s=cause_s - free_s[span.lane] if cause else 0.0,
                earlier=schedule is None,
                held_bytes=action.gpu_kept if action is not None and action.op in (Op.STASH, Op.UNSTASH) else 0,
            )
        )
        free_s[span.lane] = max(free_s[span.lane], span.end_s)
    return tuple(bars)


def _causes(schedule: Schedule, action: Action) -> list[tuple[int, str]]:
    """(passes back, at least, and id) of all that it waits for, the tick that opens it included."""
    opened = action.opens >= 0 and action.op not in TICK_OPS
    opener = [(0, schedule.ticks[action.opens].id)] if opened else []
    return [*((0, name) for name in action.after), *((1, name) for name in action.after_prev), *opener]


def _lane_times(bars: Sequence[Bar], step_s: float) -> tuple[LaneTime, ...]:
    busy = dict.fromkeys(Lane, 0.0)
    stall = dict.fromkeys(Lane, 0.0)
    lane_of = {bar.id: bar.lane for bar in bars}
    free_s = 0.0
    for bar in bars:
        busy[bar.lane] += max(0.0, min(bar.end_s, step_s) - max(bar.start_s, 0.0))
        if bar.lane is Lane.COMPUTE:
            stall[lane_of.get(bar.waited_for, Lane.COMPUTE)] += bar.waited_s
            stall[Lane.COMPUTE] += max(0.0, bar.start_s - free_s - bar.waited_s)
            free_s = max(free_s, bar.end_s)
    return tuple(LaneTime(lane, busy[lane], stall[lane]) for lane in Lane if lane.always_shown or busy[lane])
