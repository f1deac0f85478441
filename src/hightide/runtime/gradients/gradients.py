"""The ledger of gradients: which parameters have one, where it is, by what it was scaled, and its norm.

[Note: gradients that come and go] While a block runs backward, `param.grad` is a view of its gradient chunk on the
GPU, so that autograd adds every micro-batch in place, in fp32. Each view has a version counter of its own: one that has
grown meanwhile says that the parameter received a gradient (torch.optim skips parameters that did not, and so do we).
Afterwards `param.grad` is a placeholder that answers norms, takes scalings and can be read; `None` still means that
there is no gradient, whoever set it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from hightide.ir.block import ModelProfile
from hightide.ir.chunk import ParamRange
from hightide.ir.plan import Update
from hightide.process.forks import Birthplace
from hightide.process.interrupts import uninterrupted
from hightide.runtime.chunks.absent import Disabled
from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.chunks.homes import GRAD_DTYPE
from hightide.runtime.gradients.factors import Factor, Factors, HostNumber, scale
from hightide.runtime.gradients.gradient_placeholder import GradientPlaceholder
from hightide.runtime.gradients.gradient_values import GradientValues
from hightide.runtime.schedule.in_flight import Tickets
from hightide.runtime.tables.row_sums import NewRows, RowsNorm
from hightide.stores.ticket import Ticket


class Gradients(GradientValues):
    def __init__(
        self,
        profile: ModelProfile,
        chunks: Chunks,
        update: Update,
        tickets: Tickets,
    ) -> None:
        self._update = update
        self._birthplace = Birthplace()
        trainable = {spec.name for spec in profile.params if spec.trainable}
        self.optimised = frozenset(spec.name for spec in profile.params if spec.group is not None)
        self._loose = {name for block in profile.blocks if block.loose for name in block.params} & trainable
        self._placeholders = {
            spec.name: GradientPlaceholder(chunks.parameters[spec.name], self, spec.name)
            for spec in profile.params
            if spec.name in trainable and spec.name not in self._loose
        }
        self._valid: set[str] = set()  # parameters whose chunk holds a gradient
        self._factor: dict[str, float | Tensor] = {}  # what it still has to be multiplied by; absent: 1
        self._factors = Factors()
        self._norms: dict[str, Tensor | RowsNorm] = {}
        self._on_host: dict[int, HostNumber] = {}  # factors of this step, by the id of their tensor
        self._opened: set[int] = set()  # chunks whose gradient was opened in this pass
        self._unrounded: set[int] = set()  # whose sum is still to be rounded where it is
        self.unreduced: set[int] = set()  # of several ranks: chunks whose gradient is this rank's own, so far
        self.are_used_up = False  # updates in backward have read them, or are about to
        self.takes_norms = update is Update.DEFERRED  # else nobody asks, unless somebody sets it: see `total_norm`
        # Of the blocks that run backward now, by chunk: names, parameters, their gradients, and versions of these.
        self._bound: dict[int, list[tuple[str, Parameter, Tensor, int]]] = {}
        self._tickets = tickets
        self.move_to(chunks)
        for param in (chunks.parameters[name] for name in self._placeholders):
            if param.dtype != torch.float32:
                param.grad_dtype = None  # autograd adds a low-precision gradient to an fp32 `.grad` in one pass
        for name in self._loose:
            if chunks.parameters[name].dtype == torch.float16:  # a GradScaler refuses gradients in fp16
                chunks.parameters[name].grad_dtype = torch.float32

    # -- life of a gradient ---------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        self._opened.clear()
        self._on_host.clear()
        self._factors = Factors()

    def end_backward(self) -> None:
        """The user may scale or drop gradients now; the next backward looks again, also one of the same pass."""
        self._opened.clear()

    def any_valid(self) -> bool:
        """Whether gradients exist that a backward would add to. What the user did to `p.grad` is the truth."""
        known = self._valid | self._factor.keys() | self._norms.keys()
        with Disabled():  # an absent parameter would ask Python each time
            found = {key: self._chunks.parameters[key].grad for key in self._placeholders}
        for key, gradient in found.items():
            if gradient is not None or key in known:
                self._look_at(key, gradient)
        return bool(self._valid)

    def valid_unowned(self) -> str | None:
        """A parameter that has a gradient and is in no group of the optimizer."""
        return next((key for key in self._placeholders if key in self._valid and key not in self.optimised), None)

    def _look_at(self, key: str, gradient: Tensor | None) -> bool:
        """Whether a parameter has a gradient now. The user may have set `p.grad` to None, or to a tensor of their
        own."""
        if gradient is None:
            self._forget(key)
        elif gradient is not self._placeholders[key]:
            self._take_over(key, gradient)
        return key in self._valid

    def refuse_dropped(self, keys: Iterable[str]) -> None:
        """Of parameters whose updates have run, at step(): in plain PyTorch it would pass over them."""
        with Disabled():
            for key in keys:
                if key in self._placeholders and self._chunks.parameters[key].grad is None:
                    self._refuse_in_backward(f"dropped (that of {key!r} is None)", "drop them before step()")

    def _take_over(self, key: str, gradient: Tensor) -> None:
        """`p.grad = p.grad * 0.5` has put a plain tensor there: its values go to the gradient's home."""
        self._refuse_in_backward("replaced", "change them")
        chunk = self._chunks.places[key][0]
        self._await_home(chunk)
        with uninterrupted:
            rounding = self._rounds_now(chunk)
            self._put(key, gradient if rounding is None else gradient.to(rounding))
            self._is_written(chunk)
            self._forget(key)
            self._valid.add(key)
            self._norms[key] = torch.linalg.vector_norm(gradient, dtype=GRAD_DTYPE)
            self._chunks.parameters[key].grad = self._placeholders[key]

    def _put(self, key: str, gradient: Tensor) -> None:
        place = self.place_of(key)
        place.put(gradient.to(place.dtype))

    def has_gradient(self, chunk: int) -> bool:
        return any(entry.param in self._valid for entry in self._entries[chunk])

    def is_summed(self, chunk: int) -> bool:
        """Whether there is a sum at its home to which a backward adds."""
        return self.has_gradient(chunk)

    def is_trainable(self, chunk: int) -> bool:
        return bool(self._entries[chunk])

    def is_open(self, chunk: int) -> bool:
        """Whether the chunk's gradient was opened in this pass."""
        return chunk in self._opened

    def cleared(self, chunk: int) -> None:
        """The chunk's gradient on the GPU is all zero now."""
        self._opened.add(chunk)

    def bind(self, chunk: int, block: int) -> None:
        """Points `param.grad` at the gradient chunk on the GPU, where autograd adds to it."""
        if chunk not in self._opened:
            self._freshen(chunk, self._chunks.grad_on_gpu(chunk))
        views = self._chunks.grad_views(chunk)
        bound = self._bound[chunk] = []
        used = self._used.get((chunk, block))
        if used is None:
            used = self._used[chunk, block] = self._used_by(chunk, block)
        for key, param in used:
            view = param.grad = views[key]
            bound.append((key, param, view, view._version))

    def open_rows(self, chunk: int, is_final: bool) -> NewRows:
        """Before the gradients of rows are added to that of their table, on the host: what becomes of what is there.
        From now on the parameter has a gradient, and its norm as soon as that is summed. Not `is_final`: a later pass
        of the step adds to it, so nothing is rounded yet."""
        (entry,), place = self._entries[chunk], self._chunks.placed[chunk]
        key, is_open = entry.param, chunk in self._opened
        starts = not is_open and key not in self._valid
        factor = self._factor_at(chunk, key) if not is_open and key in self._valid else 1.0
        if not is_open:
            self._factor.pop(key, None)
        self._opened.add(chunk)
        self._valid.add(key)
        if place.rounds_in_place:
            (self._unrounded.discard if is_final else self._unrounded.add)(chunk)
        norm = None
        if self.takes_norms:
            norm = self._norms[key] = RowsNorm()
        with Disabled():
            self._chunks.parameters[key].grad = self._placeholders[key]
        nowhere = torch.empty(0)
        rounding = self._chunks.rounding_dtype(chunk) if is_final or place.is_narrow else None
        return NewRows(nowhere, nowhere, starts, factor, rounding, norm=norm)

    def harvest(self, chunk: int, is_final: bool = True) -> None:
        """After a block's backward: which parameters received a gradient, and its norm while it is on the GPU: that of
        the fp32 sum, before any rounding. But fp16 may overflow in rounding, and the norm must show it. Not `is_final`:
        a later pass of the step adds to it, so nothing is rounded yet."""
        bound, valid = self._bound.pop(chunk, ()), self._valid
        received: dict[str, Tensor] = {}
        with Disabled():
            for key, param, view, version in bound:
                gradient = param.grad
                if gradient is not None and (gradient is not view or view._version != version):
                    valid.add(key)
                if gradient is not None and key in valid:
                    received[key] = gradient
        self._summed(chunk, received, is_final)
        if self._chunks.placed[chunk].rounds_in_place:
            (self._unrounded.discard if is_final else self._unrounded.add)(chunk)
        with Disabled():
            for key, param, _, _ in bound:
                param.grad = self._placeholders[key] if key in valid else None

    def _summed(self, chunk: int, received: dict[str, Tensor], is_final: bool) -> None:
        """See [Note: rounded gradients] in chunks/staging.py."""
        chunks, place = self._chunks, self._chunks.placed[chunk]
        if is_final and place.rounds_to is not None and chunks.rounding_dtype(chunk) == torch.float16:
            chunks.round_gradient(chunk)
        if received and self.takes_norms:
            norms = torch._foreach_norm(list(received.values()))
            self._norms.update(zip(received, norms, strict=True))
        if is_final and place.rounds_in_place:
            chunks.round_gradient(chunk)

    def _used_by(self, chunk: int, block: int) -> list[tuple[str, Parameter]]:
        """Parameters of a chunk that have gradients and that this block uses."""
        users = {entry.param for entry in self._chunks.placements(chunk, block)}
        keys = [entry.param for entry in self._entries[chunk] if entry.param in users]
        return [(key, self._chunks.parameters[key]) for key in keys]

    def _freshen(self, chunk: int, flat: Tensor) -> None:
        """Before adding to a gradient from an earlier backward: apply its scaling, and clear what has none."""
        for entry in self._entries[chunk]:
            if entry.param not in self._valid:
                self._chunks.view_of(flat, entry).zero_()
            elif entry.param in self._factor:
                scale(self._chunks.view_of(flat, entry), self._factor.pop(entry.param))
        self._opened.add(chunk)

    def has_loose(self, chunk: int) -> bool:
        return bool(self._loose_in[chunk])

    def drop(self, keys: Iterable[str]) -> None:
        """As `zero_grad(set_to_none=True)`: the bytes stay for updates that still read them."""
        keys, parameters = list(keys), self._chunks.parameters
        with Disabled():
            for key in keys:
                parameters[key].grad = None
        self._valid.difference_update(keys)
        for known in (self._factor, self._norms):
            for key in keys if known else ():
                known.pop(key, None)

    def drop_chunk(self, chunk: int) -> None:
        self.drop(entry.param for entry in self._entries[chunk])

    def _forget(self, key: str) -> None:
        self._valid.discard(key)
        self._factor.pop(key, None)
        self._norms.pop(key, None)

    # -- from one plan to another ----------------------------------------------------------------------------------

    def move_to(self, chunks: Chunks) -> None:
        """Gradients are the same, at other places, and nothing is under way: what users keep of `p.grad` stays good."""
        unrounded = {key for key in self._valid if self._is_unrounded(self._chunks.places[key][0])}
        self._chunks = chunks
        self._entries: list[list[ParamRange]] = [
            [entry for entry in spec.params if entry.param in self._placeholders] for spec in chunks.specs
        ]
        self._trained = [name for name in chunks.places if name in self._placeholders or name in self._loose]
        self._loose_in = [[entry.param for entry in spec.params if entry.param in self._loose] for spec in chunks.specs]
        self._used: dict[tuple[int, int], list[tuple[str, Parameter]]] = {}
        self._trained_in = [  # without a placeholder: loose
            [
                (entry, chunks.parameters[entry.param], self._placeholders.get(entry.param))
                for entry in spec.params
                if entry.param in self._placeholders or entry.param in self._loose
            ]
            for spec in chunks.specs
        ]
        self._unrounded = {
            spec.index
            for spec in chunks.specs
            if chunks.placed[spec.index].rounds_in_place and any(entry.param in unrounded for entry in spec.params)
        }
        self.of_parameters_here = [
            chunks.parameters[key] for key in self._placeholders if not chunks.binding.is_hidden(key)
        ]
        self.begin_pass()

    def of_use(self, chunk: int) -> list[str]:
        """Whose gradients lie in the chunk and will be read again. An update in backward has used them up; but a loose
        parameter's own `.grad` lies there, once an update has collected it."""
        is_kept = self._update is Update.DEFERRED or not self.are_used_up
        return [
            entry.param
            for entry in self._chunks.specs[chunk].params
            if (entry.param in self._valid and is_kept)
            or (entry.param in self._loose and self._is_collected(entry.param))
        ]

    def _is_collected(self, key: str) -> bool:
        gradient = self._chunks.parameters[key].grad
        return gradient is not None and gradient.data_ptr() == self.place_of(key).view.data_ptr()

    def is_in_place(self, key: str) -> None:
        """Its bytes have moved in."""
        if key in self._loose:
            self._chunks.parameters[key].grad = self.place_of(key).view

    # -- for the update -------------------------------------------------------------------------------------------

    def ready(self, chunk: int) -> list[tuple[ParamRange, Factor]]:
        """The parameters of a chunk that have a gradient, with the factor that the update must apply."""
        if self._loose_in[chunk]:
            self._collect_loose(chunk)
        trained, factors = self._trained_in[chunk], self._factor
        with Disabled():
            found = [param.grad for _, param, _ in trained]
        ready: list[tuple[ParamRange, Factor]] = []
        for (entry, _, placeholder), gradient in zip(trained, found, strict=True):
            key = entry.param
            if placeholder is None:  # loose
                has_gradient = gradient is not None
            elif gradient is placeholder:
                has_gradient = key in self._valid
            else:
                has_gradient = self._look_at(key, gradient)
            if has_gradient:
                ready.append((entry, self._factor_at(chunk, key) if key in factors else 1.0))
        if chunk in self._unrounded:
            self._round_late(chunk)
        return ready

    def _round_late(self, chunk: int) -> None:
        """A step that came before the pass that was to be its last, or in which that pass left the block out."""
        self._unrounded.discard(chunk)
        self._await_home(chunk)
        dtype = self._chunks.rounding_dtype(chunk)
        assert dtype is not None
        with uninterrupted, self._chunks.grad(chunk).opened() as gradient:
            gradient.copy_(gradient.to(dtype))

    def _factor_at(self, chunk: int, key: str) -> Factor:
        """A factor that was computed on the GPU comes to host updates without anyone waiting for the GPU here."""
        factor = self._factor.get(key, 1.0)
        if isinstance(factor, Tensor) and not self._chunks.placed[chunk].is_updated_on_gpu:
            if id(factor) not in self._on_host:
                self._on_host[id(factor)] = HostNumber(factor)
            return self._on_host[id(factor)]
        return factor

    def awaited_factors(self) -> list[Ticket]:
        """Of updates on the host, on their way from the GPU. The lane must not choose an update before: it would wait
        with it, and then begin with one that may not be due first. They come in their order, and there may be one for
        each parameter: the last is enough."""
        return [number.ticket for number in list(self._on_host.values())[-1:]]

    def _collect_loose(self, chunk: int) -> None:
        """Plain autograd made the gradients of loose parameters; bring them to their place in the chunk."""
        for key in self._loose_in[chunk]:
            param = self._chunks.parameters[key]
            if param.grad is not None and not self._is_collected(key):
                place = self.place_of(key).view
                place.copy_(param.grad)
                param.grad = place if param.dtype == place.dtype else param.grad
