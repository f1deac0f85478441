"""The simulated accelerator counts everything, and refuses what a GPU could not hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hightide
import models
from hightide.ir.tier import Tier
from hightide.planner.solution import Solution
from hightide.stores.store import OutOfMemory
from unit.runtime.steps import Twins, adamw, train_step, twins


def measured(pair: Twins) -> tuple[int, int]:
    for _ in range(2):
        pair.step()
    stats = hightide.stats(pair.model)
    return stats.forecast.gpu_peak_bytes, stats.peak_bytes["gpu"]


LIMITS = {
    "llama": ("190KiB", "300KiB", "4MiB"),
    "gpt2": ("260KiB", "400KiB"),
    "vit": ("210KiB", "4MiB"),
    "plain": ("190KiB", "300KiB"),
}


@pytest.mark.parametrize(("name", "gpu"), [(name, gpu) for name, limits in LIMITS.items() for gpu in limits])
def test_the_forecast_bounds_the_measured_peak_and_is_close(name: str, gpu: str) -> None:
    pair = twins(*models.ZOO[name](), gpu=gpu)
    forecast, peak = measured(pair)
    limit = pair.run.plan.gpu_limit_bytes
    assert peak <= forecast <= limit, pair.run.gpu.peak_breakdown()
    assert forecast <= 1.15 * peak, (forecast, peak, pair.run.gpu.peak_breakdown())
    host = hightide.stats(pair.model)
    assert host.peak_bytes["host"] <= host.forecast.host_peak_bytes <= host.plan.host_limit_bytes
    pair.close()


def test_everything_that_a_gpu_would_hold_is_in_the_account() -> None:
    pair = twins(*models.llama(), gpu="200KiB")
    pair.step()
    peak = pair.run.gpu.peak_breakdown()
    for label in ("activations", "slots", "gradient slots", "persistent chunks", "batch", "buffers"):
        assert peak.get(label, 0) > 0, (label, peak)
    assert sum(peak.values()) == pair.run.gpu.peak_bytes
    pair.close()


def larger(**sizes: int) -> Callable[[], tuple[torch.nn.Module, Any]]:
    return lambda: models.llama(**sizes)


def test_block_inputs_are_counted() -> None:
    """With inputs on the GPU, each block more holds one input more between forward and backward."""
    held = []
    for num_layers in (2, 4):
        model, batch = models.llama(num_layers=num_layers)

        def inputs_on_gpu(plan: hightide.Plan) -> hightide.Plan:
            blocks = [replace(b, params=Tier.HOST, states=Tier.HOST, inputs=Tier.GPU) for b in plan.blocks]
            return replace(plan, num_slots=2, num_grad_slots=2, gpu_limit_bytes=2**22, blocks=tuple(blocks))

        pair = twins(model, batch, edit=inputs_on_gpu, gpu="190KiB")
        pair.step()
        loss = models.loss_of(pair.model, batch)
        held.append(pair.run.gpu.breakdown()["activations"])
        loss.backward()
        pair.close()
    one_input_bytes = models.NUM_SAMPLES * models.NUM_TOKENS * models.HIDDEN * 4
    assert held[1] - held[0] >= 2 * one_input_bytes


def test_logits_are_counted_by_slice_and_never_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger slices of tokens raise the peak of the loss; the smallest keep it below one whole set of logits."""
    peaks = []
    whole_bytes = models.NUM_SAMPLES * models.NUM_TOKENS * models.VOCABULARY * 4
    for tokens in (2, models.NUM_SAMPLES * models.NUM_TOKENS):

        def slices(plan: hightide.Plan, tokens: int = tokens) -> hightide.Plan:
            return replace(plan, loss_tile_tokens=tokens, loss_kept_tokens=0, gpu_limit_bytes=2**22)

        pair = twins(*models.llama(), gpu="190KiB", edit=slices)
        loss = models.loss_of(pair.model, pair.batch)
        before = pair.run.gpu.used_bytes
        pair.run.gpu.reset_peak()
        loss.backward(retain_graph=False)
        del loss
        pair.run.gpu.reset_peak()
        hidden = torch.randn(models.NUM_SAMPLES, models.NUM_TOKENS, models.HIDDEN)
        with pair.run.gpu.meter("test"):
            logits = pair.model.lm_head(hidden)
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), pair.batch["labels"].flatten())
        peaks.append(pair.run.gpu.peak_bytes - pair.run.gpu.used_bytes)
        assert before > 0
        pair.close()
    assert peaks[0] < whole_bytes <= peaks[1]


def test_gradients_on_the_gpu_are_counted() -> None:
    pair = twins(*models.llama(), gpu="4MiB")
    assert all(block.states is Tier.GPU for block in pair.run.plan.blocks)
    numel = sum(spec.trainable_numel for spec in pair.run.chunks.specs)
    used = pair.run.gpu.breakdown()
    assert used["gradients"] >= 4 * numel and used["optimizer states"] >= 8 * numel
    pair.close()


def test_chunks_plus_less_than_one_blocks_activations_are_refused() -> None:
    """The leanest limit that works, and one that leaves room for the chunks but not for the block beside them."""
    model, batch = models.llama()
    lean = hightide.plan(model, adamw(model), batch, limits=hightide.Limits(gpu="190KiB", host="8MiB"), micro_batch=2)
    slots = lean.layout.slot_numel * 4 * (lean.num_slots + lean.num_grad_slots)
    persistent = sum(chunk.param_bytes for chunk in lean.layout.chunks if lean.blocks[chunk.block].params is Tier.GPU)
    too_little = slots + persistent + 2048
    assert too_little < lean.forecast.gpu_peak_bytes
    with pytest.raises(ValueError, match=f"(?s)limit is {too_little}.*raise the plan's gpu_limit_bytes") as refused:
        hightide.wrap(model, adamw(model), batch, plan=replace(lean, gpu_limit_bytes=too_little))
    assert str(lean.forecast.gpu_peak_bytes) in str(refused.value)
    train_step(model, adamw(model), batch)  # a refusal leaves the model as it was


@pytest.mark.parametrize("missing_bytes", [4096, 16384, 65536])
def test_the_accelerator_itself_raises_when_verification_is_off(
    missing_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = models.llama()
    lean = hightide.plan(model, adamw(model), batch, limits=hightide.Limits(gpu="190KiB", host="8MiB"), micro_batch=2)
    pair = twins(model, batch, gpu="190KiB")
    _, peak = measured(pair)
    pair.close()
    monkeypatch.setattr(Solution, "verify", lambda _: None)
    limit = peak - missing_bytes
    model, optimizer = hightide.wrap(model, adamw(model), batch, plan=replace(lean, gpu_limit_bytes=limit))
    with pytest.raises(OutOfMemory) as raised:
        for _ in range(2):
            train_step(model, optimizer, batch)
    error = raised.value
    assert error.tier is Tier.GPU and error.capacity_bytes == limit
    assert error.used_bytes + error.requested_bytes > limit
    for text in (str(limit), str(error.requested_bytes), str(error.used_bytes), "Limits(gpu=...)", "micro_batch"):
        assert text in str(error)
    assert hightide.stats(model).peak_bytes["gpu"] <= limit
    hightide.unwrap(model)


def test_a_user_who_keeps_outputs_is_told_when_they_no_longer_fit() -> None:
    """Evaluation outputs are the user's; holding them is what fills the accelerator."""
    pair = twins(*models.llama(), gpu="300KiB")
    kept = []
    with torch.no_grad(), pytest.raises(OutOfMemory, match="activations"):
        for _ in range(100):
            kept.append(pair.model(**models.token_batch(num_samples=2)).logits)
    assert kept
    kept.clear()
    pair.assert_equal(*pair.step())
    pair.close()


def test_logits_that_are_wider_than_the_limit_are_made_in_smaller_tiles() -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=32000,
            tie_word_embeddings=True,
        )
        model = LlamaForCausalLM(config)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)

    tokens = torch.randint(0, 32000, (8, 128), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    plain, optimizer = made()
    expected = [train_step(plain, optimizer, batch).item() for _ in range(2)]
    model, optimizer = made()
    limits = hightide.Limits(gpu="100MiB", host="1GiB")  # all logits take 125 MiB, twice that with their gradient
    model, optimizer = hightide.wrap(model, optimizer, batch, limits=limits, device="cpu")
    assert hightide.stats(model).plan.loss_tile_tokens < 1024
    found = [train_step(model, optimizer, batch).item() for _ in range(2)]
    assert found == pytest.approx(expected, rel=1e-5)
    assert hightide.stats(model).peak_bytes["gpu"] <= 100 * 2**20
    hightide.unwrap(model)
