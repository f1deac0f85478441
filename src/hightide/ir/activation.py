"""How much of what a block computes in forward is held for its backward: a ladder, from nothing to everything."""

from __future__ import annotations

from enum import StrEnum


class Activation(StrEnum):
    """In order: each holds more than the one before, and repeats less."""

    RECOMPUTE = "recompute"  # nothing: backward repeats forward, as far as it needs it
    SELECTIVE = "selective"  # what takes most operations for its bytes (products, attention): the rest is repeated
    KEEP = "keep"  # everything that backward reads
