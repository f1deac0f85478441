"""Every sequence is in one row, whole, and rows are not longer than they may be."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hightide.data.packing import one_each, pack
from hightide.data.tokens import RowKind, Sequences

LENGTH = 20


def of_lengths(lengths: list[int]) -> Sequences:
    starts = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.arange(int(starts[-1]), dtype=torch.int32)
    return Sequences(ids, torch.ones(len(ids), dtype=torch.bool), starts, RowKind.TEXT)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, LENGTH), min_size=1, max_size=60))
def test_each_sequence_is_in_one_row_that_has_room_for_it(lengths: list[int]) -> None:
    rows = pack(of_lengths(lengths), LENGTH)
    assert sorted(rows.members.tolist()) == list(range(len(lengths)))
    sums = [sum(lengths[index] for index in rows.of(row)) for row in range(len(rows))]
    assert all(0 < total <= LENGTH for total in sums)
    assert len(rows) <= 1 + 2 * sum(lengths) // LENGTH  # no two rows could be one
    assert rows.are_packed == (len(rows) < len(lengths))


def test_full_sequences_have_rows_of_their_own() -> None:
    rows = pack(of_lengths([LENGTH, LENGTH, 7]), LENGTH)
    assert [rows.of(row) for row in range(3)] == [[0], [1], [2]] and not rows.are_packed


def test_unpacked_sequences_are_rows() -> None:
    rows = one_each(of_lengths([3, 4]))
    assert [rows.of(row) for row in range(len(rows))] == [[0], [1]] and not rows.are_packed
