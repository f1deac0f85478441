"""A checkpoint that several ranks write together.

[Note: a checkpoint of ranks] Where each byte will lie follows from names, shapes and dtypes, so all ranks know it. The
first makes the folder, what is small, and all files in their full length; the others look whether they see it. Then
each writes the elements that it hands out (`Homes.saved_entries`), syncs them and tells the sums of its runs, which the
first joins: so it knows that every byte was written once. It writes the manifest and puts the folder in place. After
each of these four the ranks tell each other whether they could do it. Whoever could not is the reason why all give up;
the first removes what there is, and earlier checkpoints are as they were.

Tensors that are cut or joined on their way to files (`Written.convert`) come together on one rank each, part by part.
All of this is said on a lane of its own, in the thread that writes: training goes on beside it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hightide.checkpoint.files.shared_file import joined_sums
from hightide.checkpoint.files.shared_folder import SharedFolder
from hightide.checkpoint.files.writer import CheckpointWriter
from hightide.checkpoint.ranked_training import places_of
from hightide.checkpoint.saving import Abandoned, Saving
from hightide.checkpoint.shards import FilePlace, FilePlaces
from hightide.checkpoint.writing import CheckpointContent
from hightide.integrations.model_files import Written
from hightide.runtime.saving.snapshot import Snapshot
from hightide.runtime.saving.tiles import PARAM
from hightide.shard.agreement import of_each
from hightide.shard.collectives import Collectives
from hightide.shard.communicators import SAVE

SECRET_BYTES = 16
TRAVELLING_BYTES = 4 * 2**20  # of a tensor that comes together on one rank, at once


@dataclass(frozen=True)
class SharedContent(CheckpointContent):
    collectives: Collectives

    def _look_at_others(self, saving: Saving) -> None:
        if self._is_first:
            super()._look_at_others(saving)

    @property
    def _is_first(self) -> bool:
        return self.collectives.ranks.rank == 0

    def _write(self, saving: Saving) -> None:
        places, name = places_of(self), saving.path.name
        writer: CheckpointWriter | None = None
        shared: SharedFolder | None = None

        def begin() -> bytes:
            nonlocal writer
            if not self._is_first:
                return b""
            writer = CheckpointWriter(saving.path.parent, saving.step, sum(places.sizes.values()), name)
            self._write_small(writer, places.index)
            for file, num_bytes in places.sizes.items():
                writer.reserve(file, num_bytes)
            secret = os.urandom(SECRET_BYTES)
            writer.show(secret)
            return secret

        def look() -> bytes:
            nonlocal shared
            ranks = self.collectives.ranks
            expected_bytes = -(-sum(places.sizes.values()) // ranks.world)
            shared = SharedFolder(saving.path, secret, ranks.rank, self.values.lend, expected_bytes)
            for file, num_bytes in places.sizes.items():
                shared.check(file, num_bytes)
            return b""

        def write() -> bytes:
            assert shared is not None
            try:
                _Parts(self, places, shared, saving).write()
                return json.dumps(shared.finish()).encode()
            finally:
                shared.close()

        def commit() -> bytes:
            if writer is not None:
                found = [json.loads(one) for one in told]
                sums = [
                    joined_sums(file, num_bytes, [tuple(one) for its in found for one in its[file]])
                    for file, num_bytes in places.sizes.items()
                ]
                writer.commit(self.facts, sums)
            return b""

        try:
            secret, *_ = self._each(f"the beginning of {name}", begin)
            self._each(f"opening {name}", look)
            told = self._each(f"writing {name}", write)
            self._each(f"the end of {name}", commit)
        finally:
            if shared is not None:
                shared.close()
            if writer is not None:
                writer.abandon()

    def _each(self, what: str, make: Callable[[], bytes]) -> list[bytes]:
        return of_each(self.collectives, what, make, SAVE)


class _Parts:
    """What one rank writes."""

    def __init__(self, content: SharedContent, places: FilePlaces, folder: SharedFolder, saving: Saving) -> None:
        assert isinstance(content.values, Snapshot)
        self._content, self._values, self._places, self._folder = content, content.values, places, folder
        self._saving, self._collectives = saving, content.collectives
        numbers = {tensor.key: index for index, tensor in enumerate(self._values.tensors) if tensor.kind == PARAM}
        # By the number of the tensor after which all its sources have come; buffers have before all others.
        self._due = [(max(numbers.get(name, -1) for name in one.sources), one) for one in places.converted]
        is_first = self._collectives.ranks.rank == 0
        self._heads = dict(places.heads) if is_first else {}  # of files, each written when it is first touched
        self._held: dict[str, Tensor] = {}  # this rank's elements of what is to be converted, one after the other
        self._error: Exception | None = None

    def write(self) -> None:
        """All ranks come together for each tensor that is converted, whatever one of them could not do."""
        numbers = {tensor: index for index, tensor in enumerate(self._values.tensors)}
        try:
            for name, value in self._content.buffers.items() if self._collectives.ranks.rank == 0 else ():
                self._put(self._places.of_tensor(name), 0, value.view(-1))
            sources = {name for _, one in self._due for name in one.sources}
            for tensor, first, part in self._values.parts():
                self._convert_until(numbers[tensor])
                if self._saving.is_abandoned:
                    raise Abandoned(f"{self._saving.path} was given up")
                at = self._places.of_tensor(tensor.key) if tensor.kind == PARAM else self._places.of_state(tensor)
                self._put(at, first, part)
                if tensor.kind == PARAM and tensor.key in sources:
                    held = self._held.get(tensor.key)
                    self._held[tensor.key] = part.clone() if held is None else torch.cat((held, part))
                self._saving.num_bytes += part.nbytes
        except Exception as error:
            self._error = self._error or error
        self._convert_until(len(numbers))
        if self._error is not None:
            raise self._error
        for file in list(self._heads):
            self._folder.write(file, 0, self._heads.pop(file))

    def _put(self, places: list[FilePlace], first: int, part: Tensor) -> None:
        for place in places:
            if place.file in self._heads:
                self._folder.write(place.file, 0, self._heads.pop(place.file))
            assert part.dtype == place.entry.dtype and part.device.type == "cpu", (place, part.dtype, part.device)
            self._folder.write(place.file, place.offset + first * part.dtype.itemsize, part)

    # ---- what comes together

    def _convert_until(self, number: int) -> None:
        while self._due and self._due[0][0] < number:
            _, one = self._due.pop(0)
            target = len(self._due) % self._collectives.ranks.world
            values = {name: self._whole(name, target) for name in one.sources}
            if target == self._collectives.ranks.rank and self._error is None:
                try:
                    self._convert(one, {name: value for name, value in values.items() if value is not None})
                except Exception as error:
                    self._error = error

    def _convert(self, one: Written, values: dict[str, Tensor]) -> None:
        assert one.convert is not None
        made = one.convert(values)
        for stored in one.stored:
            place = self._places.of_converted(one, stored.name)
            self._put([place], 0, made[stored.name].contiguous().view(-1))

    def _whole(self, name: str, target: int) -> Tensor | None:
        """On the rank `target`: of all ranks' elements, which lie in their order. Of a buffer all have all."""
        if name in self._content.buffers:
            return self._content.buffers[name]
        shape, dtype = next(
            (tensor.shape, tensor.dtype)
            for tensor in self._values.tensors
            if (tensor.key, tensor.kind) == (name, PARAM)
        )
        own = self._held.pop(name, torch.empty(0, dtype=dtype))
        rows: list[list[bytes]] = [[] for _ in range(self._collectives.ranks.world)]
        for received in self._received(name, own):
            if target == self._collectives.ranks.rank:
                for row, piece in zip(rows, received, strict=True):
                    row.append(piece)
        if target != self._collectives.ranks.rank:
            return None
        content = bytearray(b"".join(piece for row in rows for piece in row))
        if len(content) != torch.Size(shape).numel() * dtype.itemsize:  # some rank has failed, and says so
            self._error = self._error or ValueError(f"{name!r} is not whole: another rank could not read its part")
            return torch.zeros(shape, dtype=dtype)
        return torch.frombuffer(content, dtype=dtype).view(shape) if content else torch.empty(shape, dtype=dtype)

    def _received(self, name: str, own: Tensor) -> Iterator[list[bytes]]:
        content = own.view(torch.uint8).numpy().tobytes()
        lengths = [int(one) for one in self._collectives.exchange(f"length of {name}", b"%d" % len(content), SAVE)]
        for start in range(0, max(lengths), TRAVELLING_BYTES):
            part = content[start : start + TRAVELLING_BYTES]
            yield self._collectives.exchange(f"{name} from byte {start} on", part, SAVE)
