"""A plan by a simple rule: start lean, then fill the GPU in execution order.

The first blocks gain most from being persistent: nothing can hide their fetch or their update. So from the front:
what little is trained in a frozen model, blocks wholly on the GPU, then parameters only; then, from the back,
activations that are kept instead of recomputed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hightide.ir.action import Mode
from hightide.ir.block import ModelProfile
from hightide.ir.plan import Forecast, GradientDtype, Plan, Update
from hightide.ir.tier import Tier
from hightide.ir.units import format_bytes
from hightide.planner.choice import Choice, Problem, check_micro_batch
from hightide.planner.explain import explain
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.lower import lower
from hightide.planner.memory import Peaks, peaks

LEAN_FRACTION = 3 / 4  # of the GPU that the leanest plan may use before the micro-batch is halved instead
FILL_FRACTION = 0.95  # of the GPU that optional things may fill: a forecast is not a measurement


def plan_by_rule(
    profile: ModelProfile,
    gpu_bytes: int,
    host_bytes: int,
    update: Update,
    micro_batch: int | None = None,
    num_moments: int = 2,
    gradients: GradientDtype = GradientDtype.FLOAT32,
) -> Plan:
    check_micro_batch(profile, micro_batch)
    rule = _Rule(Problem(profile, gpu_bytes, host_bytes, update, num_moments, gradients))
    return rule.finish(rule.fill(rule.lean(micro_batch)))


def plan_by_hand(
    profile: ModelProfile,
    choice: Choice,
    gpu_bytes: int,
    host_bytes: int,
    update: Update,
    num_moments: int = 2,
    gradients: GradientDtype = GradientDtype.FLOAT32,
) -> Plan:
    """The plan that follows from a person's choices."""
    rule = _Rule(Problem(profile, gpu_bytes, host_bytes, update, num_moments, gradients))
    peak = rule.peaks(choice)
    _require(Tier.GPU, peak.gpu_peak_bytes, gpu_bytes, peak.gpu_peak_at, what="this")
    return rule.finish(choice)


@dataclass(frozen=True)
class _Rule:
    problem: Problem

    def finish(self, choice: Choice) -> Plan:
        plan = self.problem.build(choice)
        schedule = lower(self.problem.profile, plan, Mode.TRAIN)
        peak = peaks(schedule)
        _require(Tier.HOST, peak.host_peak_bytes, self.problem.host_bytes, peak.host_peak_at)
        plan = replace(plan, forecast=Forecast(peak.gpu_peak_bytes, peak.host_peak_bytes))
        return replace(plan, explanation=explain(self.problem.profile, plan, {Mode.TRAIN: schedule}))

    def lean(self, micro_batch: int | None) -> Choice:
        """Everything streamed and recomputed; the largest micro-batch that leaves room, the plainest variant first."""
        variants = [(Tier.GPU, 1), (Tier.HOST, 1), (Tier.HOST, 0)]
        sizes = halvings(self.problem.profile.num_samples) if micro_batch is None else [micro_batch]
        for inputs, spare in variants:
            for size in sizes:
                choice = Choice(size, inputs, spare)
                if self._fits(choice, LEAN_FRACTION):
                    return choice
        for inputs, spare in variants:
            choice = Choice(sizes[-1], inputs, spare)
            if self._fits(choice, 1.0):
                return choice
        return self._last_resort(choice)

    def _last_resort(self, leanest: Choice) -> Choice:
        """Slots may cost more than what goes through them: then adapters, or everything, on the GPU fit where the
        leanest stream does not."""
        adapted = replace(leanest, trained=frozenset(self.problem.adapted))
        whole = replace(leanest, inputs=Tier.GPU, whole=frozenset(self.problem.movable))
        choices = {choice: self.peaks(choice) for choice in (leanest, adapted, whole)}
        least = min(choices, key=lambda choice: choices[choice].gpu_peak_bytes)
        _require(Tier.GPU, choices[least].gpu_peak_bytes, self.problem.gpu_bytes, choices[least].gpu_peak_at)
        return least

    def fill(self, lean: Choice) -> Choice:
        movable = self.problem.movable
        everything = replace(lean, inputs=Tier.GPU, whole=frozenset(movable))
        if self._fits(everything, FILL_FRACTION):
            choice = everything
        elif lean.whole or lean.trained:  # a last resort: there is no room, and with less on the GPU it would not fit
            return lean
        else:
            adapted = self.problem.adapted
            start = self._most(lambda count: replace(lean, trained=frozenset(adapted[:count])), len(adapted))
            choice = self._most(lambda count: replace(start, whole=frozenset(movable[:count])), len(movable))
            rest = [block for block in movable if block not in choice.whole]
            base = choice
            choice = self._most(lambda count: replace(base, params=frozenset(rest[:count])), len(rest))
        filled = self._keep_logits(choice)
        keepable = self.problem.keepable
        return self._most(lambda count: replace(filled, keep=frozenset(keepable[:count])), len(keepable))

    def _keep_logits(self, choice: Choice) -> Choice:
        """Before activations: per byte, a projection saved is more time than a block's recomputation."""
        tokens = (0, *self.problem.keepable_tokens)
        return self._most(lambda count: replace(choice, loss_kept_tokens=tokens[count]), limit=len(tokens) - 1)

    def _most(self, make: Callable[[int], Choice], limit: int) -> Choice:
        """The largest count that fits. None at all is always right: it is what fitted before."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(make(middle), FILL_FRACTION) else (low, middle - 1)
        return make(low)

    def _fits(self, choice: Choice, fraction: float) -> bool:
        return self.peaks(choice).gpu_peak_bytes <= fraction * self.problem.gpu_bytes

    def peaks(self, choice: Choice) -> Peaks:
        return peaks(lower(self.problem.profile, self.problem.build(choice), Mode.TRAIN))


def halvings(num_samples: int) -> list[int]:
    sizes = [num_samples]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def _require(tier: Tier, needed_bytes: int, limit_bytes: int, moment: str, what: str = "the leanest") -> None:
    if needed_bytes <= limit_bytes:
        return
    remedy = "a smaller micro_batch or batch, or " if tier is Tier.GPU else "more GPU memory, or "
    raise InfeasiblePlan(
        f"{what} plan does not fit the {tier}: it needs {needed_bytes} bytes ({format_bytes(needed_bytes)}), the "
        f"limit is {limit_bytes} ({format_bytes(limit_bytes)}), {needed_bytes - limit_bytes} bytes "
        f"({format_bytes(needed_bytes - limit_bytes)}) are missing; give it {remedy}a larger Limits({tier}=...)",
        moment,
        tier,
        needed_bytes,
    )
