"""It stands in `p.grad` while the real gradient lies in a chunk somewhere else.

[Note: gradient placeholder] Code around an optimizer looks at `p.grad`: `clip_grad_norm_` takes norms and multiplies,
a GradScaler unscales, loops test for None or print. With None there, clipping would silently do nothing. A
placeholder has shape and dtype, no memory, and forwards the few operations that make sense where the gradient is:
norm, product with a number, sum with a tensor, zero. Other reads fetch a copy; a view of a placeholder is again a
placeholder, so that a write through it is noticed. Any other write raises.

[Note: who holds a placeholder] A parameter's `.grad` is held in C++, where Python's collector does not look. So a
placeholder knows its owner weakly: a strong reference would be a circle (parameter, gradient, ledger, chunks,
parameter) that is never found, and a model that is dropped while it has gradients would never be freed.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from hightide.ir.refusal import Refused
from hightide.runtime.gradients.gradient_values import GradientValues
from hightide.runtime.guards.other_optimizer import refuse_other_optimizer

aten = torch.ops.aten


class GradientPlaceholder(Tensor):
    """`GradientPlaceholder(param_like, owner, key)`: see [Note: gradient placeholder]."""

    _owner: weakref.ref[GradientValues]  # [Note: who holds a placeholder]
    _key: str
    _views: tuple[Callable[[Tensor], Tensor], ...]  # from the whole gradient to this view of it

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, param_like: Tensor, owner: GradientValues, key: str) -> GradientPlaceholder:
        # An absent parameter is an expanded scalar, so its strides are no example: the gradient is contiguous. And a
        # GradScaler refuses gradients in fp16, which would overflow when summed; ours are sums in fp32.
        dtype = torch.float32 if param_like.dtype == torch.float16 else param_like.dtype
        return _placeholder(torch.empty(param_like.shape, dtype=dtype, device="meta"), param_like.device, owner, key)

    def __init__(self, param_like: Tensor, owner: GradientValues, key: str) -> None:
        """Everything happens in __new__."""

    @property
    def owner(self) -> GradientValues:
        owner = self._owner()
        if owner is None:
            raise Refused(
                f"the gradient of {self._key!r} is gone with the wrapped model that it belonged to; keep the model, or "
                "take copies with p.grad.clone() while it is there"
            )
        return owner

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func.overloadpacket)
        if handler is not None:
            result = handler(func, args, kwargs)
            if result is not NotImplemented:
                return result
        _refuse_writes(func, args, kwargs)
        if _is_view(func):
            return _view(func, args, kwargs)
        args, kwargs = tree_map(_real, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        kind = "view of the gradient" if self._views else "gradient"
        return (
            f"GradientPlaceholder({kind} of {self._key!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={self.device}; values: .clone())"
        )

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    # What copies or reads memory without asking the dispatcher.

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = _real(self)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _real(self).__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        return _real(self).numpy(force=force)

    def tolist(self) -> Any:
        return _real(self).tolist()


def _placeholder(
    like: Tensor,
    device: torch.device,
    owner: GradientValues,
    key: str,
    views: tuple[Callable[[Tensor], Tensor], ...] = (),
) -> GradientPlaceholder:
    """Shape, strides and dtype are those of `like`, which may be on the meta device."""
    placeholder: GradientPlaceholder = Tensor._make_wrapper_subclass(
        GradientPlaceholder, like.shape, strides=like.stride(), dtype=like.dtype, device=device
    )
    placeholder._owner, placeholder._key, placeholder._views = weakref.ref(owner), key, views
    return placeholder


def _real(value: Any) -> Any:
    """The values of a placeholder, as an ordinary tensor that owns them."""
    if not isinstance(value, GradientPlaceholder):
        return value
    gradient = value.owner.read(value._key).to(dtype=value.dtype, device=value.device).contiguous()
    for view in value._views:
        gradient = view(gradient)
    return gradient


# -- operations done where the gradient is -----------------------------------------------------------------------


def _whole(value: object) -> bool:
    return isinstance(value, GradientPlaceholder) and not value._views


def _norm_of(gradient: Tensor, norm_type: float) -> Tensor:
    if isinstance(gradient, GradientPlaceholder) and not gradient._views:
        return gradient.owner.norm(gradient._key, float(norm_type))
    norm: Tensor = torch.linalg.vector_norm(gradient, norm_type)
    return norm


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`linalg_vector_norm(self, ord=2, dim=None, keepdim=False, dtype=None)` and the older `norm(self, p=2)`."""
    gradient, *rest = args
    norm_type = rest[0] if rest else kwargs.get("ord", kwargs.get("p", 2))
    dim = rest[1] if len(rest) > 1 else kwargs.get("dim")
    keepdim = rest[2] if len(rest) > 2 else kwargs.get("keepdim", False)
    is_number = norm_type is None or isinstance(norm_type, int | float)
    if not _whole(gradient) or dim or keepdim or not is_number or isinstance(dim, torch.dtype):
        return NotImplemented
    norm = _norm_of(gradient, 2.0 if norm_type is None else norm_type)
    return norm if kwargs.get("dtype") is None else norm.to(kwargs["dtype"])


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    gradients, *rest = args
    norms = [_norm_of(gradient, rest[0] if rest else kwargs.get("ord", 2)) for gradient in gradients]
    return norms if kwargs.get("dtype") is None else [norm.to(kwargs["dtype"]) for norm in norms]


def _multiply(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gradient, factor = args[0], args[1] if len(args) > 1 else None
    if not _whole(gradient) or not _is_number(factor) or kwargs:
        return NotImplemented
    assert isinstance(gradient, GradientPlaceholder) and factor is not None
    gradient.owner.scale(gradient._key, 1 / factor if func.overloadpacket is aten.div_ else factor)
    return gradient


def _foreach_multiply(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gradients, factors = args
    if not isinstance(factors, Sequence):
        factors = [factors] * len(gradients)
    are_views = [isinstance(gradient, GradientPlaceholder) and not _whole(gradient) for gradient in gradients]
    if kwargs or any(are_views) or not all(_is_number(factor) for factor in factors):
        return NotImplemented
    for gradient, factor in zip(gradients, factors, strict=True):
        gradient.div_(factor) if func.overloadpacket is aten._foreach_div_ else gradient.mul_(factor)
    return None


def _add(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By hand, or by autograd: a parameter that is on the GPU may be part of the loss outside of its block too."""
    gradient, value = args
    if not _whole(gradient) or not isinstance(value, Tensor):
        return NotImplemented
    gradient.owner.add(gradient._key, _real(value) * kwargs.get("alpha", 1))
    return gradient


def _zero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (gradient,) = args
    if not _whole(gradient):
        return NotImplemented
    gradient.owner.zero(gradient._key)
    return gradient


def _foreach_zero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (gradients,) = args
    for gradient in gradients:
        gradient.zero_()


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What torch.amp.GradScaler does to all gradients: look for infinities, then multiply."""
    gradients, found_inf, inverse_scale = args
    factor = inverse_scale.reshape(())
    for gradient in gradients:
        is_finite = gradient.owner.is_finite(gradient._key) if _whole(gradient) else _all_finite(gradient)
        found_inf.copy_(torch.maximum(found_inf, (~is_finite).to(found_inf)))
        gradient.mul_(factor)


def _all_finite(gradient: Tensor) -> Tensor:
    return torch.isfinite(_norm_of(gradient, math.inf))


def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GradientPlaceholder:
    (gradient,) = args
    return _placeholder(gradient, gradient.device, gradient.owner, gradient._key, gradient._views)


_HANDLERS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    aten.linalg_vector_norm: _vector_norm,
    aten.norm: _vector_norm,
    aten._foreach_norm: _foreach_norm,
    aten.mul_: _multiply,
    aten.div_: _multiply,
    aten._foreach_mul_: _foreach_multiply,
    aten._foreach_div_: _foreach_multiply,
    aten.add_: _add,
    aten.zero_: _zero,
    aten._foreach_zero_: _foreach_zero,
    aten._amp_foreach_non_finite_check_and_unscale_: _unscale,
    aten.detach: _detach,
}


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not isinstance(value, GradientPlaceholder)
    return isinstance(value, int | float)


# -- everything else ---------------------------------------------------------------------------------------------


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises when an argument that the operation writes to is, or holds, a placeholder. Collectives do not say to which
    they write."""
    is_collective = func.namespace == "c10d"
    for position, argument in enumerate(func._schema.arguments):
        if not is_collective and (argument.alias_info is None or not argument.alias_info.is_write):
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        leaves, _ = tree_flatten(value)
        for leaf in leaves:
            if isinstance(leaf, GradientPlaceholder):
                refuse_other_optimizer()
                if is_collective:
                    raise Refused(
                        f"a collective of torch.distributed ({func}) on the gradient of {leaf._key!r}, which hightide "
                        "keeps in chunks. Of ranks that train together it is the mean already; to send it, pass a copy "
                        "(p.grad.clone()), and put back what has come with p.grad = tensor"
                    )
                raise Refused(
                    f"hightide keeps gradients in chunks, where {func} cannot change the gradient of {leaf._key!r}; "
                    "scale with p.grad.mul_(number), add with p.grad.add_(tensor), replace with p.grad = tensor, clip "
                    "with torch.nn.utils.clip_grad_norm_ or optimizer.clip_grad_norm_, read with p.grad.clone()"
                )


def _is_view(func: Any) -> bool:
    return not func._schema.is_mutable and any(result.alias_info is not None for result in func._schema.returns)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A placeholder for a view (or a list of them): a copy would take writes and lose them."""
    gradient, *rest = args
    assert isinstance(gradient, GradientPlaceholder), func
    shape_only = torch.empty_strided(gradient.shape, gradient.stride(), dtype=gradient.dtype, device="meta")
    views = func(shape_only, *rest, **kwargs)

    def placeholder(view: Tensor, pick: Callable[[Any], Tensor]) -> GradientPlaceholder:
        steps = (*gradient._views, lambda real: pick(func(real, *rest, **kwargs)))
        return _placeholder(view, gradient.device, gradient.owner, gradient._key, steps)

    if isinstance(views, Tensor):
        return placeholder(views, lambda result: result)
    return [placeholder(view, itemgetter(index)) for index, view in enumerate(views)]
