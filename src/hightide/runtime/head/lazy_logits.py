"""A tensor that stands for logits which nobody has computed.

[Note: lazy logits] In grad mode the head returns a `LazyLogits` instead of logits. It knows shape and dtype, and
records through `__torch_function__` what models do between head and loss: casts, products with numbers and tanh (logit
scaling, soft-capping), views of the leading dimensions and selections of rows. Views and selections are done at once
to the hidden rows, since the head works row by row; the rest waits. `F.cross_entropy` then runs fused, tile by tile
(see [Note: fused loss]). Every other operation computes the whole logits once, with one warning per head, and goes on
with an ordinary tensor: more memory, the same values and gradients.

Code that goes round `__torch_function__` (a custom autograd function over the logits) still reads right values, but its
gradient arrives at this object itself, where it raises: silence would lose it.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from hightide.ir.refusal import Refused
from hightide.ir.units import format_bytes
from hightide.runtime.blocks.autocast import Autocast
from hightide.runtime.head.cross_entropy import CrossEntropy
from hightide.runtime.head.fused_loss import Projection, Recorded, fused_cross_entropy, replay

if TYPE_CHECKING:
    from hightide.runtime.head.head import HeadCall


@dataclass(frozen=True)
class _Record:
    """What a LazyLogits stands for."""

    identity: object  # of the head's block, for which one warning is enough
    projection: Projection
    hidden: Tensor  # the head's input, as it was called
    hidden_version: int
    rows: Tensor  # the same after the recorded views and selections
    dtype: torch.dtype
    device: torch.device
    needs_grad: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.rows.shape[:-1], self.projection.head.num_classes)

    def with_operation(self, operation: Recorded) -> Projection:
        return replace(self.projection, operations=(*self.projection.operations, operation))

    def whole_logits(self) -> Tensor:
        with self.projection.autocast.restored():
            logits = self.projection.head.materialise(self.hidden)
        return replay(logits, self.projection.operations)

    def check_fresh(self) -> None:
        self.projection.check_version()
        if self.hidden._version != self.hidden_version:
            raise Refused(
                "the input of the head was changed in place after the head was called, so its logits can no longer be "
                "computed; change a copy (`hidden = hidden.clone()`) instead"
            )


class LazyLogits(Tensor):
    """`LazyLogits(head, hidden)`: the logits of `hidden`, not computed. See [Note: lazy logits].

    Where a new head object is made for every call, `identity` is what stays the same; warnings are counted by it.
    """

    _record: _Record
    _whole: Tensor | None  # the logits, once an operation needed all of them
    _has_views: bool  # shares its (virtual) memory with another LazyLogits: operations in place would have to reach it

    @staticmethod
    def __new__(cls, head: HeadCall, hidden: Tensor, identity: object | None = None) -> LazyLogits:
        autocast = Autocast.capture(hidden.device.type)
        needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or head.anchor is not None)
        return _lazy(
            _Record(
                identity=head if identity is None else identity,
                projection=Projection(head, autocast, (), head.version),
                hidden=hidden,
                hidden_version=hidden._version,
                rows=hidden,
                dtype=autocast.dtype if autocast.enabled else hidden.dtype,
                device=hidden.device,
                needs_grad=needs_grad,
            )
        )

    def __init__(self, head: HeadCall, hidden: Tensor, identity: object | None = None) -> None:
        """Everything happens in __new__: the object is the output of an autograd function."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        if name in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if not any(isinstance(arg, LazyLogits) and arg._whole is not None for arg in args):
            result = _try_lazily(func, name, args, kwargs)
            if result is not NotImplemented:
                return result
        return _run_on_whole_logits(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Reached only by code that goes round __torch_function__; autograd is already behind us.
        name = str(func)
        with torch.no_grad():
            args, kwargs = tree_map(lambda value: _whole(value, name), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        record = self._record
        state = "not computed" if self._whole is None else "computed"
        return f"LazyLogits(shape={record.shape}, dtype={record.dtype}, device={record.device}, {state})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


# -- making one --------------------------------------------------------------------------------------------------


class _Attach(torch.autograd.Function):
    """Makes a LazyLogits part of the autograd graph: a gradient that arrives at the object itself shall be noticed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor | None, record: _Record) -> LazyLogits:
        return _wrapper(record)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise Refused(
            "a gradient reached hightide's lazy logits through code that goes round __torch_function__ (a custom "
            "autograd function?); give it ordinary logits: `logits = logits.clone()`"
        )


def _lazy(record: _Record) -> LazyLogits:
    if not record.needs_grad:
        return _wrapper(record)
    logits: LazyLogits = _Attach.apply(record.rows, record.projection.head.anchor, record)
    return logits


def _wrapper(record: _Record) -> LazyLogits:
    logits: LazyLogits = Tensor._make_wrapper_subclass(
        LazyLogits, record.shape, dtype=record.dtype, device=record.device, requires_grad=False
    )
    logits._record, logits._whole, logits._has_views = record, None, False
    return logits


def _derived(logits: LazyLogits, **changes: Any) -> LazyLogits:
    needs_grad = logits._record.needs_grad and torch.is_grad_enabled()
    return _lazy(replace(logits._record, **{"needs_grad": needs_grad, **changes}))


# -- operations that stay lazy -----------------------------------------------------------------------------------


def _try_lazily(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in _SCALINGS:
        return _scaled(func, args, kwargs)
    if not args or not isinstance(args[0], LazyLogits):
        return NotImplemented
    logits, rest = args[0], args[1:]
    if func is F.cross_entropy:
        return _cross_entropy(logits, *rest, **kwargs)
    if name in _CASTS:
        return _cast(func, logits, rest, kwargs)
    if name in ("view", "reshape", "flatten"):
        return _view(func, logits, rest, kwargs)
    if name == "__getitem__":
        return _select_rows(logits, rest[0])
    if name == "contiguous":
        return logits
    if name in ("detach", "data"):
        return _sharing(logits, _derived(logits, needs_grad=False))
    return NotImplemented


def _sharing(logits: LazyLogits, view: LazyLogits) -> LazyLogits:
    logits._has_views = view._has_views = True
    return view


def _scaled(func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By numbers: what scaling and soft-capping consist of."""
    positions = [index for index, arg in enumerate(args) if isinstance(arg, LazyLogits)]
    if len(positions) != 1:
        return NotImplemented
    position = positions[0]
    if not all(_is_scalar(other) for other in (*args[:position], *args[position + 1 :], *kwargs.values())):
        return NotImplemented
    before, after, options = tree_map(_by_value, (args[:position], args[position + 1 :], kwargs))
    operation = Recorded(func, before, after, options)
    record = args[position]._record
    # torch's own promotion rules, from one element.
    dtype = operation(torch.ones(1, dtype=record.dtype, device=record.device)).dtype
    return _derived(args[position], projection=record.with_operation(operation), dtype=dtype)


def _is_scalar(value: object) -> bool:
    """Numbers, and what acts like one. A scalar that wants a gradient is not: it would have to get one."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and not isinstance(value, LazyLogits) and not value.requires_grad
    return value is None or isinstance(value, bool | int | float | str)


def _by_value(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _cast(func: Callable[..., Any], logits: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As torch casts a tensor without elements."""
    record = logits._record
    before = torch.empty(0, dtype=record.dtype, device=record.device)
    with torch._C.DisableTorchFunctionSubclass():
        after = func(before, *args, **kwargs)
    if not isinstance(after, Tensor):  # `logits.type()`
        return after
    if after is before:
        return logits
    if not after.is_floating_point():
        return NotImplemented
    operation = Recorded(Tensor.to, options={"device": after.device, "dtype": after.dtype})
    return _derived(logits, projection=record.with_operation(operation), dtype=after.dtype, device=after.device)


def _view(func: Callable[..., Tensor], logits: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of the leading dimensions, with the shape that torch gives to a tensor without memory."""
    record = logits._record
    with _disable_current_modes():  # a meter would count that tensor
        view = func(torch.empty(record.shape, dtype=record.dtype, device="meta"), *args, **kwargs)
    shape = tuple(view.shape)
    if shape[-1:] != record.shape[-1:] or view.dtype != record.dtype:
        return NotImplemented
    rows = record.rows.reshape(*shape[:-1], record.rows.shape[-1])
    projection = record.with_operation(Recorded(Tensor.reshape, after=(shape,), elementwise=False))
    return _sharing(logits, _derived(logits, rows=rows, projection=projection))


def _select_rows(logits: LazyLogits, index: Any) -> Any:
    record = logits._record
    entries = index if isinstance(index, tuple) else (index,)
    if not _selects_whole_rows(entries, len(record.shape)):
        return NotImplemented
    rows = record.rows[index]
    operation = Recorded(Tensor.__getitem__, after=(tree_map(_by_value, index),), elementwise=False)
    selected = _derived(logits, rows=rows, projection=record.with_operation(operation))
    copies = any(isinstance(entry, Tensor) for entry in entries)  # everything else is a view
    return selected if copies else _sharing(logits, selected)


def _selects_whole_rows(entries: tuple[Any, ...], num_dims: int) -> bool:
    """Does the index leave the last dimension alone? Only kinds of entries whose reach is plain are judged."""
    reach = 0
    for entry in entries:
        if isinstance(entry, Tensor):
            is_mask = entry.dtype in (torch.bool, torch.uint8)
            if isinstance(entry, LazyLogits) or (is_mask and entry.dim() == 0):
                return False
            reach += entry.dim() if is_mask else 1
        elif isinstance(entry, bool) or not (entry is Ellipsis or isinstance(entry, int | slice)):
            return False
        else:
            reach += entry is not Ellipsis
    if reach < num_dims and not any(entry is Ellipsis for entry in entries[:-1]):
        return True
    return isinstance(entries[-1], slice) and entries[-1] == slice(None)


def _cross_entropy(
    logits: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    record = logits._record
    if size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    if len(record.shape) != 2 or target.dim() != 1 or target.is_floating_point() or isinstance(target, LazyLogits):
        return NotImplemented
    if weight is not None and weight.requires_grad:
        return NotImplemented
    if len(target) != record.shape[0]:
        raise ValueError(f"Expected input batch_size ({record.shape[0]}) to match target batch_size ({len(target)}).")
    record.check_fresh()
    options = CrossEntropy(ignore_index, reduction, label_smoothing)
    with torch.set_grad_enabled(torch.is_grad_enabled() and record.needs_grad):
        loss = fused_cross_entropy(record.projection, record.rows, target, weight, options)
    # As torch would type it: autocast makes the loss fp32.
    return loss if torch.is_autocast_enabled(record.device.type) else loss.to(record.dtype)


# -- operations that need all logits -----------------------------------------------------------------------------

_warned_about: weakref.WeakSet[Any] = weakref.WeakSet()


def _run_on_whole_logits(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    changed = [args[0]] if args and isinstance(args[0], LazyLogits) and _changes_its_tensor(name) else []
    changed += [out for out in [kwargs.get("out")] if isinstance(out, LazyLogits)]
    for logits in changed:
        _check_in_place(logits, name)
        with torch.enable_grad():  # what changes must be the logits that all later operations see
            _whole(logits, name)
    args, kwargs = tree_map(lambda value: _whole(value, name), (args, kwargs))
    return func(*args, **kwargs)


def _whole(value: Any, operation: str) -> Any:
    """The logits of a LazyLogits, computed at most once as long as they carry the gradient they should."""
    if not isinstance(value, LazyLogits):
        return value
    if value._whole is not None:
        return value._whole
    record = value._record
    record.check_fresh()
    _warn(record, operation)
    with torch.set_grad_enabled(torch.is_grad_enabled() and record.needs_grad):
        logits = record.whole_logits()
    if logits.requires_grad or not record.needs_grad:
        value._whole = logits
    return logits


def _warn(record: _Record, operation: str) -> None:
    if record.identity in _warned_about:
        return
    _warned_about.add(record.identity)
    num_bytes = math.prod(record.shape) * record.dtype.itemsize
    warnings.warn(
        f"hightide: the operation {operation!r} needs whole logits of shape {record.shape}, which are computed at once "
        f"({format_bytes(num_bytes)}). Only F.cross_entropy over flattened logits (tokens, vocabulary) with class "
        "indices is computed in tiles of tokens; results are the same.",
        stacklevel=2,
    )


def _check_in_place(logits: LazyLogits, operation: str) -> None:
    if logits._has_views:
        raise Refused(
            f"the operation {operation!r} would change lazy logits of which views exist, and cannot reach those; write "
            "it out of place (`logits = logits * scale`, `logits = logits.clone()` before an assignment)"
        )


# -- names -------------------------------------------------------------------------------------------------------

_METADATA = frozenset(
    """ shape size dim ndim ndimension dtype device requires_grad numel nelement nbytes itemsize element_size layout
    stride is_floating_point is_complex is_contiguous is_leaf is_cuda is_cpu is_meta is_sparse is_sparse_csr
    is_quantized is_nested is_mkldnn is_inference is_signed is_mps is_xpu is_xla is_hpu is_mtia is_conj is_neg
    get_device grad_fn output_nr _version __len__ __hash__ __repr__ __format__ """.split()  # noqa: SIM905
)
_SCALINGS = frozenset("mul multiply __mul__ __rmul__ div divide true_divide __truediv__ tanh".split())  # noqa: SIM905
_CASTS = frozenset("float double half bfloat16 to type type_as".split())  # noqa: SIM905


def _name(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", str(func))
    if name == "__get__":  # a property of Tensor
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def _changes_its_tensor(name: str) -> bool:
    if not name.startswith("__"):
        return name.endswith("_") or name in ("register_hook", "retain_grad")
    in_place = name.startswith("__i") and name not in ("__iter__", "__invert__", "__index__", "__int__")
    return in_place or name in ("__setitem__", "__set__")
