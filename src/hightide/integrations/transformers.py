"""Words to a transformers model before it trains through blocks. The library itself is not imported."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from hightide.ir.refusal import Refused, RefusedArgument
from hightide.profiler.model.call_tree import Batch, call_arguments
from hightide.profiler.switches import checkpointing
from hightide.profiler.switches.caches import is_pretrained
from hightide.profiler.switches.packed_positions import plain_positions
from hightide.runtime.run_context import AroundCall

# Arguments of a call that say nothing about positions.
OF_TOKENS = {"input_ids", "inputs_embeds", "labels", "logits_to_keep", "num_items_in_batch", "return_dict", "use_cache"}


def around_call(model: nn.Module) -> AroundCall | None:
    """What to enter for each call of the whole model.

    In every forward transformers asks the GPU whether positions show several sequences packed into one, and waits for
    the answer until the GPU has nothing left to do. One of the library's own models that is given tokens only makes
    consecutive positions: then the answer is known. Not where somebody else's code comes in between."""
    inside = [module for module in model.modules() if is_pretrained(module)]
    if model not in inside or not all(_is_its_own(module) for module in inside):
        return None
    return functools.partial(_without_asking, inside)


def _is_its_own(module: nn.Module) -> bool:
    return "forward" not in vars(module) and type(module).forward.__module__.startswith("transformers.models.")


@contextmanager
def _without_asking(inside: list[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    given = {name for name, value in kwargs.items() if value is not None}
    is_hooked = any(module._forward_pre_hooks for module in inside)
    if len(args) > 1 or not given <= OF_TOKENS or is_hooked:
        yield
        return
    with plain_positions():
        yield


CAPTURES = ("output_attentions", "output_router_logits")  # tensors that hooks take out of the middle of a block


def training_checks(model: nn.Module, batch: Batch) -> Callable[[Mapping[str, Any]], None]:
    """Checks of each training call. What hooks capture inside a block is taken out of it as the probe of the example
    batch has shown; what that did not ask for would be one micro-batch's, without gradient."""
    recomputing = [module for module in model.modules() if hasattr(module, checkpointing.FLAG)]
    config = getattr(model, "config", None)

    def asked(name: str, kwargs: Mapping[str, Any]) -> bool:
        value = kwargs.get(name)
        return bool(getattr(config, name, False) if value is None else value)

    probed = {name for name in CAPTURES if asked(name, call_arguments(batch)[1])}

    def check(kwargs: Mapping[str, Any]) -> None:
        if any(getattr(module, checkpointing.FLAG, False) is True for module in recomputing):
            raise Refused(
                "the model's own gradient checkpointing was switched on after wrapping, and its blocks would be "
                "recomputed twice; call model.gradient_checkpointing_disable(): what is recomputed is in the plan"
            )
        for name in CAPTURES:
            if name not in probed and asked(name, kwargs):
                raise RefusedArgument(
                    f"{name}=True in training, but not in the example batch or the model's config when the model was "
                    "wrapped: how these tensors leave the blocks was not learned. Wrap with it, leave it out, or ask "
                    "for it under torch.no_grad()"
                )

    return check
