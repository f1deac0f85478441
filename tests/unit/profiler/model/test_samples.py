"""Where the samples of a batch are."""

from __future__ import annotations

import pytest
import torch

from hightide.profiler.model.call_tree import UnevenBatch
from hightide.profiler.model.samples import Samples, num_samples, possible_samples, resized, shapes

FIRST, SECOND, NOWHERE = Samples.FIRST, Samples.SECOND, Samples.NOWHERE
X = torch.zeros


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"x": X(6, 8), "labels": X(6)}, [FIRST, SECOND]),
        ({"labels": X(6)}, [FIRST]),
        ({"x": X(5, 6, 8), "labels": X(5, 6)}, [FIRST, SECOND]),
        ({"x": X(5, 6, 8), "labels": X(6)}, [SECOND]),
        ({"source": X(7, 6, 8), "target": X(5, 6, 8), "mask": X(6, 7)}, [SECOND]),
        ({"nodes": X(12, 8), "edges": X(2, 30), "labels": X(3)}, [NOWHERE]),
    ],
)
def test_what_is_possible(batch: dict[str, torch.Tensor], expected: list[Samples]) -> None:
    assert possible_samples(batch) == expected


def test_one_sample_more_is_where_the_samples_are() -> None:
    batch = {"x": torch.arange(30.0).view(5, 6), "labels": torch.arange(6), "scale": torch.tensor(1.0)}
    assert num_samples(batch, SECOND) == 6 and num_samples(batch, NOWHERE) == 1
    _, larger = resized(batch, SECOND, 1)
    assert larger["x"].shape == (5, 7) and torch.equal(larger["x"][:, 6], batch["x"][:, 5])
    assert larger["labels"].tolist() == [0, 1, 2, 3, 4, 5, 5]
    _, same = resized(batch, NOWHERE, 1)
    assert all(torch.equal(same[name], batch[name]) for name in batch)


def test_a_batch_of_another_layout_is_refused() -> None:
    with pytest.raises(UnevenBatch, match="time first"):
        num_samples({"x": X(5, 6, 8), "y": X(3, 4)}, SECOND)


def test_shapes_do_not_depend_on_the_number_of_samples_nor_on_who_shares_a_tensor() -> None:
    tokens = torch.zeros(4, 7, dtype=torch.long)
    first = shapes({"input_ids": tokens, "labels": tokens}, Samples.FIRST)
    assert first == {(-1, 7)} == shapes({"input_ids": tokens[:2], "labels": tokens[:2].clone()}, Samples.FIRST)
    assert first != shapes({"input_ids": tokens[:, :6], "labels": tokens[:, :6]}, Samples.FIRST)
    table = torch.zeros(3, 3)  # of no sample
    assert shapes((tokens.T, table), Samples.NOWHERE) == {(7, 4), (3, 3)}
    assert shapes((tokens.T, tokens.T), Samples.SECOND) == {(7, -1)}
