"""What a transformers model needs to be told before it trains through blocks. The library itself is not imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


def training_kwargs(model: nn.Module) -> dict[str, Any]:
    """Keyword arguments for every training call: a cache would leak keys and values of one micro-batch into the
    next."""
    if not hasattr(model, "config"):
        return {}
    parameters = inspect.signature(type(model).forward).parameters
    takes_cache = "use_cache" in parameters
    takes_any = any(entry.kind is inspect.Parameter.VAR_KEYWORD for entry in parameters.values())
    knows_cache = hasattr(model.config, "use_cache")
    return {"use_cache": False} if takes_cache or (takes_any and knows_cache) else {}


def prepare(model: nn.Module) -> None:
    """Switches off the model's own gradient checkpointing: recomputation is the plan's decision, once."""
    if getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()  # type: ignore[operator]


CAPTURES = ("output_attentions", "output_router_logits")  # tensors that hooks take out of the middle of a block


def refuse_captures(model: nn.Module) -> Callable[[Mapping[str, Any]], None]:
    """A check of each training call. What is captured inside a block is one micro-batch's, and carries no gradient."""
    config = getattr(model, "config", None)

    def check(kwargs: Mapping[str, Any]) -> None:
        for name in CAPTURES:
            if kwargs.get(name) or (kwargs.get(name) is None and getattr(config, name, False)):
                raise ValueError(
                    f"{name}=True in training: tensors captured inside a block would be those of one micro-batch, "
                    "without "
                    f"gradient. Leave {name} out (also of the model's config), or ask for it under torch.no_grad()"
                )

    return check
