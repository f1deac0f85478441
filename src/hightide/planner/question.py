"""What the planner is asked: a model, a machine, limits, and what the user has fixed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hightide.ir.block import ModelProfile
from hightide.ir.costs import Costs
from hightide.ir.machine import Machine
from hightide.ir.plan import GradientDtype, Update
from hightide.ir.state_spec import ADAM_STATES, StateSpecs
from hightide.ir.tier import Tier
from hightide.planner.search import Found, search


@dataclass(frozen=True)
class Question:
    profile: ModelProfile
    costs: Costs
    machine: Machine
    gpu_bytes: int
    host_bytes: int
    update: Update = Update.DEFERRED
    micro_batch: int | None = None  # None: the planner decides
    states: StateSpecs = ADAM_STATES
    gradients: GradientDtype = GradientDtype.FLOAT32
    disk_bytes: int = 0
    quick: bool = False  # see search

    def answer(self) -> Found:
        """Raises InfeasiblePlan."""
        return search(
            self.profile,
            self.costs,
            self.machine,
            self.gpu_bytes,
            self.host_bytes,
            self.update,
            self.micro_batch,
            self.states,
            self.gradients,
            self.disk_bytes,
            self.quick,
        )

    def with_limit(self, tier: Tier, num_bytes: int) -> Question:
        if tier is Tier.DISK:
            return replace(self, disk_bytes=num_bytes)
        return replace(self, gpu_bytes=num_bytes) if tier is Tier.GPU else replace(self, host_bytes=num_bytes)

    def with_samples(self, num_samples: int) -> Question:
        """With another batch: everything that a profile says about bytes and work is a function of its samples. Costs
        of sizes that they do not have are in proportion."""
        before = self.profile
        batch_bytes = -(-before.batch_bytes * num_samples // before.num_samples)
        micro_batch = None if self.micro_batch is None else min(self.micro_batch, num_samples)
        profile = replace(before, num_samples=num_samples, batch_bytes=batch_bytes)
        return replace(self, profile=profile, micro_batch=micro_batch)
