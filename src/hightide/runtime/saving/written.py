"""Whether somebody has written to parameters that are on the GPU, which no update and nothing of hightide's tells."""

from __future__ import annotations

from hightide.ir.tier import Tier
from hightide.runtime.chunks.chunks import Chunks


class WrittenSince:
    def __init__(self, chunks: Chunks) -> None:
        """Since now."""
        self._chunks = chunks
        self._keys = {
            spec.index: [entry.param for entry in spec.params]
            for spec in chunks.specs
            if chunks.home(spec.index).store.tier is Tier.GPU
        }
        self._before = {chunk: chunks.writes(keys) for chunk, keys in self._keys.items()}

    def __call__(self, chunk: int) -> str | None:
        """A parameter of this chunk that was."""
        now, before = self._chunks.writes(self._keys.get(chunk, ())), self._before.get(chunk, {})
        return next((key for key, number in now.items() if before.get(key, number) != number), None)
