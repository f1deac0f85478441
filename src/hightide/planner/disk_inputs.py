"""Block inputs that wait for their backward on disk.

[Note: inputs on disk] They pass through a ring of buffers on the host, each as large as the inputs of the widest call:
STASH fills one and WRITE empties it; ahead of backward READ fills one and UNSTASH empties it. The last calls of a
forward are the first of backward: as many of them as there are buffers wait in these, and never see the disk. A buffer
that an UNSTASH leaves is for the next call that has to be read. Of each tensor the first byte lies where a direct
transfer may begin, in a buffer and on disk, where each call has a place of its own for the whole run."""

from __future__ import annotations

from hightide.ir.block import CallSpec, ModelProfile
from hightide.ir.chunk import DISK_REGION_BYTES, on_disk_bytes
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier


def goes_to_disk(plan: Plan, call: CallSpec) -> bool:
    is_away = call.needs_backward and plan.blocks[call.block].inputs is Tier.DISK
    return is_away and call.saved_inputs.at(plan.num_samples) > 0


def place_bytes(num_samples: int, call: CallSpec) -> int:
    """Of a call's inputs, in a buffer and on disk."""
    return on_disk_bytes(call.saved_inputs.at(num_samples)) + max(0, call.num_saved - 1) * DISK_REGION_BYTES


def passing_calls(profile: ModelProfile, plan: Plan) -> list[int]:
    """Whose inputs go through the ring, in the order of forward."""
    return [index for index, call in enumerate(profile.calls) if goes_to_disk(plan, call)]


def stored_bytes(profile: ModelProfile, plan: Plan) -> dict[int, int]:
    """Calls whose inputs are written to disk, and what is set aside there for each."""
    passing = passing_calls(profile, plan)
    stored = passing[: max(0, len(passing) - plan.num_input_buffers)]
    return {index: place_bytes(plan.num_samples, profile.calls[index]) for index in stored}


def buffer_bytes(profile: ModelProfile, plan: Plan) -> int:
    """Of one."""
    calls = (profile.calls[index] for index in passing_calls(profile, plan))
    return max((place_bytes(plan.num_samples, call) for call in calls), default=0)


def standing_bytes(profile: ModelProfile, plan: Plan) -> dict[Tier, int]:
    """What is set aside for it during the whole run."""
    buffers = plan.num_input_buffers * buffer_bytes(profile, plan)
    return {Tier.GPU: 0, Tier.HOST: buffers, Tier.DISK: sum(stored_bytes(profile, plan).values())}
