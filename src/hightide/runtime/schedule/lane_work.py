"""Work that an action leaves for its lane."""

from __future__ import annotations

from collections.abc import Callable

LaneWork = Callable[[], object]  # a number that it returns is that of the bytes moved


def nothing() -> None:
    """An action that the model's path through this pass made unnecessary."""
