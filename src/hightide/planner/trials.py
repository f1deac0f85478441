"""What becomes of a choice: whether it fits, and how long its step takes. Remembered, because searches come back."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from hightide.ir.action import Mode, Schedule
from hightide.ir.costs import Costs
from hightide.ir.machine import Machine
from hightide.ir.tier import Tier
from hightide.planner.base import Bases, Needs
from hightide.planner.bounds import least_step_s
from hightide.planner.choice import Choice, Problem
from hightide.planner.cost import forecast_step_s
from hightide.planner.lower import lower
from hightide.planner.memory import Peaks, is_real, needed_bytes, peaks, reserved_beside
from hightide.planner.placement import Placement
from hightide.planner.room import Room

NUM_PASSES = 2  # simulated for a comparison: one that leaves updates behind, one that counts


_NONE: frozenset[int] = frozenset()


@dataclass
class Trials:
    """`num_simulated` counts what was not remembered and not excluded by a bound."""

    problem: Problem
    costs: Costs
    machine: Machine
    num_simulated: int = 0
    num_actions: int = 0  # of all schedules that were simulated: what that cost
    _known_bases: dict[Choice, Needs] = field(default_factory=dict)
    _guesses: dict[Choice, Needs] = field(default_factory=dict)
    _step_s: dict[Choice, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._room = Room(self.problem)
        self._bases = Bases(self.problem)

    def may_fit(self, choice: Choice) -> bool:
        """The GPU and the host. The more is filled in there, the less is left for the disk: it is checked last."""
        needs = self.guess(choice)
        return needs.gpu_bytes <= self.problem.gpu_bytes and needs.host_bytes <= self.problem.host_bytes

    def within(self, needs: Needs) -> bool:
        memory = needs.gpu_bytes <= self.problem.gpu_bytes and needs.host_bytes <= self.problem.host_bytes
        return memory and needs.disk_bytes <= self.problem.disk_bytes

    def guess(self, choice: Choice) -> Needs:
        """What the choice needs, but for small differences in what is on its way."""
        if choice not in self._guesses:
            always = self._always(choice)
            inside = self._room.gpu_bytes(choice)
            if is_real(self.machine):
                inside = reserved_beside(inside, self._room.stashed_bytes(choice))
            host_bytes = always.host_bytes + self._room.host_bytes(choice)
            self._guesses[choice] = Needs(always.gpu_bytes + inside, host_bytes, always.disk_bytes)
        return self._guesses[choice]

    def needs(self, choice: Choice) -> Needs:
        schedule = self._lowered(choice)
        return self._needs(schedule, peaks(schedule))

    def peaks(self, choice: Choice) -> Peaks:
        return peaks(self._lowered(choice))

    def least_bytes(self) -> int:
        """On the GPU and the host together, of any choice without a disk."""
        return self._bases.least_bytes()

    def step_s(self, choice: Choice, below_s: float = math.inf) -> float:
        """Infinite if the choice does not fit, or surely takes `below_s` or more."""
        if choice in self._step_s:
            return self._step_s[choice]
        plan = self.problem.build(choice)
        placement = self.problem.placement(plan)
        if least_step_s(self.problem.profile, plan, self.costs, self.machine, placement) >= below_s:
            return math.inf
        schedule = lower(self.problem.profile, plan, Mode.TRAIN, placement)
        step_s = math.inf
        if self.within(self._needs(schedule, peaks(schedule))):
            step_s = self._simulate(placement, schedule)
        self._step_s[choice] = step_s
        return step_s

    def _lowered(self, choice: Choice) -> Schedule:
        return lower(self.problem.profile, self.problem.build(choice), Mode.TRAIN)

    def _simulate(self, placement: Placement, schedule: Schedule) -> float:
        self.num_simulated += 1
        self.num_actions += len(schedule.actions)
        return forecast_step_s(self.problem.profile, placement, self.costs, self.machine, schedule, NUM_PASSES)

    def _always(self, choice: Choice) -> Needs:
        """Chunks and slots, which do not depend on activations."""
        key = replace(choice, micro_batch=1, inputs=Tier.GPU, keep=_NONE, near=_NONE)
        key = replace(key, loss_kept_tokens=0, loss_tile_tokens=None)
        if key not in self._known_bases:
            self._known_bases[key] = self._bases.of(key)
        return self._known_bases[key]

    def _needs(self, schedule: Schedule, peak: Peaks) -> Needs:
        gpu_bytes = needed_bytes(schedule, peak, self.machine)
        return Needs(gpu_bytes, peak.host_peak_bytes, peak.disk_peak_bytes)
