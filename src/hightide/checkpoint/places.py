"""Where the values of a checkpoint go: into a run's chunks, on whatever tier, or into plain tensors.

[Note: masters of a checkpoint] A parameter's true value is fp32: itself, or a 16-bit parameter with its master, or bf16
with what it lacks of one. Files have one of these forms and the run another, if its dtype is another or if it trains
without masters. Files of the model are read before those of the optimizer. So a value first becomes the whole truth:
the parameter is rounded from it, its master is it, or its remainder what rounding has left. What the optimizer's files
know beyond that is then added to it, part by part: nobody needs the two side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from hightide.ir.state_spec import MASTER, REMAINDER
from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.chunks.homes import DTYPES
from hightide.runtime.chunks.remainder import split
from hightide.stores.array import Array

TILE_NUMEL = 2**20  # of what is converted so many elements exist twice


class Places(Protocol):
    def needed_of_value(self, key: str) -> range:
        """Which elements of a parameter are of use."""

    def needed_of_state(self, key: str, name: str) -> range:
        """And of one of its states."""

    def value(self, key: str, start: int, part: Tensor) -> None:
        """Elements of a parameter, from number `start` on."""

    def state(self, key: str, name: str, start: int, part: Tensor) -> None:
        """Elements of one of its states, a master or a remainder among them."""


class RunPlaces:
    """Inside Run.rewriting. Of several ranks each takes what has its place there, and passes over the rest."""

    def __init__(self, chunks: Chunks, others: dict[str, dict[str, Any]], shapes: Mapping[str, Mapping[str, Any]]):
        """`others`: gets the states of parameters that have no room for any, with these `shapes` by key and name."""
        self._chunks, self._others, self._shapes = chunks, others, shapes
        self._room: dict[str, dict[str, _Place]] = {}  # by the state's name

    def needed_of_value(self, key: str) -> range:
        """Which elements of a parameter are of use here."""
        return self._chunks.home_range(key)

    def needed_of_state(self, key: str, name: str) -> range:
        room = self._states(key)
        if name in room:
            return room[name].elements
        if name in (MASTER.name, REMAINDER.name):  # in another form: it belongs to the value
            return self.needed_of_value(key)
        return range(prod(self._shapes[key][name]))

    def value(self, key: str, start: int, part: Tensor) -> None:
        for offset, tile in _tiles(part):
            self._put_truth(key, start + offset, tile)

    def state(self, key: str, name: str, start: int, part: Tensor) -> None:
        room = self._states(key)
        if name in room:
            room[name].put(start, part)
        elif name in (MASTER.name, REMAINDER.name):
            self._add_to_truth(key, name, start, part)
        else:
            held = self._others.setdefault(key, {})
            whole = held.setdefault(name, torch.empty(self._shapes[key][name], dtype=part.dtype))
            whole.view(-1)[start : start + len(part)] = part

    def _put_truth(self, key: str, start: int, truth: Tensor) -> None:
        param, room = self._param(key), self._states(key)
        if REMAINDER.name in room and truth.dtype != torch.bfloat16:
            high, low = torch.empty_like(truth, dtype=torch.bfloat16), torch.empty_like(truth, dtype=torch.int16)
            split(truth.float(), high, low)
            param.put(start, high)
            room[REMAINDER.name].put(start, low)
            return
        param.put(start, truth)
        if REMAINDER.name in room:
            room[REMAINDER.name].put(start, torch.zeros_like(truth, dtype=torch.int16))
        if MASTER.name in room:
            room[MASTER.name].put(start, truth)

    def _add_to_truth(self, key: str, name: str, start: int, part: Tensor) -> None:
        """In another form than the one that is kept here."""
        room, param = self._states(key), self._param(key)
        for offset, tile in _tiles(part):
            begin = start + offset
            if name == MASTER.name and (REMAINDER.name in room or param.dtype == torch.float32):
                self._put_truth(key, begin, tile)
            elif name == REMAINDER.name and (MASTER.name in room or param.dtype == torch.float32):
                kept = room.get(MASTER.name, param)
                own = kept.within(begin, len(tile))
                truth = kept.array.part(own.start - kept.elements.start, (len(own),)).get()
                truth.view(torch.int32).add_(tile[own.start - begin : own.stop - begin])
                self._put_truth(key, own.start, truth)

    def _param(self, key: str) -> _Place:
        value = self._chunks.own_value(key)
        return _Place(value, self._chunks.home_range(key), self._chunks.home(self._chunks.places[key][0]).dtype)

    def _states(self, key: str) -> dict[str, _Place]:
        if key not in self._room:
            chunks, spec = self._chunks, self._chunks.specs[self._chunks.places[key][0]]
            elements = chunks.updated_range(key)
            self._room[key] = {
                state.name: _Place(
                    chunks.own_state(key, state),
                    range(elements.start // state.per_numel, -(-elements.stop // state.per_numel)),
                    DTYPES[state.dtype],
                )
                for state in (spec.states if chunks.has_room(key) else ())
            }
        return self._room[key]


@dataclass(frozen=True)
class _Place:
    """Some elements of a tensor, in one dimension."""

    found: Array | None  # None: there are none here
    elements: range
    dtype: torch.dtype

    @property
    def array(self) -> Array:
        assert self.found is not None
        return self.found

    def within(self, start: int, numel: int) -> range:
        """Of so many from `start` on, those that are here."""
        first = max(start, self.elements.start)
        return range(first, max(first, min(start + numel, self.elements.stop)))

    def put(self, start: int, part: Tensor) -> None:
        own = self.within(start, len(part))
        if own:
            _put(self.array, own.start - self.elements.start, part[own.start - start : own.stop - start])


class PlainPlaces:
    """Of a plain model; states gather in `states`, of which they become the optimizer's own."""

    def __init__(self, params: Mapping[str, Tensor], shapes: Mapping[str, Mapping[str, Any]]) -> None:
        self._params, self._shapes = params, shapes
        self._scattered: dict[str, Tensor] = {}  # a value whose parameter does not lie in one piece, until it is whole
        self.states: dict[str, dict[str, Tensor]] = {}

    def needed_of_value(self, key: str) -> range:
        return range(self._params[key].numel())

    def needed_of_state(self, key: str, name: str) -> range:
        return range(prod(self._shapes[key][name]))

    def value(self, key: str, start: int, part: Tensor) -> None:
        param = self._params[key].data
        if param.is_contiguous():
            param.view(-1)[start : start + len(part)].copy_(part)
            return
        whole = self._scattered.setdefault(key, torch.empty(param.shape, dtype=param.dtype))
        whole.view(-1)[start : start + len(part)] = part
        if start + len(part) == whole.numel():
            param.copy_(self._scattered.pop(key))

    def state(self, key: str, name: str, start: int, part: Tensor) -> None:
        """A parameter of plain PyTorch has no master: of one that is fp32 it is the value itself."""
        if name in (MASTER.name, REMAINDER.name):
            if self._params[key].dtype == torch.float32:
                self._add_to_truth(key, name, start, part)
            return
        held = self.states.setdefault(key, {})
        if name not in held:
            held[name] = torch.empty(self._shapes[key][name], dtype=part.dtype)
        held[name].view(-1)[start : start + len(part)] = part

    def _add_to_truth(self, key: str, name: str, start: int, part: Tensor) -> None:
        param = self._params[key].data
        whole = param if param.is_contiguous() else param.contiguous()
        target = whole.view(-1)[start : start + len(part)]
        if name == MASTER.name:
            target.copy_(part)
        else:
            target.view(torch.int32).add_(part.to(target.device))
        if whole is not param:
            param.copy_(whole)


def _tiles(part: Tensor) -> list[tuple[int, Tensor]]:
    return [(start, part[start : start + TILE_NUMEL]) for start in range(0, len(part), TILE_NUMEL)]


def _put(array: Array, start: int, part: Tensor) -> None:
    """Without a copy on the way, where none is needed."""
    if not len(part):
        return
    target = array.part(start, part.shape)
    if target.is_memory or part.dtype != target.dtype:
        target.put(part)
    else:
        target.write(part).wait()
