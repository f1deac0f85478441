"""Who is alone, and what is wrong before ranks have met."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist

from hightide.shard.meeting import ENVIRONMENT, Facts, _check, _facts_of_all, _nodes, _portion_of_cores, find_ranks
from hightide.shard.signs import Patience
from waiting import OwnThreads


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENVIRONMENT, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_without_torchrun_one_is_alone() -> None:
    threads = OwnThreads()
    ranks = find_ranks(device="cpu")
    assert (ranks.rank, ranks.world, ranks.is_alone, ranks.watchman) == (0, 1, True, None)
    assert (ranks.node, ranks.num_nodes, ranks.local_rank, ranks.ranks_of_node) == (0, 1, 0, (0,))
    assert not dist.is_initialized() and not threads.alive()
    ranks.close()


def test_one_rank_of_torchrun_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(ENVIRONMENT, ("0", "1", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    assert find_ranks(device="cpu").is_alone and not dist.is_initialized()


def test_one_rank_can_be_made_to_talk() -> None:
    threads = OwnThreads()
    ranks = find_ranks(device="cpu", even_alone=True)
    assert (ranks.world, ranks.is_alone, ranks.backend) == (1, False, "gloo") and dist.is_initialized()
    ranks.close()
    assert not dist.is_initialized() and threads.end()


def test_ranks_that_are_dropped_end() -> None:
    threads = OwnThreads()
    find_ranks(device="cpu", even_alone=True)
    assert threads.end() and not dist.is_initialized()


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="not MASTER_ADDR, MASTER_PORT: start with torchrun"):
        find_ranks(device="cpu")


def test_too_few_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="process 3 of its node, counted from 0, but it has 2 GPUs"):
        find_ranks(device="cuda")


def test_a_launcher_may_show_each_process_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert find_ranks(device="cuda").device == torch.device("cuda", 0)


@pytest.mark.parametrize(("current", "found"), [(0, 1), (2, 2)])
def test_each_process_of_a_node_has_a_gpu_of_its_own_unless_it_has_chosen_one(
    current: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert find_ranks(device="cuda").device == torch.device("cuda", found)
    assert find_ranks(device="cuda:3").device == torch.device("cuda", 3)


def test_a_node_is_a_host_since_its_boot() -> None:
    names = [("a", "1"), ("b", "1"), ("a", "1"), ("a", "2")]
    assert _nodes([Facts(host, boot, "gloo", "") for host, boot in names]) == [0, 1, 0, 2]


def test_what_ranks_cannot_have_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 0 nccl, rank 1 gloo"):
        _check([Facts("a", "1", "nccl", "gpu-0"), Facts("a", "1", "gloo", "")])
    with pytest.raises(ValueError, match="ranks 0 and 2 have the same GPU"):
        _check([Facts("a", "1", "nccl", gpu) for gpu in ("gpu-0", "gpu-1", "gpu-0")])
    _check([Facts("a", "1", "gloo", "gpu-0")] * 2)


def test_cores_are_divided_among_the_ranks_that_may_use_them() -> None:
    """torchrun gives all ranks the same cores; others bind each to some of its own, which nobody else uses."""

    def portions(cpus: list[tuple[int, ...]], hosts: str) -> list[float]:
        facts = [Facts(host, "1", "gloo", "", own) for host, own in zip(hosts, cpus, strict=True)]
        return [_portion_of_cores(facts, rank) for rank in range(len(facts))]

    all_of_four = (0, 1, 2, 3)
    assert portions([all_of_four, all_of_four], "aa") == [0.5, 0.5]
    assert portions([(0, 1), (2, 3)], "aa") == [1.0, 1.0]
    assert portions([all_of_four, all_of_four], "ab") == [1.0, 1.0]
    assert portions([all_of_four, (0, 1)], "aa") == [0.75, 0.5]


class StoreThatGoes:
    """With the rank that has it, which has raised as soon as it knew enough."""

    def __init__(self, other: Facts) -> None:
        self._there = {"facts/0": json.dumps(asdict(other))}

    def set(self, key: str, value: str) -> None:
        self._there[key] = value

    def get(self, key: str) -> str:
        return self._there[key]

    def check(self, keys: list[str]) -> bool:
        if "known/0" in keys:
            raise dist.DistNetworkError("Failed to recv, got 0 bytes")
        return all(key in self._there for key in keys)


def test_who_raises_first_may_take_the_store_with_it() -> None:
    own = Facts("a", "1", "gloo", "")
    with pytest.raises(ValueError, match=r"different backends \(rank 0 nccl, rank 1 gloo\)"):
        _facts_of_all(StoreThatGoes(Facts("a", "1", "nccl", "gpu-0")), own, 1, 2, Patience())
    with pytest.raises(dist.DistNetworkError):  # nothing is wrong but that it died
        _facts_of_all(StoreThatGoes(own), own, 1, 2, Patience())
