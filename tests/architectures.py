"""Models of the zoo that any test may train: whole, with a frozen part, or with adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import peft
import torch

import models


@dataclass(frozen=True)
class Architecture:
    build: Callable[..., models.Pair]
    adapted: tuple[str, ...]  # names of linear layers
    batch: Callable[..., dict[str, Any]] = models.token_batch
    can_tie: bool = True
    can_pad: bool = True


QUERY_AND_DOWN = ("q_proj", "down_proj")
ARCHITECTURES = {
    "llama": Architecture(models.llama, QUERY_AND_DOWN),
    "gpt2": Architecture(models.gpt2, ("c_attn", "c_proj")),
    "qwen3": Architecture(models.qwen3, QUERY_AND_DOWN),
    "mistral": Architecture(models.mistral, QUERY_AND_DOWN),
    "gemma2": Architecture(models.gemma2, QUERY_AND_DOWN),
    "gemma3": Architecture(models.gemma3, QUERY_AND_DOWN),
    "opt": Architecture(models.opt, ("q_proj", "fc2")),
    "bert": Architecture(models.bert, ("query", "output.dense")),
    "t5": Architecture(models.t5, ("q", "wo"), models.translation_batch),
    "vit": Architecture(models.vit, ("q_proj", "fc2"), models.image_batch, can_tie=False, can_pad=False),
    "qwen3_moe": Architecture(models.qwen3_moe, ("q_proj", "o_proj")),
    "plain": Architecture(models.plain, ("linear1", "linear2"), partial(models.token_batch, mask=False), can_pad=False),
    "hand_written": Architecture(
        models.hand_written, ("mlp.0", "mlp.2"), models.vector_batch, can_tie=False, can_pad=False
    ),
}
TRAINED = ("all", "part", "lora")


def build(model: str, trained: str = "all", **options: Any) -> models.Pair:
    """`options`: of the function of the zoo. `trained`: see TRAINED."""
    architecture = ARCHITECTURES[model]
    made, example = architecture.build(num_layers=2, **options)
    if trained == "part":  # not the first blocks, and not all of any block
        params = list(made.parameters())
        for number, param in enumerate(params):
            param.requires_grad_(number > len(params) // 3 and number % 5 != 0)
    if trained == "lora":
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=4,
            lora_alpha=16,
            target_modules=list(architecture.adapted),
            init_lora_weights=False,
            fan_in_fan_out=model == "gpt2",
        )
        made = peft.get_peft_model(made, config).train()  # type: ignore[arg-type]
    return made, example
