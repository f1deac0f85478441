"""Moments that live on disk, for users who take them from `optimizer.state`.

[Note: copies of moments] In memory a user gets the very moment that updates work on. From disk he gets a copy, which is
remembered until the next update: if its version has grown by then, its values are written to their place. An update
makes the copy obsolete, and a write to it after that could not be followed: it is refused at the next look, never lost
without a word. Copies that only this file holds are let go when there are many of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hightide.ir.refusal import Refused
from hightide.stores.array import Array

MOST_BYTES = 2**28  # of copies that nobody else has
_OWN_REFERENCES = 2  # to a copy's tensor: that of its record, and the argument of getrefcount

Moment = tuple[str, int]  # of which parameter, and which of its moments


@dataclass(slots=True)
class _Copy:
    values: Tensor
    version: int  # when they were last what is on disk


class LentCopies:
    def __init__(self, place: Callable[[Moment], Array], await_states: Callable[[str], object]) -> None:
        """`await_states`: until nothing is under way with a parameter's states, and what was read ahead of them is read
        again."""
        self._place, self._await_states = place, await_states
        self._copies: dict[Moment, _Copy] = {}
        self._obsolete: list[tuple[str, _Copy]] = []  # others have these still

    def lend(self, moment: Moment, values: Tensor | None = None) -> Tensor:
        """`values`: a tensor that somebody has of it already, as it is on disk."""
        copy = self._copies.get(moment)
        if copy is None:
            self._let_go()
            values = self._place(moment).get() if values is None else values
            copy = self._copies[moment] = _Copy(values, values._version)
        return copy.values

    def write(self, key: str | None = None) -> None:
        """What was changed, of all parameters or of one."""
        self._check()
        for moment, copy in self._copies.items():
            if (key is None or moment[0] == key) and copy.values._version != copy.version:
                self._await_states(moment[0])
                self._place(moment).put(copy.values)
                copy.version = copy.values._version

    def age(self) -> None:
        """An update is about to change what is on disk."""
        self._obsolete += [(key, copy) for (key, _), copy in self._copies.items() if not _is_alone(copy)]
        self._copies.clear()

    def drop(self, key: str) -> None:
        """The parameter has no state any more; what users have of it is theirs."""
        self._copies = {moment: copy for moment, copy in self._copies.items() if moment[0] != key}
        self._obsolete = [one for one in self._obsolete if one[0] != key]

    def move(self) -> None:
        """To other places: copies of what is memory there become that."""
        self.write()
        for moment, copy in list(self._copies.items()):
            place = self._place(moment)
            if place.is_memory:
                copy.values.data = place.view
                del self._copies[moment]

    def _check(self) -> None:
        changed = [key for key, copy in self._obsolete if copy.values._version != copy.version]
        self._obsolete = [one for one in self._obsolete if not _is_alone(one[1])]
        for _, copy in self._obsolete:
            copy.version = copy.values._version
        if changed:
            raise Refused(
                f"a state of {changed[0]!r} was written to after a step() that came after it was taken from "
                "optimizer.state: it lives on disk, and that tensor was a copy. Take it from optimizer.state again "
                "after each step()"
            )

    def _let_go(self) -> None:
        """Of what nobody else has, if it is much."""
        if sum(copy.values.nbytes for copy in self._copies.values()) > MOST_BYTES:
            self.write()
            self._copies = {moment: copy for moment, copy in self._copies.items() if not _is_alone(copy)}


def _is_alone(copy: _Copy) -> bool:
    return sys.getrefcount(copy.values) <= _OWN_REFERENCES
