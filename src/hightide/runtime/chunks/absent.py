"""A parameter while its values are somewhere else: everything about it but its values.

[Note: reading absent parameters] A regulariser over `model.parameters()`, a logged norm, a copy for an average: code
outside of blocks that computes with parameters would get NaN, or the values before the last update, and a gradient
that reaches no one. So while a parameter is not in use it has a subclass of its class, as an uninitialised parameter of
torch has: shape, dtype and `.grad` are answered, computing raises and says what to call instead. While a block runs
its parameters have their own class, so that blocks and torch.compile see nothing of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves

from hightide.ir.refusal import Refused
from hightide.runtime.guards.other_optimizer import refuse_other_optimizer

Disabled = torch._C.DisableTorchFunctionSubclass  # as a context: torch sees ordinary tensors
METHODS = (
    "__len__",
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "is_inference",
    "is_shared",
    "is_signed",
    "ndimension",
    "nelement",
    "numel",
    "requires_grad_",
    "size",
    "storage_offset",
    "stride",
)
VALUES = ("data", "T", "mT", "H", "mH", "real", "imag")  # properties that are values; the others describe
_CONVERSIONS = ("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type")
CONVERSIONS = {getattr(Tensor, name) for name in _CONVERSIONS}
_DESCRIBE = {getattr(Tensor, name) for name in METHODS}
_DESCRIBE |= {torch.is_complex, torch.is_floating_point, torch.numel, torch._has_compatible_shallow_copy_type}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_OF_VALUES = {getattr(Tensor, name).__get__ for name in VALUES} | {_SET_DATA}

_NAN_BYTES = 8  # room for any dtype

REFUSAL = (
    "{what} of the parameter {name!r}, whose values are elsewhere: hightide brings them in while its block runs. Read "
    "a copy with model.get_submodule({module!r}).state_dict()[{leaf!r}], write with load_state_dict(), shrink weights "
    "by the optimizer's weight_decay and not by a term of the loss, take gradients from p.grad after backward(), or "
    "make the model plain with hightide.unwrap(model)"
)
UPDATED = (
    "{what} of the parameter {name!r} between backward and optimizer.step(), but this model was wrapped with "
    "update='in_backward': its update has run already. Do that before backward() or after step(), or wrap with "
    "update='deferred' (the default)"
)


class AbsentParameter(nn.Parameter):
    """See [Note: reading absent parameters]."""

    hightide_names: Mapping[int, str]  # by the id of the parameter
    hightide_refusal: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DESCRIBE or (type(func).__name__ == "method-wrapper" and func not in _OF_VALUES):
            with Disabled():
                return func(*args, **kwargs)
        if func == _SET_DATA and args[0] is args[1]:  # model.to(where it is)
            return None
        if func in CONVERSIONS:
            with Disabled():
                result = func(*args, **kwargs)
            if result is args[0] or isinstance(result, str):  # nothing to convert; or `p.type()`
                return result
        refuse_other_optimizer()
        absent = next(_absent((args, kwargs)))
        name = absent.hightide_names.get(id(absent), "?")
        raise Refused(refusal(_spoken(func), name, absent.hightide_refusal))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        name = self.hightide_names.get(id(self), "?")
        return (
            f"Parameter {name!r} (shape={tuple(self.shape)}, dtype={self.dtype}; values elsewhere: model.state_dict())"
        )

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


class NotedParameter(nn.Parameter):
    """A parameter that is where it is needed, and of which there is another copy: what somebody writes to it has no
    effect on that one. A write is noticed by its version, which `.data` would not share with it, and this does."""

    hightide_inside: type[nn.Parameter]  # what it is while its block runs

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _SET_DATA(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied: nn.Parameter = super().__deepcopy__(memo)
        copied.__class__ = self.hightide_inside
        return copied


def absent_class(original: type, names: Mapping[int, str], told: str = REFUSAL) -> type[nn.Parameter]:
    return _outside(AbsentParameter, original, hightide_names=names, hightide_refusal=told)


def noted_class(original: type) -> type[nn.Parameter]:
    return _outside(NotedParameter, original, hightide_inside=original)


def _outside(kind: type[nn.Parameter], original: type, **attributes: Any) -> type[nn.Parameter]:
    """What a parameter is outside of its block. It keeps the class's name."""
    bases = (kind,) if original is nn.Parameter else (kind, original)
    body = {"__module__": original.__module__, "__qualname__": original.__qualname__, **attributes}
    return type(original)(original.__name__, bases, body)


def refusal(what: str, name: str, told: str = REFUSAL) -> str:
    module, _, leaf = name.rpartition(".")
    return told.format(what=what, name=name, module=module, leaf=leaf)


def _absent(values: Any) -> Iterator[AbsentParameter]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, AbsentParameter))


def _spoken(func: Callable[..., Any]) -> str:
    name = resolve_name(func) or f"{getattr(func, '__module__', '')}.{getattr(func, '__name__', func)}"
    return str(name).removesuffix(".__get__").replace(".__set__", " = ...")


class Nans:
    """One NaN per parameter: what its absent values are. On the host it is seen when somebody writes one; looking at
    one that is on a GPU would wait for it."""

    def __init__(self, chunks: Sequence[Mapping[str, torch.dtype]], device: torch.device) -> None:
        """Those of a chunk lie together."""
        self._numbers: list[dict[str, Tensor]] = []
        self._memory: list[bytearray] = []  # by chunk; none on a GPU
        self._untouched: list[bytes] = []
        for dtypes in chunks:
            if device.type != "cpu":
                nans = {name: torch.full((), math.nan, dtype=dtype, device=device) for name, dtype in dtypes.items()}
                self._numbers.append(nans)
                continue
            memory = bytearray(_NAN_BYTES * len(dtypes))
            numbers = [
                torch.frombuffer(memory, dtype=dtype, count=1, offset=index * _NAN_BYTES).view(()).fill_(math.nan)
                for index, dtype in enumerate(dtypes.values())
            ]
            self._numbers.append(dict(zip(dtypes, numbers, strict=True)))
            self._memory.append(memory)
            self._untouched.append(bytes(memory))

    def everyone(self) -> dict[str, Tensor]:
        return {name: number for numbers in self._numbers for name, number in numbers.items()}

    def written(self, chunk: int) -> str | None:
        """A parameter of the chunk to whose NaN somebody has written. Once: it is NaN again afterwards. By bytes: a
        tensor's `item()` would let go of Python's lock."""
        if not self._memory or self._memory[chunk] == self._untouched[chunk]:
            return None
        for name, number in self._numbers[chunk].items():
            if not math.isnan(number.item()):
                number.fill_(math.nan)
                return name
        return None
