"""A question with other facts: what a run has measured, in the place of what was forecast for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hightide.ir.action import TICK_OPS, Mode, Op, Schedule
from hightide.ir.block import Affine, ModelProfile
from hightide.ir.costs import CallCost, Costs, Curve, Point
from hightide.ir.machine import Machine, Speeds
from hightide.ir.plan import Plan
from hightide.ir.tier import Lane
from hightide.planner.lower import lower
from hightide.planner.memory import peaks, reserved_bytes
from hightide.planner.question import Question

MARGIN = 1.05  # on what blocks were seen to take: the moment that was seen need not be the worst
MOST_FACTOR = 8.0  # beyond it, something else than blocks takes the memory


@dataclass(frozen=True)
class Shortage:
    """The GPU was seen to need more than was forecast."""

    needed_bytes: int  # at least
    num_ticks: int  # of the pass, that had begun by then
    factor: float = 1.0  # by which blocks were seen to take more than they were said to; 1: they were not looked at


def with_slower_lanes(question: Question, factors: Mapping[Lane, float]) -> Question:
    """`factors`: how much longer each lane was busy than forecast."""
    machine, compute = question.machine, factors.get(Lane.COMPUTE, 1.0)
    return replace(question, costs=_scaled_costs(question.costs, compute), machine=_scaled_machine(machine, factors))


def with_wider_blocks(question: Question, factor: float) -> Question:
    """Blocks take `factor` times the memory that they were said to take."""
    return replace(question, profile=_scaled_profile(question.profile, factor * MARGIN))


def with_more_memory(question: Question, plan: Plan, shortage: Shortage) -> Question:
    """For a shortage that is explained by blocks; what they do not explain is kept free on the GPU."""
    factor = shortage.factor
    if factor <= 1:
        forecast, without = (
            forecast_bytes(replace(question, profile=profile), plan, shortage.num_ticks)
            for profile in (question.profile, _scaled_profile(question.profile, 0.0))
        )
        inside = forecast - without
        factor = max(1.0, min(MOST_FACTOR, (shortage.needed_bytes - without) / inside)) if inside else 1.0
    corrected = with_wider_blocks(question, factor)
    rest = max(0, shortage.needed_bytes - forecast_bytes(corrected, plan, shortage.num_ticks))
    return replace(corrected, gpu_bytes=max(1, question.gpu_bytes - rest))


@dataclass(frozen=True)
class ForwardNeed:
    """What one call's forward takes on the GPU, and how much of that is the block's own affair, beside what enters and
    leaves it: this is not known for sure."""

    peak_bytes: int  # at most, while it runs
    inside_bytes: int  # of these
    left_bytes: int  # when it has ended
    kept_bytes: int  # of these

    def factor(self, peak_bytes: int, left_bytes: int, least_bytes: int) -> float:
        """How many times what was forecast the block took, as far as there is enough of it to tell."""
        pairs = ((peak_bytes, self.peak_bytes, self.inside_bytes), (left_bytes, self.left_bytes, self.kept_bytes))
        return max((1 + (seen - whole) / part for seen, whole, part in pairs if part >= least_bytes), default=1.0)


def forward_needs(profile: ModelProfile, plan: Plan) -> dict[int, ForwardNeed]:
    """By call."""
    ticks, without = (
        {tick.call: tick for tick in lower(one, plan, Mode.TRAIN).ticks if tick.op is Op.FORWARD}
        for one in (profile, _scaled_profile(profile, 0.0))
    )
    needs: dict[int, ForwardNeed] = {}
    for call, tick in ticks.items():
        assert call is not None
        peak_bytes = tick.gpu_takes + tick.gpu_transient
        known_bytes = without[call].gpu_takes + without[call].gpu_transient
        kept_bytes = tick.gpu_kept - without[call].gpu_kept
        needs[call] = ForwardNeed(peak_bytes, peak_bytes - known_bytes, tick.gpu_takes, kept_bytes)
    return needs


def forecast_bytes(question: Question, plan: Plan, num_ticks: int | None = None) -> int:
    """What the GPU will have given at most when so many ticks have begun: on a real one what torch reserves."""
    schedule = lower(question.profile, plan, Mode.TRAIN)
    begun = schedule if num_ticks is None else _beginning(schedule, num_ticks)
    is_real = question.machine.gpu is not None and not question.machine.is_simulated
    return reserved_bytes(begun) if is_real else peaks(begun).gpu_peak_bytes


def _beginning(schedule: Schedule, num_ticks: int) -> Schedule:
    ticks = [at for at, action in enumerate(schedule.actions) if action.op in TICK_OPS]
    end = ticks[num_ticks] if num_ticks < len(ticks) else len(schedule.actions)
    return replace(schedule, actions=schedule.actions[:end])


def _scaled_profile(profile: ModelProfile, factor: float) -> ModelProfile:
    """What blocks take inside, times `factor`. What enters and leaves them is known."""
    calls = tuple(
        replace(
            call,
            forward_peak=_scaled(call.forward_peak, factor),
            kept=_scaled(call.kept, factor),
            backward_peak=_scaled(call.backward_peak, factor),
        )
        for call in profile.calls
    )
    return replace(profile, calls=calls)


def _scaled(line: Affine, factor: float) -> Affine:
    return Affine(math.ceil(line.fixed * factor), math.ceil(line.per_sample * factor))


def _scaled_costs(costs: Costs, factor: float) -> Costs:
    def slower(curve: Curve) -> Curve:
        return Curve(tuple(Point(point.num_samples, point.value * factor) for point in curve.points))

    def slower_call(cost: CallCost) -> CallCost:
        return CallCost(
            slower(cost.forward_s),
            slower(cost.forward_kept_s),
            slower(cost.recompute_s),
            slower(cost.backward_s),
            cost.issue_s,
        )

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

    return replace(machine, speeds=tuple(map(slower, machine.speeds)))
