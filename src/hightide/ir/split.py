"""How one call of a block divides into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass


def micro_batches(num_samples: int, micro_batch: int) -> list[tuple[int, int]]:
    """(start, number of samples) of each micro-batch; the last one may be smaller."""
    return [(start, min(micro_batch, num_samples - start)) for start in range(0, num_samples, micro_batch)]


@dataclass(frozen=True)
class BatchDim:
    """The dimension of a tensor that carries the batch: its size is rows * number of samples, sample by sample."""

    dim: int
    rows: int = 1  # per sample. Bloom's alibi has the shape (samples * heads, 1, tokens): rows is its number of heads


@dataclass(frozen=True)
class Split:
    """What was learned about the calls of one block that have one signature. `note` says why a call is not split."""

    signature: str  # of the arguments: profiler.model.call_tree.signature_of
    inputs: tuple[BatchDim | None, ...]  # per tensor leaf of the arguments; None: no batch dimension
    outputs: tuple[BatchDim | None, ...]  # per tensor leaf of the result
    note: str = ""

    @property
    def splittable(self) -> bool:
        return not self.note
