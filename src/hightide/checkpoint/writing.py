"""A checkpoint from values that come one after the other, to its files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from hightide.checkpoint.files.blocks import Lend
from hightide.checkpoint.files.keeping import keep_only, later
from hightide.checkpoint.files.tensor_layout import Entry
from hightide.checkpoint.files.writer import CheckpointWriter
from hightide.checkpoint.fitting import OPTIMIZER, StateKey
from hightide.checkpoint.saving import Abandoned, Saving
from hightide.checkpoint.shards import ModelShards, Shards
from hightide.checkpoint.training import PLAN, TENSORS
from hightide.integrations.model_files import ModelFiles, Named
from hightide.ir import codec
from hightide.ir.foreign import shown
from hightide.ir.plan import Plan
from hightide.process.interrupts import safe_point
from hightide.runtime.saving.tiles import PARAM, SaveCost, SavedTensor

_told: set[Path] = set()  # folders that have checkpoints of later steps


class SavedValues(Protocol):
    """A run's Snapshot, or plain tensors."""

    @property
    def tensors(self) -> tuple[SavedTensor, ...]: ...

    @property
    def cost(self) -> SaveCost: ...

    @property
    def lend(self) -> Lend | None:
        """Of host memory, for as long as they are read. None: no limit counts."""

    def tiles(self) -> Iterable[tuple[Sequence[tuple[SavedTensor, int, Tensor]], Callable[[], object]]]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class CheckpointContent:
    """All of a checkpoint: what is small, as it was at the call, and where the values come from."""

    model: nn.Module  # it lives until it is saved, whoever drops it
    values: SavedValues
    files: ModelFiles
    buffers: Mapping[str, Tensor]
    small: Mapping[str, bytes]
    plan: Plan | None
    training: Mapping[str, Tensor]
    facts: Mapping[str, Any]
    keep: int | None
    keep_every: int | None

    def write(self, saving: Saving) -> None:
        saving.cost = lambda: self.values.cost
        try:
            self._write(saving)
        finally:
            self.values.close()
            cost = self.values.cost
            saving.cost = lambda: cost
        self._look_at_others(saving)

    def _look_at_others(self, saving: Saving) -> None:
        folder = saving.path.parent
        try:
            keep_only(folder, self.keep, self.keep_every, saving.step)
            if folder not in _told and (other := later(folder, saving.step)) is not None:
                _told.add(folder)
                raise ValueError(
                    f"who loads from its folder gets {other.name}, which is of a later step: save into a folder of its "
                    "own, move that one away, or load by name"
                )
        except (OSError, ValueError) as error:
            with suppress(Warning):  # where warnings are errors: this one is none of the checkpoint's
                warnings.warn(f"the checkpoint {shown(saving.path)} is saved, but {error}", stacklevel=2)

    def _write(self, saving: Saving) -> None:
        tensors = self.values.tensors
        states = [Entry(str(StateKey(one.key, one.kind)), one.dtype, one.shape) for one in tensors if one.kind != PARAM]
        order = [Named(name, value.dtype, tuple(value.shape)) for name, value in self.buffers.items()]
        order += [Named(one.key, one.dtype, one.shape) for one in tensors if one.kind == PARAM]
        expected_bytes = sum(Entry(*one).num_bytes for one in order) + sum(entry.num_bytes for entry in states)
        folder, lend = saving.path.parent, self.values.lend
        with CheckpointWriter(folder, saving.step, expected_bytes, saving.path.name, lend) as writer:
            self._write_small(writer)
            model, optimizer = ModelShards(writer, self.files.written, order), Shards(writer, OPTIMIZER, states)
            for name, value in self.buffers.items():
                model.put(name, value.view(-1))
            for parts, passed in self.values.tiles():
                safe_point()
                if saving.is_abandoned:
                    raise Abandoned(f"{saving.path} was given up")
                with writer.copying(passed):
                    for tensor, _, part in parts:
                        if tensor.kind == PARAM:
                            model.put(tensor.key, part)
                        else:
                            optimizer.put(str(StateKey(tensor.key, tensor.kind)), part)
                        saving.num_bytes += part.nbytes
            for name, content in model.finish(self.files.num_parameters).items():
                writer.bytes(name, content)
            optimizer.finish()
            writer.commit(self.facts)

    def _write_small(self, writer: CheckpointWriter, more: Mapping[str, bytes] | None = None) -> None:
        for name, content in {**self.small, **(more or {})}.items():
            writer.bytes(name, content)
        if self.plan is not None:
            writer.bytes(PLAN, (codec.to_json(self.plan) + "\n").encode())
        _write_tensors(writer, TENSORS, self.training)


def _write_tensors(writer: CheckpointWriter, name: str, tensors: Mapping[str, Tensor]) -> None:
    """A small file of them."""
    # Each at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda one: -one[1].dtype.itemsize)
    file = writer.tensors(name, [Entry(key, value.dtype, tuple(value.shape)) for key, value in ordered])
    for _, value in ordered:
        file.put(value.contiguous().view(-1))
