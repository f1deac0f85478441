"""Randomness and rounding switched off, for comparing runs that would draw or add in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
DROPOUT = ("dropout_p", "dropout")  # arguments of attention and recurrent kernels
FLOAT = 0.5  # what a random number is then
_DROPOUTS = {aten.native_dropout, aten._fused_dropout, aten.alpha_dropout, aten.dropout}


class Quiet(TorchDispatchMode):
    """Random operations give constants: nothing is dropped, a permutation is the reverse. It works for every
    operation that torch marks as random, on any device. `draws` has the number of elements of each draw."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func.overloadpacket in _DROPOUTS:
            return self._kept(func, args)
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if any(name in names for name in DROPOUT):
            return func(**{**given, **{name: 0.0 for name in DROPOUT if name in names}})
        if "training" in names:  # a random slope: its mean
            return func(**{**given, "training": False})
        result = func(*args, **kwargs)
        for tensor in [result] if isinstance(result, Tensor) else result:
            self.draws.append(tensor.numel())
            _make_constant(func, given, tensor)
        return result

    def _kept(self, func: Any, args: Any) -> Any:
        """Everything is kept. The scale of backward is that of the call: the same, however it is split."""
        kept = args[0].clone()
        self.draws.append(kept.numel())
        if func.overloadpacket in (aten.native_dropout, aten._fused_dropout):
            return kept, torch.ones_like(kept, dtype=torch.bool)
        return kept


def _make_constant(func: Any, given: dict[str, Any], drawn: Tensor) -> None:
    """In place: there may be no room for more."""
    name = func.overloadpacket._qualified_op_name.removeprefix("aten::").rstrip("_")
    if name == "randperm":
        drawn.copy_(torch.arange(drawn.numel() - 1, -1, -1, device=drawn.device))  # the identity would hide it
    elif name == "bernoulli":
        drawn.fill_(1)
    elif name == "normal" and isinstance(given.get("mean"), Tensor):
        drawn.copy_(given["mean"].expand_as(drawn))
    elif drawn.is_floating_point() or drawn.is_complex():
        drawn.fill_(FLOAT)
    else:
        low = given.get("low", 0)
        drawn.fill_(low if isinstance(low, int) else 0)


@contextmanager
def float32_precision(precision: str = "highest") -> Iterator[None]:
    """Of products of fp32 matrices, and of convolutions. Less than the highest is TF32 on a GPU, which has hardly more
    bits than bf16. Where a user has chosen it in torch's newer way, the older one cannot be asked."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before: list[Any]
    ways: list[Callable[[Any], object]]
    try:
        before = [torch.get_float32_matmul_precision(), cudnn.allow_tf32]
        ways = [torch.set_float32_matmul_precision, partial(setattr, cudnn, "allow_tf32")]
        now = [precision, precision != "highest"]
    except RuntimeError:
        places = (matmul, cudnn.conv, cudnn.rnn)  # type: ignore[attr-defined]
        before = [place.fp32_precision for place in places]
        ways = [partial(setattr, place, "fp32_precision") for place in places]
        now = ["ieee" if precision == "highest" else "tf32"] * len(places)
    try:
        for way, value in zip(ways, now, strict=True):
            way(value)
        yield
    finally:
        for way, value in zip(ways, before, strict=True):
            way(value)
