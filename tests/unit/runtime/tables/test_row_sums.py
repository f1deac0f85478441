"""Sums of rows are those of plain PyTorch, whoever makes them and however many rows there are."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hightide.ir.tier import Tier
from hightide.runtime.lanes.update_threads import RunInThreads
from hightide.runtime.tables import row_sums
from hightide.runtime.tables.row_sums import NewRows, RowsNorm, RowSums
from hightide.stores.array import Array
from hightide.stores.host_arena import HostArena

VOCABULARY, WIDTH = 50, 24


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows at a time: one id fills several."""
    monkeypatch.setattr(row_sums, "TILE_NUMEL", 3 * WIDTH)


def home(dtype: torch.dtype = torch.float32) -> Array:
    store = HostArena(2**20)
    assert store.tier is Tier.HOST
    array = Array(store, store.allocate(VOCABULARY * WIDTH * dtype.itemsize, "gradients"), dtype, (VOCABULARY, WIDTH))
    array.view.fill_(7)  # of an earlier step, which nobody knows
    return array


def alone(work: Callable[[int], object], _: int) -> None:
    work(0)


def in_threads(work: Callable[[int], object], _: int) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def rows_of(seed: int, count: int = 64, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 9, (count,), generator=draw)
    return ids, torch.randn(count, WIDTH, generator=draw).to(dtype)


def of_torch(ids: Tensor, rows: Tensor, padding: int | None = None) -> Tensor:
    weight = torch.zeros(VOCABULARY, WIDTH, requires_grad=True)
    F.embedding(ids, weight, padding_idx=padding).backward(rows)
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("share", [alone, in_threads])
@pytest.mark.parametrize("padding", [None, 4])
def test_the_bits_are_those_of_plain_pytorch(share: RunInThreads, padding: int | None) -> None:
    array = home()
    sums = RowSums(array)
    for step in range(3):  # what a step leaves is gone in the next
        expected = torch.zeros(VOCABULARY, WIDTH)
        for part in range(3):
            ids, rows = rows_of(10 * step + part)
            norm = RowsNorm()
            sums.add(NewRows(ids + step, rows, starts=part == 0, padding=padding, norm=norm), share)
            expected += of_torch(ids + step, rows, padding)
            assert torch.equal(array.view, expected)
            assert norm.value == pytest.approx(expected.norm().item(), rel=1e-6)


def test_threads_do_not_change_norms() -> None:
    found = []
    for share in (alone, in_threads, in_threads):
        sums, norm = RowSums(home()), RowsNorm()
        for part in range(2):
            ids, rows = rows_of(part)
            sums.add(NewRows(5 * part + ids, rows, starts=part == 0, norm=norm), share)
        found.append(norm.value)
    assert found[0] == found[1] == found[2]


def test_what_is_there_is_scaled_first() -> None:
    array = home()
    sums = RowSums(array)
    first, second = rows_of(0), rows_of(1, count=3)
    sums.add(NewRows(*first, starts=True), alone)
    sums.add(NewRows(*second, starts=False, factor=0.25), alone)
    assert torch.equal(array.view, of_torch(*first) * 0.25 + of_torch(*second))
    array.view[-1] = torch.inf
    sums.forget()
    sums.add(NewRows(*second, starts=False, factor=0.0), alone)  # zero is asked for, and not zero times infinity
    assert torch.equal(array.view, of_torch(*second))


def test_what_others_wrote_counts_and_goes() -> None:
    array = home()
    sums, norm = RowSums(array), RowsNorm()
    ids, rows = rows_of(0)
    sums.add(NewRows(ids, rows, starts=True), alone)
    array.view.add_(1)  # rows that nobody has looked up
    sums.forget()
    sums.add(NewRows(ids, rows, starts=False, norm=norm), alone)
    expected = of_torch(ids, rows) + 1 + of_torch(ids, rows)
    assert torch.equal(array.view, expected)
    assert norm.value == pytest.approx(expected.norm().item(), rel=1e-6)
    sums.add(NewRows(ids, rows, starts=True), alone)
    assert torch.equal(array.view, of_torch(ids, rows))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("at_home", [None, torch.float32])
def test_sums_of_narrow_rows_are_fp32_and_rounded_once(dtype: torch.dtype, at_home: torch.dtype | None) -> None:
    """At home in fp32: earlier passes of the step were not rounded, and their rows are now."""
    array = home(at_home or dtype)
    sums, norm = RowSums(array), RowsNorm()
    first, second = rows_of(0, dtype=dtype), rows_of(1, count=5, dtype=dtype)
    before = of_torch(first[0], first[1].float())
    sums.add(NewRows(*first, starts=True, round_to=dtype if at_home is None else None), alone)
    before = before.to(dtype).float() if at_home is None else before
    assert torch.equal(array.view.float(), before)
    sums.add(NewRows(*second, starts=False, round_to=dtype, norm=norm), alone)
    exact = before + of_torch(second[0], second[1].float())
    assert torch.equal(array.view.float(), exact.to(dtype).float())
    kept = exact.to(dtype).float() if dtype is torch.float16 else exact
    assert norm.value == pytest.approx(kept.norm().item(), rel=1e-6)


def test_an_overflow_in_rounding_is_in_the_norm() -> None:
    sums, norm = RowSums(home(torch.float16)), RowsNorm()
    rows = torch.full((2, WIDTH), 6e4, dtype=torch.float16)
    sums.add(NewRows(torch.tensor([1, 1]), rows, starts=True, round_to=torch.float16, norm=norm), alone)
    assert norm.value == float("inf")


def test_no_rows_are_a_gradient_of_zero() -> None:
    array = home()
    norm = RowsNorm()
    none = torch.empty(0, dtype=torch.int64), torch.empty(0, WIDTH)
    RowSums(array).add(NewRows(*none, starts=True, norm=norm), in_threads)
    assert norm.value == 0.0 and not array.view.any()
