"""Gradients between backward and step(): where each lies, its norm, its values; scaled, or added to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hightide.ir.plan import Update
from hightide.ir.refusal import Refused
from hightide.process.forks import Birthplace
from hightide.process.interrupts import uninterrupted
from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.chunks.homes import GRAD_DTYPE
from hightide.runtime.chunks.residency import Residency
from hightide.runtime.gradients.factors import Factors, scale
from hightide.runtime.schedule.in_flight import Tickets
from hightide.runtime.tables.row_sums import RowsNorm
from hightide.stores.array import Array

IN_BACKWARD_REFUSAL = (
    "this model was wrapped with update='in_backward': updates run during backward, so gradients can no longer be "
    "{what} afterwards. Wrap with update='deferred' (the default) to {what_for}."
)


class GradientValues:
    """What `Gradients` knows about those that there are."""

    _chunks: Chunks
    _update: Update
    _birthplace: Birthplace
    _tickets: Tickets
    _placeholders: Mapping[str, Tensor]  # by parameter, but for loose ones
    _trained: Sequence[str]  # parameters
    _loose: set[str]  # of these, those whose gradients plain autograd makes
    _valid: set[str]  # parameters whose chunk holds a gradient
    _factor: dict[str, float | Tensor]  # what it still has to be multiplied by; absent: 1
    _factors: Factors
    _norms: dict[str, Tensor | RowsNorm]
    _unrounded: set[int]  # chunks whose sum is still to be rounded where it is
    takes_norms: bool

    def place_of(self, key: str) -> Array:
        """Where it is between passes: where the update reads it, or where it stays until then."""
        chunk, entry = self._chunks.places[key]
        return self._chunks.part(self._chunks.latest_grad(chunk), entry)

    def _is_written(self, chunk: int) -> None:
        """By the user, at its home."""
        if chunk in self._chunks.tables and (sums := self._chunks.tables[chunk].sums) is not None:
            sums.forget()

    def _await_home(self, chunk: int) -> None:
        """Until nobody moves or reads the gradient at its home. Whoever asks may change it: what was read ahead of an
        update, or of another pass, is read again."""
        tickets = self._tickets
        for ticket in (tickets.exits.get(chunk), *tickets.changes(chunk), *tickets.reads_of(chunk)):
            if ticket is not None:
                ticket.wait_through()
        if self._chunks.disk is not None:
            self._chunks.disk.rings.forget(chunk)

    def _rounds_now(self, chunk: int) -> torch.dtype | None:
        """To which what is written to a finished gradient is rounded at once: where fp32 is kept it has the bits that
        it would have where only 16 are kept. A sum to which more is added is rounded when that has ended."""
        is_finished = self._chunks.placed[chunk].rounds_in_place and chunk not in self._unrounded
        return self._chunks.rounding_dtype(chunk) if is_finished else None

    def _is_unrounded(self, chunk: int) -> bool:
        """A step now would round it: whoever looks at it sees it so."""
        place, state = self._chunks.placed[chunk], self._chunks.grad_copies[chunk].state
        will_leave = place.stays and place.leaves and state is Residency.DIRTY
        return (will_leave and place.rounds_to is not None) or chunk in self._unrounded

    def norm(self, key: str, norm_type: float) -> Tensor:
        """0-dimensional, over the whole gradient."""
        self._refuse_in_backward("measured", "clip or inspect them")
        chunk = self._chunks.places[key][0]
        overflows = self._is_unrounded(chunk) and self._chunks.rounding_dtype(chunk) == torch.float16
        if norm_type == 2.0 and key in self._norms and not overflows:
            return self._norm_of(key) * self._factor_size(key)
        return torch.linalg.vector_norm(self.read(key), norm_type)

    def _factor_size(self, key: str) -> float | Tensor:
        factor = self._factor.get(key, 1.0)
        return factor.abs() if isinstance(factor, Tensor) else abs(factor)

    def is_finite(self, key: str) -> Tensor:
        """Whether all elements of a gradient are."""
        return torch.isfinite(self.norm(key, math.inf))

    def total_norm(self) -> Tensor:
        """The 2-norm of all gradients together, as each was when it was final: updates in backward have used them up
        since. `takes_norms` was set before."""
        assert self.takes_norms and self._update is Update.IN_BACKWARD
        self._birthplace.check()
        norms = [self._final_norm(key) for key in self._trained if key in self._valid]
        grads = [self._chunks.parameters[key].grad for key in self._trained if key in self._loose]
        norms += [torch.linalg.vector_norm(gradient) for gradient in grads if gradient is not None]
        if not norms:
            return torch.zeros((), device=self._chunks.gpu.device)
        return torch.linalg.vector_norm(torch.stack([norm.to(GRAD_DTYPE) for norm in norms]))

    def _final_norm(self, key: str) -> Tensor:
        return self._norm_of(key)

    def _norm_of(self, key: str) -> Tensor:
        """That of a table's gradient is known when it is summed on the host. On the simulated accelerator it is that of
        the whole array, in the order in which all other plans add up squares; a GPU has an order of its own."""
        norm, chunk = self._norms[key], self._chunks.places[key][0]
        if not isinstance(norm, RowsNorm):
            return norm
        self._await_home(chunk)
        gradient, device = self.place_of(key), self._chunks.gpu.device
        is_whole = gradient.dtype == GRAD_DTYPE and self._chunks.rounding_dtype(chunk) is None
        is_here = self._update is Update.DEFERRED  # else an update has used it up
        if norm.value is None or (device.type == "cpu" and is_whole and is_here):
            norm.value = float(torch.linalg.vector_norm(gradient.view, dtype=GRAD_DTYPE))
        found = self._norms[key] = torch.full((), norm.value, dtype=GRAD_DTYPE, device=device)
        return found

    def scale(self, key: str, factor: float | Tensor) -> None:
        """By a number or a 0-dimensional tensor."""
        self._refuse_in_backward("scaled", "clip or scale them")
        if isinstance(factor, Tensor):
            factor = float(factor) if factor.device.type == "cpu" else self._factors.kept(factor)
        earlier = self._factor.get(key)
        self._factor[key] = factor if earlier is None else self._factors.product(earlier, factor)

    def add(self, key: str, value: Tensor) -> None:
        """A tensor of the gradient's shape, or one that broadcasts to it."""
        self._refuse_in_backward("changed", "change them")
        self._await_home(chunk := self._chunks.places[key][0])
        self._is_written(chunk)
        with uninterrupted, (place := self.place_of(key)).opened() as gradient:
            self._add_to(gradient, self._factor.pop(key, 1.0), value, self._rounds_now(chunk))
        self._norms[key] = torch.linalg.vector_norm(self._at_rest(chunk, place)).to(self._chunks.gpu.device)

    @staticmethod
    def _add_to(gradient: Tensor, factor: float | Tensor, value: Tensor, rounding: torch.dtype | None) -> None:
        """In fp32, also where 16 bits are kept: then it is rounded once, as where `rounding` says so."""
        exact = gradient.to(GRAD_DTYPE)
        scale(exact, factor)
        exact.add_(value.to(gradient.device))
        if rounding is not None:
            exact = exact.to(rounding)
        if exact is not gradient:
            gradient.copy_(exact)

    def zero(self, key: str) -> None:
        self._factor[key] = 0.0

    def read(self, key: str) -> Tensor:
        """A copy of one gradient, as plain PyTorch would show it."""
        self._refuse_in_backward("read", "read them")
        chunk, _ = self._chunks.places[key]
        if chunk in self._tickets.exits:
            self._tickets.exits[chunk].wait_through()
        value = self._at_rest(chunk, self.place_of(key))
        scale(value, self._factor.get(key, 1.0))
        return value.to(self._placeholders[key].dtype).to(self._chunks.gpu.device)

    def _at_rest(self, chunk: int, place: Array) -> Tensor:
        """A copy of a part of a chunk's gradient, as an update would see it but for its factor."""
        value = place.peek().to(GRAD_DTYPE, copy=True)
        if self._is_unrounded(chunk):
            value = value.to(self._chunks.rounding_dtype(chunk)).to(GRAD_DTYPE)
        return value

    def _refuse_in_backward(self, what: str, what_for: str) -> None:
        self._birthplace.check()
        if self._update is Update.IN_BACKWARD:
            raise Refused(IN_BACKWARD_REFUSAL.format(what=what, what_for=what_for))
