"""Gradients that several ranks average: blocks sum those of their own batch, and every rank keeps a shard of the mean.

[Note: reading gradients in shards] Outside of backward a gradient is what DDP shows: the mean over all ranks. Norms of
type 2 are summed for all parameters at the end of backward, so it does not matter who asks for one. Everything else is
an exchange in the user's thread: values, and norms of other types. All ranks have to ask for the same, in the same
order. A rank that asks alone is told at once: the watchman sees that others go on without it (see [Note: two lanes] in
shard/verdicts.py). Writing needs no exchange: of a tensor that all ranks put there each takes its own elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hightide.ir.block import ModelProfile
from hightide.ir.plan import Update
from hightide.ir.refusal import Refused
from hightide.ir.tier import Lane
from hightide.process.interrupts import uninterrupted
from hightide.runtime.chunks.absent import Disabled
from hightide.runtime.chunks.between_ranks import BetweenRanks
from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.chunks.homes import GRAD_DTYPE
from hightide.runtime.chunks.residency import Residency
from hightide.runtime.gradients.factors import scale
from hightide.runtime.gradients.gradients import Gradients
from hightide.runtime.schedule.in_flight import InFlight
from hightide.stores.array import Array
from hightide.stores.ticket import Ticket


class RankedGradients(Gradients):
    def __init__(
        self, profile: ModelProfile, chunks: Chunks, update: Update, flight: InFlight, between: BetweenRanks
    ) -> None:
        self.between, self._flight = between, flight
        self._unfinished: set[int] = set()  # chunks to which a later pass of the step adds
        self._reduced: set[int] = set()  # chunks that were averaged in this pass
        self._part_norms: dict[str, Tensor] = {}  # of the elements that this rank answers for
        self._summed_norms: Ticket | None = None  # norms of whole parameters, once it is done
        self._rewritten: set[str] = set()  # parameters whose gradient is not what was averaged
        self._other_norms: dict[float, dict[str, Tensor]] = {}  # by type, of all parameters, as far as asked for
        super().__init__(profile, chunks, update, flight)

    # -- in backward ----------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        super().begin_pass()
        self._other_norms.clear()
        self._reduced.clear()

    def cleared(self, chunk: int) -> None:
        super().cleared(chunk)
        self.unreduced.add(chunk)

    def will_be_averaged(self, chunk: int) -> None:
        self.unreduced.discard(chunk)
        self._reduced.add(chunk)

    def is_summed(self, chunk: int) -> bool:
        """Also what other ranks alone have added to in this pass: which parameters those are is known at its end."""
        return chunk in self._reduced or super().is_summed(chunk)

    def pass_over(self, chunk: int) -> None:
        """Its block adds nothing here, but may do so elsewhere: what is averaged then are the sums so far, with what
        the user has multiplied them by since."""
        chunks, place = self._chunks, self._chunks.placed[chunk]
        if chunk in self._opened or chunk in chunks.tables or not self.is_trainable(chunk):
            return
        if place.is_reduced_home:
            self.freshen_home(chunk)
        elif not (place.in_grad_slot or place.leaves) or not self._is_leaving(chunk):
            self.wait_for(chunk)
            self._go_on(chunk)
            self._freshen(chunk, chunks.grad_on_gpu(chunk))

    def _is_leaving(self, chunk: int) -> bool:
        """Or has left: see [Note: how far lanes are] in schedule/demand.py."""
        return self._chunks.grad_copies[chunk].state in (Residency.LEAVING, Residency.ABSENT)

    def bind(self, chunk: int, block: int) -> None:
        """A sum that goes on where it lies may still be averaged: its last pass has ended, or its planned calls of this
        one, and others are slower."""
        self.wait_for(chunk)
        self._go_on(chunk)
        super().bind(chunk, block)

    def _go_on(self, chunk: int) -> None:
        """With a sum that was averaged where it stays: a step came, and nobody has cleared it."""
        place = self._chunks.placed[chunk]
        if not (self._chunks.is_cut(chunk) and place.stays and not place.leaves):
            return
        if chunk not in self.unreduced and self.has_gradient(chunk):
            self._chunks.spread_gradient(chunk)
            self.unreduced.add(chunk)

    def _summed(self, chunk: int, received: dict[str, Tensor], is_final: bool) -> None:
        """What is done where there is one rank, `averaged` does."""
        self.unreduced.add(chunk)
        self._rewritten.difference_update(entry.param for entry in self._entries[chunk])
        (self._unfinished.discard if is_final else self._unfinished.add)(chunk)

    def freshen_home(self, chunk: int) -> None:
        """As `_freshen`, of a sum on the GPU that is in shards: what is added comes there when it is averaged."""
        if chunk in self._opened:
            return
        self._opened.add(chunk)
        self.wait_for(chunk)
        flat, entries = self._chunks.grad(chunk).view, self._chunks.shards[chunk].params
        if not self.has_gradient(chunk):
            flat.zero_()
        for entry in entries if self.has_gradient(chunk) else ():
            if entry.param in self._placeholders and entry.param not in self._valid:
                flat[entry.within()].zero_()
            elif entry.param in self._factor:
                scale(flat[entry.within()], self._factor[entry.param])
        for entry in self._entries[chunk]:
            self._factor.pop(entry.param, None)

    def is_finished(self, chunk: int) -> bool:
        """No later pass of the step adds to it, as far as this rank has seen."""
        return chunk not in self._unfinished

    def averaged(self, chunk: int, is_finished: bool) -> None:
        """On the lane that has done it."""
        chunks = self._chunks
        rounds_first = chunks.rounding_dtype(chunk) == torch.float16
        if is_finished and rounds_first:
            chunks.round_gradient(chunk)
        if self.takes_norms:
            self._part_norms.update(self.between.norms(chunk))
        if is_finished and chunks.placed[chunk].rounds_in_place:
            chunks.round_gradient(chunk)

    # -- at its end -----------------------------------------------------------------------------------------------

    def agree(self, block_chunks: Iterable[int] | None = None) -> list[int]:
        """After a backward, or that of one block: a parameter has a gradient if it has one on any rank, as with DDP.
        After a backward: returns chunks whose gradient any rank has not averaged."""
        self._other_norms.clear()
        marks = {f"chunk {chunk}": chunk for chunk in range(len(self._entries))} if block_chunks is None else {}
        unreduced = {mark for mark, chunk in marks.items() if chunk in self.unreduced}
        if block_chunks is None:
            keys, what = [*self._trained, *marks], "parameters that have gradients"
        else:
            chunks = [*block_chunks]
            keys = [entry.param for chunk in chunks for entry in self._entries[chunk]]
            what = f"parameters of chunks {', '.join(map(str, chunks))} that have gradients"
        if not keys:
            return []
        with Disabled():
            loose = {key for key in self._loose if self._chunks.parameters[key].grad is not None}
        found = self.between.any_of(what + self.between.moment, keys, self._valid | loose | unreduced)
        left = sorted(marks[mark] for mark in found & marks.keys())
        found -= marks.keys()
        with Disabled():
            for key in found - self._valid - self._loose:
                self._valid.add(key)
                self._chunks.parameters[key].grad = self._placeholders[key]
            for key in (found & self._loose) - loose:
                param, place = self._chunks.parameters[key], self.place_of(key).view
                param.grad = place.zero_() if param.dtype == place.dtype else torch.zeros_like(param)
        return left

    def begin_averaging(self, chunk: int) -> None:
        """Of loose parameters, whose gradients are now in place, so far as there are any."""
        self._collect_loose(chunk)

    def end_averaging(self, chunk: int) -> None:
        for key in self._loose_in[chunk]:
            gradient = self._chunks.parameters[key].grad
            if gradient is not None and not self._is_collected(key):
                gradient.copy_(self.place_of(key).view)

    def norms_to_sum(self) -> Callable[[], dict[str, Tensor]]:
        """Work for the lane that averages, once all of it is averaged."""
        keys = [key for key in self._trained if key in self._valid]
        return partial(self.between.sum_norms, keys, self._part_norms)

    def will_have_norms(self, ticket: Ticket | None) -> None:
        self._summed_norms = ticket

    # -- what a placeholder asks ----------------------------------------------------------------------------------

    def norm(self, key: str, norm_type: float) -> Tensor:
        self._refuse_in_backward("measured", "clip or inspect them")
        self._check_averaged(key, "the norm of ")
        norms = {} if key in self._rewritten or norm_type == 0.0 else self._norms_of(norm_type)
        if key in norms:
            return norms[key] * self._factor_size(key)
        return torch.linalg.vector_norm(self.read(key), norm_type)

    def is_finite(self, key: str) -> Tensor:
        """On all ranks."""
        return torch.isfinite(self.norm(key, 2.0))

    def read(self, key: str) -> Tensor:
        self._refuse_in_backward("read", "read them")
        self._check_averaged(key, "")
        chunk, _ = self._chunks.places[key]
        self._come_home(chunk)
        if not self._chunks.is_cut(chunk):
            value = self._at_rest(chunk, self.place_of(key))
        else:
            part = self._own_part(key)
            value = self.between.whole(f"gradient of {key}", part, GRAD_DTYPE)
        value = value.view(self._chunks.shapes[key]).to(self._chunks.gpu.device)
        scale(value, self._factor.get(key, 1.0))
        return value.to(self._placeholders[key].dtype)

    def add(self, key: str, value: Tensor) -> None:
        self._refuse_in_backward("changed", "change them")
        self._check_averaged(key, "")
        self._await_home(chunk := self._chunks.places[key][0])
        self._rewritten.add(key)
        self._is_written(chunk)
        place = self.place_of(key) if not self._chunks.is_cut(chunk) else self._own_place(key)
        factor = self._factor.pop(key, 1.0)
        if place is not None:
            whole = value.broadcast_to(self._chunks.shapes[key])
            with uninterrupted, place.opened() as gradient:
                self._add_to(gradient, factor, self._chunks.own_elements(key, whole), self._rounds_now(chunk))

    def _put(self, key: str, gradient: Tensor) -> None:
        self._check_averaged(key, "")
        self._rewritten.add(key)
        if not self._chunks.is_cut(self._chunks.places[key][0]):
            super()._put(key, gradient)
        elif (place := self._own_place(key)) is not None:
            place.put(self._chunks.own_elements(key, gradient).to(place.dtype))

    # -- where this rank has what -----------------------------------------------------------------------------------

    def _own_place(self, key: str) -> Array | None:
        """Of a gradient in shards, this rank's elements, in one dimension. None: it has none."""
        chunks, own = self._chunks, self._chunks.own_entry(key)
        if own is None:
            return None
        chunk, entry = chunks.places[key]
        array = chunks.latest_grad(chunk)
        is_whole = array.shape[0] == chunks.specs[chunk].trainable_numel
        start = entry.offset_numel + own.start_numel if is_whole else own.offset_numel
        return array.part(start, (own.numel,))

    def _own_part(self, key: str) -> Tensor | None:
        place = self._own_place(key)
        return None if place is None else self._at_rest(self._chunks.places[key][0], place)

    def _check_averaged(self, key: str, what: str) -> None:
        if self._chunks.places[key][0] in self.unreduced:
            raise Refused(
                f"{what}the gradient of {key!r} is asked for before the last backward of its step, but with "
                "accumulate= gradients are averaged over the ranks in that one; ask for it then"
            )

    def wait_for(self, chunk: int) -> None:
        """Until it is averaged, as long as other ranks take, who may do something else meanwhile."""
        if (ticket := self._tickets.exits.get(chunk)) is not None:
            self._flight.wait(ticket, Lane.REDUCE)

    def wait_for_all(self, chunks: Iterable[int]) -> None:
        for chunk in list(chunks):
            self.wait_for(chunk)

    def _come_home(self, chunk: int) -> None:
        self.wait_for(chunk)
        if (ticket := self._tickets.exits.get(chunk)) is not None:
            ticket.wait_through()

    # -- norms ----------------------------------------------------------------------------------------------------

    def _final_norm(self, key: str) -> Tensor:
        return self._norms_of(2.0)[key]

    def _norms_of(self, norm_type: float) -> dict[str, Tensor]:
        """Of gradients as they were averaged; of all of them, or of none: then somebody else has to look."""
        if norm_type != 2.0:
            return self._norms_of_type(norm_type)
        if self._summed_norms is None:
            return {}
        self._flight.wait(self._summed_norms, Lane.REDUCE)
        found: Any = self._summed_norms.wait()
        return dict(found)

    def _norms_of_type(self, norm_type: float) -> dict[str, Tensor]:
        """By one exchange."""
        if norm_type not in self._other_norms:
            keys = [key for key in self._trained if key in self._valid]
            own = torch.tensor([self._power_of(key, norm_type) for key in keys], dtype=torch.float64)
            powers = self.between.rows(f"norms of type {norm_type:g} of gradients", own)
            if math.isinf(norm_type):
                found = powers.amax(0) if norm_type > 0 else powers.amin(0)
            else:
                found = powers.sum(0) ** (1 / norm_type)
            on_gpu = found.to(self._chunks.gpu.device, GRAD_DTYPE)
            self._other_norms[norm_type] = dict(zip(keys, on_gpu.unbind(), strict=True))
        return self._other_norms[norm_type]

    def _power_of(self, key: str, norm_type: float) -> float:
        """Of the elements for which this rank answers: their norm to that power, which can be summed; the largest or
        the smallest of them, if that is the norm."""
        chunk = self._chunks.places[key][0]
        self._come_home(chunk)
        part: Tensor | None = None
        if self._chunks.is_cut(chunk):
            part = self._own_part(key) if self.between.answers else None
        elif self.between.is_first:
            part = self._at_rest(chunk, self.place_of(key))
        if part is None or not part.numel():
            return math.inf if norm_type == -math.inf else 0.0
        norm = float(torch.linalg.vector_norm(part, norm_type))
        return norm if math.isinf(norm_type) else norm**norm_type
