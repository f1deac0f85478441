"""Results of operations on tensors without values, remembered by what their arguments look like.

[Note: known results] Torch remembers it too, but takes ten times as long to look it up as to find a result here: a
profile consists of little else. Remembered are operations of torch's own on tensors of one fake mode, whose results
follow from shapes, strides, offsets, dtypes and devices alone: each is one of the arguments, a view of one, or new and
exactly as large as it must be. A tensor with values (the batch's) may be among the arguments where all results are new:
the fake mode looks at nothing else of it. All others go to the fake mode every time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

MAX_KNOWN = 50_000  # a profile of a large model has a few thousand
MOVES_STORAGE = ("aten::set_", "aten::resize_", "aten::resize_as_", "aten::lift", "aten::lift_fresh")
VALUES = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


class _Result(NamedTuple):
    """One tensor: an argument itself, a view of it, or (without one) new."""

    argument: int | None = None  # among the tensors of the call
    is_itself: bool = False
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")


class _Known(NamedTuple):
    results: tuple[_Result, ...]
    kind: type | None  # of the sequence that they are returned in; None: it is one tensor


class _Rule(NamedTuple):
    """Which calls of an operation are remembered."""

    any: bool
    with_values: bool  # those with tensors that have values, too


_ATTRIBUTES = "hightide_attributes"  # of a fake mode

_known: dict[Any, _Known | None] = {}  # None: it is to be asked for each time
_rules: dict[Any, _Rule] = {}


def result_of(mode: FakeTensorMode, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the fake mode would return. See [Note: known results]."""
    rule = _rules.get(func)
    if rule is None:
        rule = _rules.setdefault(func, _rule_of(func))
    if not rule.any:
        return mode.__torch_dispatch__(func, types, args, kwargs)
    with torch._C.DisableTorchFunction():  # else a mode of the caller's would see each question about a tensor
        looks: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        given: list[FakeTensor] = []
        if not _describe_call(args, kwargs, mode, rule, looks, given):
            return mode.__torch_dispatch__(func, types, args, kwargs)
        key = tuple(looks)
        known = _known.get(key)
        if known is not None:
            made = [_made(result, mode, given) for result in known.results]
            return made[0] if known.kind is None else known.kind(made)
        found = mode.__torch_dispatch__(func, types, args, kwargs)
        if key not in _known:
            if len(_known) >= MAX_KNOWN:
                _known.clear()
            after: list[Any] = looks[:3]
            same = _describe_call(args, kwargs, mode, rule, after, [])
            _known[key] = _remember(found, mode, given) if same and tuple(after) == key else None
        return found


def _rule_of(func: Any) -> _Rule:
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return _Rule(False, False)
    schema = func._schema
    if schema.name in MOVES_STORAGE or any(argument.is_out for argument in schema.arguments):
        return _Rule(False, False)
    if torch.Tag.inplace_view in func.tags or torch.Tag.data_dependent_output in func.tags:
        return _Rule(False, False)
    # Composites, which arrive whole in inference mode, may return an argument without saying so.
    is_composite = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    shares = any(part.alias_info is not None for part in (*schema.arguments, *schema.returns))
    return _Rule(True, with_values=not is_composite and not shares)


def _describe_call(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: FakeTensorMode,
    rule: _Rule,
    looks: list[Any],
    given: list[FakeTensor],
) -> bool:
    """Adds what results follow from; whether that is possible."""
    if not _describe(args, mode, rule, looks, given):
        return False
    if not kwargs:
        return True
    looks.extend(kwargs)
    return _describe(tuple(kwargs.values()), mode, rule, looks, given)


def _describe(
    values: Sequence[Any], mode: FakeTensorMode, rule: _Rule, looks: list[Any], given: list[FakeTensor]
) -> bool:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.fake_mode is not mode or value.constant is not None or value.layout is not torch.strided:
                return False
            looks.append(_look(value, value.fake_device))
            given.append(value)
        elif kind in VALUES:
            looks.append(kind)  # True is 1
            looks.append(value)
        elif kind is list or kind is tuple:
            looks.append((kind, len(value)))
            if not _describe(value, mode, rule, looks, given):
                return False
        elif kind is torch.Tensor and rule.with_values and value.layout is torch.strided:
            looks.append(kind)
            looks.append(_look(value, value.device))
        else:
            return False
    return True


def _look(tensor: torch.Tensor, device: torch.device) -> tuple[Any, ...]:
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        device,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
    )


def _made(result: _Result, mode: FakeTensorMode, given: Sequence[FakeTensor]) -> torch.Tensor:
    if result.is_itself:
        assert result.argument is not None
        return given[result.argument]
    plain = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
    if result.argument is not None:
        plain.set_(given[result.argument].untyped_storage(), result.offset, result.shape, result.stride)
    return fake_of(plain, mode, result.device)


def fake_of(plain: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    """FakeTensor(mode, plain, device) of a tensor on the meta device, in a fifth of the time: its attributes are those
    of the first one that the mode has made so."""
    known = vars(mode).setdefault(_ATTRIBUTES, {})
    attributes = known.get(device)
    if attributes is None:
        first = FakeTensor(mode, plain, device)
        known[device] = {name: value for name, value in vars(first).items() if name != "fake_mode"}
        return first
    fake = torch.Tensor._make_subclass(FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=device)
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(attributes)
    fake.fake_mode = mode
    return fake


def _remember(found: Any, mode: FakeTensorMode, given: Sequence[FakeTensor]) -> _Known | None:
    """None: not all of it can be made again from what was given."""
    kind = list if isinstance(found, list) else tuple if isinstance(found, tuple) else None
    tensors = found if kind is not None else (found,)
    results = [result for tensor in tensors if (result := _seen(tensor, mode, given)) is not None]
    if not results or len(results) < len(tensors):
        return None
    new = [tensor.untyped_storage() for tensor, result in zip(tensors, results, strict=True) if result.argument is None]
    if len({id(storage) for storage in new}) < len(new):
        return None  # views of each other
    return _Known(tuple(results), kind)


def _seen(tensor: Any, mode: FakeTensorMode, given: Sequence[FakeTensor]) -> _Result | None:
    for at, argument in enumerate(given):
        if tensor is argument:
            return _Result(at, is_itself=True)
    if type(tensor) is not FakeTensor or tensor.fake_mode is not mode or tensor.constant is not None:
        return None
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return None
    shape, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    storage = tensor.untyped_storage()
    for at, argument in enumerate(given):
        if argument.untyped_storage() is storage:
            return _Result(at, False, shape, stride, offset, tensor.dtype, tensor.fake_device)
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    needed = (last + 1) * tensor.element_size() if tensor.numel() else 0
    if offset or storage.nbytes() != needed:
        return None
    return _Result(None, False, shape, stride, 0, tensor.dtype, tensor.fake_device)
