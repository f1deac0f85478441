"""A plan that does not fit is told what to change there: something that frees bytes at that moment."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hightide.ir.action import Mode
from hightide.ir.activation import Activation
from hightide.ir.block import Affine, ModelProfile
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.lower import lower
from hightide.planner.predict.peaks import peaks
from unit.planner.profiles import UNLIMITED, plan_with, stack, verify_within

STACK = stack(4)
WORDY = replace(  # logits are most of it
    STACK,
    vocabulary=2**16,
    blocks=tuple(replace(block, plain_linear=block.lazy_head) for block in STACK.blocks),
)


def with_calls(**changes: Affine) -> ModelProfile:
    """Of the layers and the norm."""
    embedding, *calls, head = STACK.calls
    return replace(STACK, calls=(embedding, *(replace(call, **changes) for call in calls), head))


WIDE = with_calls(backward_peak=Affine(0, 2**20))
UNSPLIT = replace(WIDE, calls=tuple(replace(call, splittable=False) for call in WIDE.calls))
LONG = with_calls(saved_inputs=Affine(0, 2**20), outputs=Affine(0, 2**20))
HOST_INPUTS = plan_with(LONG, inputs=Tier.HOST)
ROOMY = plan_with(STACK, spare=1000)
KEPT = plan_with(STACK, activation=Activation.KEEP, micro_batch=6, spare=0)
TILED = replace(plan_with(WORDY, spare=0), loss_tile_tokens=10**6)
LOGITS = replace(plan_with(WORDY, spare=0), loss_tile_tokens=1, loss_kept_tokens=40)


@pytest.mark.parametrize(
    ("profile", "plan", "tier", "remedy", "better"),
    [
        (STACK, ROOMY, Tier.GPU, "a smaller num_slots", replace(ROOMY, num_slots=2)),
        (STACK, ROOMY, Tier.GPU, "a smaller num_grad_slots", replace(ROOMY, num_grad_slots=2)),
        (STACK, KEPT, Tier.GPU, "activation=recompute in more blocks", plan_with(STACK, micro_batch=6, spare=0)),
        (WORDY, TILED, Tier.GPU, "a smaller loss_tile_tokens", replace(TILED, loss_tile_tokens=1)),
        (WORDY, LOGITS, Tier.GPU, "a smaller loss_kept_tokens", replace(LOGITS, loss_kept_tokens=0)),
        (WIDE, plan_with(WIDE), Tier.GPU, "a smaller micro_batch", plan_with(WIDE, micro_batch=1)),
        (WIDE, plan_with(WIDE, micro_batch=1), Tier.GPU, "a smaller batch", None),
        (UNSPLIT, plan_with(UNSPLIT), Tier.GPU, "a smaller batch", None),
        (LONG, plan_with(LONG), Tier.GPU, "inputs of more blocks on the host", HOST_INPUTS),
        (LONG, plan_with(LONG, activation=Activation.KEEP), Tier.GPU, "a smaller batch", None),
        (
            STACK,
            plan_with(STACK, params=Tier.GPU, states=Tier.GPU),
            Tier.GPU,
            "params and states of more blocks on the host",
            plan_with(STACK),
        ),
        (
            STACK,
            plan_with(STACK),
            Tier.HOST,
            "params and states of more blocks on the gpu",
            plan_with(STACK, params=Tier.GPU, states=Tier.GPU),
        ),
        (LONG, HOST_INPUTS, Tier.HOST, "inputs of more blocks on the gpu", plan_with(LONG)),
        (
            STACK,
            plan_with(STACK, params=Tier.DISK, states=Tier.DISK, num_buffers=50),
            Tier.HOST,
            "a smaller num_state_buffers",
            plan_with(STACK, params=Tier.DISK, states=Tier.DISK, num_buffers=1),
        ),
    ],
)
def test_the_remedy_is_about_what_holds_the_memory(
    profile: ModelProfile, plan: Plan, tier: Tier, remedy: str, better: Plan | None
) -> None:
    needed_bytes = peak_bytes(profile, plan, tier)
    limits = {Tier.GPU: UNLIMITED, Tier.HOST: UNLIMITED} | {tier: needed_bytes - 1}
    plan = replace(plan, disk_limit_bytes=UNLIMITED)
    with pytest.raises(InfeasiblePlan) as caught:
        verify_within(profile, plan, lower(profile, plan, Mode.TRAIN), limits[Tier.GPU], limits[Tier.HOST])
    named = re.search(r"1 bytes too many; use (.*), or raise the plan's (\w+)_limit_bytes$", str(caught.value))
    assert named is not None and named[2] == tier, caught.value
    assert re.search(rf"(^|, or ){re.escape(remedy)} \(up to ", named[1]), named[1]
    if better is not None:
        assert peak_bytes(profile, better, tier) < needed_bytes


def test_a_micro_batch_is_not_named_where_it_would_not_help() -> None:
    for profile, plan in ((STACK, ROOMY), (STACK, KEPT), (WORDY, TILED), (WIDE, plan_with(WIDE, micro_batch=1))):
        with pytest.raises(InfeasiblePlan) as caught:
            verify_within(profile, plan, lower(profile, plan, Mode.TRAIN), 1, UNLIMITED)
        assert "micro_batch" not in str(caught.value)


def peak_bytes(profile: ModelProfile, plan: Plan, tier: Tier) -> int:
    peak = peaks(lower(profile, plan, Mode.TRAIN))
    return peak.gpu_peak_bytes if tier is Tier.GPU else peak.host_peak_bytes
