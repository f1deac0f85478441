"""The states of each parameter: its moments, where they lie, and how many updates it has had."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from hightide.ir.refusal import Refused
from hightide.optim.rule import Rule
from hightide.optim.states.lent_copies import LentCopies
from hightide.runtime.chunks.chunks import Chunks
from hightide.stores.array import Array


class Moments:
    def __init__(self, rule: Rule, chunks: Chunks, await_states: Callable[[str], object]) -> None:
        """`await_states`: see LentCopies."""
        self._rule, self._chunks = rule, chunks
        self._counts: dict[str, int] = {}  # updates that used the moments, of each parameter that has a state
        self._counters: dict[str, Tensor] = {}  # the same, where somebody has asked for it, and may have written to it
        self._lent: weakref.WeakValueDictionary[tuple[str, int], Tensor] = weakref.WeakValueDictionary()
        self._copies = LentCopies(self._place, await_states)  # of moments that are no memory

    def __contains__(self, key: str) -> bool:
        """Whether the parameter has a state. Where it has none, its moments are zero."""
        return key in self._counts

    # -- how many updates -----------------------------------------------------------------------------------------

    def count(self, key: str) -> int:
        self.read_counters([key] if key in self._counters else [])
        return self._counts.get(key, 0)

    def read_counters(self, keys: Iterable[str] | None = None) -> None:
        """What users have written there, to all or to some."""
        for key in self._counters if keys is None else keys:
            self._counts[key] = self._whole(key, float(self._counters[key]))

    def set_count(self, key: str, number: float) -> None:
        self._counts[key] = self._whole(key, number)
        if key in self._counters:
            self._counters[key].fill_(number)

    def _whole(self, key: str, number: float) -> int:
        if number < 0 or number != int(number):
            raise Refused(
                f"{self._rule.step_name!r} in the state of {key!r} is {number}, but it counts updates; set it to a "
                "whole number"
            )
        return int(number)

    def counter(self, key: str) -> Tensor:
        """The count as a tensor, as the plain optimizer has it: writes to it count."""
        if key not in self._counters:
            self._counters[key] = torch.tensor(float(self._counts[key]))
        return self._counters[key]

    def advance(self, key: str) -> int:
        """Another update. Returns its number, from 1."""
        counts = self._counts
        if key in self._counters:
            self.set_count(key, self.count(key) + 1)
        else:
            counts[key] = counts[key] + 1 if key in counts else 1
        return counts[key]

    # -- where they are -------------------------------------------------------------------------------------------

    def of(self, key: str) -> list[Array]:
        """Where one parameter's moments are, with what users have written to copies of them."""
        self._copies.write(key)
        return [self._place((key, index)) for index in range(len(self._rule.states))]

    def put(self, key: str, index: int, value: Tensor) -> None:
        """A whole moment."""
        self._copies.write(key)
        self._chunks.put_state(key, self._rule.states[index], value)

    def _place(self, moment: tuple[str, int]) -> Array:
        key, index = moment
        return self._chunks.state_of(key, self._rule.states[index])

    def lend(self, key: str, index: int) -> Tensor:
        """One moment, for the user: its very memory, for as long as the parameter keeps this state; or, on disk, a copy
        that is written there before the next update if the user has changed it."""
        if not self._place((key, index)).is_memory:
            return self._copies.lend((key, index))
        if (lent := self._lent.get((key, index))) is None:
            lent = self._lent[key, index] = self._place((key, index)).view
        return lent

    def flush_copies(self) -> None:
        """What users have written to copies of moments so far."""
        self._copies.write()

    def write_copies(self) -> None:
        """The same before updates, after which copies are old."""
        self.flush_copies()
        self._copies.age()

    def reset(self, key: str) -> None:
        """As if the parameter had never been updated. What the user still has of the state keeps its values, in memory
        of its own: on the host, because the GPU has no room for it."""
        self._counters.pop(key, None)
        if self._counts.pop(key, None) is None:
            return
        self._copies.drop(key)
        for index, state in enumerate(self._rule.states):
            if (lent := self._lent.pop((key, index), None)) is not None:
                lent.data = lent.to("cpu", copy=True)
            if (moment := self._chunks.own_state(key, state)) is not None:
                with moment.opened(is_new=True) as values:
                    values.zero_()

    def renew(self, key: str, count: int) -> None:
        """The parameter has had so many updates; the values of its moments are the caller's to write. What the user
        still has of them stays his, as after `reset`."""
        self._copies.drop(key)
        for index, moment in enumerate(self.of(key)):
            if (lent := self._lent.pop((key, index), None)) is not None:
                lent.data = moment.get()
        self._counters.pop(key, None)
        self._counts[key] = count

    def move_to(self, chunks: Chunks) -> None:
        """Where the moments are now. What the user has of them is what it was: their memory, or a copy."""
        self._chunks = chunks
        for moment, lent in list(self._lent.items()):
            place = self._place(moment)
            if place.is_memory:
                lent.data = place.view
            else:
                lent.data = place.get()
                self._copies.lend(moment, lent)
                del self._lent[moment]
        self._copies.move()
