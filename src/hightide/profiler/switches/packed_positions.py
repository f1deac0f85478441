"""Transformers' question whether positions show several sequences packed into one, and who knows the answer.

In a forward without a cache transformers asks this of `position_ids`, on a GPU by waiting for it, and separates the
sequences by a mask if it is so."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

MASKING, ASKING = "transformers.masking_utils", "find_packed_sequence_indices"
_has_plain_positions: ContextVar[bool] = ContextVar("has_plain_positions", default=False)
_would_not_ask: ContextVar[bool] = ContextVar("would_not_ask", default=False)


@contextmanager
def plain_positions() -> Iterator[None]:
    """Inside, positions are known to be 0, 1, 2, ...: nothing is packed, and nobody waits for the GPU to tell."""
    with _answering(_has_plain_positions, True):
        yield


@contextmanager
def asked_as_in_plain(would_ask: bool) -> Iterator[None]:
    """Inside, the question is put only if plain PyTorch would put it."""
    with _answering(_would_not_ask, not would_ask):
        yield


@contextmanager
def _answering(variable: ContextVar[bool], is_known: bool) -> Iterator[None]:
    """Stands between the library and its question for as long as somebody knows the answer. Other threads are asked as
    before."""
    if is_known:
        _interception.enter()
    token = variable.set(is_known)
    try:
        yield
    finally:
        variable.reset(token)
        if is_known:
            _interception.leave()


class _Interception:
    """In the library's place, as long as any caller is inside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._asking: Callable[..., Any] | None = None  # the library's own

    def enter(self) -> None:
        with self._lock:
            self._num_inside += 1
            masking = sys.modules.get(MASKING)
            asking = getattr(masking, ASKING, None)
            if self._asking is None and asking is not None:
                self._asking = asking
                setattr(masking, ASKING, functools.wraps(asking)(functools.partial(_answered, asking)))

    def leave(self) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside and self._asking is not None:
                setattr(sys.modules[MASKING], ASKING, self._asking)
                self._asking = None


def _answered(asking: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():  # another model, as a whole: torch.compile cannot look into a ContextVar
        return asking(*args, **kwargs)
    return None if _has_plain_positions.get() or _would_not_ask.get() else asking(*args, **kwargs)


_interception = _Interception()
