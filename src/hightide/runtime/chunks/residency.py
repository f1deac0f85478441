"""The state of one copy of a chunk on one tier, as a table of legal transitions."""

from __future__ import annotations

from enum import StrEnum


class Residency(StrEnum):
    ABSENT = "absent"  # no copy here
    ARRIVING = "arriving"  # being filled by a lane
    CLEAN = "clean"  # valid, may be used or dropped
    HELD = "held"  # in use: must neither move nor be dropped
    DIRTY = "dirty"  # the only valid copy: must be written back before it is dropped
    LEAVING = "leaving"  # being written back by a lane


_ = Residency
TRANSITIONS: dict[Residency, frozenset[Residency]] = {
    _.ABSENT: frozenset({_.ARRIVING, _.CLEAN}),  # fetch; open at zero
    _.ARRIVING: frozenset({_.CLEAN, _.ABSENT}),  # arrived; failed
    _.CLEAN: frozenset({_.HELD, _.ARRIVING, _.ABSENT}),  # hold; refresh; evict
    _.HELD: frozenset({_.CLEAN, _.DIRTY}),  # release, read or written
    _.DIRTY: frozenset({_.HELD, _.LEAVING}),  # hold again; write back
    _.LEAVING: frozenset({_.ABSENT, _.DIRTY}),  # written back and dropped; failed
}
del _


class IllegalTransition(RuntimeError):
    """A bug in hightide, never the user's fault: a copy was used in a state that does not allow it."""


class Copy:
    """One copy of one chunk on one tier. `move` is the only way to change its state."""

    __slots__ = ("label", "state")

    def __init__(self, label: str, state: Residency = Residency.ABSENT) -> None:
        self.label = label
        self.state = state

    def move(self, to: Residency) -> None:
        if to not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self.label}: {self.state} cannot become {to}")
        self.state = to
