"""A plan with all that follows from it, for whoever needs it: where each chunk lives, its schedules, their peaks, its
simulated step.

Each plan is placed and lowered once. A search, a person's choices or a plan file lead to a `Solution`; runs, forecasts,
pages and explanations read it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self, TypeVar

from hightide.ir.action import Mode, Schedule
from hightide.ir.block import ModelProfile
from hightide.ir.machine import Machine
from hightide.ir.passes import Passes
from hightide.ir.plan import Forecast, Plan
from hightide.planner.advice.explain import explain
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.lower import lower, lower_step, modes_beside
from hightide.planner.mechanism import NONE, Mechanisms
from hightide.planner.placement import Placement
from hightide.planner.predict.moving_in import moving_in_bytes
from hightide.planner.predict.peaks import Peaks, bytes_forecast, step_peaks
from hightide.planner.predict.save_forecast import SaveForecast, save_forecast
from hightide.planner.predict.step_seconds import StepForecast, forecast
from hightide.planner.problem import Problem
from hightide.planner.search.candidate import Candidate
from hightide.planner.verify.precedence import Disorder
from hightide.planner.verify.verify_schedule import verify, verify_step

S = TypeVar("S", bound="Solution")


@dataclass(frozen=True)
class Solution:
    """To be verified before it runs."""

    profile: ModelProfile
    placement: Placement
    passes: Passes  # of the training step
    peaks: Peaks  # of these
    on_simulated: bool = field(default=False, kw_only=True)  # for a machine without a GPU

    @classmethod
    def of(cls, profile: ModelProfile, plan: Plan) -> Solution:
        """Of a plan that nobody has searched."""
        placement = Placement(plan)
        passes = lower_step(profile, plan, placement)
        return Solution(profile, placement, passes, _peaks(passes))

    @property
    def plan(self) -> Plan:
        return self.placement.plan

    @property
    def without(self) -> Mechanisms:
        """That were forbidden."""
        return NONE

    @cached_property
    def schedules(self) -> Mapping[Mode, Schedule]:
        """In every mode in which the plan may run."""
        modes = modes_beside(self.plan)
        beside = {mode: lower(self.profile, self.plan, mode, self.placement, self.without) for mode in modes}
        return {**self.passes.by_mode, **beside}

    def verify(self) -> None:
        """Raises InfeasiblePlan."""
        verify_step(self.profile, self.placement, self.passes)
        for mode in modes_beside(self.plan):
            verify(self.profile, self.placement, self.schedules[mode])

    def described(self, machine: Machine | None = None) -> Solution:
        """With a forecast and an explanation of its own: of a plan that a person has made. Nobody has simulated it."""
        sizes = bytes_forecast(self.passes, self.peaks, machine)
        return self._changed(on_simulated=machine is not None and machine.is_simulated)._told(sizes)

    def moving_in(self, on_host: Collection[str], waiting_bytes: int, process_bytes: int) -> Self:
        """With what the host needs while a model's values move in, see planner/predict/moving_in.py, and what the
        process has beside it."""
        needed = moving_in_bytes(self.placement, on_host, waiting_bytes)
        return self._told(replace(self.plan.forecast, moving_host_bytes=needed, process_bytes=process_bytes))

    def _told(self, sizes: Forecast) -> Self:
        return self._changed(placement=_explained(self, sizes))

    def _changed(self, **changes: Any) -> Self:
        """In what nothing is lowered by."""
        return _with_schedules_of(self, replace(self, **changes))


@dataclass(frozen=True)
class Searched(Solution):
    problem: Problem
    candidate: Candidate | None  # None: another rank has searched
    step: StepForecast
    num_simulated: int  # plans, until this one was found
    save: SaveForecast  # of a checkpoint

    @classmethod
    def made(cls, problem: Problem, candidate: Candidate, placement: Placement, num_simulated: int) -> Searched:
        profile, without = problem.profile, problem.terms.without
        passes = lower_step(profile, placement.plan, placement, without)
        peak, step = step_peaks(passes), forecast(problem, placement, passes)
        sizes = replace(bytes_forecast(passes, peak, problem.machine), step_s=step.step_s)
        save = save_forecast(problem, placement, passes, peak, step)
        is_simulated = problem.machine.is_simulated
        found = cls(
            profile, placement, passes, peak, problem, candidate, step, num_simulated, save, on_simulated=is_simulated
        )
        return found._told(sizes)

    @classmethod
    def elsewhere(cls, problem: Problem, plan: Plan) -> Searched:
        """A plan that another rank has found for this problem."""
        placement = Placement(plan)
        passes = lower_step(problem.profile, plan, placement, problem.terms.without)
        return cls.simulated(problem, Solution(problem.profile, placement, passes, _peaks(passes)))

    @classmethod
    def simulated(cls, problem: Problem, known: Solution) -> Searched:
        """A plan that nobody has searched, of this problem and its profile: with its seconds."""
        about = known.placement, known.passes
        step = forecast(problem, *about)
        save = save_forecast(problem, *about, known.peaks, step)
        found = cls(
            known.profile, *about, known.peaks, problem, None, step, 0, save, on_simulated=problem.machine.is_simulated
        )
        return _with_schedules_of(known, found)

    def save_at(self, write_bytes_per_s: float, source: str) -> SaveForecast:
        """On a disk of this speed, as `source` says."""
        told = (write_bytes_per_s, source)
        return save_forecast(self.problem, self.placement, self.passes, self.peaks, self.step, told)

    def with_slots(self, number: int) -> Searched:
        """With at least so many of each kind."""
        slots, grad_slots = max(number, self.plan.num_slots), max(number, self.plan.num_grad_slots)
        other = Searched.elsewhere(self.problem, replace(self.plan, num_slots=slots, num_grad_slots=grad_slots))
        sizes = bytes_forecast(other.passes, other.peaks, self.problem.machine)
        return other._told(replace(sizes, step_s=other.step.step_s))

    def _told(self, sizes: Forecast) -> Self:
        return self._changed(placement=_explained(self, sizes, self.save))

    @property
    def without(self) -> Mechanisms:
        return self.problem.terms.without


def _with_schedules_of(known: Solution, other: S) -> S:
    """What was lowered already stays: `other` is of the same profile, plan and mechanisms."""
    if "schedules" in vars(known):
        vars(other)["schedules"] = known.schedules
    return other


def _peaks(passes: Passes) -> Peaks:
    """Of a plan that no search has made: its schedule may not even end."""
    try:
        return step_peaks(passes)
    except Disorder as disorder:
        raise InfeasiblePlan(
            f"the schedule cannot run: {disorder}. More slots or buffers may do: num_slots, num_grad_slots, "
            "num_grad_buffers",
            disorder.at,
        ) from None


def _explained(solution: Solution, sizes: Forecast, save: SaveForecast | None = None) -> Placement:
    told = solution.placement.of(replace(solution.plan, forecast=sizes))
    text = explain(solution.profile, told, solution.passes, solution.peaks, save, solution.on_simulated)
    return told.of(told.plan.explained(text))
