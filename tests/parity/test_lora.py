"""LoRA with PEFT: a frozen base that streams, adapters that train as they do in plain PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from harness import (
    EPS,
    SUBJECTS,
    Trained,
    assert_parity,
    assert_streamed,
    compare,
    make_optimizer,
    streamed,
    train,
    wrap,
)
from torch import nn

import hightide
import models
from hightide.ir.activation import Activation
from hightide.ir.chunk import ChunkSpec
from hightide.ir.tier import Tier
from hightide.runtime.surgery import run_of

WRAP = {"micro_batch": 3}
BUILDERS: dict[str, Callable[..., models.Pair]] = {"llama": models.llama, "gpt2": models.gpt2}


def lora(
    name: str = "llama", num_samples: int = 7, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[peft.PeftModel, dict[str, Any]]:
    """A tiny language model with adapters that are not zero."""
    base, batch = BUILDERS[name](num_layers=3, num_samples=num_samples)
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, init_lora_weights=False, task_type="CAUSAL_LM", fan_in_fan_out=name == "gpt2", **options
    )
    return peft.get_peft_model(base.to(dtype), config).train(), batch


def batches(num_steps: int = 3, **options: Any) -> list[dict[str, Any]]:
    return SUBJECTS["llama"].batches(num_steps, **options)


def layers(plan: hightide.Plan) -> list[tuple[Tier, Tier]]:
    return [(block.params, block.states) for block in plan.blocks if ".layers." in block.name or ".h." in block.name]


def frozen_and_adapters(plan: hightide.Plan) -> tuple[list[ChunkSpec], list[ChunkSpec]]:
    chunks = plan.layout.chunks
    return [c for c in chunks if not c.trainable_numel], [c for c in chunks if c.trainable_numel]


@pytest.mark.parametrize(("name", "update"), [("llama", "deferred"), ("gpt2", "in_backward")])
def test_adapters_train_as_in_plain_peft(name: str, update: str) -> None:
    before = {key: value.clone() for key, value in lora(name)[0].state_dict().items()}
    clip = "torch" if update == "deferred" else None
    _, wrapped = compare(
        partial(lora, name), lambda: batches(6), wrap=WRAP | {"update": update}, clip=clip, scheduler="before"
    )
    assert_streamed(wrapped, micro_batches=[3, 3, 1])
    for key, value in wrapped.weights.items():
        assert torch.equal(value, before[key]) == ("lora_" not in key), key


@pytest.mark.parametrize("update", ["deferred", pytest.param("in_backward", marks=pytest.mark.long)])
def test_adapters_stay_on_the_gpu_while_the_frozen_base_streams(update: str) -> None:
    _, wrapped = compare(lora, batches, wrap=WRAP | {"update": update, "room": 1.38})
    stats = wrapped.stats
    assert stats is not None
    assert_streamed(wrapped, micro_batches=[3, 3, 1])
    assert set(layers(stats.plan)) == {(Tier.HOST, Tier.GPU)}
    used_up = update == "in_backward"  # gradients of what is updated on the GPU pass through a slot there
    assert stats.plan.num_grad_slots == int(used_up)
    if all(block.inputs is Tier.GPU for block in stats.plan.blocks):
        assert stats.moved_bytes.get("d2h", 0) == 0, "nothing leaves the GPU: no gradient does, and no update"


@pytest.mark.parametrize("room", [1.3, pytest.param(1.02, marks=pytest.mark.long)])
def test_frozen_chunks_have_no_gradient_and_no_state(room: float) -> None:
    model, batch = lora()
    model, optimizer = wrap(model, make_optimizer(model), batch, room=room, **WRAP)
    plan = hightide.stats(model).plan
    frozen, adapters = frozen_and_adapters(plan)
    trained = [param for param in model.parameters() if param.requires_grad]
    trained_bytes = sum(-(-param.numel() // 128) * 128 for param in trained) * 4  # each starts at a multiple of 128
    assert sum(chunk.grad_bytes for chunk in frozen) == sum(chunk.state_bytes for chunk in frozen) == 0
    assert sum(chunk.param_bytes for chunk in adapters) == sum(chunk.grad_bytes for chunk in adapters) == trained_bytes
    assert sum(chunk.state_bytes for chunk in adapters) == 2 * trained_bytes
    run = run_of(model)
    assert run is not None
    used = run.gpu.breakdown(), run.host.breakdown()
    rounding_bytes = 512 * len(adapters)  # stores give space in multiples of 512
    for label, expected in (("gradients", trained_bytes), ("optimizer states", 2 * trained_bytes)):
        found = sum(tier.get(label, 0) for tier in used)
        assert expected <= found <= expected + rounding_bytes, f"{label}: {found} bytes, not {expected}"
    models.loss_of(model, batch).backward()
    optimizer.step()
    assert len(optimizer.state_dict()["state"]) == len(trained)
    assert all((param.grad is not None) == param.requires_grad for param in model.parameters())


def test_slots_are_no_larger_than_what_streams_through_them() -> None:
    """PEFT keeps adapters in fp32 beside a base in bf16: the slots of the base must not be twice as large for that."""
    model, batch = lora(dtype=torch.bfloat16)
    plan = hightide.plan(model, make_optimizer(model), batch, limits=hightide.Limits(gpu="2MiB", host="4MiB"), **WRAP)
    assert {chunk.dtype for chunk in plan.layout.chunks} == {"bfloat16", "float32"}
    plan = streamed(plan, Activation.RECOMPUTE)
    model, _ = hightide.wrap(model, make_optimizer(model), batch, plan=plan)
    run = run_of(model)
    assert run is not None
    frozen, adapters = frozen_and_adapters(plan)
    largest_bytes = max(chunk.param_bytes for chunk in frozen)
    assert run.chunks.slot_bytes <= largest_bytes + 512
    assert run.chunks.grad_slot_bytes <= max(chunk.grad_bytes for chunk in adapters) + 512
    assert run.chunks.grad_slot_bytes < largest_bytes / 2


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.long)])
def test_dropout_in_adapters_with_one_micro_batch_equals_plain(name: str) -> None:
    build = partial(lora, name, lora_dropout=0.3)
    plain, wrapped = compare(build, batches, wrap={"micro_batch": 7})
    without = train(lora(name), batches())
    assert plain.losses != without.losses
    assert wrapped.stats is not None and wrapped.stats.evictions > 0


@pytest.mark.parametrize(
    "modules",
    [
        ["lm_head", "embed_tokens"],
        pytest.param(["lm_head"], marks=pytest.mark.long),
        pytest.param(["embed_tokens"], marks=pytest.mark.long),
    ],
    ids="+".join,
)
def test_modules_to_save_train_whole_and_their_originals_stay(modules: list[str]) -> None:
    build = partial(lora, modules_to_save=modules)
    _, wrapped = compare(build, lambda: batches(6), wrap=WRAP, clip="torch")
    assert_streamed(wrapped, micro_batches=[3, 3, 1])
    before = build()[0].state_dict()
    for key, value in wrapped.weights.items():
        assert torch.equal(value, before[key]) == ("lora_" not in key and "modules_to_save" not in key), key


def test_logits_of_a_saved_head_are_fused_with_the_loss() -> None:
    model, batch = lora(modules_to_save=["lm_head"])
    text = hightide.plan(model, make_optimizer(model), batch, limits=hightide.Limits(gpu="4MiB", host="4MiB")).explain()
    assert "fused with the head" in text


def test_lora_of_embedding_and_head() -> None:
    """The adapters of an embedding are used without a call of a module that holds them: they are loose."""
    build = partial(lora, target_modules=["q_proj", "embed_tokens", "lm_head"])
    _, wrapped = compare(build, batches, wrap=WRAP)
    assert wrapped.stats is not None and wrapped.stats.evictions > 0


def lora_on_experts(
    experts: str | None = None, targets: tuple[str, ...] = ("gate_up_proj", "down_proj")
) -> models.Pair:
    base, batch = models.qwen3_moe(num_samples=7, experts=experts)
    torch.manual_seed(1)
    params = [f"mlp.experts.{name}" for name in targets]
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"], target_parameters=params)
    return peft.get_peft_model(base, config).train(), batch  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("experts", "update"), [("grouped_mm", "deferred"), pytest.param("eager", "in_backward", marks=pytest.mark.long)]
)
def test_adapters_of_the_experts_of_a_mixture(experts: str, update: str) -> None:
    """They are adapters of a parameter, not of a linear module: PEFT parametrises it in each call."""
    build = partial(lora_on_experts, experts)
    before = build()[0].state_dict()
    _, wrapped = compare(build, batches, wrap=WRAP | {"update": update})
    assert_streamed(wrapped, micro_batches=[3, 3, 1])
    adapters = [key for key in before if ".experts." in key and "lora_" in key]
    assert len(adapters) == 2 * 2 * 2  # in two layers, for two tensors, A and B
    for key, value in wrapped.weights.items():
        assert torch.equal(value, before[key]) == ("lora_" not in key), key


@pytest.mark.parametrize("activation", Activation)
def test_adapters_of_experts_with_every_activation_policy(activation: Activation) -> None:
    model, batch = lora_on_experts()
    plan = hightide.plan(model, make_optimizer(model), batch, limits=hightide.Limits(gpu="8MiB", host="8MiB"), **WRAP)
    _, wrapped = compare(lora_on_experts, batches, wrap={"plan": streamed(plan, activation)})
    assert wrapped.stats is not None and wrapped.stats.evictions > 0 and wrapped.stats.deviations == 0


def test_inputs_that_are_made_to_require_gradients_do_no_harm() -> None:
    """What people call before gradient checkpointing with a frozen embedding."""

    def build() -> models.Pair:
        model, batch = lora()
        model.enable_input_require_grads()
        return model, batch

    _, wrapped = compare(build, batches, wrap=WRAP)
    assert_streamed(wrapped, micro_batches=[3, 3, 1])


def test_gradient_checkpointing_of_the_base_is_switched_off() -> None:
    def build() -> models.Pair:
        model, batch = lora()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model, batch

    _, wrapped = compare(build, batches, wrap=WRAP)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in wrapped.model.modules())


def test_only_adapters_in_the_optimizer_and_accumulation() -> None:
    def run(wrap: dict[str, Any] | None) -> Trained:
        model, batch = lora()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, eps=EPS)
        pairs = list(zip(batches(5), batches(5, seed=50), strict=True))
        return train((model, batch), pairs, wrap=wrap, optimizer=optimizer, clip="torch", accumulate=2)

    wrapped = run(WRAP)
    assert_parity(run(None), wrapped)
    assert_streamed(wrapped)


def trained_model(**options: Any) -> tuple[nn.Module, dict[str, Any]]:
    model, batch = lora(**options)
    trained = train((model, batch), batches(3), wrap=WRAP)
    return trained.model, batch


def logits_of(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=batch["input_ids"]).logits.clone()


@pytest.mark.parametrize(
    "modules", [["lm_head"], pytest.param(None, marks=pytest.mark.long)], ids=["adapters and head", "adapters"]
)
def test_only_adapters_are_saved_and_plain_peft_loads_them(tmp_path: Path, modules: list[str] | None) -> None:
    from safetensors.torch import load_file

    model, batch = trained_model(modules_to_save=modules)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    assert weights and all("lora_" in key or "lm_head" in key for key in weights)
    assert any("lm_head" in key for key in weights) == (modules is not None)
    base, _ = models.llama(num_layers=3)
    plain = peft.PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(logits_of(plain, batch), logits_of(model, batch))


def test_merging_after_unwrapping() -> None:
    model, batch = trained_model()
    expected = logits_of(model, batch)
    merged = hightide.unwrap(model).merge_and_unload()  # type: ignore[operator]
    assert type(merged).__name__ == "LlamaForCausalLM" and not any("lora" in name for name, _ in merged.named_modules())
    torch.testing.assert_close(logits_of(merged, batch), expected, rtol=1e-4, atol=1e-5)


def test_the_base_alone_and_generation_between_steps() -> None:
    base, _ = models.llama(num_layers=3)
    model, batch = trained_model()
    plain, _ = lora()
    plain.load_state_dict(model.state_dict())
    with model.disable_adapter():  # type: ignore[operator]
        torch.testing.assert_close(logits_of(model, batch), logits_of(base, batch))
    torch.testing.assert_close(logits_of(model, batch), logits_of(plain, batch))
    prompt = {"input_ids": batch["input_ids"][:2, :4], "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(**prompt), plain.generate(**prompt))  # type: ignore[operator]
    models.loss_of(model.train(), batch).backward()  # and training goes on


def test_no_warnings() -> None:
    model, batch = lora()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer = wrap(model, make_optimizer(model), batch, room=1.1, **WRAP)
        models.loss_of(model, batch).backward()
        optimizer.step()
