"""Values for a checkpoint, read from a real GPU while training goes on."""

from __future__ import annotations

import tempfile
import time
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import disk_plans
import models
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier
from hightide.runtime import run_values as run_module
from hightide.runtime.saving.copy_buffers import CopyBuffer, CopyStage
from hightide.runtime.saving.copy_on_update import CopyOnUpdate
from hightide.stores.pinned import PinnedArena
from snapshot_readers import Case, Reader, Training, assert_same_bits, with_spare

pytestmark = pytest.mark.gpu

MIB = 2**20
PLENTY, LITTLE, NONE = 32 * MIB, MIB // 4, 0
MIXED = [(Tier.GPU, Tier.GPU), (Tier.HOST, Tier.HOST), (Tier.GPU, Tier.HOST)]


def wide() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Chunks of a few hundred KiB: several tiles each."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(5)]
    draw = torch.Generator().manual_seed(1)
    batch = {"x": torch.randn(8, 256, generator=draw), "labels": torch.randn(8, 256, generator=draw)}
    return Deep(layers), batch


class Deep(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": (x - labels).square().mean()}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "TILE_BYTES", 64 * 1024)
    monkeypatch.setattr(run_module, "SMALL_TILE_BYTES", 64 * 1024)


def begun(homes: str, update: str, spare: int, dtype: torch.dtype = torch.float32) -> Training:
    def placed(plan: Plan) -> Plan:
        choose = (lambda index: MIXED[index % 3]) if homes == "mixed" else homes.removesuffix(", states later")
        plan = replace(disk_plans.placed(plan, choose), gpu_limit_bytes=2**30)
        if homes.endswith(", states later"):
            plan = replace(plan, blocks=tuple(replace(block, settles=True) for block in plan.blocks))
        return with_spare(plan, spare)

    def make() -> tuple[nn.Module, dict[str, torch.Tensor]]:
        model, batch = wide()
        return model.to(dtype), {name: value.to(dtype) for name, value in batch.items()}

    disk = {"disk": f"{tempfile.gettempdir()}:64MiB"} if "disk" in homes or homes == "every tier" else {}
    training = Case(make, placed, {"update": update}, disk, device="cuda").begin()
    training.steps(2)
    return training


CASES = [(homes, update, PLENTY) for homes in ("gpu", "host", "mixed") for update in ("deferred", "in_backward")]
CASES += [("gpu", "deferred", NONE), ("gpu", "in_backward", LITTLE), ("mixed", "deferred", LITTLE)]
CASES += [("every tier", "deferred", PLENTY), ("every tier", "in_backward", NONE)]
CASES += [("host, states later", "deferred", PLENTY), ("host, states later", "deferred", NONE)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("homes", "update", "spare"), CASES)
def test_values_are_those_after_the_step(homes: str, update: str, spare: int, dtype: torch.dtype) -> None:
    training = begun(homes, update, spare, dtype)
    expected = training.at_rest()
    snapshot = training.run.snapshot()
    stands_still = homes == "gpu" and spare == PLENTY
    reader = Reader(snapshot, num_parts=0) if stands_still else Reader(snapshot, pause_s=0.001)
    training.steps(6)
    assert_same_bits(reader.values(), expected)
    final = training.at_rest()
    assert any(not torch.equal(final[name], value) for name, value in expected.items()), "training went on"
    host = training.run.host
    assert host.peak_bytes <= host.capacity_bytes and "copies for a checkpoint" not in host.breakdown()
    training.close()


def test_what_leaves_the_gpu_goes_into_pinned_memory_and_the_next_time_too() -> None:
    training = begun("gpu", "deferred", PLENTY)
    host = training.run.host
    assert isinstance(host, PinnedArena)
    for _ in range(2):
        expected = training.at_rest()
        reader = Reader(training.run.snapshot(), num_parts=3)
        while reader.num_read < 3:
            pass
        aside = set_aside(training)
        deadline_s = time.monotonic() + 30
        while len(aside) <= 5 and time.monotonic() < deadline_s:  # one after the other
            time.sleep(0.001)
            aside = set_aside(training)
        assert len(aside) > 5 and all(buffer.is_pinned and buffer.memory.is_pinned() for buffer in aside)
        training.steps(1)
        assert_same_bits(reader.values(), expected)
    training.close()
    assert not host._pinned_spare


def set_aside(training: Training) -> list[CopyBuffer]:
    saving = training.run.performer.updating._saving
    assert saving is not None
    return [one.buffer for one in saving._kept if one.buffer is not None]


def test_an_update_on_the_gpu_does_not_make_the_host_wait_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader does not run ahead, so that each update must ask for its copies; and waits on the GPU alone."""
    training = begun("gpu", "deferred", PLENTY)
    if not steps_without_waiting(training):
        pytest.skip("a step waits for the GPU by itself")
    Reader(training.run.snapshot()).values()  # all is pinned now
    expected = training.at_rest()
    monkeypatch.setattr(CopyOnUpdate, "_run_ahead", lambda *_: None)
    reader = Reader(training.run.snapshot(), num_parts=0)
    deadline_s = time.monotonic() + 30
    while training.run.performer.updating._saving._kept[0].stage is CopyStage.HOME:  # type: ignore[union-attr]
        assert time.monotonic() < deadline_s, "the reader has not begun"
    assert steps_without_waiting(training)
    assert_same_bits(reader.values(), expected)
    training.close()


def steps_without_waiting(training: Training) -> bool:
    """One step; whether the host waited for the GPU in its update."""
    models.loss_of(training.model, training.batch).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            training.optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    training.model.zero_grad()
    return not caught


def test_a_snapshot_that_is_closed_half_way_leaves_nothing_behind() -> None:
    training = begun("mixed", "in_backward", PLENTY)
    for num_parts in (0, 3, 20):
        values = training.run.snapshot().values()
        for _ in range(num_parts):
            next(values)
        del values
        training.steps(1)
        assert training.run.performer.updating.saving is None
        assert "copies for a checkpoint" not in training.run.host.breakdown()
    training.close()
