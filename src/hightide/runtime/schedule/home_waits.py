"""Waiting until the values of a chunk are at home, for whoever reads or changes them between passes."""

from __future__ import annotations

from hightide.ir.tier import Lane
from hightide.runtime.chunks.residency import Residency
from hightide.runtime.schedule.in_flight import InFlight
from hightide.runtime.schedule.performer import Performer


class HomeWaits:
    def __init__(self, flight: InFlight, performer: Performer) -> None:
        self._flight, self._performer, self._chunks = flight, performer, performer.chunks
        self._rings = None if self._chunks.disk is None else self._chunks.disk.rings

    def wait_for_updates(self) -> None:
        for chunk in self._flight.updates:
            self.wait_for_update(chunk)

    def wait_for_update(self, chunk: int) -> None:
        """Until its home has the values, and its states too."""
        if chunk in self._flight.updates:
            self._flight.wait(self._flight.updates[chunk], Lane.CPU)
        if chunk in self._flight.settled:
            self._flight.wait(self._flight.settled[chunk], Lane.CPU)
        if chunk in self._flight.stored:
            self._flight.wait(self._flight.stored[chunk], Lane.DISK_WRITE)
        if self._chunks.placed[chunk].is_gathered_after_update and chunk in self._flight.fetches:
            self._flight.wait(self._flight.fetches[chunk], Lane.GATHER)

    def await_home(self, chunk: int) -> None:
        """The same, and nothing reads them there. Whoever asks may change them: what was read ahead is read again."""
        self.wait_for_update(chunk)
        if self._rings is not None:
            for ticket in self._flight.reads_of(chunk):
                self._flight.wait(ticket, Lane.DISK_READ)
            self._rings.forget(chunk)

    def open_home(self, chunk: int) -> None:
        """The same, and no copy of them is on the GPU, or on its way there: there will be new values at home."""
        if chunk in self._flight.fetches:
            self._flight.wait(self._flight.fetches[chunk], Lane.H2D)  # other ranks may take long
            self._flight.fetches[chunk].wait_through()
        self.await_home(chunk)
        if self._chunks.placed[chunk].is_streamed and self._chunks.param_copies[chunk].state is Residency.CLEAN:
            self._performer.evict(chunk)
