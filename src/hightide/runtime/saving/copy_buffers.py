"""Tiles of a snapshot: how far each is, where its values are, and host memory for copies: what the plan leaves free,
and two buffers for what comes from elsewhere.

Not thread-safe by itself: whoever keeps the tiles has a lock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import torch
from torch import Tensor

from hightide.ir.save_sizes import NUM_STAGED
from hightide.ir.tier import Tier
from hightide.runtime.saving.tiles import Tile
from hightide.stores.host_arena import HostArena
from hightide.stores.store import Region
from hightide.stores.ticket import Ticket


class CopyStage(Enum):
    HOME = auto()  # nobody has read it
    ASIDE = auto()  # in a buffer, when its ticket is done
    HANDED = auto()  # the reader has it, where it lies
    READ = auto()


@dataclass(eq=False, slots=True)
class CopyBuffer:
    memory: Tensor  # bytes on the host
    region: Region | None  # None: it is not of the arena
    is_staged: bool = False
    is_pinned: bool = False

    def of(self, tile: Tile) -> Tensor:
        return self.memory[: tile.num_bytes].view(tile.array.dtype)


@dataclass(eq=False, slots=True)
class SnapshotTile:
    """A tile, and where its values are."""

    tile: Tile
    number: int
    runs_ahead: bool  # an update on the GPU changes it
    stage: CopyStage = CopyStage.HOME
    buffer: CopyBuffer | None = None
    ticket: Ticket | None = None
    is_through: bool = False  # it has left the GPU

    @property
    def tier(self) -> Tier:
        return self.tile.array.store.tier if self.tile.numel else Tier.HOST


class CopyBuffers:
    def __init__(self, host: HostArena) -> None:
        self._host = host
        self._staged: list[CopyBuffer] = []
        # Until that is done nothing leaves the GPU for memory that is not pinned: it would take longer than pinning.
        self._is_pinning = host.is_pinned

    def lent_for(self, one: SnapshotTile) -> CopyBuffer | None:
        """None: there is no room, or none yet."""
        leaves_gpu = one.tier is Tier.GPU
        buffer = self._lent(one.tile.num_bytes, leaves_gpu)
        if buffer is not None and leaves_gpu and self._is_pinning and not buffer.is_pinned:
            self.give_back(buffer)
            return None
        return buffer

    def _lent(self, num_bytes: int, leaves_gpu: bool) -> CopyBuffer | None:
        region = self._host.lend(num_bytes, leaves_gpu)
        if region is None:
            return None
        return CopyBuffer(self._host.view(region, torch.uint8), region, is_pinned=self._host.is_pinned_at(region))

    def lent_bytes(self, num_bytes: int) -> tuple[Tensor, Callable[[], None]] | None:
        region = self._host.lend(num_bytes, leaves_gpu=False)
        return None if region is None else (self._host.view(region, torch.uint8), partial(self._host.free, region))

    def give_back(self, buffer: CopyBuffer) -> None:
        if buffer.is_staged:
            self._staged.append(buffer)
        elif buffer.region is not None:
            self._host.free(buffer.region)

    # ---- for what the reader brings

    def stage(self, num_bytes: int) -> None:
        """Beside the limit only if all that the plan leaves free is in use."""
        if self._staged or not num_bytes:
            return
        self._staged = [self._lent(num_bytes, True) or _plain(num_bytes) for _ in range(NUM_STAGED)]
        for buffer in self._staged:
            buffer.is_staged = True

    @property
    def has_staged(self) -> bool:
        return bool(self._staged)

    def take_staged(self) -> CopyBuffer:
        return self._staged.pop()

    # ---- pinning

    def pin_more(self, leaving_bytes: int, staged_bytes: int) -> bool:
        """A part of what leaves the GPU, and of the staged buffers: whether there is now more of it. Takes a while, the
        first time, and needs no lock."""
        return self._host.pin_spare(leaving_bytes + NUM_STAGED * staged_bytes)

    def pinning_is_over(self) -> None:
        self._is_pinning = False

    # ---- the end

    def close(self) -> None:
        staged, self._staged = self._staged, []
        for buffer in staged:
            self.release(buffer)

    def release(self, buffer: CopyBuffer) -> None:
        """Whatever it was for."""
        if buffer.region is not None:
            self._host.free(buffer.region)


def _plain(num_bytes: int) -> CopyBuffer:
    return CopyBuffer(torch.empty(num_bytes, dtype=torch.uint8), None)
