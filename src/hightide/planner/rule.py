"""A plan by a simple rule: start lean, then fill the GPU in execution order.

The first blocks gain most from being persistent: nothing can hide their fetch or their update. So from the front:
what little is trained in a frozen model, blocks wholly on the GPU, then parameters only; then, from the back,
activations that are kept instead of recomputed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hightide.ir.action import Mode
from hightide.ir.block import BlockSpec, ModelProfile
from hightide.ir.chunk import Layout
from hightide.ir.plan import PLAN_VERSION, Activation, BlockPlan, Forecast, GradientDtype, Plan, Update
from hightide.ir.tier import Tier
from hightide.ir.units import format_bytes
from hightide.planner.explain import explain
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.layout import adapters, pack, search_slot_numel, tiny_blocks
from hightide.planner.loss import loss_tile_tokens, num_rows
from hightide.planner.lower import lower
from hightide.planner.memory import Peaks, peaks
from hightide.planner.place import in_grad_slot, is_used_up, widest_tick

LEAN_FRACTION = 3 / 4  # of the GPU that the leanest plan may use before the micro-batch is halved instead
FILL_FRACTION = 0.95  # of the GPU that optional things may fill: a forecast is not a measurement


@dataclass(frozen=True)
class Choice:
    """What is decided; everything else in a plan follows."""

    micro_batch: int
    inputs: Tier = Tier.GPU
    spare_slots: int = 1
    whole: frozenset[int] = field(default_factory=frozenset)  # blocks with params and states on the GPU
    params: frozenset[int] = field(default_factory=frozenset)  # blocks with params only
    keep: frozenset[int] = field(default_factory=frozenset)
    trained: frozenset[int] = field(default_factory=frozenset)  # blocks whose adapters stay while the rest streams
    loss_kept_tokens: int = 0


def plan_by_rule(
    profile: ModelProfile,
    gpu_bytes: int,
    host_bytes: int,
    update: Update,
    micro_batch: int | None = None,
    num_moments: int = 2,
    gradients: GradientDtype = GradientDtype.FLOAT32,
) -> Plan:
    if micro_batch is not None and not 1 <= micro_batch <= profile.num_samples:
        raise ValueError(
            f"micro_batch={micro_batch} does not fit the batch of {profile.num_samples} samples; "
            f"choose a number from 1 to {profile.num_samples}, or None"
        )
    rule = _rule(profile, gpu_bytes, host_bytes, update, num_moments, gradients)
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
    rule = _rule(profile, gpu_bytes, host_bytes, update, num_moments, gradients)
    peak = rule.peaks(choice)
    _require(Tier.GPU, peak.gpu_peak_bytes, gpu_bytes, peak.gpu_peak_at, what="this")
    return rule.finish(choice)


def _rule(
    profile: ModelProfile,
    gpu_bytes: int,
    host_bytes: int,
    update: Update,
    num_moments: int,
    gradients: GradientDtype,
) -> _Rule:
    layout = pack(profile, search_slot_numel(profile), num_moments)
    return _Rule(profile, layout, gpu_bytes, host_bytes, update, gradients)


@dataclass(frozen=True)
class _Rule:
    profile: ModelProfile
    layout: Layout
    gpu_bytes: int
    host_bytes: int
    update: Update
    gradients: GradientDtype = GradientDtype.FLOAT32

    def finish(self, choice: Choice) -> Plan:
        plan = self.build(choice)
        schedule = lower(self.profile, plan, Mode.TRAIN)
        peak = peaks(schedule)
        _require(Tier.HOST, peak.host_peak_bytes, self.host_bytes, peak.host_peak_at)
        plan = replace(plan, forecast=Forecast(peak.gpu_peak_bytes, peak.host_peak_bytes))
        return replace(plan, explanation=explain(self.profile, plan, {Mode.TRAIN: schedule}))

    def lean(self, micro_batch: int | None) -> Choice:
        """Everything streamed and recomputed; the largest micro-batch that leaves room, the plainest variant first."""
        variants = [(Tier.GPU, 1), (Tier.HOST, 1), (Tier.HOST, 0)]
        sizes = _halvings(self.profile.num_samples) if micro_batch is None else [micro_batch]
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
        adapted = replace(leanest, trained=frozenset(self._adapted()))
        whole = replace(leanest, inputs=Tier.GPU, whole=frozenset(self._movable()))
        choices = {choice: self.peaks(choice) for choice in (leanest, adapted, whole)}
        least = min(choices, key=lambda choice: choices[choice].gpu_peak_bytes)
        _require(Tier.GPU, choices[least].gpu_peak_bytes, self.gpu_bytes, choices[least].gpu_peak_at)
        return least

    def fill(self, lean: Choice) -> Choice:
        movable = self._movable()
        everything = replace(lean, inputs=Tier.GPU, whole=frozenset(movable))
        if self._fits(everything, FILL_FRACTION):
            choice = everything
        elif lean.whole or lean.trained:  # a last resort: there is no room, and with less on the GPU it would not fit
            return lean
        else:
            adapted = self._adapted()
            start = self._most(lambda count: replace(lean, trained=frozenset(adapted[:count])), len(adapted))
            choice = self._most(lambda count: replace(start, whole=frozenset(movable[:count])), len(movable))
            rest = [block for block in movable if block not in choice.whole]
            base = choice
            choice = self._most(lambda count: replace(base, params=frozenset(rest[:count])), len(rest))
        filled = self._keep_logits(choice)
        keepable = self._keepable()
        return self._most(lambda count: replace(filled, keep=frozenset(keepable[:count])), len(keepable))

    def _keep_logits(self, choice: Choice) -> Choice:
        """Before activations: per byte, a projection saved is more time than a block's recomputation."""
        heads = {block.index for block in self.profile.blocks if block.lazy_head and block.plain_linear}
        if not any(call.block in heads and call.needs_backward for call in self.profile.calls):
            return choice
        rows, tile = num_rows(self.profile), loss_tile_tokens(self.profile)
        return self._most(
            lambda count: replace(choice, loss_kept_tokens=min(rows, count * tile)), limit=-(-rows // tile)
        )

    def _most(self, make: Callable[[int], Choice], limit: int) -> Choice:
        """The largest count that fits. None at all is always right: it is what fitted before."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(make(middle), FILL_FRACTION) else (low, middle - 1)
        return make(low)

    def _movable(self) -> list[int]:
        """Called blocks in the order in which they become persistent: tiny ones, then as they run."""
        called = {call.block for call in self.profile.calls}
        tiny = tiny_blocks(self.profile)
        blocks = [block.index for block in self.profile.blocks if not block.loose and block.index in called]
        return sorted(blocks, key=lambda block: block not in tiny)

    def _adapted(self) -> list[int]:
        """Blocks with adapters, as they run. They cost little and save the way of gradients to the host and back."""
        apart, called = adapters(self.profile), {call.block for call in self.profile.calls}
        return [b.index for b in self.profile.blocks if b.index in called and not apart.isdisjoint(b.params)]

    def _keepable(self) -> list[int]:
        """From the back. A lazy head recomputes its logits anyway."""
        blocks = {call.block for call in self.profile.calls if call.needs_backward}
        return [block for block in sorted(blocks, reverse=True) if not self.profile.blocks[block].lazy_head]

    def _fits(self, choice: Choice, fraction: float) -> bool:
        return self.peaks(choice).gpu_peak_bytes <= fraction * self.gpu_bytes

    def peaks(self, choice: Choice) -> Peaks:
        return peaks(lower(self.profile, self.build(choice), Mode.TRAIN))

    def build(self, choice: Choice) -> Plan:
        plan = Plan(
            version=PLAN_VERSION,
            fingerprint=self.profile.fingerprint,
            num_samples=self.profile.num_samples,
            micro_batch=choice.micro_batch,
            update=self.update,
            num_slots=0,
            num_grad_slots=0,
            loss_tile_tokens=loss_tile_tokens(self.profile),
            gpu_limit_bytes=self.gpu_bytes,
            host_limit_bytes=self.host_bytes,
            blocks=tuple(_block_plan(block, choice) for block in self.profile.blocks),
            layout=self.layout,
            forecast=Forecast(0, 0),
            explanation="",
            gradients=self.gradients,
            loss_kept_tokens=choice.loss_kept_tokens,
            profile=self.profile,
        )
        slots, grad_slots = widest_tick(plan, {call.block for call in self.profile.calls})
        # A spare one lets a block begin while the gradient before it leaves; one that is used up is gone by then.
        leaving = any(in_grad_slot(plan, chunk) and not is_used_up(plan, chunk) for chunk in plan.layout.chunks)
        return replace(
            plan,
            num_slots=_with_spare(slots, choice.spare_slots),
            num_grad_slots=grad_slots + (choice.spare_slots if leaving else 0),
        )


def _with_spare(widest: int, spare: int) -> int:
    """A spare slot lets the next fetch run beside compute; beside a chunk that is wider than one slot and stays for its
    next use, that takes one more. Nothing streamed: no slots."""
    if not widest:
        return 0
    return widest + (spare + 1 if spare and widest > 1 else spare)


def _block_plan(block: BlockSpec, choice: Choice) -> BlockPlan:
    whole = block.loose or block.index in choice.whole
    keep = block.index in choice.keep
    return BlockPlan(
        name=block.name,
        params=Tier.GPU if whole or block.index in choice.params else Tier.HOST,
        states=Tier.GPU if whole or block.index in choice.trained else Tier.HOST,
        activation=Activation.KEEP if keep else Activation.RECOMPUTE,
        inputs=Tier.GPU if keep or block.loose else choice.inputs,
    )


def _halvings(num_samples: int) -> list[int]:
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
