"""The fate of a candidate: whether it fits, and how long its step takes. Remembered, because searches come back."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from hightide.ir.passes import Passes
from hightide.ir.tier import Tier
from hightide.planner.lower import lower_step
from hightide.planner.placement import Placement
from hightide.planner.predict.bounds import least_step_s
from hightide.planner.predict.peaks import Peaks, is_real, needed_bytes, reserved_beside, step_peaks
from hightide.planner.predict.step_seconds import forecast_step_s
from hightide.planner.problem import Problem
from hightide.planner.search.activation_bytes import ActivationBytes
from hightide.planner.search.candidate import Candidate
from hightide.planner.search.space import Space
from hightide.planner.search.standing_bytes import Needs, StandingBytes, StandingNeeds
from hightide.process.interrupts import safe_point

NUM_STEPS = 2  # simulated for a comparison: one that leaves updates behind, one that counts


_WITHOUT_ACTIVATIONS: dict[str, Any] = {
    **{"micro_batch": 1, "inputs": Tier.GPU, "loss_kept_tokens": 0, "loss_tile_tokens": None, "input_buffers": 0},
    **dict.fromkeys(("keep", "selective", "swapped", "near", "far"), frozenset()),
}


@dataclass
class Trials:
    """`num_simulated` counts what was not remembered and not excluded by a bound."""

    problem: Problem
    num_simulated: int = 0
    num_actions: int = 0  # of all schedules that were simulated: what that cost
    _known_standing: dict[Candidate, StandingNeeds] = field(default_factory=dict)
    _guesses: dict[Candidate, Needs] = field(default_factory=dict)
    _others: dict[Candidate, tuple[int, int]] = field(default_factory=dict)
    _step_s: dict[Candidate, float] = field(default_factory=dict)
    _least_s: dict[Candidate, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.space = Space(self.problem.profile, self.problem.terms)
        self._activations = ActivationBytes(self.space)
        self._standing = StandingBytes(self.space)

    def anew(self) -> Trials:
        """Nothing has been simulated; what is known of bytes and bounds stays."""
        other = copy(self)
        other.num_simulated, other.num_actions, other._step_s = 0, 0, {}
        return other

    def may_fit(self, candidate: Candidate) -> bool:
        """The GPU and the host. The more is filled in there, the less is left for the disk: it is checked last."""
        if self.is_forbidden(candidate) or not self.host_fits(candidate):
            return False
        gpu_bytes = self.problem.terms.gpu_bytes  # activations last: to know them takes longest
        return self._always(candidate).gpu_bytes <= gpu_bytes and self.guess(candidate).gpu_bytes <= gpu_bytes

    def host_fits(self, candidate: Candidate) -> bool:
        return self._beside_gpu(candidate)[0] <= self.problem.terms.host_bytes

    def within(self, needs: Needs) -> bool:
        limits = self.problem.terms.limits
        return all(needs.by_tier[tier] <= limits[tier] for tier in Tier)

    def guess(self, candidate: Candidate) -> Needs:
        """What the candidate needs, but for small differences in what is on its way."""
        found = self._guesses.get(candidate)
        if found is None:
            always = self._always(candidate)
            inside = self._activations.gpu_bytes(candidate)
            if is_real(self.problem.machine):
                inside = reserved_beside(inside, self._activations.holes_bytes(candidate))
            found = self._guesses[candidate] = Needs(always.gpu_bytes + inside, *self._beside_gpu(candidate))
        return found

    def _beside_gpu(self, candidate: Candidate) -> tuple[int, int]:
        """On the host and on disk."""
        found = self._others.get(candidate)
        if found is None:
            always = self._always(candidate)
            waiting = self._activations.host_bytes(candidate, always.parked_bytes)
            buffers, stored = self.space.input_bytes(candidate)
            found = self._others[candidate] = always.host_bytes + waiting + buffers, always.disk_bytes + stored
        return found

    def needs(self, candidate: Candidate) -> Needs:
        passes = self._lowered(self.space.placed(candidate))
        return self._needs(passes, step_peaks(passes))

    def peaks(self, candidate: Candidate) -> Peaks:
        return step_peaks(self._lowered(self.space.placed(candidate)))

    def is_too_much(self, disk: bool = True) -> bool:
        """Of chunks alone for all tiers together, or for all but the disk."""
        limits = self.problem.terms.limits
        tiers = [tier for tier in Tier if limits[tier] and (disk or tier is not Tier.DISK)]
        return self._standing.least_bytes(tiers) > sum(limits[tier] for tier in tiers)

    def step_s(self, candidate: Candidate, below_s: float = math.inf) -> float:
        """Infinite if the candidate does not fit, or surely takes `below_s` or more."""
        if candidate in self._step_s:
            return self._step_s[candidate]
        if self.is_forbidden(candidate):
            return math.inf
        safe_point()
        placement = self.space.placed(candidate)
        if self.least_s(candidate, placement) >= below_s:
            return math.inf
        passes = self._lowered(placement)
        step_s = math.inf
        if self.within(self._needs(passes, step_peaks(passes))):
            step_s = self._simulate(placement, passes)
        self._step_s[candidate] = step_s
        return step_s

    def least_s(self, candidate: Candidate, placement: Placement | None = None) -> float:
        """That its step takes, if it fits. `placement`: its own, if that is known already."""
        if candidate not in self._least_s:
            placement = placement or self.space.placed(candidate)
            self._least_s[candidate] = least_step_s(self.problem, placement)
        return self._least_s[candidate]

    def _lowered(self, placement: Placement) -> Passes:
        return lower_step(self.problem.profile, placement.plan, placement, self.problem.terms.without)

    def is_forbidden(self, candidate: Candidate) -> bool:
        without = self.problem.terms.without
        return bool(without) and not without.isdisjoint(candidate.mechanisms)

    def _simulate(self, placement: Placement, passes: Passes) -> float:
        self.num_simulated += 1
        self.num_actions += sum(len(schedule.actions) for schedule in passes)
        return forecast_step_s(self.problem, placement, passes, NUM_STEPS)

    def _always(self, candidate: Candidate) -> StandingNeeds:
        """Chunks and slots, which do not depend on activations."""
        key = candidate.changed(**_WITHOUT_ACTIVATIONS)
        found = self._known_standing.get(key)
        if found is None:
            found = self._known_standing[key] = self._standing.of(key)
        return found

    def _needs(self, passes: Passes, peak: Peaks) -> Needs:
        gpu_bytes = needed_bytes(passes, peak, self.problem.machine)
        return Needs(gpu_bytes, peak.host_peak_bytes, peak.disk_peak_bytes)
