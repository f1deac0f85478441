"""A forked child has the model's objects, but neither the threads nor the memory behind them."""

from __future__ import annotations

import os

FORKED = (
    "this model was wrapped by hightide in another process, of which this one is a fork: the threads that move its "
    "parameters and the memory that holds them are not here. Use it in the process that wrapped it. A worker of a "
    "DataLoader, or another child that needs values, gets copies made before the fork (model.state_dict()), or wraps a "
    "model of its own"
)

_num_forks = 0  # between the first process and this one


def _after_fork() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_after_fork)


class Birthplace:
    """The process in which something was made."""

    __slots__ = ("_num_forks",)

    def __init__(self) -> None:
        self._num_forks = _num_forks

    @property
    def is_here(self) -> bool:
        return self._num_forks == _num_forks

    def check(self) -> None:
        """RuntimeError in a fork."""
        if self._num_forks != _num_forks:
            raise RuntimeError(FORKED)
