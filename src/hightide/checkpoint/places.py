"""Where the values of a checkpoint go: into a run's chunks, on whatever tier, or into plain tensors.

[Note: masters of a checkpoint] A parameter's true value is fp32: itself, or a 16-bit parameter with its master, or bf16
with what it lacks of one. Files have one of these forms and the run another, if its dtype is another or if it trains
without masters. Files of the model are read before those of the optimizer. So a value first becomes the whole truth:
the parameter is rounded from it, its master is it, or its remainder what rounding has left. What the optimizer's files
know beyond that is then added to it, part by part: nobody needs the two side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from hightide.ir.state_spec import MASTER, REMAINDER, StateSpec
from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.chunks.remainder import split
from hightide.stores.array import Array

TILE_NUMEL = 2**20  # of what is converted so many elements exist twice


class Places(Protocol):
    def value(self, key: str, start: int, part: Tensor) -> None:
        """Elements of a parameter, from number `start` on."""

    def state(self, key: str, name: str, start: int, part: Tensor) -> None:
        """Elements of one of its states, a master or a remainder among them."""


class RunPlaces:
    """Inside Run.rewriting."""

    def __init__(self, chunks: Chunks, others: dict[str, dict[str, Any]], shapes: Mapping[str, Mapping[str, Any]]):
        """`others`: gets the states of parameters that have no room for any, with these `shapes` by key and name."""
        self._chunks, self._others, self._shapes = chunks, others, shapes
        self._room: dict[str, dict[str, tuple[StateSpec, Array]]] = {}  # flat, by the state's name

    def value(self, key: str, start: int, part: Tensor) -> None:
        for offset, tile in _tiles(part):
            self._put_truth(key, start + offset, tile)

    def state(self, key: str, name: str, start: int, part: Tensor) -> None:
        room = self._states(key)
        if name in room:
            _put(room[name][1], start, part)
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
            _put(param, start, high)
            _put(room[REMAINDER.name][1], start, low)
            return
        _put(param, start, truth)
        if REMAINDER.name in room:
            _put(room[REMAINDER.name][1], start, torch.zeros_like(truth, dtype=torch.int16))
        if MASTER.name in room:
            _put(room[MASTER.name][1], start, truth)

    def _add_to_truth(self, key: str, name: str, start: int, part: Tensor) -> None:
        """In another form than the one that is kept here."""
        room, param = self._states(key), self._param(key)
        for offset, tile in _tiles(part):
            begin = start + offset
            if name == MASTER.name and (REMAINDER.name in room or param.dtype == torch.float32):
                self._put_truth(key, begin, tile)
            elif name == REMAINDER.name and (MASTER.name in room or param.dtype == torch.float32):
                kept = room[MASTER.name][1] if MASTER.name in room else param
                truth = kept.part(begin, tile.shape).get()
                truth.view(torch.int32).add_(tile)
                self._put_truth(key, begin, truth)

    def _param(self, key: str) -> Array:
        value = self._chunks.value(key)
        return value.part(0, (value.nbytes // value.dtype.itemsize,))

    def _states(self, key: str) -> dict[str, tuple[StateSpec, Array]]:
        if key not in self._room:
            chunk, entry = self._chunks.places[key]
            spec = self._chunks.specs[chunk]
            states = spec.states if entry.offset_numel < spec.optimised_numel else ()
            arrays = {state.name: (state, self._chunks.state_of(key, state)) for state in states}
            self._room[key] = {
                name: (state, array.part(0, (array.nbytes // array.dtype.itemsize,)))
                for name, (state, array) in arrays.items()
            }
        return self._room[key]


class PlainPlaces:
    """Of a plain model; states gather in `states`, of which they become the optimizer's own."""

    def __init__(self, params: Mapping[str, Tensor], shapes: Mapping[str, Mapping[str, Any]]) -> None:
        self._params, self._shapes = params, shapes
        self._scattered: dict[str, Tensor] = {}  # a value whose parameter does not lie in one piece, until it is whole
        self.states: dict[str, dict[str, Tensor]] = {}

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
