"""Patience of ranks with each other."""

from __future__ import annotations

from dataclasses import dataclass

BEATS_OF_DOUBT = 5  # a rank whose connection is closed, and that gave no sign for so many, is dead


@dataclass(frozen=True)
class Patience:
    """How long ranks wait for each other."""

    timeout_s: float = 1800.0  # for a rank that lives, and does something else: rank 0 evaluates
    warn_s: float = 60.0  # after which that is said
    silent_s: float = 45.0  # for a rank that gives no sign of life; one that keeps Python's lock gives none either
    beat_s: float = 1.0  # from one sign to the next

    def __post_init__(self) -> None:
        if not 0 < self.beat_s * (BEATS_OF_DOUBT + 1) <= self.silent_s:
            raise ValueError(
                f"silent_s={self.silent_s:g} must be at least {BEATS_OF_DOUBT + 1} times beat_s={self.beat_s:g}, else "
                f"ranks that live are taken for dead; set silent_s={self.beat_s * (BEATS_OF_DOUBT + 1):g} or more"
            )
        if self.timeout_s <= 0 or self.warn_s <= 0:
            raise ValueError(f"timeout_s={self.timeout_s:g} and warn_s={self.warn_s:g} must be above 0")
