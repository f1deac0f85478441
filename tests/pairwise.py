"""Cases of several features: all of them, and few of them that have every pair of values in some case."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Case = tuple[Any, ...]  # a value of each feature, in their order


def product(features: Mapping[str, Sequence[Any]], allowed: Callable[..., bool]) -> list[Case]:
    """Every combination of values for which `allowed`, called with the features' names as keywords, is true."""
    return [case for case in itertools.product(*features.values()) if allowed(**dict(zip(features, case, strict=True)))]


def pairs_of(case: Case) -> set[tuple[int, Any, int, Any]]:
    """Two features and their values in this case."""
    return {(one, case[one], other, case[other]) for one, other in itertools.combinations(range(len(case)), 2)}


def covering(features: Mapping[str, Sequence[Any]], cases: Sequence[Case]) -> list[Case]:
    """Some of the cases: each pair of values that occurs in any of them occurs in these.

    Greedy and deterministic: the case with the most pairs that are new; of several the one whose pairs were chosen
    least, so that values take turns where nothing asks for one."""
    pairs = _pair_numbers([len(values) for values in features.values()], _value_numbers(features, cases))
    times = torch.zeros(int(pairs.max()) + 1, dtype=torch.int64)
    chosen: list[Case] = []
    while True:
        times_by_case = times[pairs]
        num_new = (times_by_case == 0).sum(1)
        if not num_new.max():
            return chosen
        repeats = times_by_case.sum(1).masked_fill(num_new < num_new.max(), torch.iinfo(torch.int64).max)
        best = int((repeats == repeats.min()).nonzero()[0])
        chosen.append(cases[best])
        times[pairs[best]] += 1


def _value_numbers(features: Mapping[str, Sequence[Any]], cases: Sequence[Case]) -> Tensor:
    numbers = [{value: number for number, value in enumerate(values)} for values in features.values()]
    return torch.tensor([[of[value] for of, value in zip(numbers, case, strict=True)] for case in cases])


def _pair_numbers(num_values: Sequence[int], values: Tensor) -> Tensor:
    """[case, pair of features] -> a number that is different for different pairs of values."""
    columns, start = [], 0
    for one, other in itertools.combinations(range(len(num_values)), 2):
        columns.append(start + values[:, one] * num_values[other] + values[:, other])
        start += num_values[one] * num_values[other]
    return torch.stack(columns, dim=1)
