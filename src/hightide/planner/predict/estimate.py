"""Costs from counted operations, for a GPU that is not there: planning for another machine, or before a rehearsal.

The constants were fitted to one measurement (docs/log.md, W1 on an H200, compiled blocks: a Llama layer of 3072
features takes 11.6 ms forward and 33.5 ms recomputed and backward for 32,768 tokens, 2.65 and 8.8 ms for 8,192, where
large products run at 806 TFLOP/s). Another GPU may be off by a quarter; a rehearsal is not.
"""

from __future__ import annotations

from dataclasses import dataclass

from hightide.ir.block import Affine, CallSpec, ModelProfile, Work
from hightide.ir.costs import CallCost, Costs, Curve, LossCost, Point, SelectiveCost
from hightide.ir.machine import Machine
from hightide.planner.loss_tiles import logit_bytes, loss_tile_tokens
from hightide.planner.predict.light import main_dtype

PRODUCT_SHARE = 0.85  # of the rate of one large product, that a layer's products reach
HALF_RATE_FLOP = 2e10  # a call of so many operations fills the GPU half,
HALF_RATE_S = 1e-3  # and one of so many seconds the processor that a simulated accelerator is: it is full at once
FUSED_SHARE = 0.25  # of the bytes that operations touch one by one, that compiled blocks touch
LAUNCH_S = 20e-6  # of a call that does next to nothing
# Bytes that an update of Adam moves, for each that it touches (once per array). Counted per parameter: gradient,
# master and moments are read, master and moments written again (28 bytes); fp16 is converted from the master (6); the
# master of bf16 is joined from its two parts before and split after (8 each).
UPDATE_PASSES = {"float32": 28 / 16, "float16": 34 / 18, "bfloat16": 44 / 16}
LOGIT_PASSES = (3, 4)  # over the logits, by forward and backward: written and read again, read and written over
GLUE_S = 2e-3  # a model's own code waits for the GPU about once per step


@dataclass(frozen=True)
class _Rates:
    flop_per_s: float  # of large matrix products in the model's dtype
    half_rate_flop: float  # of a call that is half as fast
    memory_bytes_per_s: float
    update_bytes_per_s: float


def estimate(profile: ModelProfile, machine: Machine) -> Costs:
    gpu = _rates(profile, machine)
    kinds = {call.kind: call for call in reversed(profile.calls)}
    return Costs(
        source=f"estimated for {machine.name}",
        fingerprint=profile.fingerprint,
        calls=tuple(_call_cost(kinds[kind], profile.num_samples, gpu) for kind in range(len(kinds))),
        loss=_loss_cost(profile, gpu),
        memory_bytes_per_s=gpu.memory_bytes_per_s,
        update_bytes_per_s=gpu.update_bytes_per_s,
        glue_s=GLUE_S,
    )


def _rates(profile: ModelProfile, machine: Machine) -> _Rates:
    if machine.gpu is None:
        raise ValueError(
            f"the machine {machine.name!r} says nothing about its GPU (0 known rates of products); measure it "
            "with `hightide doctor`, or name a preset"
        )
    known, memory_bytes_per_s = machine.gpu.matmul_flop_per_s, machine.gpu.memory_bytes_per_s
    dtype = main_dtype(profile)
    passes = UPDATE_PASSES.get(dtype, UPDATE_PASSES["float32"])
    flop_per_s = known.of(dtype) or known.float32
    half_rate_flop = min(HALF_RATE_FLOP, HALF_RATE_S * flop_per_s) if machine.is_simulated else HALF_RATE_FLOP
    return _Rates(flop_per_s, half_rate_flop, memory_bytes_per_s, memory_bytes_per_s / passes)


def _call_cost(call: CallSpec, num_samples: int, gpu: _Rates) -> CallCost:
    sizes = _doublings(num_samples) if call.splittable else [num_samples]
    # A block with products is compiled, so that its passes are fused, also where a part of it is repeated without them.
    share = FUSED_SHARE if call.forward.flop != Affine() else 1.0

    def curve(work: Work) -> Curve:
        if work == Work():
            return Curve(())
        return Curve(tuple(Point(size, _seconds(work, size, gpu, share)) for size in sizes))

    forward, selective = curve(call.forward), None
    if call.selective is not None:
        selective = SelectiveCost(forward, curve(call.selective.recompute))
    return CallCost(forward, forward, curve(call.recompute), curve(call.backward), selective=selective)


def _seconds(work: Work, num_samples: int, gpu: _Rates, share: float) -> float:
    """Products and passes over memory, one after the other. `share`: of what is touched, that moves."""
    flop, touched = work.flop.at(num_samples), work.touched_bytes.at(num_samples)
    return LAUNCH_S + _product_seconds(flop, gpu) + share * touched / gpu.memory_bytes_per_s


def _product_seconds(flop: float, gpu: _Rates) -> float:
    return (flop + gpu.half_rate_flop) / (PRODUCT_SHARE * gpu.flop_per_s) if flop else 0.0


def _loss_cost(profile: ModelProfile, gpu: _Rates) -> LossCost | None:
    head = next((call for call in profile.calls if profile.blocks[call.block].lazy_head), None)
    if head is None:
        return None
    tile = loss_tile_tokens(profile)

    def products(flop: Affine) -> float:
        return _product_seconds(flop.at_fraction(tile, profile.tokens_per_sample), gpu)

    pass_s = tile * profile.vocabulary * logit_bytes(profile) / gpu.memory_bytes_per_s
    forward_s = products(head.forward.flop)
    return LossCost(
        tile_tokens=tile,
        forward_s=forward_s + LOGIT_PASSES[0] * pass_s,
        backward_s=products(head.backward.flop) + LOGIT_PASSES[1] * pass_s,
        project_s=forward_s + pass_s,
    )


def _doublings(num_samples: int) -> list[int]:
    sizes = [1]
    while sizes[-1] * 2 < num_samples:
        sizes.append(sizes[-1] * 2)
    return sizes if num_samples == 1 else [*sizes, num_samples]
