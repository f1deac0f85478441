"""Advice of libraries about loops that are not ours, which nobody has asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def errors_only(library: str) -> Iterator[None]:
    """Of what it logs."""
    logger = logging.getLogger(library)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
