"""Ranks on a GPU: alone over NCCL, where one is made to talk, and two on one GPU over gloo. A whole run of one alone is
in test_cuda_even_alone.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ranks.test_ddp_parity import check
from started_ranks import StartedRanks

pytestmark = pytest.mark.gpu

PROGRAMS = Path(__file__).resolve().parents[1] / "ranks"


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[StartedRanks]:
    ranks = StartedRanks("rank_programs", PROGRAMS)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def training_on_gpu() -> Iterator[StartedRanks]:
    ranks = StartedRanks("ranked_training", PROGRAMS)
    yield ranks
    ranks.close()


def test_one_rank_over_nccl(on_gpu: StartedRanks) -> None:
    (rank,) = on_gpu.run("nccl_alone", 1, within_s=60.0)
    assert rank.result == {
        "backend": "nccl",
        "is_ahead": True,
        "chunk": 301.0 - 12.0,  # and the elements of nobody, which are -1
        "is_mean": True,
        "total": [1.0, 1.0],
        "any": True,
        "threads": ["MainThread"],
        "is_initialised": False,
    }


def test_a_fault_breaks_nccl_off(on_gpu: StartedRanks) -> None:
    (rank,) = on_gpu.run("nccl_raises", 1, within_s=60.0)
    assert rank.result["sum"] == 10.0
    assert rank.result["message"].endswith("rank 0 raised KeyError: 'a bad batch' (at the start)")


def test_two_ranks_cannot_share_a_gpu_over_nccl(on_gpu: StartedRanks) -> None:
    for rank in on_gpu.run("nccl_on_one_gpu", 2, within_s=60.0):
        assert "ranks 0 and 1 have the same GPU" in rank.result["message"]


def test_chunks_of_a_gpu_over_gloo(on_gpu: StartedRanks) -> None:
    sizes = [[128, 0, 64], [3 * 2**20 + 5, 3, 1]]
    for rank in on_gpu.run("gathered", 2, within_s=60.0, sizes=sizes, device="cuda:0"):
        assert rank.result["wrong"] == []


def test_gradients_of_a_gpu_over_gloo(on_gpu: StartedRanks) -> None:
    """The same bits as on the host."""
    for rank in on_gpu.run("reduced", 2, within_s=60.0, part_numels=[3 * 2**20 + 5, 0, 17], device="cuda:0"):
        assert all(rank.result["equal"]), rank.result


def test_numbers_of_a_gpu_over_gloo(on_gpu: StartedRanks) -> None:
    first, second = (rank.result for rank in on_gpu.run("numbers", 2, within_s=60.0, device="cuda:0"))
    assert first == second and first["fp64"] == pytest.approx(0.3, rel=1e-15)


@pytest.mark.parametrize(
    "options",
    [
        {"places": ["streamed", "mixed"], "clip": 0.5},
        {"places": ["mixed"], "update": "in_backward"},
        {"places": ["mixed"], "accumulate": 3, "sums": "gpu"},
    ],
    ids=str,
)
def test_two_ranks_on_one_gpu_train_as_ddp(training_on_gpu: StartedRanks, options: dict[str, Any]) -> None:
    """Over gloo, in shards; products of fp32 are rounded in another order than in DDP."""
    check(training_on_gpu, 2, subject="llama", device="cuda:0", rel=1e-4, most=1e-4, **options)
