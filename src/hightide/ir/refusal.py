"""The one exception of everything that hightide will not do while a model trains."""

from __future__ import annotations


class Refused(RuntimeError):
    """Going on would give other results than plain PyTorch, or cannot be done. The message says what to do instead.

    What is wrong with arguments of `wrap` and `plan` is a ValueError, before anything has changed."""


class RefusedArgument(Refused, ValueError):
    """What was passed to a call is the reason."""
