"""Transformers' question whether positions show several sequences packed into one, and who knows the answer.

In a forward without a cache transformers asks this of `position_ids`, on a GPU by waiting for it, and separates the
sequences by a mask if it is so."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

ASKING = "find_packed_sequence_indices"  # of transformers.masking_utils
_has_plain_positions: ContextVar[bool] = ContextVar("has_plain_positions", default=False)
_would_not_ask: ContextVar[bool] = ContextVar("would_not_ask", default=False)


@contextmanager
def plain_positions() -> Iterator[None]:
    """Inside, positions are known to be 0, 1, 2, ...: nothing is packed, and nobody waits for the GPU to tell."""
    with _set(_has_plain_positions, can_answer()):
        yield


@contextmanager
def asked_as_in_plain(would_ask: bool) -> Iterator[None]:
    """Inside, the question is put only if plain PyTorch would put it."""
    with _set(_would_not_ask, not would_ask and can_answer()):
        yield


@contextmanager
def _set(variable: ContextVar[bool], value: bool) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def can_answer() -> bool:
    """Puts itself between the library and its question, once; other models and threads are asked as before."""
    masking = sys.modules.get("transformers.masking_utils")
    asking = getattr(masking, ASKING, None)
    if asking is None or hasattr(asking, "__wrapped__"):
        return asking is not None

    @functools.wraps(asking)
    def answered(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # another model, as a whole: torch.compile cannot look into a ContextVar
            return asking(*args, **kwargs)
        is_known = _has_plain_positions.get() or _would_not_ask.get()
        return None if is_known else asking(*args, **kwargs)

    setattr(masking, ASKING, answered)
    return True
