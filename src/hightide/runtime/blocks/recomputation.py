"""A graph that keeps nothing but the way to make its saved tensors again.

As torch's checkpoint without re-entrance, and with a small part of its work for each tensor: what a block needs is one
backward, whose random numbers, autocast and inputs are the block's business (see [Note: recomputation]). Forward counts
the tensors that autograd saves; the first one that backward asks for runs the function once more, up to the last of
them. A tensor is given once, so that its memory is free when its reader is done.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from hightide.ir.refusal import Refused
from hightide.runtime.blocks.autocast import Autocast

Context = AbstractContextManager[Any]

ANOTHER = (
    "a block does not compute the same when it runs again in backward: {what}. Its forward must depend on nothing but "
    "its inputs, parameters and buffers"
)
TWICE = (
    "a saved tensor of a block was asked for a second time in backward, where the first time has used it up; call "
    "ctx.saved_tensors once in the backward of an autograd function"
)


class _Saved:
    """Stands for one tensor in the graph."""

    __slots__ = ("__weakref__", "form", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.form = tensor.shape, tensor.dtype, tensor.device
        self.tensor: Tensor | None = None  # once it is made again


class _AllThere(BaseException):
    """Every tensor that backward needs is there. No error that the block might mind, and go another way."""


class Recomputed:
    """One run of a function. `first` and `again`: contexts of forward and of recomputation."""

    def __init__(self, function: Callable[[], Any], first: Context, again: Context, stops_early: bool) -> None:
        self._function, self._first, self._again, self._stops_early = function, first, again, stops_early
        self._saved: list[weakref.ref[_Saved]] = []  # a node that is done lets go of its own
        self._autocast = Autocast.capture("cpu")  # the block restores the GPU's
        self._is_forward_done = self._is_spent = False
        self._num_saved = self._num_again = 0
        modes = reversed(_get_current_function_mode_stack())  # backward's thread has no `torch.device(...)` of its own
        self._device: Context = next((mode for mode in modes if isinstance(mode, DeviceContext)), nullcontext())

    def forward(self) -> Any:
        with saved_tensors_hooks(self._pack, self._unpack), self._first:
            result = self._function()
        self._is_forward_done, self._num_saved = True, len(self._saved)
        if self._num_again:  # a gradient was taken on the way: what else was made again for it would stay
            for found in self._saved:
                if (saved := found()) is not None:
                    saved.tensor = None
        return result

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._saved.append(weakref.ref(saved))
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        if saved.tensor is None:
            if self._is_spent:
                raise Refused(TWICE)
            self._is_spent = self._is_forward_done  # a gradient that is taken in the middle of forward comes before it
            self._recompute()
        tensor, saved.tensor = saved.tensor, None
        if tensor is None:
            raise Refused(ANOTHER.format(what=f"it saves {self._num_again} tensors, not {len(self._saved)}"))
        return tensor

    def _recompute(self) -> None:
        self._num_again = 0
        with (
            suppress(_AllThere),
            saved_tensors_hooks(self._keep, lambda tensor: tensor),
            torch.enable_grad(),
            self._autocast.restored(),
            self._again,
            self._device,
        ):
            self._function()

    def _keep(self, tensor: Tensor) -> Tensor:
        """One more tensor that recomputation saves, in the order of forward. It must not be part of a graph: a node
        that holds its own output would never die."""
        tensor = tensor.detach()
        number, self._num_again = self._num_again, self._num_again + 1
        num_saved = self._num_saved if self._is_forward_done else len(self._saved)
        if number < num_saved:
            saved = self._saved[number]()
            if saved is not None:
                if saved.form != (tensor.shape, tensor.dtype, tensor.device):
                    now = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, and was another in forward"
                    raise Refused(ANOTHER.format(what=f"the tensor {number} that it saves is {now}"))
                saved.tensor = tensor
            if self._stops_early and number + 1 == num_saved:
                raise _AllThere
        elif self._is_forward_done:
            raise Refused(ANOTHER.format(what=f"it saves more than {num_saved} tensors"))
        return tensor
