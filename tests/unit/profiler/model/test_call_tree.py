from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from hightide.ir.codec import from_json, to_json
from hightide.ir.split import BatchDim, Split
from hightide.profiler.model.call_tree import (
    _flatten,
    _signature,
    batch_size,
    flatten,
    flatten_call,
    mode_of,
    narrow,
    signature_of,
    unflatten,
    way_of,
)


@dataclass(frozen=True)
class Packed:
    hidden: torch.Tensor
    note: str
    inner: Any = None


def test_calls_come_back_as_they_were() -> None:
    a, b, c = torch.zeros(2), torch.ones(3), torch.ones(1)
    packed = Packed(a, "text", Packed(b, "inner"))
    opaque = object()
    leaves, tree = flatten_call((a, [b, None]), {"x": packed, "y": BaseModelOutput(last_hidden_state=c), "z": opaque})
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    assert [id(tensor) for tensor in tensors] == [id(tensor) for tensor in (a, b, a, b, c)]
    replaced = [leaf + 1 if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    (first, (second, nothing)), kwargs = unflatten(replaced, tree)
    assert first.tolist() == [1, 1] and second.tolist() == [2, 2, 2] and nothing is None
    assert isinstance(kwargs["x"], Packed) and kwargs["x"].inner.hidden.tolist() == [2, 2, 2]
    assert kwargs["x"].note == "text" and kwargs["z"] is opaque
    assert isinstance(kwargs["y"], BaseModelOutput) and kwargs["y"].last_hidden_state.tolist() == [2]
    assert packed.hidden is a, "the original is not touched"


def test_a_dataclass_without_tensors_is_a_leaf() -> None:
    value = Packed(None, "config")  # type: ignore[arg-type]
    leaves, tree = flatten([value])
    assert leaves == [value] and unflatten(leaves, tree)[0] is value


Pair = namedtuple("Pair", "a b")
Kind = StrEnum("Kind", ["CAUSAL", "FULL"])


class Flag(int):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, 1),
        lambda: ((), [], {}),
        lambda: ((torch.zeros(2), None), {"b": [torch.ones(1), 3], "a": (True, "text", 2.5)}),
        lambda: ((), {"mask": None, "flag": Flag(0), "kind": Kind.FULL, "rotary": (torch.ones(1, 3), torch.ones(4))}),
        lambda: {"pair": Pair(torch.ones(2), 1), "ordered": OrderedDict(b=torch.ones(3), a=2)},
        lambda: [{1: torch.ones(2)}, {True: torch.ones(2)}],
        lambda: (Packed(torch.ones(2), "text"), {"x": torch.ones(3)}),
        lambda: (object, {3, 4}, torch.float32),
    ],
)
def test_what_is_known_of_a_structure_is_what_torch_says_of_it(make: Callable[[], Any]) -> None:
    for value in (make(), make()):  # the second is known already
        (leaves, tree), (expected, its_tree) = flatten(value), _flatten(value)
        assert len(leaves) == len(expected) and all(a is b for a, b in zip(leaves, expected, strict=True))
        assert str(tree) == str(its_tree) and tree.spec == its_tree.spec
        assert signature_of(leaves, tree, "train") == _signature(leaves, its_tree, "train")
        back, as_torch_does = unflatten(leaves, tree), unflatten(leaves, its_tree)
        again = flatten(back)[0]
        assert type(back) is type(as_torch_does) is type(value)
        assert len(again) == len(leaves) and all(a is b for a, b in zip(again, leaves, strict=True))
    assert flatten(make())[1].signatures.keys() or tree.outline is None


def test_a_known_signature_is_that_of_its_leaves() -> None:
    """What differs in a size alone, or in a flag."""
    one, other = torch.zeros(2, 1), torch.zeros(2, 3)
    found = [signature_of(*flatten_call((x,), {"flag": flag}), "train") for x in (one, other) for flag in (True, False)]
    assert len(set(found)) == 4


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return way_of(*flatten_call(args, kwargs))


def test_signature_tells_structure_dtype_and_rank_but_not_size() -> None:
    base = signature((torch.zeros(2, 3),), {"mask": None})
    assert base == signature((torch.zeros(5, 7),), {"mask": None})
    others = [
        signature((torch.zeros(2, 3),), {"mask": torch.zeros(2)}),
        signature((torch.zeros(2, 3, 1),), {"mask": None}),
        signature((torch.zeros(2, 3, dtype=torch.bfloat16),), {"mask": None}),
        signature((torch.zeros(2, 3),), {"other": None}),
        signature(([torch.zeros(2, 3)],), {"mask": None}),
        signature((Packed(torch.zeros(2, 3), ""),), {"mask": None}),
        signature((torch.zeros(2, 3), True), {"mask": None}),
        signature((torch.zeros(2, 3), False), {"mask": None}),
    ]
    assert len({base, *others}) == 1 + len(others)
    assert signature((1,), {}) == signature((2,), {}), "numbers count by type"
    assert signature(("a",), {}) != signature(("b",), {}), "words count"


def test_a_signature_tells_single_rows_and_the_mode() -> None:
    def told(shape: tuple[int, ...], mode: str = "train") -> str:
        return signature_of(*flatten_call((torch.zeros(shape),), {}), mode)

    assert told((4, 3)) == told((5, 7))
    assert len({told((4, 3)), told((1, 3)), told((4, 1)), told((4, 3), "eval")}) == 4


def test_the_mode_of_a_block_is_that_of_all_its_modules() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    modes = [mode_of(list(block.modules()))]
    block[1].eval()
    modes.append(mode_of(list(block.modules())))
    modes.append(mode_of(list(block.eval().modules())))
    assert modes[0] == "train" and modes[2] == "eval" and len(set(modes)) == 3


def test_narrow_takes_whole_samples() -> None:
    alibi = torch.arange(12).reshape(6, 2)  # 3 samples of 2 rows
    assert narrow(alibi, BatchDim(0, 2), 1, 2).tolist() == alibi[2:6].tolist()
    assert narrow(alibi, BatchDim(1, 1), 1, 1).tolist() == alibi[:, 1:].tolist()
    assert narrow(alibi, None, 1, 1) is alibi


def test_split_survives_json() -> None:
    split = Split("(*)", (BatchDim(0), None), (BatchDim(1, 4),), note="why")
    assert from_json(Split, to_json(split)) == split
    assert not split.splittable


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": torch.zeros(4, 7), "num_items_in_batch": torch.tensor(3), "flag": True},
        (torch.zeros(4, 7), torch.zeros(4), None),
        [{"nested": torch.zeros(4, 1)}],
        torch.zeros(4),
    ],
)
def test_batch_size_is_the_first_dimension(batch: Any) -> None:
    assert batch_size(batch) == 4


@pytest.mark.parametrize("batch", [{}, {"n": torch.tensor(1)}, (), torch.tensor(1.0), {"text": "words"}])
def test_a_batch_without_a_batch_dimension_is_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"without a batch dimension.*pass the whole batch"):
        batch_size(batch)


def test_batch_sizes_that_differ_are_named() -> None:
    batch = {"input_ids": torch.zeros(4, 7), "extra": [torch.zeros(4), torch.zeros(3)]}
    with pytest.raises(ValueError, match=r"input_ids: 4, extra\[0\]: 4, extra\[1\]: 3.*expand or drop"):
        batch_size(batch)


def test_an_empty_batch_and_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match="0 samples"):
        batch_size(torch.zeros(0, 3))
    with pytest.raises(ValueError, match="type int"):
        batch_size(3)  # type: ignore[arg-type]
