"""A model whose values are still in files: its parameters are on the meta device, and its class knows their origins.

As for wrapped models, nothing is stored on the user's objects. Origins belong to parameters, not to names: whatever a
library like PEFT builds around the model, the parameters are the same.

[Note: where a parameter seems to be] A library that adds to a model puts what it adds where the model is. On the meta
device the values that PEFT has just drawn for its adapters would be lost; so a parameter without values says that it is
on the CPU, where the adapters then stay. It is not: who reads or writes values of it, as initialisations of adapters do
that are made from the weight, is refused. What is written to its `data` is lost on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hightide.runtime.chunks.origin import Origin

MAX_PARAMETERS = 1_000_000
MAX_VALUE_BYTES = 2 * 1024**3


HARMLESS = ("requires_grad_", "detach_", "share_memory_")
_NO_VALUES = (
    "{}() needs values of a model of hightide.from_pretrained, which has none before hightide.wrap: they are still in "
    "files. Adapters of PEFT that are made from the weights (pissa, olora, loftq, DoRA, trainable tokens, ...) and "
    "new or changed embeddings need them: load the model with transformers' own from_pretrained"
)


@dataclass(frozen=True)
class Remembered:
    source: str  # what a message calls it
    origins: Mapping[int, tuple[nn.Parameter, Origin]]  # by id; the parameter is there to keep its id its own
    parameter: type[nn.Parameter]  # the class that these have meanwhile


class UnloadedParameter(nn.Parameter):
    """See [Note: where a parameter seems to be]. Each model has a class of its own."""

    hightide_origins: dict[int, tuple[nn.Parameter, Origin]]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cpu")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What asks for a shape may, and what makes a tensor like this one. What reads or writes values may not: torch
        makes results where this parameter seems to be, so they would be memory that nobody has filled."""
        name = getattr(func, "__name__", str(func))
        if (name.endswith("_") and not name.endswith("__") and name not in HARMLESS) or name == "__setitem__":
            raise RuntimeError(_NO_VALUES.format(name))
        try:
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args, **(kwargs or {}))
        except (NotImplementedError, RuntimeError, TypeError) as error:  # what the meta device cannot do
            if "meta" not in str(error):
                raise
            raise RuntimeError(_NO_VALUES.format(name)) from error
        has_values = any(isinstance(one, Tensor) and not one.is_meta for one in tree_leaves(found))
        if has_values and not (name.endswith("_like") or name.startswith("new_") or name == "__get__"):
            raise RuntimeError(_NO_VALUES.format(name))
        return found

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Modules that are converted ask with a device, a dtype and a third argument; others want values."""
        if len(args) < 3:
            raise RuntimeError(_NO_VALUES.format("to"))
        return super().to(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """It has the same values: PEFT copies the modules that it trains beside its adapters."""
        if id(self) not in memo:
            copy = nn.Parameter(torch.empty_like(self, device="meta"), requires_grad=self.requires_grad)
            copy.__class__ = type(self)
            self.hightide_origins[id(copy)] = (copy, self.hightide_origins[id(self)][1])
            memo[id(self)] = copy
        found: nn.Parameter = memo[id(self)]
        return found


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
    known = dict(origins)
    parameter = type("Parameter", (UnloadedParameter,), {"hightide_origins": known})
    kind = type(model)
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    remembered = {"hightide_remembered": Remembered(source, known, parameter), "forward": _described(kind)}
    model.__class__ = type(kind.__name__, (Unloaded, kind), {**body, **remembered})
    seem_unloaded(model, True)


def _described(kind: type[nn.Module]) -> Callable[..., Any]:
    """Libraries look at the arguments of a model's forward."""

    @wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return Unloaded.forward(self, *args, **kwargs)

    return forward


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


def seem_unloaded(model: nn.Module, does: bool) -> None:
    """Whether parameters that are still in files say that they are on the CPU: while they are loaded they are whatever
    they are."""
    for module in model.modules():
        if isinstance(module, Unloaded):
            kind = module.hightide_remembered.parameter if does else nn.Parameter
            for param, _ in module.hightide_remembered.origins.values():
                param.__class__ = kind


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made inside have parameters without memory. Buffers are real, unlike under torch.device("meta"): many are
    computed when a module is made, and nobody could tell their values afterwards. ValueError where one is larger than
    any model has, or where there are more parameters: the numbers that a model is made by may be a stranger's."""
    made: dict[int, tuple[ref[nn.Parameter], nn.Parameter]] = {}  # a parameter may be registered more than once
    num_made = 0  # not len(made): an original that is gone leaves its id to the next one

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        nonlocal num_made
        if param is None or param.is_meta:
            return None
        original, empty = made.get(id(param), (None, None))
        if empty is None or original is None or original() is not param:
            empty = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
            empty.__dict__.update(param.__dict__)
            made[id(param)] = (ref(param), empty)
            num_made += 1
            if num_made > MAX_PARAMETERS:
                raise ValueError(f"the model has more than {MAX_PARAMETERS} parameters; make it of larger ones")
        return empty

    handle = nn.modules.module.register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        with _BoundedValues():
            yield
    finally:
        handle.remove()


class _BoundedValues(TorchDispatchMode):
    """Asks the meta device first how large a result would be. Memory that is only set aside costs nothing: parameters
    are made like that."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        values = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        is_real = (
            any(value.device.type == "cpu" for value in values) if values else device in (None, torch.device("cpu"))
        )
        if is_real and "empty" not in func.__name__:
            num_bytes = _result_bytes(func, args, kwargs)
            if num_bytes > MAX_VALUE_BYTES:
                raise ValueError(
                    f"a tensor beside the parameters would have {num_bytes} bytes, more than {MAX_VALUE_BYTES}; make "
                    "the model's sizes smaller"
                )
        return func(*args, **kwargs)


def _result_bytes(func: Any, args: Any, kwargs: Any) -> int:
    """0: nobody can tell without values."""
    args, kwargs = tree_map_only(Tensor, lambda value: torch.empty_like(value, device="meta"), (args, kwargs))
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("meta")}
    try:
        made = func(*args, **kwargs)
    except Exception:
        return 0
    return max((one.nbytes for one in tree_leaves(made) if isinstance(one, Tensor)), default=0)
