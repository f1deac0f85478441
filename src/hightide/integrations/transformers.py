"""What a transformers model needs to be told before it trains through blocks. The library itself is not imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hightide.profiler.split import Batch, call_arguments


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


def refuse_captures(model: nn.Module, batch: Batch) -> Callable[[Mapping[str, Any]], None]:
    """A check of each training call. What hooks capture inside a block is taken out of it as the probe of the example
    batch has shown; what that did not ask for would be one micro-batch's, without gradient."""
    config = getattr(model, "config", None)

    def asked(name: str, kwargs: Mapping[str, Any]) -> bool:
        value = kwargs.get(name)
        return bool(getattr(config, name, False) if value is None else value)

    probed = {name for name in CAPTURES if asked(name, call_arguments(batch)[1])}

    def check(kwargs: Mapping[str, Any]) -> None:
        for name in CAPTURES:
            if name not in probed and asked(name, kwargs):
                raise ValueError(
                    f"{name}=True in training, but not in the example batch or the model's config when the model was "
                    "wrapped: how these tensors leave the blocks was not learned. Wrap with it, leave it out, or ask "
                    "for it under torch.no_grad()"
                )

    return check
