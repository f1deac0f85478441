"""Synthetic model profiles for planner tests: no torch, sizes as wanted."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from hightide.ir.action import Mode, Schedule
from hightide.ir.activation import Activation
from hightide.ir.block import Affine, BlockSpec, CallSpec, Glue, ModelProfile, ParamSpec, Selective, Work
from hightide.ir.costs import Costs
from hightide.ir.machine import Machine
from hightide.ir.plan import PLAN_VERSION, BlockPlan, Forecast, GradientDtype, Plan, Update
from hightide.ir.tier import Tier
from hightide.planner.chunk_place import RING_COUNTS
from hightide.planner.disk_inputs import passing_calls
from hightide.planner.layout import pack, slot_sizes
from hightide.planner.loss_tiles import loss_tile_tokens
from hightide.planner.lower import lower
from hightide.planner.placement import Placement
from hightide.planner.predict.step_seconds import StepForecast, forecast
from hightide.planner.problem import Problem, Terms
from hightide.planner.verify.verify_schedule import verify


def verify_within(profile: ModelProfile, plan: Plan, schedule: Schedule, gpu_bytes: int, host_bytes: int) -> None:
    verify(profile, Placement(replace(plan, gpu_limit_bytes=gpu_bytes, host_limit_bytes=host_bytes)), schedule)


def forecast_of(profile: ModelProfile, plan: Plan, costs: Costs, machine: Machine) -> StepForecast:
    problem = Problem(profile, costs, machine, Terms.of(plan))
    return forecast(problem, Placement(plan), lower(profile, plan, Mode.TRAIN))


@dataclass
class Sketch:
    name: str
    params: list[str]
    loose: bool = False
    lazy_head: bool = False


def param(name: str, numel: int, dtype: str = "float32", trainable: bool = True, group: int | None = 0) -> ParamSpec:
    return ParamSpec((name,), (numel,), dtype, trainable, group)


def call(
    block: int, width: int = 64, needs_backward: bool = True, splittable: bool = True, first: bool = False
) -> CallSpec:
    row = 4 * width
    return CallSpec(
        block=block,
        needs_backward=needs_backward,
        splittable=splittable,
        note="" if splittable else "integer inputs only",
        new_inputs=Affine(128, 16) if first else Affine(),
        saved_inputs=Affine(0, row) if needs_backward else Affine(),
        outputs=Affine(0, row),
        forward_peak=Affine(64, 3 * row),
        kept=Affine(32, 5 * row),
        backward_peak=Affine(96, 9 * row),
        input_grads=Affine(0, row) if needs_backward else Affine(),
    )


def build(params: list[ParamSpec], sketches: list[Sketch], calls: list[CallSpec], num_samples: int = 6) -> ModelProfile:
    return ModelProfile(
        fingerprint="0123456789abcdef",
        num_samples=num_samples,
        tokens_per_sample=8,
        batch_bytes=512,
        buffer_bytes=256,
        params=tuple(params),
        blocks=tuple(
            BlockSpec(index, sketch.name, "Layer", tuple(sketch.params), sketch.loose, sketch.lazy_head)
            for index, sketch in enumerate(sketches)
        ),
        calls=tuple(calls),
        vocabulary=64 if any(sketch.lazy_head for sketch in sketches) else 0,
    )


def stack(num_layers: int = 4, tied: bool = False, num_samples: int = 6, dtype: str = "float32") -> ModelProfile:
    """Embedding, equal layers, a tiny norm, a lazy head: the shape of a small language model."""
    params = [param("embed.weight", 64 * 32, dtype)]
    sketches = [Sketch("embed", ["embed.weight"])]
    for layer in range(num_layers):
        names = [f"layers.{layer}.attn", f"layers.{layer}.mlp", f"layers.{layer}.norm"]
        params += [param(names[0], 1024, dtype), param(names[1], 2048, dtype), param(names[2], 32, dtype, group=1)]
        sketches.append(Sketch(f"layers.{layer}", names))
    params.append(param("norm.weight", 32, dtype, group=1))
    sketches.append(Sketch("norm", ["norm.weight"]))
    if not tied:
        params.append(param("head.weight", 64 * 32, dtype))
    sketches.append(Sketch("head", ["embed.weight" if tied else "head.weight"], lazy_head=True))
    calls = [call(0, splittable=False, first=True)] + [call(index) for index in range(1, len(sketches))]
    calls[0] = replace(calls[0], saved_inputs=Affine(), input_grads=Affine())
    kinds = [0, *[1] * num_layers, 2, 3]
    return build(
        params, sketches, [_working(entry, kind) for entry, kind in zip(calls, kinds, strict=True)], num_samples
    )


def _working(spec: CallSpec, kind: int) -> CallSpec:
    """With operations as a layer has them: backward twice those of forward, recomputation three quarters."""
    flop = 2 * 3072 * 8 if kind in (1, 3) else 0
    forward, recompute, backward = (Work(Affine(0, flop * n // 4), Affine(12288, 512 * n)) for n in (4, 3, 8))
    return replace(spec, kind=kind, forward=forward, recompute=recompute, backward=backward)


def plan_with(
    profile: ModelProfile,
    params: Tier = Tier.HOST,
    states: Tier = Tier.HOST,
    activation: Activation = Activation.RECOMPUTE,
    inputs: Tier = Tier.GPU,
    update: Update = Update.DEFERRED,
    micro_batch: int = 2,
    spare: int = 1,
    slot_numel: int | None = None,
    num_buffers: int = 2,
) -> Plan:
    """The same decisions for all blocks (except the loose one), without limits."""
    blocks = [
        BlockPlan(
            block.name,
            Tier.GPU if block.loose else params,
            Tier.GPU if block.loose else states,
            activation,
            Tier.GPU if block.loose else inputs,
        )
        for block in profile.blocks
    ]
    return finish(profile, blocks, update, micro_batch, spare, spare, slot_numel, num_buffers)


def finish(
    profile: ModelProfile,
    blocks: list[BlockPlan],
    update: Update,
    micro_batch: int,
    spare: int,
    spare_grad: int,
    slot_numel: int | None = None,
    num_buffers: int = 2,
) -> Plan:
    plan = Plan(
        version=PLAN_VERSION,
        fingerprint=profile.fingerprint,
        num_samples=profile.num_samples,
        micro_batch=micro_batch,
        update=update,
        num_slots=0,
        num_grad_slots=0,
        loss_tile_tokens=loss_tile_tokens(profile),
        gpu_limit_bytes=2**60,
        host_limit_bytes=2**60,
        blocks=tuple(blocks),
        layout=pack(profile, slot_numel or slot_sizes(profile)[0]),
        forecast=Forecast(0, 0),
        explanation="",
        disk_limit_bytes=2**60,
    )
    slots, grad_slots = Placement(plan).widest_tick({entry.block for entry in profile.calls})
    placement = Placement(plan)
    rings = {name: num_buffers if placement.buffer_bytes[ring] else 0 for ring, name in RING_COUNTS.items()}
    rings["num_input_buffers"] = num_buffers if passing_calls(profile, plan) else 0
    return replace(plan, num_slots=slots + spare, num_grad_slots=grad_slots + spare_grad, **rings)


def rounded_on_gpu(profile: ModelProfile, plan: Plan, spare: int = 1) -> Plan:
    """What is rounded waits on the GPU in its own dtype: sums need grad slots."""
    plan = replace(plan, gradients=GradientDtype.PARAM, rounded_on_gpu=True)
    _, grad_slots = Placement(plan).widest_tick({entry.block for entry in profile.calls})
    return replace(plan, num_grad_slots=grad_slots + spare)


@st.composite
def profiles(draw: st.DrawFn) -> ModelProfile:
    """Any mix of sizes, dtypes, groups, frozen, shared, loose and unused parameters; any order of calls, with
    repeats."""
    num_blocks = draw(st.integers(1, 6))
    specs: list[ParamSpec] = []
    sketches = [Sketch(f"blocks.{index}", []) for index in range(num_blocks)]
    if draw(st.booleans()):
        sketches.append(Sketch("", [], loose=True))
    for index, sketch in enumerate(sketches):
        for number in range(draw(st.integers(0, 3))):
            kind = draw(st.sampled_from(["group 0", "group 1", "no group", "frozen"]))
            numel = draw(st.sampled_from([0, 1, 100, 128, 300, 1000, 2500]))
            dtype = draw(st.sampled_from(["float32", "float32", "bfloat16"]))
            group = int(kind[-1]) if kind[-1].isdigit() else None
            specs.append(param(f"b{index}.p{number}", numel, dtype, kind != "frozen", group))
            sketch.params.append(specs[-1].name)
            for other in (
                draw(st.sets(st.integers(index, len(sketches) - 1), max_size=2)) if draw(st.booleans()) else ()
            ):
                if other != index:
                    sketches[other].params.append(specs[-1].name)
    order = draw(st.lists(st.integers(0, num_blocks - 1), min_size=1, max_size=10))
    calls = [
        call(block, draw(st.sampled_from([8, 64])), draw(st.booleans()), draw(st.booleans()), first=place == 0)
        for place, block in enumerate(order)
    ]
    calls = [
        replace(one, glue=draw(glues()), glue_backward=draw(glues()), selective=draw(rungs(one.kept))) for one in calls
    ]
    profile = build(specs, sketches, calls, num_samples=draw(st.integers(1, 7)))
    profile = with_tables(profile, *(block.index for block in profile.blocks if len(block.params) == 1))
    return replace(profile, glue_end=draw(st.sampled_from([Affine(), Affine(8, 3000)])))


def with_tables(profile: ModelProfile, *tables: int) -> ModelProfile:
    """These blocks are embeddings, if nobody shares their parameter."""
    used = [key for block in profile.blocks for key in block.params]
    blocks = [
        replace(block, plain_embedding=block.index in tables and not block.loose and used.count(block.params[0]) == 1)
        for block in profile.blocks
    ]
    return replace(profile, blocks=tuple(blocks))


def looked_up(profile: ModelProfile, plan: Plan) -> Plan:
    """With all embeddings on the host."""
    there = {"params": Tier.HOST, "states": Tier.HOST, "sums": Tier.HOST, "compute": Tier.HOST}
    pairs = zip(profile.blocks, plan.blocks, strict=True)
    return replace(
        plan, blocks=tuple(replace(block, **there) if spec.plain_embedding else block for spec, block in pairs)
    )


def glues() -> st.SearchStrategy[Glue]:
    """Most models have nothing between their blocks."""
    sizes = st.builds(Affine, st.sampled_from([0, 40]), st.sampled_from([0, 300, 3000]))
    return st.just(Glue()) | st.builds(Glue, sizes, sizes)


def rungs(kept: Affine) -> st.SearchStrategy[Selective | None]:
    """Of many calls a part is worth holding."""
    part = Affine(kept.fixed // 2, kept.per_sample // 2)
    return st.sampled_from([None, Selective(part, Work(), flop_per_byte=1, num_held=2)])


LEVELS = [
    (Activation.RECOMPUTE, Tier.GPU, Tier.GPU),
    (Activation.RECOMPUTE, Tier.HOST, Tier.GPU),
    (Activation.SELECTIVE, Tier.GPU, Tier.GPU),
    (Activation.SELECTIVE, Tier.HOST, Tier.GPU),
    (Activation.SELECTIVE, Tier.GPU, Tier.HOST),
    (Activation.SELECTIVE, Tier.HOST, Tier.HOST),
    (Activation.KEEP, Tier.GPU, Tier.GPU),
    (Activation.KEEP, Tier.HOST, Tier.HOST),
]  # with the tiers of inputs and of what is held
LEVELS_FROM_DISK = [
    (Activation.RECOMPUTE, Tier.DISK, Tier.GPU),
    (Activation.RECOMPUTE, Tier.DISK, Tier.GPU),
    (Activation.SELECTIVE, Tier.DISK, Tier.GPU),
]


@st.composite
def plans(draw: st.DrawFn, profile: ModelProfile, update: Update, disk: bool = False) -> Plan:
    """Any legal plan, not only those that the rule makes. `disk`: also with blocks, or their inputs, there."""
    homes_on_disk = [(Tier.HOST, Tier.DISK), (Tier.GPU, Tier.DISK), (Tier.DISK, Tier.DISK)]
    slot_numel = draw(st.sampled_from([128, 256, 1024, 4096]))
    with_frozen = {chunk.block for chunk in pack(profile, slot_numel).chunks if not chunk.trainable_numel}
    blocks = []
    for block in profile.blocks:
        params, states = draw(
            st.sampled_from(
                [
                    (Tier.HOST, Tier.HOST),
                    (Tier.HOST, Tier.HOST),
                    (Tier.GPU, Tier.HOST),
                    (Tier.HOST, Tier.GPU),
                    (Tier.GPU, Tier.GPU),
                    *(homes_on_disk if disk else []),
                ]
            )
        )
        activation, inputs, held = draw(st.sampled_from(LEVELS + (LEVELS_FROM_DISK if disk else [])))
        if states is Tier.GPU and block.index not in with_frozen:
            params = Tier.GPU
        if block.loose:
            params = states = inputs = held = Tier.GPU
        parks = draw(st.booleans()) if disk else True
        late = parks and states is Tier.DISK and draw(st.booleans())
        blocks.append(BlockPlan(block.name, params, states, activation, inputs, held, parks=parks, late=late))
    micro_batch = draw(st.integers(1, profile.num_samples))
    spares = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    buffers = draw(st.integers(1, 3)) if disk else 0
    plan = finish(profile, blocks, update, micro_batch, *spares, slot_numel, buffers)
    if draw(st.booleans()):
        plan = looked_up(profile, plan)
    if update is Update.DEFERRED and draw(st.booleans()):
        return rounded_on_gpu(profile, plan, spares[1])
    return replace(plan, gradients=draw(st.sampled_from(GradientDtype)))


UNLIMITED = 2**60


def total_numel(profile: ModelProfile) -> int:
    return sum(math.prod(spec.shape) for spec in profile.params)
