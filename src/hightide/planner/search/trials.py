"""The fate of a candidate: whether it fits, and how long its step takes. Remembered, because searches come back."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from hightide.ir.action import Mode, Schedule
from hightide.ir.tier import Tier
from hightide.planner.lower import lower
from hightide.planner.placement import Placement
from hightide.planner.predict.bounds import least_step_s
from hightide.planner.predict.peaks import Peaks, is_real, needed_bytes, peaks, reserved_beside
from hightide.planner.predict.step_seconds import forecast_step_s
from hightide.planner.problem import Problem
from hightide.planner.search.activation_bytes import ActivationBytes
from hightide.planner.search.candidate import Candidate
from hightide.planner.search.space import Space
from hightide.planner.search.standing_bytes import Needs, StandingBytes
from hightide.process.interrupts import safe_point

NUM_PASSES = 2  # simulated for a comparison: one that leaves updates behind, one that counts


_NONE: frozenset[int] = frozenset()


@dataclass
class Trials:
    """`num_simulated` counts what was not remembered and not excluded by a bound."""

    problem: Problem
    num_simulated: int = 0
    num_actions: int = 0  # of all schedules that were simulated: what that cost
    _known_standing: dict[Candidate, Needs] = field(default_factory=dict)
    _guesses: dict[Candidate, Needs] = field(default_factory=dict)
    _step_s: dict[Candidate, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.space = Space(self.problem.profile, self.problem.terms)
        self._activations = ActivationBytes(self.space)
        self._standing = StandingBytes(self.space)

    def may_fit(self, candidate: Candidate) -> bool:
        """The GPU and the host. The more is filled in there, the less is left for the disk: it is checked last."""
        needs, terms = self.guess(candidate), self.problem.terms
        return needs.gpu_bytes <= terms.gpu_bytes and needs.host_bytes <= terms.host_bytes

    def within(self, needs: Needs) -> bool:
        terms = self.problem.terms
        memory = needs.gpu_bytes <= terms.gpu_bytes and needs.host_bytes <= terms.host_bytes
        return memory and needs.disk_bytes <= terms.disk_bytes

    def guess(self, candidate: Candidate) -> Needs:
        """What the candidate needs, but for small differences in what is on its way."""
        if candidate not in self._guesses:
            always = self._always(candidate)
            inside = self._activations.gpu_bytes(candidate)
            if is_real(self.problem.machine):
                stashed, holes = self._activations.stashed_bytes(candidate), self._activations.holes_bytes(candidate)
                inside = reserved_beside(inside, stashed, holes)
            host_bytes = always.host_bytes + self._activations.host_bytes(candidate)
            self._guesses[candidate] = Needs(always.gpu_bytes + inside, host_bytes, always.disk_bytes)
        return self._guesses[candidate]

    def needs(self, candidate: Candidate) -> Needs:
        schedule = self._lowered(candidate)
        return self._needs(schedule, peaks(schedule))

    def peaks(self, candidate: Candidate) -> Peaks:
        return peaks(self._lowered(candidate))

    def least_bytes(self) -> int:
        """On the GPU and the host together, of any candidate without a disk."""
        return self._standing.least_bytes()

    def step_s(self, candidate: Candidate, below_s: float = math.inf) -> float:
        """Infinite if the candidate does not fit, or surely takes `below_s` or more."""
        if candidate in self._step_s:
            return self._step_s[candidate]
        safe_point()
        plan = self.space.build(candidate)
        placement = self.space.placement(plan)
        if least_step_s(self.problem, placement) >= below_s:
            return math.inf
        schedule = lower(self.problem.profile, plan, Mode.TRAIN, placement)
        step_s = math.inf
        if self.within(self._needs(schedule, peaks(schedule))):
            step_s = self._simulate(placement, schedule)
        self._step_s[candidate] = step_s
        return step_s

    def _lowered(self, candidate: Candidate) -> Schedule:
        plan = self.space.build(candidate)
        return lower(self.problem.profile, plan, Mode.TRAIN, self.space.placement(plan))

    def _simulate(self, placement: Placement, schedule: Schedule) -> float:
        self.num_simulated += 1
        self.num_actions += len(schedule.actions)
        return forecast_step_s(self.problem, placement, schedule, NUM_PASSES)

    def _always(self, candidate: Candidate) -> Needs:
        """Chunks and slots, which do not depend on activations."""
        key = replace(candidate, micro_batch=1, inputs=Tier.GPU, keep=_NONE, selective=_NONE, near=_NONE)
        key = replace(key, swapped=_NONE)
        key = replace(key, loss_kept_tokens=0, loss_tile_tokens=None)
        if key not in self._known_standing:
            self._known_standing[key] = self._standing.of(key)
        return self._known_standing[key]

    def _needs(self, schedule: Schedule, peak: Peaks) -> Needs:
        gpu_bytes = needed_bytes(schedule, peak, self.problem.machine)
        return Needs(gpu_bytes, peak.host_peak_bytes, peak.disk_peak_bytes)
