"""Placement never changes results: the same bits from every plan of one micro-batch size, dropout included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from harness import SUBJECTS, Subject, Trained, assert_parity, assert_same_bits, make_optimizer, train

import hightide
from hightide.ir.activation import Activation
from hightide.ir.block import ModelProfile
from hightide.ir.plan import BlockPlan, Plan, Update
from hightide.ir.tier import Tier
from hightide.planner.layout import pack
from hightide.planner.placement import Placement
from hightide.profiler.model.model_profile import profile_model

ROOMY = hightide.Limits(gpu="16MiB", host="64MiB")
NUM_STEPS = 2
Choose = Callable[[int], tuple[Tier, Tier, Activation, Tier]]  # block -> params, states, activation, inputs
G, H = Tier.GPU, Tier.HOST
KEEP, RECOMPUTE = Activation.KEEP, Activation.RECOMPUTE
MIXED = [(G, G, KEEP, G), (H, H, RECOMPUTE, H), (G, H, RECOMPUTE, G), (H, H, KEEP, G), (G, G, RECOMPUTE, H)]


def edit(
    profile: ModelProfile, plan: Plan, choose: Choose, spare_slots: int = 0, slot_numel: int | None = None
) -> Plan:
    """Another plan for the same model and micro-batch: where things live, how many slots, how chunks are cut."""
    if slot_numel is not None:
        plan = replace(plan, layout=pack(profile, slot_numel))
    blocks = []
    for spec, block in zip(profile.blocks, plan.blocks, strict=True):
        params, states, activation, inputs = choose(spec.index)
        if spec.lazy_head:
            activation = RECOMPUTE  # it recomputes its logits anyway
        if activation is KEEP:
            inputs = G
        blocks.append(block if spec.loose else BlockPlan(spec.name, params, states, activation, inputs))
    plan = replace(plan, blocks=tuple(blocks))
    slots, grad_slots = Placement(plan).widest_tick({call.block for call in profile.calls})
    return replace(
        plan,
        num_slots=slots + spare_slots if slots else 0,
        num_grad_slots=grad_slots + spare_slots if grad_slots else 0,
    )


def plans_for(subject: Subject, update: str, **build: Any) -> dict[str, Plan]:
    model, batch = subject.build(num_samples=7, **build)
    optimizer = make_optimizer(model, groups=2)
    base = hightide.plan(model, optimizer, batch, limits=ROOMY, micro_batch=3, update=update)
    profile, _ = profile_model(model, optimizer, batch)
    make = partial(edit, profile, base)
    is_fused = any(block.lazy_head for block in profile.blocks)
    in_forward = replace(make(lambda _: (H, H, RECOMPUTE, G)), loss_kept_tokens=0, loss_in_forward=is_fused)
    smallest = min(chunk.numel for chunk in base.layout.chunks)
    return {
        "all on the gpu, kept": make(lambda _: (G, G, KEEP, G)),
        "states on host": make(lambda _: (G, H, RECOMPUTE, G)),
        "one slot": make(lambda _: (H, H, RECOMPUTE, G)),
        "no logits kept": replace(make(lambda _: (G, G, KEEP, G)), loss_kept_tokens=0, loss_in_forward=False),
        "the loss's gradients in forward": in_forward,
        "two slots, kept": make(lambda _: (H, H, KEEP, G), spare_slots=1),
        "many slots, inputs on host": make(lambda _: (H, H, RECOMPUTE, H), spare_slots=3),
        "tiny chunks, kept": make(lambda _: (H, H, KEEP, G), slot_numel=smallest, spare_slots=1),
        "huge chunks": make(lambda _: (H, H, RECOMPUTE, H), slot_numel=16384, spare_slots=1),
        "a mixture": make(lambda block: MIXED[block % 5], spare_slots=1),
        "another mixture, small chunks": make(lambda block: MIXED[(3 * block + 2) % 5], spare_slots=2, slot_numel=2048),
    }


def run(subject: Subject, plan: Plan | None, build: dict[str, Any], **options: Any) -> Trained:
    torch.manual_seed(7)  # dropout starts from the global generator
    wrap = None if plan is None else {"plan": plan}
    pair = subject.build(num_samples=7, **build)
    torch.manual_seed(7)
    return train(pair, subject.batches(NUM_STEPS), wrap=wrap, groups=2, scheduler="after", **options)


CASES = [
    ("llama_tied", 0.3, "in_backward", None),
    ("hand_written", 0.0, "deferred", "torch"),
]
MORE = [
    ("llama", 0.0, "deferred", "torch"),
    ("hand_written", 0.2, "deferred", None),
    ("gpt2", 0.2, "deferred", "optimizer"),
    ("gpt2_untied", 0.2, "in_backward", None),
    ("plain_tied", 0.2, "deferred", "torch"),
    ("vit", 0.2, "deferred", None),
]


def check(name: str, dropout: float, update: str, clip: str | None) -> None:
    subject, build = SUBJECTS[name], {"dropout": dropout} if dropout else {}
    plans = plans_for(subject, update, **build)
    assert len({(plan.blocks, plan.num_slots, plan.num_grad_slots, plan.layout) for plan in plans.values()}) >= 6
    results = {title: run(subject, plan, build, clip=clip) for title, plan in plans.items()}
    first = results["all on the gpu, kept"]
    for title, result in results.items():
        print(title)  # pytest shows it where the next line fails
        assert_same_bits(first, result)
        assert result.stats is not None and result.stats.deviations == 0
    moved = {sum(result.stats.moved_bytes.values()) for result in results.values() if result.stats is not None}
    assert len(moved) >= 6, "the plans do not really differ"
    if not dropout:
        assert_parity(run(subject, None, build, clip=clip), first)


@pytest.mark.parametrize(("name", "dropout", "update", "clip"), CASES)
def test_every_plan_gives_the_same_bits(name: str, dropout: float, update: str, clip: str | None) -> None:
    check(name, dropout, update, clip)


@pytest.mark.long
@pytest.mark.parametrize(("name", "dropout", "update", "clip"), MORE)
def test_every_plan_gives_the_same_bits_of_more_models(
    name: str, dropout: float, update: str, clip: str | None
) -> None:
    check(name, dropout, update, clip)


@pytest.mark.parametrize("name", ["llama_tied", "hand_written"])
def test_both_timings_give_the_same_bits(name: str) -> None:
    subject, build = SUBJECTS[name], {"dropout": 0.1}
    plan = plans_for(subject, "deferred", **build)["another mixture, small chunks"]
    deferred = run(subject, plan, build)
    in_backward = run(subject, replace(plan, update=Update.IN_BACKWARD), build)
    assert_same_bits(deferred, in_backward)


def test_dropout_draws_differ_between_steps_blocks_and_micro_batches() -> None:
    """Equal bits would also come from a mask that never changes."""
    subject = SUBJECTS["hand_written"]
    model, example = subject.build(num_samples=7, dropout=0.5)
    model, _ = hightide.wrap(model, make_optimizer(model), example, limits=ROOMY, micro_batch=3)
    masks: list[torch.Tensor] = []
    for layer in model.layers:  # type: ignore[union-attr]
        layer.dropout.register_forward_hook(lambda _, args, output: masks.append((output == 0)[:1].clone()))  # type: ignore[union-attr]
    for _ in range(2):
        model(**example)["loss"]
    assert len(masks) == 2 * 3 * 3
    distinct = {tuple(mask.flatten().tolist()) for mask in masks}
    assert len(distinct) == len(masks)


def test_the_global_generator_is_left_as_plain_pytorch_leaves_it() -> None:
    """With several micro-batches nothing is drawn from it, so that what the user draws does not depend on the plan."""
    subject, build = SUBJECTS["hand_written"], {"dropout": 0.2}
    states = []
    for plan in list(plans_for(subject, "deferred", **build).values())[:5]:
        run(subject, plan, build)
        states.append(torch.default_generator.get_state())
    assert all(torch.equal(state, states[0]) for state in states)
