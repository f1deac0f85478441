"""A model whose values are still in files: its parameters are on the meta device, and its class knows their origins.

As for wrapped models, nothing is stored on the user's objects. Origins belong to parameters, not to names: whatever a
library like PEFT builds around the model, the parameters are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import nn

from hightide.runtime.origin import Origin


@dataclass(frozen=True)
class Remembered:
    source: str  # what a message calls it
    origins: Mapping[int, tuple[nn.Parameter, Origin]]  # by id; the parameter is there to keep its id its own


class Unloaded:
    """Mixed into the class of a model until `wrap` has loaded it."""

    hightide_remembered: Remembered

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(self, nn.Module)
        # Not param.is_meta: a probe has put other parameters there, and takes any question for a use of them.
        if any(id(param) in self.hightide_remembered.origins for param in self.parameters()):
            raise RuntimeError(
                f"the values of this model are still in {self.hightide_remembered.source}: hightide.wrap(model, "
                "optimizer, batch) reads them into its chunks. For a plain model use transformers' own from_pretrained"
            )
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise RuntimeError(
            "a model without values cannot be copied: the copy would not know where they are. Call "
            "hightide.from_pretrained once more"
        )


def remember(model: nn.Module, source: str, origins: Mapping[int, tuple[nn.Parameter, Origin]]) -> None:
    kind = type(model)
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    remembered = {"hightide_remembered": Remembered(source, origins)}
    model.__class__ = type(kind.__name__, (Unloaded, kind), {**body, **remembered})


def origins_in(model: nn.Module) -> dict[int, Origin]:
    """By the id of the parameter."""
    found: dict[int, Origin] = {}
    for module in model.modules():
        if isinstance(module, Unloaded):
            found |= {key: origin for key, (_, origin) in module.hightide_remembered.origins.items()}
    return found


def forget(model: nn.Module) -> None:
    """The values are there: the models are ordinary ones."""
    for module in model.modules():
        if isinstance(module, Unloaded):
            module.__class__ = type(module).__bases__[-1]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made inside have parameters without memory. Buffers are real, unlike under torch.device("meta"): many are
    computed when a module is made, and nobody could tell their values afterwards."""
    made: dict[int, tuple[ref[nn.Parameter], nn.Parameter]] = {}  # a parameter may be registered more than once

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.is_meta:
            return None
        original, empty = made.get(id(param), (None, None))
        if empty is None or original is None or original() is not param:
            empty = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
            empty.__dict__.update(param.__dict__)
            made[id(param)] = (ref(param), empty)
        return empty

    handle = nn.modules.module.register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()
