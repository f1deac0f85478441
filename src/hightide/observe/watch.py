"""The first steps of a run against the forecast of its plan.

[Note: the first steps] A forecast may be wrong: blocks may take more memory than was measured without values, and a
link may be slower than yesterday. First the memory of a few steps is looked at, then a few are timed by events that
nobody waits for. If the step or the GPU's peak is not what was forecast, one warning says why, and the run is planned
again, once, with what was seen. A forward that runs out of GPU memory, or has taken so much that backward will, is
given up and begun again under the new plan: nothing has been updated by then. In backward it is too late for that: the
error goes to the user, and a loop that goes on after it gets the new plan.

What blocks take is compared call by call, and corrected by kind of call; what they do not explain is kept free. A pass
is given up only where what its forward has left on the GPU bears out that backward would run out: a forecast is an
upper bound, and one block that is wider may fit all the same. Memory is compared only where the run is alone on its
device, times only where machine and blocks were measured: assumed speeds promise nothing.

Afterwards the watch waits for one thing only: a pass that runs out of memory later in the run. Once it has changed the
plan it lets the run go."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hightide.ir.action import Op
from hightide.ir.plan import Update
from hightide.ir.tier import Lane
from hightide.ir.units import exactly, format_seconds
from hightide.observe.timing import WARM_STEPS, Measured, StepTimes, lanes_off
from hightide.planner.advice.correct import (
    Factors,
    MemoryShortage,
    Widths,
    begun_bytes,
    expected_bytes,
    with_more_memory,
    with_slower_lanes,
)
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.predict.peaks import WORKSPACE_BYTES
from hightide.planner.predict.step_seconds import forecast
from hightide.planner.problem import Problem
from hightide.planner.search.search import search
from hightide.planner.solution import Searched, Solution
from hightide.process.interrupts import in_a_line
from hightide.process.progress import progress_line
from hightide.runtime.chunks.moving import check_room
from hightide.runtime.observer import is_short
from hightide.runtime.run import Run
from hightide.stores.store import OutOfMemory

MOST_OFF = 0.15  # of a forecast
LEAST_GAIN = 0.02  # of a step, for which a model is moved
LEAST_BYTES = {"cpu": 1024, "cuda": 2**20}  # of a block, whose need is looked at: a real GPU rounds every tensor
MOST_WIDER = 1.05  # times what a block was said to take
ISSUE_SHARE = 0.7  # of a step, from which on the thread that runs the model may be what it waits for
PATIENCE = 50  # steps, after which nothing is compared any more


@dataclass(frozen=True)
class Following:
    """Another plan, and why."""

    solution: Solution
    reason: str


class Watch:
    """An Observer (see runtime/observer.py)."""

    def __init__(self, run: Run, solution: Searched) -> None:
        self._run, self._solution = run, solution
        problem = solution.problem.without_rungs(solution.problem.estimated_rungs)  # no plan may want them now
        self.problem, self._step = problem, solution.step
        promises_time = problem.machine.is_measured and problem.costs.is_measured
        self._times = StepTimes(run) if promises_time else None
        self._forecast_bytes = solution.plan.forecast.gpu_bytes
        self._widths = Widths(solution, LEAST_BYTES[run.gpu.device.type])
        self._num_ticks = 2 * len(problem.profile.calls) + 1  # at least
        self._used_bytes = 0  # when the present tick began
        self._peak_bytes = 0  # since the last step, as far as it was looked at
        self._ran_out: MemoryShortage | None = None
        self._next: Following | None = None
        self._is_comparing = True
        self._num_watched, self._num_passes = 0, 0  # since the last step; before it
        self.is_watching = True
        self.num_replans = 0

    def begin_pass(self) -> None:
        self.settle()  # the user goes on
        self._num_watched += 1
        self._widths.clear()
        if self._sees_memory:
            self._run.gpu.lap()
        if self._times is not None and self._is_comparing:
            self._times.begin_pass()

    def begin_tick(self, op: Op) -> None:
        if op is Op.FORWARD and self._sees_blocks:
            self._lap()
            self._used_bytes = self._run.gpu.device_used_bytes

    def begin_again(self) -> None:
        self.begin_tick(Op.FORWARD)

    def end_tick(self, op: Op, call: int | None) -> None:
        if op is Op.FORWARD and self._sees_blocks and call is not None:
            peak_bytes, left_bytes = self._lap(), self._run.gpu.device_used_bytes
            before_bytes = self._used_bytes + self._taken_once_bytes
            self._widths.see(call, peak_bytes - before_bytes, left_bytes - before_bytes)

    def end_forward(self) -> bool:
        if not self._is_early:
            return False
        own = self._expected_shortage() if self._sees_memory and self._is_warm else None
        shortage, _ = self._of_all(own, None)
        if shortage is None or self._is_kept_from_moving():
            return False
        self._end_comparing()
        self._next = self._decided(lambda: self._leaner(shortage))
        return self._next is not None

    def _expected_shortage(self) -> MemoryShortage | None:
        """By what the forward of this pass has taken."""
        factors = self._widths.above(MOST_WIDER)
        if not factors:
            return None
        left_bytes = self._run.gpu.device_used_bytes - self._run.gpu.outside_bytes
        needed_bytes = expected_bytes(self.problem, self._run.plan, factors, left_bytes)
        is_short = needed_bytes > self.problem.terms.gpu_bytes
        return MemoryShortage(needed_bytes, self._num_ticks, factors) if is_short else None

    def may_repeat(self, can: bool) -> bool:
        return can

    def ran_out(self, error: OutOfMemory) -> bool:
        is_recording = self._run.between_passes is not None  # of one plan
        if not self.is_watching or not self._is_alone or is_recording or not is_short(error):
            return False
        needed_bytes = error.used_bytes + error.requested_bytes - self._run.gpu.outside_bytes
        seen, supposed = self._widths.above(MOST_WIDER), self._widths.supposed(MOST_WIDER)
        self._ran_out = MemoryShortage(needed_bytes, self._run.executor.num_begun, seen, supposed)
        if self._run.plan.update is Update.DEFERRED:
            error.add_note(
                "The GPU's need was forecast too low. A loop that catches this, calls zero_grad() and goes on, does so "
                "under a plan that leaves more memory free."
            )
        return True

    def replan(self, must: bool = True) -> None:
        if self._next is None:
            assert self._ran_out is not None
            shortage, self._ran_out = self._ran_out, None
            self._next = self._leaner(shortage, must)
        if self._next is not None:
            self._go_on_with(self._next)

    def end_step(self) -> None:
        if not self._is_comparing:
            return
        is_recording = self._run.between_passes is not None
        own = None if is_recording else self._shortage_of_step()
        times = None if is_recording or self._times is None else self._times.end_step()
        shortage, measured = self._of_all(own, times)
        if shortage is not None:
            self._end_comparing()
            self._follow(self._decided(lambda: self._leaner(shortage)))
        elif measured is not None:
            self._end_comparing()
            self._follow(self._decided(lambda: self._compared(measured)))
        elif self._run.num_steps >= (WARM_STEPS if self._times is None else PATIENCE):
            self._end_comparing()

    def settle(self) -> None:
        is_owed = self._ran_out is not None or self._next is not None
        if is_owed and not self._is_kept_from_moving():
            self.replan(must=False)

    def let_in_larger(self) -> None:
        self._end_comparing()

    def _shortage_of_step(self) -> MemoryShortage | None:
        is_plain = self._run.num_passes - self._num_passes == self._num_watched  # else graphs were alive side by side
        self._num_watched, self._num_passes = 0, self._run.num_passes
        shortage = self._overrun() if is_plain else None
        self._peak_bytes = 0
        return shortage

    def _of_all(
        self, shortage: MemoryShortage | None, measured: Measured | None
    ) -> tuple[MemoryShortage | None, Measured | None]:
        """What any rank is short of, and what all of them have measured."""
        return shortage, measured

    def _decided(self, decide: Callable[[], Following | None]) -> Following | None:
        """By one for all ranks."""
        return decide()

    def _is_kept_from_moving(self) -> bool:
        """A recording is of one plan."""
        return self._run.between_passes is not None

    def _follow(self, following: Following | None) -> None:
        if following is not None:
            self._go_on_with(following)

    def _end_comparing(self) -> None:
        self._is_comparing = False
        if self._times is not None:
            self._times.stop()

    @property
    def _is_early(self) -> bool:
        """In the steps that are not timed: looking takes time itself."""
        return self._is_comparing and self._run.num_steps < WARM_STEPS

    @property
    def _sees_memory(self) -> bool:
        """Not while a recording reads laps already."""
        return self._is_early and self._run.between_passes is None and self._is_alone

    @property
    def _sees_blocks(self) -> bool:
        """In training: an evaluation runs them unsplit."""
        return self._sees_memory and self._is_warm and self._run.executor.is_training

    @property
    def _is_alone(self) -> bool:
        """Else what the device holds is not this run's."""
        return self._run.gpu.is_alone

    @property
    def _is_warm(self) -> bool:
        """Before, compilers take memory that they need once."""
        return not self._run.compiled.enabled or self._run.num_passes > 1

    @property
    def _taken_once_bytes(self) -> int:
        """By libraries, for workspaces that no block was said to take: see [Note: what a GPU reserves]."""
        return WORKSPACE_BYTES if self._run.gpu.device.type == "cuda" and self._run.num_passes == 1 else 0

    # -- memory ----------------------------------------------------------------------------------------------------

    def _lap(self) -> int:
        lap_bytes = self._run.gpu.lap().tensor_bytes
        self._peak_bytes = max(self._peak_bytes, lap_bytes)
        return lap_bytes

    def _overrun(self) -> MemoryShortage | None:
        """In the step that has ended."""
        if not self._peak_bytes or not self._is_alone:
            return None  # nobody has looked
        self._lap()
        needed_bytes = self._peak_bytes - self._run.gpu.outside_bytes
        return MemoryShortage(needed_bytes, self._num_ticks) if needed_bytes > self._forecast_bytes else None

    def _leaner(self, shortage: MemoryShortage, must: bool = False) -> Following | None:
        """None: it goes on as it is, and the user knows why. `must`: it cannot."""
        corrected = with_more_memory(self.problem, self._run.plan, shortage)
        expected = begun_bytes(self._solution.passes.last, self.problem.machine, shortage.num_ticks)
        reason = (
            f"the GPU needs {exactly(shortage.needed_bytes)} at least, where {exactly(expected)} were forecast"
            f"{self._wider(shortage.factors)}"
        )
        try:
            found = self._search(corrected.problem)
            check_room(self._run)
        except InfeasiblePlan as refusal:
            if shortage.supposed:
                return self._leaner(replace(shortage, supposed={}), must)
            message = f"{refusal}"
            if corrected.kept_free_bytes:
                message += f"; {exactly(corrected.kept_free_bytes)} of it are kept free for what blocks do not explain"
            if must:
                raise InfeasiblePlan(f"{reason}; {message}", refusal.moment, refusal.tier, refusal.num_bytes) from None
            warnings.warn(f"{reason}. The plan stays: {message}", stacklevel=3)
            return None
        if not must and found.plan.decisions == self._run.plan.decisions:
            warnings.warn(f"{reason}. The plan stays: it fits all the same", stacklevel=3)
            return None
        found.verify()
        return Following(found, reason)

    def _wider(self, factors: Factors) -> str:
        if not factors:
            return ""
        kind = max(factors, key=lambda one: factors[one])
        profile = self.problem.profile
        name = next(profile.blocks[call.block].name for call in profile.calls if call.kind == kind)
        return f": blocks like {name!r} take {factors[kind]:.2f} times the memory that they were measured to take"

    # -- time ------------------------------------------------------------------------------------------------------

    def _compared(self, measured: Measured) -> Following | None:
        expected_s = self._step.step_s
        if abs(measured.step_s / expected_s - 1) <= MOST_OFF:
            return None
        reason = f"a step takes {format_seconds(measured.step_s)}, and {format_seconds(expected_s)} were forecast"
        if self._step.issue_s > ISSUE_SHARE * measured.step_s > ISSUE_SHARE * expected_s:
            warnings.warn(
                f"{reason}. The GPU waits for Python: the thread that runs the model was forecast to need "
                f"{format_seconds(self._step.issue_s)} of it. The plan stays; larger batches or compile=True help",
                stacklevel=4,
            )
            return None
        factors = lanes_off(measured, self._step, MOST_OFF)
        if not factors:
            warnings.warn(f"{reason}. {self._beside_lanes(measured.step_s < expected_s)}", stacklevel=4)
            return None
        busy = {lane: (measured.lane_s[lane], self._step.simulated.action_s[lane]) for lane in factors}
        parts = [
            f"{lane} was busy for {format_seconds(a)} instead of {format_seconds(b)}" for lane, (a, b) in busy.items()
        ]
        again = "hightide doctor" + (" --disk FOLDER" if {Lane.DISK_READ, Lane.DISK_WRITE} & factors.keys() else "")
        measured_on = f"by speeds of {self.problem.machine.date[:10]}; `{again}` measures again"
        reason = f"{reason}: {', '.join(parts)} ({measured_on})"
        return self._faster(with_slower_lanes(self.problem, factors), reason)

    def _beside_lanes(self, is_faster: bool) -> str:
        """Why a step is not as long as forecast, although every lane is busy for as long as forecast."""
        if not is_faster:
            return (
                "No lane was slower than forecast: the time goes by outside of the plan, in loading data or in the "
                "loop's own code"
            )
        if self._run.plan.update is Update.DEFERRED:
            return (
                "No lane was faster than forecast, but the forecast is that of a loop that clips: its updates wait for "
                "the norm of all gradients. If yours never clips, they begin during backward, and update='in_backward' "
                "makes a plan for that"
            )
        return "No lane was faster than forecast: they overlap more"

    def _faster(self, corrected: Problem, reason: str) -> Following | None:
        present_s = forecast(corrected, self._solution.placement, self._solution.passes).step_s
        found = self._search(corrected)
        try:
            check_room(self._run)
        except InfeasiblePlan as refusal:
            warnings.warn(f"{reason}. The plan stays: {refusal}", stacklevel=3)
            return None
        if found.step.step_s > (1 - LEAST_GAIN) * present_s:
            warnings.warn(f"{reason}. The plan stays: with these speeds there is no better one", stacklevel=3)
            return None
        found.verify()
        gain = f"With these speeds another plan takes {format_seconds(found.step.step_s)} instead of"
        return Following(found, f"{reason}. {gain} {format_seconds(present_s)}")

    def _search(self, problem: Problem) -> Searched:
        return search(problem)

    # -- another plan ----------------------------------------------------------------------------------------------

    def _go_on_with(self, following: Following) -> None:
        """Whatever comes of it, there is no second time."""
        self._end_comparing()
        self._next = self._ran_out = None
        self.is_watching, self._run.observer = False, None
        try:
            with progress_line("hightide moves to another plan"):
                self._run.move_to(following.solution)
        except (torch.OutOfMemoryError, MemoryError) as error:  # the old plan is as it was
            problem = f"the model could not be moved to another one ({in_a_line(error)})"
            self._say(f"{following.reason}. The plan stays: {problem}")
            return
        self.num_replans += 1
        self._say(
            f"{following.reason}. Planned again, once; results are the same. stats(model).plan.explain() shows the new "
            "plan"
        )

    def _say(self, text: str) -> None:
        warnings.warn(text, stacklevel=5)
