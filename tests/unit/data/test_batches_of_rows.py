"""Batches hold what the rows hold, in an order that follows from the seed; where they stand can be gone on from."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest
import torch

from hightide.data.batches import Batches, RankPart, Steps, all_rows
from hightide.data.packing import one_each, pack
from hightide.data.tokens import RowKind, Sequences

PAD = 99
LENGTHS = [5, 9, 3, 7, 2, 8, 4, 6, 3, 5]


def sequences() -> Sequences:
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    ids = torch.arange(1, int(starts[-1]) + 1, dtype=torch.int32)
    is_learned = ids % 3 > 0
    is_learned[starts[:-1]] = False
    is_learned[starts[1:] - 1] = True
    return Sequences(ids, is_learned, starts, RowKind.PAIRS)


def packed() -> Batches:
    return Batches(sequences(), pack(sequences(), 12), 12, PAD, one_shape=True)


def padded() -> Batches:
    return Batches(sequences(), one_each(sequences()), 12, PAD, one_shape=False)


def pieces(batches: Batches, rows: list[int]) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of each sequence of a packed batch, by positions that begin again."""
    batch = batches.batch(rows)
    found = []
    for ids, labels, positions in zip(batch["input_ids"], batch["labels"], batch["position_ids"], strict=True):
        begins = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        for begin, end in pairwise(begins):
            if int(ids[begin]) != PAD:
                assert positions[begin:end].tolist() == list(range(end - begin))
                found.append((ids[begin:end].tolist(), labels[begin:end].tolist()))
            else:
                assert labels[begin:end].tolist() == [-100] * (end - begin)
    return found


def test_a_packed_batch_holds_each_sequence_with_its_labels() -> None:
    batches, data = packed(), sequences()
    found = dict((ids[0], (ids, labels)) for ids, labels in pieces(batches, list(range(len(batches)))))
    assert len(found) == len(LENGTHS)
    for begin, end in zip(data.starts.tolist(), data.starts.tolist()[1:], strict=False):
        ids, labels = found[int(data.ids[begin])]
        assert ids == data.ids[begin:end].tolist()
        assert labels == torch.where(data.is_learned[begin:end], data.ids[begin:end], -100).tolist()
    batch = batches.batch([0, 1])
    assert batch["input_ids"].shape == (2, 12) and batch["use_cache"] is False and "attention_mask" not in batch


def test_a_padded_batch_has_a_mask_and_one_of_a_few_lengths() -> None:
    long = Sequences(
        torch.arange(300, dtype=torch.int32),
        torch.ones(300, dtype=torch.bool),
        torch.tensor([0, 200, 300]),
        RowKind.CHAT,
    )
    batches = Batches(long, one_each(long), 256, PAD, one_shape=False)
    assert batches.lengths == (64, 128, 192, 200)
    batch = batches.batch([1, 1])
    assert batch["input_ids"].shape == (2, 128) and batch["attention_mask"].sum().item() == 200
    assert (batch["input_ids"][:, 100:] == PAD).all() and (batch["labels"][:, 100:] == -100).all()
    assert batches.example(3)["input_ids"].shape == (3, 200)


@pytest.mark.parametrize(("lengths", "leaves_out"), [([5, 9, 3], True), ([9, 9, 9], False)])
def test_the_example_is_padded_if_a_batch_may_be(lengths: list[int], leaves_out: bool) -> None:
    """With a mask of ones models take less memory than with one that leaves a token out."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.arange(int(starts[-1]), dtype=torch.int32)
    data = Sequences(ids, torch.ones(len(ids), dtype=torch.bool), starts, RowKind.CHAT)
    batches = Batches(data, one_each(data), 12, PAD, one_shape=False)
    for number in (1, 3):
        assert (batches.example(number)["attention_mask"] == 0).any() == leaves_out


def test_shares_of_calls_are_those_of_the_tokens_that_are_learned() -> None:
    for batches in (packed(), padded()):
        for world, calls in ((1, 1), (1, 4), (2, 2), (4, 1)):
            size = 4
            total = []
            for rank in range(world):
                (step,) = islice(Steps(batches, size, 0, RankPart(rank, world, calls)), 1)
                assert len(step) == calls
                counts = [int((call.batch["labels"][:, 1:] != -100).sum()) for call in step]
                total += [(count, call.share) for count, call in zip(counts, step, strict=True)]
            learned = sum(count for count, _ in total)
            for count, share in total:
                assert share == pytest.approx(count / learned * world)


def rows_of(steps: Steps, number: int) -> list[list[int]]:
    return [[int(ids[0]) for call in step for ids in call.batch["input_ids"]] for step in islice(steps, number)]


def test_each_pass_has_every_row_once_in_an_order_of_its_own() -> None:
    first, again, other = (rows_of(Steps(padded(), 5, seed), 4) for seed in (0, 0, 1))
    assert first == again != other
    everything = sorted(first[0] + first[1])
    assert len(set(everything)) == len(LENGTHS) and everything == sorted(first[2] + first[3])
    assert first[:2] != first[2:]


def test_calls_and_ranks_take_the_same_rows_in_the_same_order() -> None:
    whole = rows_of(Steps(padded(), 8, 3), 3)
    cut = [rows_of(Steps(padded(), 8, 3, RankPart(rank, 2, 2)), 3) for rank in range(2)]
    assert [one + other for one, other in zip(*cut, strict=True)] == whole


def test_steps_go_on_where_others_stand_and_draw_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows_of(Steps(padded(), 4, 7), 9)
    begun = Steps(padded(), 4, 7)
    rows_of(begun, 6)
    rest = Steps(padded(), 4, 7)
    rest.load_state_dict(begun.state_dict())
    drawn = []
    draw = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *args, **options: drawn.append(1) or draw(*args, **options))
    assert rows_of(rest, 3) == whole[6:]
    assert len(drawn) == 2  # the pass in which it stands, and the next


@pytest.mark.parametrize("state", [{}, {"taken": None}, {"taken": -4}, {"taken": 3}, {"taken": True}, [], None])
def test_a_state_that_is_none_of_steps_is_refused(state: object) -> None:
    with pytest.raises(ValueError, match="is no place in the data"):
        Steps(padded(), 4, 0).load_state_dict(state)


def test_a_step_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match=r"6 sequences per step cannot be divided among 2 ranks in 2 calls"):
        Steps(padded(), 6, 0, RankPart(0, 2, 2))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_evaluation_counts_each_row_once_and_all_ranks_compute_as_often(world: int) -> None:
    batches = padded()
    total = int(sequences().is_learned.sum())
    told = [list(all_rows(batches, 4, RankPart(rank, world))) for rank in range(world)]
    assert len({len(one) for one in told}) == 1
    assert sum(count for one in told for _, count in one) == total
    for batch, count in (pair for one in told for pair in one):
        assert len(batch["labels"]) == 4
        assert count in (0, int((batch["labels"][:, 1:] != -100).sum()))
        assert (batch["labels"][:, 1:] != -100).any()  # a mean over nothing is no number
