"""What a user keeps beside a model comes back equal, types included, or is refused by its place."""

from __future__ import annotations

import functools
import json
import math
import random
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hightide.checkpoint.extra import LONG, MAX_NESTING, from_plain, to_plain
from hightide.ir.foreign import parse_json

KEYS = st.one_of(
    st.text(max_size=4), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text(max_size=2)),
    st.sampled_from(["$tuple", "$"]),
)  # fmt: skip
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=20),
    st.integers(-(10**100), 10**100),
)  # fmt: skip
NESTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.frozensets(st.integers(), max_size=3),
    ),
    max_leaves=12,
)


def through_files(value: object) -> Any:
    data, tensors = to_plain(value)
    return from_plain(parse_json(json.dumps(data, allow_nan=False), "extra"), tensors)


def same(one: Any, other: Any) -> bool:
    """Equal in value and in type, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and one.tolist() == other.tolist()
    if isinstance(one, numpy.ndarray | numpy.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(same(a, c) and same(b, d) for (a, b), (c, d) in pairs)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    return bool(one == other)


@given(NESTS)
def test_any_nest_comes_back(value: Any) -> None:
    assert same(through_files(value), value)


@pytest.mark.parametrize(
    "value",
    [
        numpy.float64(0.1), numpy.float32("nan"), numpy.int8(-3), numpy.bool_(True), numpy.uint64(2**64 - 1),
        numpy.arange(6, dtype=">u4").reshape(2, 3), numpy.zeros((0, 3)), numpy.array(2.5), numpy.ones(3, dtype=complex),
        torch.randn(2, 3), torch.tensor(7), torch.empty(0, 4), torch.randn(4, 6)[::2, 1::3], torch.tensor([True]),
        torch.ones(3, dtype=torch.bfloat16), torch.ones(2, dtype=torch.complex64), torch.tensor(5, dtype=torch.uint32),
        torch.randn(3, dtype=torch.complex64).conj(), torch.ones(2).to(torch.float8_e5m2),
        b"x" * LONG, bytearray(b"x" * LONG), bytearray(b"y"), list(range(LONG)), tuple(float(i) for i in range(LONG)),
        [True] * LONG, [2**70] * LONG, [0.5, 1] * LONG, torch.Size([2, 3]), OrderedDict(b=1, a=2), Counter("abca"),
        {1, "x"}, "\ud800", {"\ud800": 1}, random.getstate(), numpy.random.default_rng(3).bit_generator.state,
    ],
    ids=lambda value: f"{type(value).__name__}",
)  # fmt: skip
def test_kinds_of_values(value: Any) -> None:
    assert same(through_files({"x": value})["x"], value)


def test_long_lists_are_tensors() -> None:
    """A million positions of a sampler would be megabytes of JSON."""
    data, tensors = to_plain({"order": list(range(100_000)), "raw": bytes(5000)})
    assert len(json.dumps(data)) < 200
    assert sorted(tensors) == ["extra['order']", "extra['raw']"]


def test_tensors_of_gradients_and_parameters_are_plain() -> None:
    value = nn.Parameter(torch.ones(2)) * 2
    found = through_files([value])[0]
    assert type(found) is torch.Tensor and not found.requires_grad and found.tolist() == [2.0, 2.0]


def test_state_dicts_of_all_schedulers_and_a_scaler_come_back() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler
    made = [
        schedule.MultiStepLR(optimizer, [2, 2, 5]),
        schedule.CosineAnnealingWarmRestarts(optimizer, 3),
        schedule.OneCycleLR(optimizer, 0.1, total_steps=9),
        schedule.ReduceLROnPlateau(optimizer),
        schedule.SequentialLR(optimizer, [schedule.ConstantLR(optimizer), schedule.LinearLR(optimizer)], [3]),
        schedule.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
        torch.amp.GradScaler("cpu", init_scale=8.0),
        torch.Generator().manual_seed(3).get_state(),
    ]
    for one in made:
        state: Any = one if isinstance(one, torch.Tensor) else one.state_dict()
        assert same(through_files(state), state), one


def test_the_place_of_what_cannot_be_kept_is_named() -> None:
    for value, message in [
        ({"scheduler": {"fn": lambda: 1}}, r"extra\['scheduler'\]\['fn'\] is a function"),
        ({"a": [1, (2, {3: object()})]}, r"extra\['a'\]\[1\]\[1\]\[3\] is of builtins.object"),
        ([nn.Linear(1, 1)], r"extra\[0\] is of torch.nn.modules.linear.Linear"),
        ({"d": defaultdict(list)}, "is of collections.defaultdict"),
        ({"p": functools.partial(print)}, "is of functools.partial"),
        ({"t": torch.ones(2, 2).to_sparse()}, "without plain values"),
        ({"t": torch.ones(2, device="meta")}, "without plain values"),
        ({"n": numpy.array(["text"])}, "give numbers"),
        ({"n": numpy.datetime64("2020-01-01")}, "give numbers"),
        ({torch.ones(1): 1}, "a tensor as a key"),
        ({"i": 1 << (1 << 21)}, "bits; keep it as bytes"),
    ]:
        with pytest.raises(ValueError, match=message):
            to_plain(value)


def test_a_nest_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append({"again": value})
    with pytest.raises(ValueError, match="contains itself"):
        to_plain(value)


def test_the_deepest_nest_can_be_read() -> None:
    value: Any = (1,)
    for _ in range(MAX_NESTING - 1):
        value = {1: value}
    data, _ = to_plain(value)
    assert same(through_files(value), value)
    parse_json(json.dumps({"a": {"b": {"c": data}}}), "where it stands in a file")


@pytest.mark.parametrize(
    "data",
    [
        {"$what": 1}, {"$tuple": 3}, {"$tuple": [1], "b": 2}, {"$int": "x"}, {"$int": 4}, {"$float": "3"},
        {"$bytes": 3}, {"$bytes": "?"}, {"$bytes": {"$tensor": "f"}}, {"$tensor": "missing"}, {"$tensor": ["f"]},
        {"$dict": [[1]]}, {"$dict": [[1, 2], [1, 3]]}, {"$dict": [[[], 2]]}, {"$set": [[]]}, {"$numbers": 3},
        {"$numbers": {"$tensor": "b"}}, {"$array": ["<f4", [2], "b"]}, {"$array": ["|O8", [1], "b"]},
        {"$array": ["<f4", [-1], "b"]}, {"$array": 3}, {"$array": ["<f4", [2**62, 4], "b"]},
        {"$number": ["<f4", "00"]}, {"$number": ["<q9", "00"]}, {"$size": ["a"]}, {"$raw": ["complex64", [1], "b"]},
        {"$raw": ["Tensor", [1], "b"]}, {"$text": "zz"}, {"$text": 3},
    ],
    ids=str,
)  # fmt: skip
def test_what_no_save_has_written_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="damaged"):
        from_plain({"x": data}, {"f": torch.ones(2), "b": torch.zeros(4, dtype=torch.uint8)})
