"""For GPU tests: plans under which everything that can move, moves; a model that is large enough to be rehearsed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import hightide
import hightide.posing
from hightide.ir.activation import Activation
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier

LIMITS = hightide.Limits(gpu="2GiB", host="8GiB")  # libraries' workspaces alone may take 100 MiB


def everything_moves(plan: Plan, inputs: Tier = Tier.HOST, activation: Activation = Activation.RECOMPUTE) -> Plan:
    away = {"params": Tier.HOST, "states": Tier.HOST, "inputs": inputs, "activation": activation}
    blocks = tuple(replace(block, **away) if block.name else block for block in plan.blocks)
    widest = max(plan.layout.num_slots(chunk) for chunk in plan.layout.chunks)
    return replace(plan, blocks=blocks, num_slots=2 * widest + 1, num_grad_slots=2 * widest + 1)


def wrap(
    model: nn.Module,
    batch: Any,
    edit: Any = everything_moves,
    update: str = "deferred",
    micro_batch: int = 2,
    **options: Any,
) -> tuple[Any, Any]:
    """`options` of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, "eps": 1e-4, **options})
    plan = hightide.plan(model, optimizer, batch, limits=LIMITS, micro_batch=micro_batch, update=update, device="cuda")
    return hightide.wrap(model, optimizer, batch, plan=edit(plan), update=update, device="cuda")


def silence_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers asks the GPU in every forward whether sequences are padded, and waits for the answer."""
    monkeypatch.setattr(transformers.PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_, **__: None)


def rehearsed_llama(width: int = 512, num_layers: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    """34 M parameters, so that it is rehearsed; a step holds gigabytes of activations."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        use_cache=False,
        tie_word_embeddings=False,
    )
    tokens = torch.randint(0, 8192, (16, 512))
    model = transformers.LlamaForCausalLM(config).train()
    assert sum(param.numel() for param in model.parameters()) > hightide.posing.SMALL_NUMEL
    return model, {"input_ids": tokens, "labels": tokens}
