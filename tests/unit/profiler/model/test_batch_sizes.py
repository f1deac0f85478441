"""Which batch is larger than another: by the sizes of all of its tensors, whatever they are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hightide.profiler.model.batch_sizes import BatchSizes
from hightide.profiler.model.samples import Samples
from hightide.runtime.known_batches import KnownBatches


def sizes(**shapes: Any) -> BatchSizes:
    batch = {name: torch.zeros(shape) if isinstance(shape, tuple) else shape for name, shape in shapes.items()}
    return BatchSizes.of(batch, Samples.FIRST)


EXAMPLE = {"x": (4, 10), "y": (4, 3, 5), "flag": True, "number": 7}


@pytest.mark.parametrize(
    ("changes", "is_held"),
    [
        ({}, True),
        ({"x": (4, 9)}, True),
        ({"x": (3, 10), "y": (3, 3, 5)}, True),
        ({"number": 99, "flag": False}, True),
        ({"x": (4, 11)}, False),
        ({"x": (1, 11), "y": (1, 3, 5)}, False),
        ({"y": (4, 3, 6)}, False),
        ({"x": (5, 1), "y": (5, 1, 1)}, False),
        ({"x": (4, 10, 1)}, False),
        ({"z": (4,)}, False),
        ({"other": True}, False),
        ({"way": "text"}, False),
        ({"thing": 1j}, False),
    ],
    ids=str,
)
def test_what_holds_what(changes: dict[str, Any], is_held: bool) -> None:
    known = KnownBatches(sizes(**EXAMPLE))
    assert known.hold(sizes(**{**EXAMPLE, **changes})) is is_held


def test_fewer_tensors_are_held() -> None:
    assert sizes(**EXAMPLE).holds(sizes(x=(4, 10)))


def test_time_first() -> None:
    batch = torch.zeros(10, 4, 8)
    found = BatchSizes.of(batch, Samples.SECOND)
    assert found.num_samples == 4 and str(found) == "argument 0 10x4x8"
    assert not found.holds(BatchSizes.of(torch.zeros(11, 4, 8), Samples.SECOND))


def test_the_largest_are_remembered() -> None:
    known = KnownBatches(sizes(x=(4, 10)))
    known.add(sizes(x=(2, 20)))
    assert not known.hold(sizes(x=(4, 20))) and str(known) == "x 4x10; or x 2x20"
    known.raise_samples(4)
    assert known.hold(sizes(x=(4, 20))) and str(known) == "x 4x20"


class Watched(torch.Tensor):
    """Says when somebody looks into it."""

    looks = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "eq" in getattr(func, "__name__", ""):
            Watched.looks += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_mask_that_leaves_something_out_is_larger_than_one_of_ones() -> None:
    ones, ids = torch.ones(4, 6, dtype=torch.long), torch.arange(24).view(4, 6)
    holes = ones.clone()
    holes[0, 5] = 0
    for full, left_out in ((ones, holes), (ones.bool(), holes.bool())):
        known = KnownBatches(BatchSizes.of({"ids": ids, "mask": full}, Samples.FIRST))
        again = known.sizes_of({"ids": ids, "mask": full.clone()}, Samples.FIRST)
        larger = known.sizes_of({"ids": ids[:2], "mask": left_out[:2]}, Samples.FIRST)
        assert known.hold(again) and not known.hold(larger)
        assert known.hold(known.sizes_of({"ids": ids}, Samples.FIRST))  # without a mask nothing is left out
        assert str(known) == "ids 4x6, mask 4x6 of ones" and BatchSizes.from_plain(again.plain()) == again
        known.add(larger.with_samples(4))
        assert known.hold(again) and known.hold(larger) and str(known) == "ids 4x6, mask 4x6"


def test_nobody_looks_into_what_cannot_be_larger_by_its_values() -> None:
    ones = torch.ones(4, 6, dtype=torch.long)
    batch = {"ids": torch.arange(24).view(4, 6).as_subclass(Watched), "mask": ones.as_subclass(Watched)}
    known = KnownBatches(BatchSizes.of(batch, Samples.FIRST))
    Watched.looks = 0
    known.sizes_of(batch, Samples.FIRST)
    assert Watched.looks == 1  # the mask
    known.add(BatchSizes.of({**batch, "mask": ones * 0}, Samples.FIRST))
    Watched.looks = 0
    known.sizes_of(batch, Samples.FIRST)
    assert Watched.looks == 0


def test_weights_of_a_loss_are_no_mask() -> None:
    found = BatchSizes.of({"weights": torch.ones(4, 6), "classes": torch.ones(4, dtype=torch.long)}, Samples.FIRST)
    assert not found.ones


def test_a_larger_batch_of_ones_does_not_hold_one_with_a_mask_that_leaves_something_out() -> None:
    """Whatever the batches before it had: an example that is padded, or one without a mask."""
    full = {"ids": torch.arange(24).view(4, 6), "mask": torch.ones(4, 6, dtype=torch.long)}
    holes = {**full, "mask": torch.tensor([[1] * 5 + [0]] * 4)}
    short = {name: value[:, 3:] for name, value in holes.items()}
    for example in (short, {"ids": full["ids"]}):
        known = KnownBatches(BatchSizes.of(example, Samples.FIRST))
        larger = known.sizes_of(full, Samples.FIRST)
        assert not known.hold(larger)
        known.add(larger)
        assert known.hold(known.sizes_of(full, Samples.FIRST))
        assert not known.hold(known.sizes_of(holes, Samples.FIRST))


def test_tokens_that_are_all_one_are_no_mask() -> None:
    ones = torch.ones(4, 6, dtype=torch.long)
    batch = {"input_ids": ones, "labels": ones, "attention_mask": ones, "valid": ones.bool()}
    assert BatchSizes.of(batch, Samples.FIRST).ones == {"attention_mask", "valid"}
