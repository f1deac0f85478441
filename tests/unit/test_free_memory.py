"""What is free here, and the limits that follow."""

from __future__ import annotations

import warnings

import pytest
import torch

import hightide
import models
from hightide import free_memory
from unit.runtime.steps import adamw

GIB = 2**30
CUDA = torch.device("cuda", 0)


class Gpu:
    """What torch says of a GPU that is not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free_bytes: int, reserved_bytes: int = 0, used_bytes: int = 0):
        self.asked: list[torch.device] = []
        self.free_bytes = free_bytes
        monkeypatch.setattr(torch.cuda, "mem_get_info", self._mem_get_info)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved_bytes)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: used_bytes)

    def _mem_get_info(self, device: torch.device) -> tuple[int, int]:
        self.asked.append(device)
        return self.free_bytes, 141 * GIB


def resolve(limits: hightide.Limits) -> tuple[int, int]:
    model, _ = models.hand_written()
    return free_memory.memory_limits(limits, CUDA, model, adamw(model))


@pytest.mark.parametrize("free_bytes", [100 * GIB, 7 * GIB])  # 7: another process has the rest
def test_the_gpu_limit_is_what_the_driver_has_free_now(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    gpu = Gpu(monkeypatch, free_bytes)
    gpu_bytes, host_bytes = resolve(hightide.Limits())
    assert gpu_bytes == int(free_memory.GPU_HEADROOM * free_bytes) < free_bytes and gpu.asked == [CUDA]
    assert host_bytes > 0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("gpu", ["2GiB", "7GiB"])  # 7: all of it is the user's wish
def test_a_limit_within_what_is_free_is_kept(monkeypatch: pytest.MonkeyPatch, gpu: str) -> None:
    Gpu(monkeypatch, 7 * GIB)
    assert resolve(hightide.Limits(gpu=gpu, host="1GiB")) == (hightide.Limits(gpu=gpu).gpu, GIB)


def test_a_limit_above_what_is_free_is_lowered_and_says_who_has_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch, 7 * GIB, reserved_bytes=4 * GIB, used_bytes=3 * GIB)
    with pytest.warns(UserWarning) as caught:
        gpu_bytes, host_bytes = resolve(hightide.Limits(gpu="24GiB", host="1000TiB"))
    assert gpu_bytes == int(8 * GIB * free_memory.GPU_HEADROOM), "1 GiB is only kept by torch for later"
    assert host_bytes == 1000 * 2**40, "what is free on the host cannot be told"
    assert [str(warning.message) for warning in caught] == [
        "Limits(gpu) is 24.0 GiB, but only 8.0 GiB of cuda:0 are free (other programs and CUDA itself hold 130 GiB, "
        "other tensors of this process 3.0 GiB): planned for 7.6 GiB"
    ]
    assert caught[0].filename == __file__


def test_what_wrap_will_move_is_free_and_what_another_run_keeps_for_later_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The simulated accelerator's model stands for one on the GPU."""
    Gpu(monkeypatch, 7 * GIB, reserved_bytes=4 * GIB, used_bytes=3 * GIB)
    monkeypatch.setattr(free_memory.device_limit, "num_limits", lambda index: 0)
    here = torch.device("cpu")
    shared = torch.nn.Linear(16, 16, bias=False)
    model = torch.nn.Sequential(shared, torch.nn.Linear(16, 16, bias=False))
    model.append(torch.nn.Linear(16, 16, bias=False, device="meta"))
    model[1].weight.data = shared.weight.data.t()  # the same storage
    optimizer = torch.optim.SGD(shared.parameters(), momentum=0.9)
    optimizer.state[shared.weight] = {"momentum_buffer": torch.zeros(16, 16)}
    room = free_memory.room_on(here, model, optimizer)
    assert room.here_bytes == 3 * GIB - 2 * 4 * 16 * 16
    assert room.free_bytes == 8 * GIB + 2 * 4 * 16 * 16
    monkeypatch.setattr(free_memory.device_limit, "num_limits", lambda index: 1)
    assert free_memory.room_on(here, model, optimizer).free_bytes == room.free_bytes - GIB


def test_a_plan_with_a_limit_above_what_is_free_is_kept_and_warned_of() -> None:
    model, batch = models.hand_written()
    plan = hightide.plan(model, adamw(model), batch, limits=hightide.Limits(gpu="24MiB", host="1MiB"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        free_memory.warn_of_room(free_memory.GpuRoom(CUDA, plan.gpu_limit_bytes, 0, 0), plan)
    words = r"may take 24.0 MiB .* but only 1.0 MiB of cuda:0 are free .* with limits=Limits\(gpu=996147\)"
    with pytest.warns(UserWarning, match=words):
        free_memory.warn_of_room(free_memory.GpuRoom(CUDA, 2**20, 0, 140 * GIB), plan)


def test_a_simulated_gpu_of_more_than_there_is_leaves_some_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 GiB, as of a GPU, on a laptop of 16."""
    monkeypatch.setattr(free_memory, "free_host_bytes", lambda: 16 * GIB)
    model, _ = models.hand_written()

    def limits(**given: str) -> tuple[int, int]:
        return free_memory.memory_limits(hightide.Limits(**given), torch.device("cpu"), model, adamw(model))

    with pytest.warns(UserWarning, match=r"24\.0 GiB, but .* of which 16\.0 GiB are free: planned for 8\.0 GiB"):
        assert limits(gpu="24GiB") == (8 * GIB, 8 * GIB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert limits(gpu="24GiB", host="1GiB") == (24 * GIB, GIB), "the user has said both"
        assert limits(gpu="15GiB") == (15 * GIB, GIB)
