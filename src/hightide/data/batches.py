"""Batches of a run: in which order rows come, what each rank and each call gets of a step, and where it stands.

[Note: the loss of a step] It is the mean over all tokens of the step that are learned, on all ranks. A call gives the
mean over its own; so its share of them is the factor that makes it a part of the step's. Into how many calls and ranks
a step is cut then does not matter to what is learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hightide.data.buckets import Batch, PadToBucket, bucket_lengths
from hightide.data.packing import Rows
from hightide.data.tokens import Sequences
from hightide.ir.foreign import quoted

IGNORED = -100  # the label of a token that is not learned


@dataclass(frozen=True)
class Call:
    batch: Batch
    share: float  # of the tokens that its step learns; see [Note: the loss of a step]


@dataclass(frozen=True)
class RankPart:
    """Of a step: of `world` ranks this one's part, in `calls`."""

    rank: int = 0
    world: int = 1
    calls: int = 1

    def rows_per_call(self, num_rows: int) -> int:
        return num_rows // self.world // self.calls


class Batches:
    """Rows as batches. Those of one shape are padded to `length`; else to the nearest of a few lengths up to it."""

    def __init__(self, sequences: Sequences, rows: Rows, length: int, pad_id: int, *, one_shape: bool) -> None:
        self._sequences, self._rows = sequences, rows
        self._has_positions, self._has_mask = rows.are_packed, not one_shape
        longest = int(sequences.lengths.max())
        self.lengths = (length,) if one_shape else bucket_lengths(min(length, longest))
        self._pad_id = pad_id
        self._padded = PadToBucket(self._collated, self.lengths, pad_values={"input_ids": pad_id, "position_ids": 0})
        per_sequence = sequences.num_learned[rows.members]
        sizes = sequences.lengths[rows.members]
        self._num_learned, self._num_tokens = (_sums(values, rows.starts) for values in (per_sequence, sizes))

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, rows: Sequence[int], unlearned: Sequence[int] = ()) -> Batch:
        """`unlearned`: more rows, of which the loss counts nothing: they are there so that a batch has its size."""
        batch = self._padded([*rows, *unlearned])
        batch["labels"][len(rows) :] = IGNORED
        return batch

    def example(self, num_rows: int) -> Batch:
        """Of the largest shape, with a row as full as any: how much memory a step takes follows from it. It is padded
        if any batch may be: with a mask of ones models compute without one."""
        fullest = int(self._num_tokens.argmax())
        most = max(range(len(self)), key=lambda row: (len(self._rows.of(row)), row)) if self._has_positions else fullest
        batch = self._padded([most] * num_rows)
        example = PadToBucket(lambda _: batch, self.lengths[-1:], pad_values=self._padded.pad_values)([])
        if self._has_mask and int(self._num_tokens.min()) < self.lengths[-1]:
            example["attention_mask"][-1, -1] = 0
        return example

    def num_learned(self, rows: Sequence[int]) -> int:
        return int(self._num_learned[list(rows)].sum())

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Without padding."""
        return int(self._num_tokens[list(rows)].sum())

    def _collated(self, rows: Sequence[int]) -> Batch:
        length = int(self._num_tokens[list(rows)].max())
        ids = torch.full((len(rows), length), self._pad_id)
        labels = torch.full_like(ids, IGNORED)
        positions = torch.zeros_like(ids)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(rows):
            end = 0
            for index in self._rows.of(row):
                begin, end = end, end + self._put(index, ids[place, end:], labels[place, end:])
                positions[place, begin:end] = torch.arange(end - begin)
            mask[place, :end] = 1
        batch: Batch = {"input_ids": ids, "labels": labels}
        if self._has_positions:
            batch["position_ids"], batch["use_cache"] = positions, False  # with a cache nobody asks positions
        elif self._has_mask:
            batch["attention_mask"] = mask
        return batch

    def _put(self, index: int, ids: Tensor, labels: Tensor) -> int:
        """A sequence at the beginning of a part of a row. Returns its length."""
        begin, end = self._sequences.starts[index : index + 2].tolist()
        ids[: end - begin] = self._sequences.ids[begin:end]
        labels[: end - begin] = torch.where(self._sequences.is_learned[begin:end], ids[: end - begin], IGNORED)
        return int(end - begin)


def _sums(values: Tensor, starts: Tensor) -> Tensor:
    sums = torch.cat([torch.zeros(1, dtype=torch.long), values.cumsum(0)])
    return sums[starts].diff()


class Steps(Iterator[list[Call]]):
    """Endless: each pass through the data in an order of its own, which follows from the seed. `state_dict` is where
    it stands: who loads it goes on there, and nothing is drawn or read again."""

    def __init__(self, batches: Batches, rows_per_step: int, seed: int, rank_part: RankPart | None = None) -> None:
        rank_part = rank_part or RankPart()
        if rows_per_step % (rank_part.world * rank_part.calls):
            raise ValueError(
                f"{rows_per_step} sequences per step cannot be divided among {rank_part.world} ranks in "
                f"{rank_part.calls} calls each; make it a multiple of {rank_part.world * rank_part.calls}"
            )
        self._batches, self._rows_per_step, self._seed, self._rank_part = batches, rows_per_step, seed, rank_part
        self._taken = 0
        self._pass: tuple[int, Tensor] = (-1, torch.empty(0))
        self.num_tokens = 0  # of the last step, on all ranks, without padding

    def __next__(self) -> list[Call]:
        rows = [self._row(self._taken + offset) for offset in range(self._rows_per_step)]
        self._taken += self._rows_per_step
        self.num_tokens = self._batches.num_tokens(rows)
        return calls_of(self._batches, rows, self._rank_part)

    def _row(self, number: int) -> int:
        which, place = divmod(number, len(self._batches))
        if self._pass[0] != which:
            generator = torch.Generator().manual_seed((self._seed * 1_000_003 + which) % 2**63)
            self._pass = (which, torch.randperm(len(self._batches), generator=generator))
        return int(self._pass[1][place])

    def state_dict(self) -> dict[str, int]:
        return {"taken": self._taken}

    def load_state_dict(self, state: object) -> None:
        """Of a checkpoint, which may be a stranger's."""
        taken = state.get("taken") if isinstance(state, dict) else None
        if isinstance(taken, bool) or not isinstance(taken, int) or taken < 0 or taken % self._rows_per_step:
            raise ValueError(f"{quoted(state)} is no place in the data: the checkpoint is not of this command")
        self._taken = taken


def calls_of(batches: Batches, rows: Sequence[int], rank_part: RankPart) -> list[Call]:
    """This rank's part of a step. Gradients are averaged over ranks and not added up, so shares are `world` times as
    large."""
    total = batches.num_learned(rows)
    size = rank_part.rows_per_call(len(rows))
    first = rank_part.rank * len(rows) // rank_part.world
    found = []
    for begin in range(first, first + rank_part.calls * size, size):
        part = rows[begin : begin + size]
        found.append(Call(batches.batch(part), batches.num_learned(part) * rank_part.world / total))
    return found


def all_rows(batches: Batches, rows_per_call: int, rank_part: RankPart) -> Iterator[tuple[Batch, int]]:
    """Each row once, for an evaluation: this rank's batches, with how many tokens are learned in each. All ranks have
    as many of them, of the same size, because they compute together."""
    at_once = rows_per_call * rank_part.world
    for begin in range(0, len(batches), at_once):
        rows = range(begin + rank_part.rank * rows_per_call, begin + (rank_part.rank + 1) * rows_per_call)
        own = [row for row in rows if row < len(batches)]
        fill = [0] * (rows_per_call - len(own))
        yield (batches.batch(own, fill), batches.num_learned(own)) if own else (batches.batch(fill), 0)
