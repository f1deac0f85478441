"""What a transformers model needs to be told before it trains through blocks. The library itself is not imported."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
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


# Arguments of a call that say nothing about positions.
OF_TOKENS = {"input_ids", "inputs_embeds", "labels", "logits_to_keep", "num_items_in_batch", "return_dict", "use_cache"}
_has_plain_positions: ContextVar[bool] = ContextVar("has_plain_positions", default=False)
PRETRAINED = "PreTrainedModel"
ASKING = "find_packed_sequence_indices"  # of transformers.masking_utils


AroundCall = Callable[[tuple[Any, ...], Mapping[str, Any]], AbstractContextManager[None]]


def around_call(model: nn.Module) -> AroundCall | None:
    """What to enter for each call of the whole model.

    In every forward transformers asks the GPU whether positions show several sequences packed into one, and waits for
    the answer until the GPU has nothing left to do. One of the library's own models that is given tokens only makes
    consecutive positions: then the answer is known. Not where somebody else's code comes in between."""
    inside = [module for module in model.modules() if any(one.__name__ == PRETRAINED for one in type(module).__mro__)]
    if model not in inside or not all(_is_its_own(module) for module in inside):
        return None
    return functools.partial(_without_asking, inside)


def _is_its_own(module: nn.Module) -> bool:
    return "forward" not in vars(module) and type(module).forward.__module__.startswith("transformers.models.")


@contextmanager
def _without_asking(inside: list[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    given = {name for name, value in kwargs.items() if value is not None}
    is_hooked = any(module._forward_pre_hooks for module in inside)
    if len(args) > 1 or not given <= OF_TOKENS or is_hooked or not _can_answer():
        yield
        return
    token = _has_plain_positions.set(True)
    try:
        yield
    finally:
        _has_plain_positions.reset(token)


def _can_answer() -> bool:
    """Puts itself between the library and its question, once; other models and threads are asked as before."""
    masking = sys.modules.get("transformers.masking_utils")
    asking = getattr(masking, ASKING, None)
    if asking is None or hasattr(asking, "__wrapped__"):
        return asking is not None

    @functools.wraps(asking)
    def answered(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # another model, as a whole: torch.compile cannot look into a ContextVar
            return asking(*args, **kwargs)
        return None if _has_plain_positions.get() else asking(*args, **kwargs)

    setattr(masking, ASKING, answered)
    return True


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
