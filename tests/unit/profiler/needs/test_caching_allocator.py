"""Torch's allocator, replayed: by its rules, and for whole steps of blocks that run eagerly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hightide
from hightide.ir.action import Mode
from hightide.ir.activation import Activation
from hightide.ir.tier import Tier
from hightide.planner.lower import lower
from hightide.planner.predict.peaks import WORKSPACE_BYTES, reserved_bytes
from hightide.profiler.needs import caching_allocator
from hightide.profiler.needs.caching_allocator import PAGE_BYTES, SMALL_PAGE_BYTES, CachingAllocator
from hightide.runtime.surgery import run_of
from hightide.stores.meter import Event

MIB = 2**20
SCALE = 64


def test_memory_grows_by_pages_and_is_not_given_back() -> None:
    allocator = CachingAllocator()
    allocator.take("a", 1)
    assert allocator.reserved_bytes == SMALL_PAGE_BYTES and allocator.peak_bytes == 512
    allocator.take("b", 30 * MIB)
    assert allocator.reserved_bytes == SMALL_PAGE_BYTES + 2 * PAGE_BYTES
    allocator.give("a")
    allocator.give("b")
    assert allocator.reserved_bytes == SMALL_PAGE_BYTES + 2 * PAGE_BYTES


def test_the_smallest_part_that_is_large_enough_is_taken_and_cut() -> None:
    allocator = CachingAllocator()
    for name, size in (("a", 10), ("b", 2), ("c", 6), ("d", 2)):  # a page
        allocator.take(name, size * MIB)
    for name in ("a", "c"):
        allocator.give(name)
    allocator.take("e", 5 * MIB)  # in the place of c
    allocator.take("f", 10 * MIB)  # in that of a
    assert allocator.reserved_bytes == PAGE_BYTES


def test_free_neighbours_become_one_and_the_last_part_grows_by_what_it_lacks() -> None:
    allocator = CachingAllocator()
    for name in "abcd":
        allocator.take(name, 5 * MIB)
    for name in "bcd":
        allocator.give(name)
    allocator.take("e", 30 * MIB)
    assert allocator.reserved_bytes == 2 * PAGE_BYTES
    allocator.give("a")
    allocator.take("f", 6 * MIB)  # 5 and 5 MiB are free, not beside each other
    assert allocator.reserved_bytes == 3 * PAGE_BYTES


def test_what_is_left_of_a_replay() -> None:
    allocator = CachingAllocator()
    events = [Event(0, 2 * MIB), Event(1, 3 * MIB), Event(0, -2 * MIB)]
    assert allocator.replay(events, "run") == [("run", 1)]
    assert allocator.peak_bytes == 5 * MIB


@pytest.mark.parametrize(
    ("activation", "inputs", "micro_batch"),
    [
        (Activation.RECOMPUTE, Tier.GPU, 4),
        (Activation.RECOMPUTE, Tier.HOST, 4),
        (Activation.RECOMPUTE, Tier.GPU, 2),
        (Activation.KEEP, Tier.GPU, 4),
    ],
)
def test_a_replayed_step_reserves_no_more_than_is_told(
    activation: Activation, inputs: Tier, micro_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every allocation of two real steps, in the order in which they come. Pages and small sizes are as much smaller
    than a GPU's as the model is."""
    for name in ("SMALL_BYTES", "SMALL_PAGE_BYTES", "PAGE_BYTES"):
        monkeypatch.setattr(caching_allocator, name, getattr(caching_allocator, name) // SCALE)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    tokens = torch.randint(64, (4, 256))
    batch = {"input_ids": tokens, "labels": tokens}
    optimizer = torch.optim.AdamW(model.parameters())
    limits = hightide.Limits(gpu="256MiB", host="256MiB")
    plan = hightide.plan(model, optimizer, batch, limits=limits, micro_batch=micro_batch)
    blocks = tuple(replace(block, activation=activation, inputs=inputs, held=Tier.GPU) for block in plan.blocks)
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=replace(plan, blocks=blocks))
    run = run_of(model)
    events: list[Event] = []
    assert run.gpu.device.type == "cpu"
    run.gpu._ledger._events = events  # type: ignore[attr-defined]
    for _ in range(2):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    allocator = CachingAllocator()
    allocator.replay(events, "steps")
    schedule = lower(run.profile, run.plan, Mode.TRAIN)
    beside = reserved_bytes(schedule) - schedule.gpu_base_bytes - WORKSPACE_BYTES - (2 - 2 / SCALE) * PAGE_BYTES
    assert allocator.reserved_bytes > 20 * PAGE_BYTES / SCALE, "pages must not matter"
    assert allocator.reserved_bytes <= beside <= 1.2 * allocator.reserved_bytes
    hightide.unwrap(model)
