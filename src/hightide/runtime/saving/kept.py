"""A tile of a snapshot: how far it is, and where its values are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from torch import Tensor

from hightide.ir.tier import Tier
from hightide.runtime.saving.tiles import Tile
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
class Kept:
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
