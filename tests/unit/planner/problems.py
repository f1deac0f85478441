"""Small random planning problems, and all their plans: an enumerator that shares nothing with the search but the
plan, the schedule and its simulation."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from hightide.ir.action import Mode
from hightide.ir.activation import Activation
from hightide.ir.block import Affine, BlockSpec, CallSpec, ModelProfile, Selective, Work
from hightide.ir.costs import CallCost, Costs, Curve, LossCost, Point, SelectiveCost
from hightide.ir.machine import Machine, Speeds, subsets
from hightide.ir.plan import BlockPlan, GradientDtype, Plan, Update
from hightide.ir.tier import Lane, Tier
from hightide.planner.layout import pack, slot_sizes
from hightide.planner.lower import lower
from hightide.planner.placement import Placement
from hightide.planner.predict.peaks import peaks
from hightide.planner.predict.step_seconds import forecast
from hightide.planner.problem import Problem, Terms
from unit.planner.profiles import Sketch, build, call, finish, param

RESIDENCES = [(Tier.HOST, Tier.HOST), (Tier.GPU, Tier.HOST), (Tier.GPU, Tier.GPU)]
ONLY_TRAINED = (Tier.HOST, Tier.GPU)  # stays, while what is frozen streams
ACTIVATIONS = [(Activation.RECOMPUTE, Tier.GPU), (Activation.RECOMPUTE, Tier.HOST), (Activation.KEEP, Tier.GPU)]
SELECTIVE = [(Activation.SELECTIVE, *tiers) for tiers in product((Tier.GPU, Tier.HOST), repeat=2)]


@dataclass(frozen=True)
class SmallProblem:
    profile: ModelProfile
    costs: Costs
    machine: Machine
    update: Update
    gradients: GradientDtype
    gpu_bytes: int = 2**60
    host_bytes: int = 2**60
    slot_sizes: tuple[int | None, ...] = (None,)  # None: the one that wastes least

    @property
    def asked(self) -> Problem:
        terms = Terms(self.gpu_bytes, self.host_bytes, self.update, gradients=self.gradients)
        return Problem(self.profile, self.costs, self.machine, terms)

    def plans(self) -> Iterator[Plan]:
        """Every one, whether it fits or not."""
        for slot_numel in self.slot_sizes:
            yield from self._plans(slot_numel)

    def _plans(self, slot_numel: int | None) -> Iterator[Plan]:
        head = self.profile.blocks[-1]
        blocks = [
            list(product(self._residences(block.index, slot_numel), self._activations(block)))
            for block in self.profile.blocks
        ]
        kept_tokens = [0, self.profile.num_samples * self.profile.tokens_per_sample] if head.lazy_head else [0]
        micro_batches = range(1, self.profile.num_samples + 1)
        for decisions in product(*blocks):
            planned = [
                BlockPlan(block.name, *residence, *activation)
                for block, (residence, activation) in zip(self.profile.blocks, decisions, strict=True)
            ]
            for micro_batch, spare, spare_grad in product(micro_batches, range(3), range(2)):
                plan = finish(self.profile, planned, self.update, micro_batch, spare, spare_grad, slot_numel)
                streams = any(block.params is Tier.HOST for block in planned)
                if (spare and not streams) or (spare_grad and not plan.num_grad_slots - spare_grad):
                    continue  # nothing would use them
                for tokens in kept_tokens:
                    yield replace(plan, gradients=self.gradients, loss_kept_tokens=tokens)

    def _residences(self, block: int, slot_numel: int | None) -> list[tuple[Tier, Tier]]:
        chunks = pack(self.profile, slot_numel or slot_sizes(self.profile)[0]).chunks
        has_frozen = any(chunk.block == block and not chunk.trainable_numel for chunk in chunks)
        return [*RESIDENCES, ONLY_TRAINED] if has_frozen else RESIDENCES

    def _activations(self, block: BlockSpec) -> list[tuple[Activation, *tuple[Tier, ...]]]:
        """With the tiers of inputs and, selective, of what is held."""
        if block.lazy_head:
            return ACTIVATIONS[:2]
        has_part = any(call.block == block.index and call.selective is not None for call in self.profile.calls)
        return [*ACTIVATIONS, *SELECTIVE] if has_part else ACTIVATIONS

    def best_step_s(self) -> float:
        """Infinite if nothing fits."""
        best_s = math.inf
        for plan in self.plans():
            schedule = lower(self.profile, plan, Mode.TRAIN)
            peak = peaks(schedule)
            if peak.gpu_peak_bytes <= self.gpu_bytes and peak.host_peak_bytes <= self.host_bytes:
                best_s = min(best_s, forecast(self.asked, Placement(plan), schedule).step_s)
        return best_s

    def with_limits(self, gpu_share: float, host_share: float) -> SmallProblem:
        """So far from the leanest plan to the one with everything on the GPU; so much of what the host can need."""
        needs = [peaks(lower(self.profile, plan, Mode.TRAIN)) for plan in self._extremes()]
        lean, most = (peak.gpu_peak_bytes for peak in needs)
        gpu_bytes = lean + int(gpu_share * (most - lean))
        return replace(self, gpu_bytes=gpu_bytes, host_bytes=int(host_share * needs[0].host_peak_bytes))

    def _extremes(self) -> Iterator[Plan]:
        lean, most = (RESIDENCES[0], ACTIVATIONS[1]), (RESIDENCES[2], ACTIVATIONS[2])
        for (residence, activation), micro_batch in ((lean, 1), (most, self.profile.num_samples)):
            blocks = [BlockPlan(block.name, *residence, *activation) for block in self.profile.blocks]
            plan = finish(self.profile, blocks, self.update, micro_batch, 0, 0)
            yield replace(plan, gradients=self.gradients)


def small_problem(seed: int, num_blocks: int) -> SmallProblem:
    draw = random.Random(seed)
    dtype = draw.choice(["float32", "bfloat16"])
    num_samples = draw.choice([1, 2, 2, 3])
    specs = [param(f"p{block}", 128 * draw.randint(1, 40), dtype) for block in range(num_blocks)]
    sketches = [Sketch(f"blocks.{block}", [f"p{block}"]) for block in range(num_blocks)]
    if num_blocks > 1 and draw.random() < 0.3:  # tied
        sketches[-1].params = ["p0"]
        specs.pop()
    sketches[-1].lazy_head = draw.random() < 0.3
    calls = [_call(draw, block) for block in range(num_blocks)]
    profile = build(specs, sketches, calls, num_samples)
    if sketches[-1].lazy_head:
        head = replace(profile.blocks[-1], plain_linear=True)
        profile = replace(profile, blocks=(*profile.blocks[:-1], head))
    problem = SmallProblem(
        profile,
        _costs(draw, profile.fingerprint, num_blocks, num_samples),
        _machine(draw),
        draw.choice(list(Update)),
        draw.choice(list(GradientDtype)),
    )
    return problem.with_limits(draw.choice([0.1, 0.3, 0.5, 0.7, 0.9]), draw.choice([0.9, 2.0, 2.0, 2.0]))


def selective_problem(seed: int, num_blocks: int) -> SmallProblem:
    """Some of what a block keeps is worth more than the rest."""
    draw, problem = random.Random(-1 - seed), small_problem(seed, num_blocks)
    calls, costs = list(problem.profile.calls), list(problem.costs.calls)
    for index, (spec, cost) in enumerate(zip(calls, costs, strict=True)):
        kept = Affine(16, int(draw.uniform(0.2, 0.8) * spec.kept.per_sample))
        calls[index] = replace(spec, selective=Selective(kept, Work(), flop_per_byte=1, num_held=1))
        share = draw.uniform(0.0, 0.4)
        points = tuple(Point(point.num_samples, share * point.value) for point in cost.recompute_s.points)
        costs[index] = replace(cost, selective=SelectiveCost(cost.forward_s, Curve(points)))
    profile = replace(problem.profile, calls=tuple(calls))
    return replace(problem, profile=profile, costs=replace(problem.costs, calls=tuple(costs)))


def chunked_problem(seed: int) -> SmallProblem:
    """One block of several parameters, some of them frozen, in chunks of any size that the search knows."""
    draw = random.Random(seed)
    dtype = draw.choice(["float32", "bfloat16"])
    num_samples = draw.choice([1, 2, 3])
    specs = []
    for number in range(draw.randint(1, 3)):
        trainable = number == 0 or draw.random() < 0.6
        specs.append(param(f"p{number}", 128 * draw.randint(1, 40), dtype, trainable, 0 if trainable else None))
    profile = build(specs, [Sketch("block", [spec.name for spec in specs])], [_call(draw, 0)], num_samples)
    problem = SmallProblem(
        profile,
        _costs(draw, profile.fingerprint, 1, num_samples),
        _machine(draw),
        draw.choice(list(Update)),
        draw.choice(list(GradientDtype)),
        slot_sizes=slot_sizes(profile),
    )
    return problem.with_limits(draw.choice([0.05, 0.1, 0.3, 0.5, 0.7]), draw.choice([0.9, 2.0, 2.0]))


def _call(draw: random.Random, block: int) -> CallSpec:
    spec = call(block, draw.choice([16, 64, 256]), first=block == 0)
    kept = draw.choice([1, 4, 12]) * spec.outputs.per_sample
    return replace(spec, kind=block, kept=Affine(32, kept), backward_peak=Affine(96, kept + spec.outputs.per_sample))


def _costs(draw: random.Random, fingerprint: str, num_blocks: int, num_samples: int) -> Costs:
    def curve(most_s: float) -> Curve:
        full_s = draw.uniform(0.2, 1.0) * most_s
        alone_s = full_s * draw.uniform(1 / num_samples, 1.0)
        points = {1: alone_s, num_samples: full_s} if num_samples > 1 else {1: full_s}
        return Curve(tuple(Point(size, value) for size, value in points.items()))

    calls = []
    for _ in range(num_blocks):
        forward = curve(1.0)
        calls.append(CallCost(forward, forward, curve(0.8), curve(2.0)))
    return Costs("made up", fingerprint, tuple(calls), LossCost(8, 0.1, 0.2, 0.1), 1e6, 4e5, glue_s=0.01)


def _machine(draw: random.Random) -> Machine:
    alone = {
        Lane.H2D: 10 ** draw.uniform(3.5, 5),
        Lane.D2H: 10 ** draw.uniform(3.5, 5),
        Lane.CPU: 10 ** draw.uniform(4, 5.5),
    }
    shares = (1.0, draw.uniform(0.7, 1.0), draw.uniform(0.4, 0.7))
    speeds = tuple(Speeds(busy, tuple(alone[lane] * shares[len(busy) - 1] for lane in busy)) for busy in subsets())
    return Machine("made up", "made up", speeds, latency_s=0.001)
