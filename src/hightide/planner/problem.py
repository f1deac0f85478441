"""The question that a search answers: a model on a machine, the costs of a step there, and the terms of a plan."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from hightide.ir.block import ModelProfile
from hightide.ir.costs import Costs
from hightide.ir.machine import Machine
from hightide.ir.plan import GradientDtype, Plan, Shared, Update
from hightide.ir.state_spec import ADAM_STATES, StateSpecs
from hightide.ir.tier import Tier
from hightide.planner.mechanism import NONE, Mechanisms


@dataclass(frozen=True)
class Terms(Shared):
    """What a plan must keep to: how much memory it may use, and what the user and the loop have fixed."""

    gpu_bytes: int
    host_bytes: int
    update: Update = Update.DEFERRED
    micro_batch: int | None = None  # None: the planner decides
    states: StateSpecs = ADAM_STATES  # that the update rule keeps of each parameter
    gradients: GradientDtype = GradientDtype.FLOAT32
    disk_bytes: int = 0
    accumulate: int = 1  # passes before every step; each has the profile's samples
    without: Mechanisms = NONE  # that a plan must do without, to see what they are worth
    ranks: int = 1  # of which each has a GPU, a batch like the profile's, and these limits for itself
    replicas: int = 1  # groups of ranks that have a copy of everything
    even_alone: bool = False  # one rank does what each of several does
    in_parts: bool = False  # updates on the host can write states later than parameters

    @classmethod
    def of(cls, plan: Plan) -> Terms:
        """Those that a plan was made for."""
        limits = plan.gpu_limit_bytes, plan.host_limit_bytes
        states = next((chunk.rule_states for chunk in plan.layout.chunks if chunk.optimised_numel), ())
        disk_bytes, accumulate = plan.disk_limit_bytes, plan.accumulate
        terms = cls(*limits, plan.update, plan.micro_batch, states, plan.gradients, disk_bytes, accumulate)
        parts = any(block.settles for block in plan.blocks)
        return replace(terms, ranks=plan.ranks, replicas=plan.replicas, even_alone=plan.even_alone, in_parts=parts)

    @property
    def limits(self) -> dict[Tier, int]:
        return {Tier.GPU: self.gpu_bytes, Tier.HOST: self.host_bytes, Tier.DISK: self.disk_bytes}

    def check_micro_batch(self, num_samples: int) -> None:
        if self.micro_batch is not None and not 1 <= self.micro_batch <= num_samples:
            raise ValueError(
                f"micro_batch={self.micro_batch} does not fit the batch of {num_samples} samples; "
                f"choose a number from 1 to {num_samples}, or None"
            )


@dataclass(frozen=True)
class Problem:
    profile: ModelProfile
    costs: Costs
    machine: Machine
    terms: Terms
    quick: bool = False  # only a few fillings are tried: for models whose step takes less time than a search

    @property
    def estimated_rungs(self) -> frozenset[int]:
        """Kinds of calls whose costs of Activation.SELECTIVE are estimated, where the others were measured."""
        kinds = range(len(self.costs.calls)) if self.costs.peaks else ()
        costs = {kind: self.costs.calls[kind].selective for kind in kinds}
        return frozenset(kind for kind, cost in costs.items() if cost is not None and not cost.is_measured)

    def without_rungs(self, kinds: Collection[int]) -> Problem:
        """Calls of these kinds recompute or keep."""
        calls = (replace(call, selective=None) if call.kind in kinds else call for call in self.profile.calls)
        costs = (replace(cost, selective=None) if kind in kinds else cost for kind, cost in enumerate(self.costs.calls))
        return replace(
            self,
            profile=replace(self.profile, calls=tuple(calls)),
            costs=replace(self.costs, calls=tuple(costs)),
        )

    def with_terms(self, **changes: object) -> Problem:
        return replace(self, terms=replace(self.terms, **changes))  # type: ignore[arg-type]

    def with_limit(self, tier: Tier, num_bytes: int) -> Problem:
        return self.with_terms(**{f"{tier}_bytes": num_bytes})

    def with_samples(self, num_samples: int) -> Problem:
        """With another batch: everything that a profile says about bytes and work is a function of its samples. Costs
        of sizes that they do not have are in proportion."""
        before, micro_batch = self.profile, self.terms.micro_batch
        batch_bytes = -(-before.batch_bytes * num_samples // before.num_samples)
        profile = replace(before, num_samples=num_samples, batch_bytes=batch_bytes)
        changed = replace(self, profile=profile)
        return changed if micro_batch is None else changed.with_terms(micro_batch=min(micro_batch, num_samples))
