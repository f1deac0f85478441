"""Which parameters have no values yet, and where these will come from."""

from __future__ import annotations

from functools import partial

from torch import nn

from hightide.loading.initial import NAMED, check_initialisers, initialise, initialised_modules
from hightide.loading.unloaded import origins_in
from hightide.runtime.chunks.origin import FirstValues


def first_values(model: nn.Module) -> FirstValues:
    """ValueError where a parameter or a buffer could not get values. The model is not touched."""
    known = origins_in(model)
    missing = {name: param for name, param in model.named_parameters() if param.is_meta}
    origins = {name: known[id(param)] for name, param in missing.items() if id(param) in known}
    rest = {name: param for name, param in missing.items() if name not in origins}
    if not rest and not any(buffer.is_meta for buffer in model.buffers()):
        return FirstValues(origins)
    if origins and rest:  # such as adapters: initialising them like any other part would change what the model computes
        raise ValueError(
            f"{len(rest)} parameters without values were added to a model of hightide.from_pretrained, or computed "
            f"from its own, which are still in files ({', '.join(list(rest)[:NAMED])}). Adapters of PEFT that begin "
            "with values of their own are fine (init_lora_weights=True or 'gaussian'); those made from the weights "
            "(pissa, olora, loftq, ...) are not: load the model with transformers' own from_pretrained, or give them "
            "values on the CPU before hightide.wrap"
        )
    check_initialisers(model, rest)
    modules = list(initialised_modules(model))
    return FirstValues(origins, partial(initialise, model, modules, frozenset(rest)))
