"""The first steps of a run against the forecast of its plan.

[Note: the first steps] A forecast may be wrong: blocks may take more memory than was measured without values, and a
link may be slower than yesterday. A few steps after the first, which compile and warm up, are timed by events that
nobody waits for. If the step or the GPU's peak is not what was forecast, one warning says why, and the run is planned
again, once, with what was seen. A forward that runs out of GPU memory, or has taken more than was forecast, is given up
and begun again under the new plan: nothing has been updated by then. In backward it is too late for that: the error
goes to the user, and a loop that goes on after it gets the new plan."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from hightide.ir.action import Mode, Op, Schedule
from hightide.ir.plan import Forecast, Plan, Update
from hightide.ir.units import format_bytes, format_seconds
from hightide.machine import free_host_bytes
from hightide.planner.correct import (
    Shortage,
    forecast_bytes,
    forward_needs,
    with_more_memory,
    with_slower_lanes,
    with_wider_blocks,
)
from hightide.planner.cost import forecast
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.lower import lower_all
from hightide.planner.question import Question
from hightide.planner.search import Found
from hightide.planner.verify import verify_all
from hightide.runtime.moving import waiting_bytes
from hightide.runtime.observer import is_short
from hightide.runtime.run import Run
from hightide.stores.base import OutOfMemory
from hightide.timing import Measured, StepTimes, lane_seconds, lanes_off

MOST_OFF = 0.15  # of a forecast
LEAST_GAIN = 0.02  # of a step, for which a model is moved
LEAST_BYTES = {"cpu": 1024, "cuda": 2**20}  # of a block, whose need is looked at: a real GPU rounds every tensor
MOST_WIDER = 0.05  # of what a block was said to take
PATIENCE = 50  # steps, after which nothing is compared any more
NUM_WEIGHED = 4  # steps whose memory is looked at, where time is not


@dataclass(frozen=True)
class _Next:
    """Another plan, and why."""

    question: Question
    plan: Plan
    schedules: dict[Mode, Schedule]
    reason: str


class Watch:
    """An Observer (see runtime/observer.py)."""

    def __init__(self, run: Run, question: Question, found: Found) -> None:
        self._run, self._question, self._step = run, question, found.step
        self._times = StepTimes(run) if question.machine.is_measured else None  # who assumes speeds promises no time
        self._peak_bytes = forecast_bytes(question, found.plan)
        self._needs = forward_needs(question.profile, found.plan)
        self._num_ticks = 2 * len(question.profile.calls) + 1  # at least
        self._factor = 1.0  # what blocks took, over what they were said to take, at most
        self._used_bytes = 0  # when the present tick began
        self._ran_out: Shortage | None = None
        self._next: _Next | None = None
        self._is_comparing = True
        self._num_watched, self._num_passes = 0, 0  # since the last step; before it
        self.num_replans = 0

    @property
    def is_watching(self) -> bool:
        return not self.num_replans

    def begin_pass(self) -> None:
        if self._ran_out is not None or self._next is not None:  # and the user goes on
            self.replan(must=False)
        self._num_watched += 1
        if self._sees_memory:
            self._run.gpu.lap()
        if self._times is not None and self._is_comparing:
            self._times.begin_pass()

    def begin_tick(self, op: Op) -> None:
        if op is Op.FORWARD and self._sees_blocks:
            self._run.gpu.lap()
            self._used_bytes = self._run.gpu.device_used_bytes

    def end_tick(self, op: Op, call: int | None) -> None:
        if op is Op.FORWARD and self._sees_blocks and call is not None:
            gpu = self._run.gpu
            peak_bytes, left_bytes = gpu.lap().tensor_bytes - self._used_bytes, gpu.device_used_bytes - self._used_bytes
            least_bytes = LEAST_BYTES[gpu.device.type]
            self._factor = max(self._factor, self._needs[call].factor(peak_bytes, left_bytes, least_bytes))

    def end_forward(self) -> bool:
        if not self._sees_memory or not self._is_warm:
            return False
        if self._factor > 1 + MOST_WIDER:
            expected_bytes = forecast_bytes(with_wider_blocks(self._question, self._factor), self._run.plan)
            if expected_bytes > self._question.gpu_bytes:
                self._end_comparing()
                self._next = self._leaner(Shortage(expected_bytes, self._num_ticks, self._factor))
        return self._next is not None

    def ran_out(self, error: OutOfMemory) -> None:
        if self.num_replans or not is_short(error):
            return
        needed_bytes = error.used_bytes + error.requested_bytes - self._run.gpu.outside_bytes
        self._ran_out = Shortage(needed_bytes, self._run.executor.num_begun, self._factor)
        if self._run.plan.update is Update.DEFERRED:
            error.add_note(
                "The GPU's need was forecast too low. A loop that catches this, calls zero_grad() and goes on, does so "
                "under a plan that leaves more memory free."
            )

    def replan(self, must: bool = True) -> None:
        if self._next is None:
            assert self._ran_out is not None
            shortage, self._ran_out = self._ran_out, None
            self._next = self._leaner(shortage, must)
        if self._next is not None:
            self._go_on_with(self._next)

    def end_step(self) -> None:
        if not self._is_comparing or not self.is_watching or self._run.between_passes is not None:
            return  # a recording is of one plan
        is_plain = self._run.num_passes - self._num_passes == self._num_watched  # else graphs were alive side by side
        self._num_watched, self._num_passes = 0, self._run.num_passes
        shortage = self._overrun(self._peak_bytes) if is_plain and self._sees_memory and self._is_warm else None
        measured = None if self._times is None else self._times.end_step()
        if shortage is not None:
            self._end_comparing()
            following = self._leaner(shortage)
            if following is not None:
                self._go_on_with(following)
        elif measured is not None:
            self._end_comparing()
            self._compare(measured)
        elif self._run.num_steps >= (NUM_WEIGHED if self._times is None else PATIENCE):
            self._end_comparing()

    def _end_comparing(self) -> None:
        self._is_comparing = False
        if self._times is not None:
            self._times.stop()

    @property
    def _sees_memory(self) -> bool:
        """Unless a recording reads laps already."""
        return self._is_comparing and self._run.between_passes is None

    @property
    def _sees_blocks(self) -> bool:
        """In training: an evaluation runs them unsplit."""
        return self._sees_memory and self._is_warm and self._run.executor.mode is Mode.TRAIN

    @property
    def _is_warm(self) -> bool:
        """Before, compilers and libraries take memory that they need once."""
        is_simulated = self._run.gpu.device.type == "cpu" and not self._run.compiled.enabled
        return is_simulated or self._run.num_passes > 1

    # -- memory ----------------------------------------------------------------------------------------------------

    def _overrun(self, forecast_bytes: int) -> Shortage | None:
        """Since the last look."""
        needed_bytes = self._run.gpu.lap().tensor_bytes - self._run.gpu.outside_bytes
        return Shortage(needed_bytes, self._num_ticks) if needed_bytes > forecast_bytes else None

    def _leaner(self, shortage: Shortage, must: bool = False) -> _Next | None:
        """None: it goes on as it is, and the user knows why. `must`: it cannot."""
        corrected = with_more_memory(self._question, self._run.plan, shortage)
        expected = forecast_bytes(self._question, self._run.plan, shortage.num_ticks)
        wider = f": blocks take up to {shortage.factor:.2f} times the memory that they were measured to take"
        reason = (
            f"the GPU needs {_bytes(shortage.needed_bytes)} at least, where {_bytes(expected)} were forecast"
            f"{wider if shortage.factor > 1 + MOST_WIDER else ''}"
        )
        try:
            found = corrected.answer()
            self._check_room()
        except InfeasiblePlan as refusal:
            if must:
                raise InfeasiblePlan(f"{reason}; {refusal}", refusal.moment, refusal.tier, refusal.num_bytes) from None
            warnings.warn(f"{reason}. The plan stays: {refusal}", stacklevel=3)
            return None
        plan = replace(found.plan, gpu_limit_bytes=self._question.gpu_bytes)
        if not must and _decisions(plan) == _decisions(self._run.plan):
            warnings.warn(f"{reason}. The plan stays: it fits all the same", stacklevel=3)
            return None
        return self._checked(corrected, plan, reason)

    def _check_room(self) -> None:
        """See [Note: moving] in runtime/moving.py."""
        waiting, free = waiting_bytes(self._run.plan), free_host_bytes()
        if waiting > free:
            raise InfeasiblePlan(
                f"moving the model to another plan takes {_bytes(waiting)} of host memory for a while, and "
                f"{_bytes(free)} are free; wrap it again with a smaller Limits(gpu=...)"
            )

    # -- time ------------------------------------------------------------------------------------------------------

    def _compare(self, measured: Measured) -> None:
        expected_s = self._step.step_s
        if abs(measured.step_s / expected_s - 1) <= MOST_OFF:
            return
        reason = f"a step takes {format_seconds(measured.step_s)}, and {format_seconds(expected_s)} were forecast"
        factors = lanes_off(measured, self._step, MOST_OFF)
        if not factors:
            warnings.warn(
                f"{reason}. No lane was slower or faster than forecast: the time goes by outside of the plan, in "
                "loading data or in the loop's own code",
                stacklevel=3,
            )
            return
        lanes = lane_seconds(self._step)
        parts = [f"{lane} was busy for {format_seconds(measured.lane_s[lane])} instead of {format_seconds(lanes[lane])}"
                 for lane in factors]  # fmt: skip
        following = self._faster(with_slower_lanes(self._question, factors), f"{reason}: {', '.join(parts)}")
        if following is not None:
            self._go_on_with(following)

    def _faster(self, corrected: Question, reason: str) -> _Next | None:
        present_s = forecast(corrected.profile, self._run.plan, corrected.costs, corrected.machine).step_s
        found = corrected.answer()
        try:
            self._check_room()
        except InfeasiblePlan as refusal:
            warnings.warn(f"{reason}. The plan stays: {refusal}", stacklevel=3)
            return None
        if found.step.step_s > (1 - LEAST_GAIN) * present_s:
            warnings.warn(f"{reason}. The plan stays: with these speeds there is no better one", stacklevel=3)
            return None
        gain = f"{reason}. With these speeds another plan takes {format_seconds(found.step.step_s)} instead of"
        return self._checked(corrected, found.plan, f"{gain} {format_seconds(present_s)}")

    # -- another plan ----------------------------------------------------------------------------------------------

    def _checked(self, question: Question, plan: Plan, reason: str) -> _Next:
        schedules = lower_all(question.profile, plan)
        verify_all(question.profile, plan, schedules)
        return _Next(question, plan, schedules, reason)

    def _go_on_with(self, following: _Next) -> None:
        self._end_comparing()
        self._next = self._ran_out = None
        self.num_replans += 1
        self._run.move_to(following.question.profile, following.plan, following.schedules)
        warnings.warn(
            f"{following.reason}. Planned again, once; results are the same. stats(model).plan.explain() shows the new "
            "plan",
            stacklevel=4,
        )


def _decisions(plan: Plan) -> Plan:
    return replace(plan, forecast=Forecast(0, 0), explanation="", profile=None)


def _bytes(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({format_bytes(num_bytes)})"
