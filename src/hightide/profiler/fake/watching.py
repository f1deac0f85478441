"""Operations shown to whoever counts or looks at them, by one dispatch mode for all who do.

[Note: one mode] Each dispatch mode is a way through torch's dispatcher and back, for every operation and for every
question that autograd has about a tensor without values. That takes longer than what is done in the mode. So whoever
watches is called by the mode that runs operations without values, where that is there; else by a mode for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from hightide.stores.meter import DispatchMode, device_asked

Before = Callable[[Any, Sequence[Any], Mapping[str, Any]], object]  # of an operation and its arguments
After = Callable[[Any, Sequence[Any], Mapping[str, Any], Any], object]  # and its results


class Operations(DispatchMode):
    """Runs operations, and shows them."""

    def __init__(self) -> None:
        super().__init__()
        self.before: tuple[Before, ...] = ()
        self.after: tuple[After, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.before and (device := device_asked(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():  # else a mode of the caller's would see each question about a tensor
            for look in self.before:
                look(func, args, kwargs)
            if (device := device_asked(func, args)) is not None:
                return device
        out = self.run(func, types, args, kwargs)
        if self.after:
            with torch._C.DisableTorchFunction():
                for see in self.after:
                    see(func, args, kwargs, out)
        return out

    def run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


@contextmanager
def watched(*, before: Sequence[Before] = (), after: Sequence[After] = ()) -> Iterator[None]:
    """Inside, each operation is shown to these, in this order. See [Note: one mode]."""
    mode = _get_current_dispatch_mode()
    if not isinstance(mode, Operations):
        with Operations() as mode, watched(before=before, after=after):
            yield
        return
    there = mode.before, mode.after
    mode.before, mode.after = (*before, *mode.before), (*mode.after, *after)
    try:
        yield
    finally:
        mode.before, mode.after = there
