"""Bytes that a call leaves for its backward, and which part of them leaves the GPU meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from hightide.ir.action import Mode
from hightide.ir.activation import Activation
from hightide.ir.block import Affine, CallSpec, ModelProfile
from hightide.ir.plan import Plan
from hightide.ir.split import micro_batches
from hightide.ir.tier import Tier


@dataclass(frozen=True)
class Away:
    """On the host, between forward and backward; or, of inputs, on the disk."""

    input_bytes: int
    held_bytes: int  # of what the block has computed

    @property
    def num_bytes(self) -> int:
        return self.input_bytes + self.held_bytes


def away(plan: Plan, call: CallSpec) -> Away:
    block = plan.blocks[call.block]
    if not call.needs_backward:
        return Away(0, 0)
    inputs = call.saved_inputs.at(plan.num_samples) if block.inputs is not Tier.GPU else 0
    return Away(inputs, held_bytes(plan, call) if block.held is Tier.HOST else 0)


def held_bytes(plan: Plan, call: CallSpec) -> int:
    """Of what the block has computed, by all micro-batches, wherever it waits."""
    return _of_all(held_by(plan, call), plan, call)


def lasting_bytes(plan: Plan, call: CallSpec) -> int:
    """Of the graphs of all micro-batches, on the GPU, whatever they hold beside."""
    return 0 if plan.blocks[call.block].compute is Tier.HOST else _of_all(call.lasting, plan, call)


def left_bytes(profile: ModelProfile, micro_batch: int) -> int:
    """By blocks that have run, until they run again: in attributes, and what was tapped with whoever got it."""
    left: dict[int, int] = {}
    for call in profile.calls:
        size = micro_batch if call.splittable else profile.num_samples
        left[call.block] = max(left.get(call.block, 0), call.left.at(size))
    return sum(left.values()) + sum(call.tapped.at(profile.num_samples) for call in profile.calls)


def _of_all(line: Affine, plan: Plan, call: CallSpec) -> int:
    """Of all micro-batches."""
    if line == Affine():
        return 0
    micro = micro_batch_of(plan, call, Mode.TRAIN)
    *whole, (_, last) = micro_batches(plan.num_samples, micro)
    return len(whole) * line.at(micro) + line.at(last)


def held_by(plan: Plan, call: CallSpec) -> Affine:
    """Of one micro-batch. What is looked up on the host holds nothing on the GPU."""
    block = plan.blocks[call.block]
    return Affine() if block.compute is Tier.HOST else call.held(block.activation)


def num_away(plan: Plan, call: CallSpec) -> int:
    """Tensors on the host, at most."""
    block = plan.blocks[call.block]
    found = call.num_saved if block.inputs is Tier.HOST else 0
    if block.held is Tier.HOST and held_by(plan, call) != Affine():
        each = call.num_kept if block.activation is Activation.KEEP else _num_selected(call)
        found += each * -(-plan.num_samples // micro_batch_of(plan, call, Mode.TRAIN))
    return found


def _num_selected(call: CallSpec) -> int:
    """An operation may make several tensors; compiled, torch selects them, some of those that would be kept."""
    assert call.selective is not None
    return max(call.num_kept, 4 * call.selective.num_held)


def micro_batch_of(plan: Plan, call: CallSpec, mode: Mode) -> int:
    """Samples that run through a block at once. Without gradients a block runs unsplit (a cache cannot be split)."""
    return plan.micro_batch if call.splittable and mode is not Mode.EVAL else plan.num_samples
