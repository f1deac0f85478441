"""All ranks must do the same to a model between two forwards: each notes its acts, and they are compared.

[Note: nobody's model] Each rank updates its own shards, and takes its own part of values that are loaded. Where ranks
update with other options, scale gradients by other numbers or load other values, DDP has models that drift apart; here
there would be one, put together of pieces of several. So all of it is noted, and compared at the beginning of each
forward, where ranks meet anyway, and when the model is saved. By what gradients are multiplied each rank has
computed, on a machine of its own maybe: there the last digits may differ. Numbers on a GPU are not looked at, which
would wait for it.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from hightide.ir.refusal import Refused
from hightide.runtime.alike import checksum
from hightide.runtime.gradients.factors import Factor
from hightide.shard.agreement import check_same
from hightide.shard.collectives import Collectives

FACTOR = "what gradients were multiplied by"
CLOSE = 1e-3  # so far apart, relatively, are factors that are meant to be the same
REMEDY = (
    "All ranks must call the model, backward and step() equally often, and do the same to the optimizer's options and "
    "groups, to p.grad and to values: if a loop leaves a batch out, or a scheduler follows a loss, all of them must, "
    "by the mean over ranks (torch.distributed.all_reduce)"
)
_FACTORS = struct.Struct("<dd")


class Acts:
    def __init__(self) -> None:
        self._loaded: dict[str, int] = {}
        self._updated: dict[str, str] = {}
        self._factors: set[float] = set()
        self._is_elsewhere = False  # a factor, on the GPU

    def clear(self) -> None:
        for part in (self._loaded, self._updated, self._factors):
            part.clear()
        self._is_elsewhere = False

    def loads(self, what: str, value: Tensor) -> None:
        self._loaded[what] = checksum(value)

    def updates(self, params: Collection[str], hypers: Mapping[int, Any], how: Collection[tuple[int, int]]) -> None:
        """These of a chunk are updated. `how`: by group, and the number of the update."""
        first = next(iter(params))
        of_groups = (f"update {step} with {hypers[group]}" for group, step in sorted(how))
        self._updated[f"the update of {first}"] = f"{len(params)} of its chunk, {', '.join(of_groups)}"

    def scales(self, factor: Factor) -> None:
        if isinstance(factor, float):
            self._factors.add(factor)
        else:
            self._is_elsewhere = True

    def compare(
        self, collectives: Collectives, when: str, options: Mapping[str, str], mark: bytes = b""
    ) -> list[bytes]:
        """With what all others have done, and the options of their optimizers; and the mark of each."""
        updated = "something" if self._updated else "nothing"
        facts = {**options, "what was updated since the last forward": updated, **self._updated}
        facts |= {name: f"{one:08x}" for name, one in self._loaded.items()}
        least, most = (min(self._factors), max(self._factors)) if self._factors else (1.0, 1.0)
        digest = zlib.crc32(repr((facts, self._is_elsewhere)).encode()).to_bytes(4, "little")
        rows = collectives.exchange(when, digest + _FACTORS.pack(least, most) + mark)
        factors = [_FACTORS.unpack_from(row, len(digest)) for row in rows]
        are_close = all(map(_are_close, zip(*factors, strict=True)))
        if len({row[: len(digest)] for row in rows}) > 1 or not are_close:
            size = "numbers on the GPU" if self._is_elsewhere else [f"{one:.6g}" for one in sorted({least, most})]
            try:
                check_same(collectives, {**facts, FACTOR: size}, REMEDY)
            except ValueError as error:
                raise Refused(str(error)) from None
        self.clear()
        return [row[len(digest) + _FACTORS.size :] for row in rows]


def _are_close(factors: Collection[float]) -> bool:
    finite = [factor for factor in factors if math.isfinite(factor)]
    if len(finite) < len(factors):
        return not finite
    return max(finite) - min(finite) <= CLOSE * max(map(abs, finite))
