"""A forked child has the model's objects, but neither the threads nor the memory behind them."""

from __future__ import annotations

import os
import weakref

FORKED = (
    "this model was wrapped by hightide in another process, of which this one is a fork: the threads that move its "
    "parameters and the memory that holds them are not here. Use it in the process that wrapped it. A worker of a "
    "DataLoader, or another child that needs values, gets copies made before the fork (model.state_dict()), or wraps a "
    "model of its own"
)


class Birthplace:
    """The process in which something was made."""

    __slots__ = ("__weakref__", "is_here")

    def __init__(self) -> None:
        self.is_here = True  # asked at every step of a block: a fork changes it
        _made_here.add(self)

    def check(self) -> None:
        """RuntimeError in a fork."""
        if not self.is_here:
            raise RuntimeError(FORKED)


_made_here: weakref.WeakSet[Birthplace] = weakref.WeakSet()


def _after_fork() -> None:
    for birthplace in _made_here:
        birthplace.is_here = False
    _made_here.clear()


os.register_at_fork(after_in_child=_after_fork)
