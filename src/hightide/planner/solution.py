"""A plan with all that follows from it, for whoever needs it: where each chunk lives, its schedules, their peaks, its
simulated step.

Each plan is placed and lowered once. A search, a person's choices or a plan file lead to a `Solution`; runs, forecasts,
pages and explanations read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from hightide.ir.action import Mode, Schedule
from hightide.ir.block import ModelProfile
from hightide.ir.machine import Machine
from hightide.ir.plan import Forecast, Plan
from hightide.planner.advice.explain import explain
from hightide.planner.lower import lower, modes_of
from hightide.planner.mechanism import NONE, Mechanisms
from hightide.planner.placement import Placement
from hightide.planner.predict.peaks import Peaks, bytes_forecast, peaks
from hightide.planner.predict.step_seconds import StepForecast, forecast
from hightide.planner.problem import Problem
from hightide.planner.search.candidate import Candidate
from hightide.planner.verify.verify_schedule import verify


@dataclass(frozen=True)
class Solution:
    """To be verified before it runs."""

    profile: ModelProfile
    placement: Placement
    training: Schedule
    peaks: Peaks  # of the training step

    @classmethod
    def of(cls, profile: ModelProfile, plan: Plan) -> Solution:
        """Of a plan that nobody has searched."""
        placement = Placement(plan)
        training = lower(profile, plan, Mode.TRAIN, placement)
        return Solution(profile, placement, training, peaks(training))

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
        return {
            mode: self.training
            if mode is Mode.TRAIN
            else lower(self.profile, self.plan, mode, self.placement, self.without)
            for mode in modes_of(self.plan)
        }

    def verify(self) -> None:
        """Raises InfeasiblePlan."""
        for schedule in self.schedules.values():
            verify(self.profile, self.placement, schedule)

    def described(self, machine: Machine | None = None) -> Solution:
        """With a forecast and an explanation of its own: of a plan that a person has made. Nobody has simulated it."""
        sizes = bytes_forecast(self.training, self.peaks, machine)
        return replace(self, placement=_explained(self.profile, self.placement, sizes, self.training, self.peaks))


@dataclass(frozen=True)
class Searched(Solution):
    problem: Problem
    candidate: Candidate
    step: StepForecast
    num_simulated: int  # plans, until this one was found

    @classmethod
    def made(cls, problem: Problem, candidate: Candidate, placement: Placement, num_simulated: int) -> Searched:
        profile, without = problem.profile, problem.terms.without
        training = lower(profile, placement.plan, Mode.TRAIN, placement, without)
        peak, step = peaks(training), forecast(problem, placement, training)
        sizes = replace(bytes_forecast(training, peak, problem.machine), step_s=step.step_s)
        explained = _explained(profile, placement, sizes, training, peak)
        return cls(profile, explained, training, peak, problem, candidate, step, num_simulated)

    @property
    def without(self) -> Mechanisms:
        return self.problem.terms.without


def _explained(
    profile: ModelProfile, placement: Placement, sizes: Forecast, training: Schedule, peak: Peaks
) -> Placement:
    told = placement.of(replace(placement.plan, forecast=sizes))
    return told.of(told.plan.explained(explain(profile, told, training, peak)))
