"""In use by the block that computes, between enter and leave: its parameters, in backward its gradients."""

from __future__ import annotations

from hightide.ir.tier import Lane
from hightide.runtime.chunks.residency import Residency
from hightide.runtime.schedule.demand import Demands
from hightide.runtime.schedule.in_flight import InFlight
from hightide.runtime.schedule.performer import Performer
from hightide.runtime.schedule.program import Pass
from hightide.runtime.schedule.promises import Promises


class InUse:
    def __init__(self, flight: InFlight, performer: Performer, demands: Demands, promises: Promises) -> None:
        self._flight, self._demands, self._promises = flight, demands, promises
        self._chunks, self._gradients = performer.chunks, performer.gradients
        tables = self._chunks.tables
        self._of_block = [tuple(chunk for chunk in used if chunk not in tables) for used in self._chunks.by_block]
        self._last_use: dict[int, int] = {}

    def take(self, current: Pass, block: int, accumulate: bool) -> None:
        """Binds parameters to where they are on the GPU and, for an accumulating backward, gradients."""
        flight, chunks, binding = self._flight, self._chunks, self._chunks.binding
        for chunk in self._of_block[block]:
            copy = chunks.param_copies[chunk]
            if chunk in flight.fetches:
                flight.wait(flight.fetches[chunk], Lane.H2D)
            if copy.state is Residency.ABSENT:
                self._demands.fetch(chunk, current, self._last_use)
            elif not chunks.placed[chunk].is_streamed:
                if chunk in flight.updates:  # the lane says with `stale` that there are newer values at home
                    flight.wait(flight.updates[chunk], Lane.CPU)
                if chunks.stale[chunk]:
                    self._demands.refresh(chunk)
            copy.move(Residency.HELD)
            binding.bind(chunk, block)
            if accumulate and self._gradients.is_trainable(chunk):
                self._take_gradient(chunk, block)

    def _take_gradient(self, chunk: int, block: int) -> None:
        copy, place = self._chunks.grad_copies[chunk], self._chunks.placed[chunk]
        self._promises.check_update(chunk, block)
        if place.leaves or place.in_grad_slot:
            self._flight.wait_for_gradients([chunk])
            if copy.state is Residency.LEAVING:
                self._flight.wait(self._flight.exits[chunk], Lane.D2H)
            if copy.state is Residency.ABSENT:
                self._demands.gradient(chunk)
        elif copy.state is Residency.ABSENT:
            copy.move(Residency.CLEAN)  # its own place; the ledger clears what is not valid
        copy.move(Residency.HELD)
        self._gradients.bind(chunk, block)

    def bring_sum(self, chunk: int) -> None:
        """Of several ranks, from its home to where it stays: this one adds nothing to it, and others may."""
        copy, place = self._chunks.grad_copies[chunk], self._chunks.placed[chunk]
        if not (place.stays and place.leaves) or self._gradients.is_open(chunk):
            return
        if copy.state is Residency.LEAVING:
            self._flight.wait(self._flight.exits[chunk], Lane.D2H)
        if copy.state is Residency.ABSENT:
            self._demands.gradient(chunk)
            self._gradients.unreduced.add(chunk)

    def release(self, current: Pass, block: int, index: int | None, accumulate: bool) -> None:
        """`index`: of its tick; None: off the plan."""
        for chunk in self._of_block[block]:
            self._chunks.binding.unbind(chunk, block)
            self._chunks.param_copies[chunk].move(Residency.CLEAN)
            self._last_use[chunk] = current.cursor if index is None else index
            if accumulate and self._gradients.is_trainable(chunk):
                current.summed.add(chunk)
                self._release_gradient(chunk, self._promises.is_final(chunk, current, index))

    def release_all(self) -> None:
        """After an exception: nothing stays bound."""
        for chunk, copy in enumerate(self._chunks.param_copies):
            if copy.state is Residency.HELD:
                self._chunks.binding.unbind(chunk)
                copy.move(Residency.CLEAN)
        for chunk, copy in enumerate(self._chunks.grad_copies):
            if copy.state is Residency.HELD:
                self._release_gradient(chunk, self._promises.is_final(chunk, None, None))

    def _release_gradient(self, chunk: int, is_final: bool) -> None:
        place = self._chunks.placed[chunk]
        self._gradients.harvest(chunk, is_final)
        is_dirty = place.leaves or place.in_grad_slot
        self._chunks.grad_copies[chunk].move(Residency.DIRTY if is_dirty else Residency.CLEAN)
