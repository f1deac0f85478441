"""Shards and sums that this rank and the others give each other. Each call is made by all ranks, in the same order on
each lane: `gather` on the lane of that name, what is about gradients on `reduce`, all others in the user's thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hightide.ir.state_spec import StateSpec
from hightide.runtime.chunks.homes import DTYPES, GRAD_DTYPE
from hightide.shard.collectives import Collectives, Section

if TYPE_CHECKING:
    from hightide.runtime.chunks.chunks import Chunks


class BetweenRanks:
    def __init__(self, collectives: Collectives, chunks: Chunks) -> None:
        self.collectives, self._chunks = collectives, chunks
        sections = [[Section(part.start, len(part)) for part in spec.sections] for spec in chunks.specs]
        self._params = sections
        self._grads = [parts[:2] for parts in sections]
        # By chunk, the trainable parameters of which this rank answers for some elements, and for which. What groups
        # have copies of, ranks of the first one answer for.
        self._holders = collectives.shard_holders
        self.answers = collectives.ranks.rank in self._holders
        self._answered = [self._answered_in(chunk) if self.answers else [] for chunk in range(len(sections))]

    @property
    def is_first(self) -> bool:
        return self.collectives.ranks.rank == 0

    def _answered_in(self, chunk: int) -> list[tuple[str, slice]]:
        found = []
        for own in self._chunks.own[chunk][:2]:
            for entry in self._chunks.specs[chunk].params:
                start = max(own.start, entry.offset_numel)
                stop = min(own.stop, entry.offset_numel + entry.numel)
                if start < stop:
                    found.append((entry.param, slice(start, stop)))
        return found

    # -- on lanes -------------------------------------------------------------------------------------------------

    @property
    def moment(self) -> str:
        """Which parameters these are, of those that there were; see OwnRank."""
        watchman = self.collectives.ranks.watchman
        return "" if watchman is None else watchman.own.moment

    def gather(self, chunk: int, when: str) -> int:
        """Into the slot or the place where all of the chunk is on the GPU. This rank's shard is there, or at home on
        the GPU. `when`: the `moment` of whoever has asked for it. Returns the bytes that come from others."""
        chunks, place = self._chunks, self._chunks.placed[chunk]
        home = chunks.home(chunk).view if place.is_streamed and place.is_home_on_gpu else None
        self.collectives.gather(f"gather of chunk {chunk}{when}", chunks.param_on_gpu(chunk), self._params[chunk], home)
        return place.gathered_bytes

    def reduce(self, chunk: int) -> int:
        """Makes the mean over ranks of a gradient on the GPU: this rank's shard of it, or all."""
        chunks, place = self._chunks, self._chunks.placed[chunk]
        name, whole = f"gradient of chunk {chunk}", chunks.grad_on_gpu(chunk)
        if place.is_averaged_whole:
            self.collectives.reduce_whole(name, whole)
        else:
            self.collectives.reduce(name, whole, self._grads[chunk])
        if place.is_reduced_home:
            home = chunks.grad(chunk).view
            for start, own in chunks.own_pieces(chunk, 2):
                home[start : start + own.stop - own.start].add_(whole[own])
        return place.reduced_bytes

    def norms(self, chunk: int) -> dict[str, Tensor]:
        """Of the elements that this rank answers for, by parameter, after `reduce`: so each counts once."""
        chunks, answered = self._chunks, self._answered[chunk]
        if not answered:
            return {}
        if chunks.placed[chunk].is_reduced_home:
            flat = chunks.grad(chunk).view
            starts = {own.start: start for start, own in chunks.own_pieces(chunk, 2)}
            parts = [flat[self._in_shard(at, starts)] for _, at in answered]
        else:
            flat = chunks.grad_on_gpu(chunk)
            parts = [flat[at] for _, at in answered]
        found = torch._foreach_norm(parts)
        return dict(zip((key for key, _ in answered), found, strict=True))

    def _in_shard(self, at: slice, starts: dict[int, int]) -> slice:
        first = max(start for start in starts if start <= at.start)
        shift = starts[first] - first
        return slice(at.start + shift, at.stop + shift)

    def sum_norms(self, keys: Sequence[str], norms: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of whole parameters, from those of parts; the same bits on all ranks."""
        none = torch.zeros((), dtype=GRAD_DTYPE, device=self._chunks.gpu.device)
        # No places are looked up there: their numbers would come from the host, which would wait for them.
        found = [norms.get(key, none).to(GRAD_DTYPE) for key in keys]
        squares = torch.stack(found).square() if found else none.new_empty(0)
        self.collectives.sum_all("norms of gradients", squares)
        return dict(zip(keys, squares.sqrt().unbind(), strict=True))

    # -- in the user's thread -------------------------------------------------------------------------------------

    def any_of(self, what: str, keys: Sequence[str], here: set[str]) -> set[str]:
        """Those of `keys` that any rank has."""
        bits = sum(1 << index for index, key in enumerate(keys) if key in here)
        rows = self.collectives.exchange(what, bits.to_bytes(-(-len(keys) // 8) or 1, "little"))
        union = 0
        for row in rows:
            union |= int.from_bytes(row, "little")
        return {key for index, key in enumerate(keys) if union >> index & 1}

    def whole_value(self, key: str) -> Tensor:
        """A parameter's present value, on the host, from the homes of all ranks."""
        chunks = self._chunks
        if chunks.has_whole_home(chunks.places[key][0]):
            return chunks.value(key).get()
        own = chunks.own_value(key)
        dtype = chunks.home(chunks.places[key][0]).dtype
        return self._together(f"value of {key}", None if own is None else own.get(), dtype, chunks.shapes[key])

    def whole_state(self, key: str, state: StateSpec) -> Tensor:
        """One array of what updates keep of a parameter."""
        chunks, (chunk, entry) = self._chunks, self._chunks.places[key]
        if not chunks.is_cut(chunk):
            return chunks.state_of(key, state).get()
        own, shape = chunks.own_state(key, state), state.shape(tuple(chunks.shapes[key]), entry.numel)
        return self._together(f"{state.name} of {key}", None if own is None else own.get(), DTYPES[state.dtype], shape)

    def whole_master(self, key: str) -> Tensor | None:
        """None: the parameter is its own."""
        chunks = self._chunks
        if not chunks.is_cut(chunks.places[key][0]):
            return chunks.master_of(key)
        if not chunks.has_own_master(key):
            return None
        return self._together(f"master of {key}", chunks.own_master(key), GRAD_DTYPE, chunks.shapes[key])

    def _together(self, what: str, own: Tensor | None, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        return self.whole(what, own, dtype).view(tuple(shape))

    def whole(self, name: str, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """On the host, in one dimension: each rank's elements, which follow one another."""
        own = b""
        if part is not None and self.answers:
            own = part.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        rows = self.collectives.exchange(name, own)
        content = bytearray(b"".join(rows[rank] for rank in self._holders))
        return torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)

    def rows(self, name: str, own: Tensor) -> Tensor:
        """Numbers of each rank, equally many."""
        rows = self.collectives.exchange(name, own.view(torch.uint8).numpy().tobytes() if own.numel() else b"")
        return torch.stack([torch.frombuffer(bytearray(row), dtype=own.dtype) if row else own for row in rows])
