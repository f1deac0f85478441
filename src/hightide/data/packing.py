"""Which sequences share a row of a batch. Each is whole, and none sees another.

[Note: packed sequences] Positions that begin again, without a mask and a cache, tell transformers that a row holds
several sequences: it masks each from the others, so that losses and gradients are those of the sequences one by one.
Not every model asks its positions that: those of `SEPARATED` do, which tests/parity/test_packed.py holds against single
sequences. For all others sequences are padded instead."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import torch
from torch import Tensor

from hightide.data.tokens import Sequences

# By model_type of the config.
SEPARATED = frozenset(
    {
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "phi3",
        "gemma",
        "gemma2",
        "olmo2",
        "smollm3",
        "granite",
        "starcoder2",
        "mixtral",
    }
)


@dataclass(frozen=True)
class Rows:
    """Row i holds the sequences members[starts[i] : starts[i + 1]], one after the other."""

    members: Tensor
    starts: Tensor

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def are_packed(self) -> bool:
        return bool((self.starts.diff() > 1).any())

    def of(self, row: int) -> list[int]:
        members: list[int] = self.members[self.starts[row] : self.starts[row + 1]].tolist()
        return members


def one_each(sequences: Sequences) -> Rows:
    return Rows(torch.arange(len(sequences)), torch.arange(len(sequences) + 1))


def pack(sequences: Sequences, length: int) -> Rows:
    """Each sequence, the longest first, into the fullest row that has room for it."""
    lengths = sequences.lengths
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # of rows that are not full, sorted: what is free, and which row
    for index in torch.argsort(lengths, descending=True, stable=True).tolist():
        size = int(lengths[index])
        place = bisect_left(room, (size, -1))
        if place == len(room):
            rows.append([])
            free, row = length, len(rows) - 1
        else:
            free, row = room.pop(place)
        rows[row].append(index)
        if free - size > 1:  # no sequence is shorter than two tokens
            insort(room, (free - size, row))
    counts = torch.tensor([0, *(len(row) for row in rows)])
    return Rows(torch.tensor([index for row in rows for index in row]), counts.cumsum(0))
