"""Where a parameter's first values come from when they are not in the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:
    from hightide.runtime.chunks.chunks import Chunks


class Origin(Protocol):
    def fill(self, target: Tensor) -> None:
        """Writes the values into `target`: contiguous, shaped as the parameter, in its dtype, on any device."""


@runtime_checkable
class PartedOrigin(Origin, Protocol):
    """One of which a part can be read alone."""

    def fill_part(self, target: Tensor, start: int) -> None:
        """The same for as many elements as `target` has, in one dimension, from `start` on."""


@runtime_checkable
class SharedOrigin(Origin, Protocol):
    """One whose values several ranks have in shards: all of them take part."""

    def fill_home(self, chunks: Chunks) -> None:
        """Writes what has its home here."""


@dataclass(frozen=True)
class FirstValues:
    """Of the parameters that are on the meta device; all others bring their own."""

    origins: Mapping[str, Origin] = field(default_factory=dict)  # by the parameter's key: read straight into chunks
    initialise: Callable[[Chunks], None] | None = None  # for those without origin, once all the others are in place
