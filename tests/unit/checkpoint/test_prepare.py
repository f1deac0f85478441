"""What a save will cost is told by the disk that it will go to, and what it takes of the host is within the limit."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import hightide
import models
from hightide.checkpoint import prepare
from hightide.checkpoint.files.folder import manifest_of
from hightide.ir.save_sizes import BLOCK_BYTES, num_blocks
from hightide.planner.solution import Searched
from hightide.runtime.surgery import run_of
from waiting import OwnThreads

Pair = tuple[torch.nn.Module, torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "LEAST_BYTES", 1)
    monkeypatch.setattr(prepare, "TRY_BYTES", 2 * BLOCK_BYTES)


def trained(host: str = "64MiB") -> Pair:
    model, batch = models.hand_written(num_layers=4)
    optimizer = torch.optim.AdamW(model.parameters())
    limits = hightide.Limits(gpu="64MiB", host=host)
    model, optimizer = hightide.wrap(model, optimizer, batch, limits=limits, micro_batch=2)
    models.loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_a_disk_is_as_fast_as_it_was_at_the_last_save(tmp_path: Path) -> None:
    model, optimizer = trained()
    for step in (1, 2):
        path = hightide.save(model, optimizer, tmp_path, step=step, wait=True).path
    manifest = manifest_of(path)
    assert manifest.written_s is not None
    told = hightide.prepare_saves(model, tmp_path)
    assert told is not None and told.write_bytes_per_s == pytest.approx(manifest.num_bytes / manifest.written_s)
    assert f"(as step-2 was written: {told.write_bytes_per_s / 1e9:.1f} GB/s)" in told.in_words
    assert told.written_s >= 0.999 * told.num_bytes / told.write_bytes_per_s
    assert hightide.save(model, optimizer, tmp_path, step=3).forecast is told
    hightide.unwrap(model)


def test_a_disk_that_nobody_has_written_to_is_tried(tmp_path: Path) -> None:
    """And what is tried leaves nothing behind, in a folder that is not there yet or cannot be written to either."""
    model, _ = trained()
    told = hightide.prepare_saves(model, tmp_path / "not" / "there")
    assert told is not None and told.speed_source == "tried:" and told.write_bytes_per_s > 0
    assert not list(tmp_path.iterdir())
    hightide.unwrap(model)


def test_where_nothing_can_be_tried_it_is_told_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise ValueError("no file can be made there")

    monkeypatch.setattr(prepare, "open_disk_file", refuses)
    model, _ = trained()
    before = run_of(model).save_forecast  # type: ignore[union-attr]
    told = hightide.prepare_saves(model, tmp_path)
    assert told is not None and before is not None and told.speed_source == before.speed_source
    hightide.unwrap(model)


def test_what_a_measured_machine_knows_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = trained()
    run = run_of(model)
    assert run is not None and isinstance(run.solution, Searched)
    run.save_forecast = run.solution.save_at(3e9, "measured")
    told = hightide.prepare_saves(model, tmp_path)
    assert told is not None and (told.write_bytes_per_s, told.speed_source) == (3e9, "measured")
    hightide.unwrap(model)


def test_it_needs_a_wrapped_model() -> None:
    with pytest.raises(ValueError, match="not wrapped"):
        hightide.prepare_saves(models.hand_written()[0])


@pytest.mark.parametrize("host", ["4MiB", "256MiB"])
def test_the_host_has_what_was_told_and_no_more(host: str, tmp_path: Path) -> None:
    model, optimizer = trained(host)
    told = hightide.prepare_saves(model, tmp_path)
    saving = hightide.save(model, optimizer, tmp_path, step=1)
    saving.wait()
    stats = hightide.stats(model)
    assert told is not None and stats.save_told_bytes == told.host_bytes
    assert stats.peak_bytes["host"] <= stats.plan.host_limit_bytes
    assert stats.save_peak_bytes <= told.host_bytes + 64 * 512, "of each tile, a region that is rounded up"
    if host == "256MiB":
        assert told.beside_bytes == 0 < num_blocks(told.num_bytes, BLOCK_BYTES) * BLOCK_BYTES <= stats.save_peak_bytes
        assert "for checkpoints, forecast" in str(stats)
    else:
        assert told.beside_bytes > 0 and "beside the host's limit" in told.in_words
    assert stats.forecast.host_peak_bytes + told.host_bytes <= stats.plan.host_limit_bytes
    hightide.unwrap(model)


def test_another_plan_gets_its_memory_too(tmp_path: Path) -> None:
    model, _ = trained()
    run = run_of(model)
    assert run is not None
    own = OwnThreads(prepare.THREAD)
    hightide.prepare_saves(model)
    assert own.end() and run.host._ready > run.host._end
    before = run.host
    run.move_to(run.solution)
    assert run.host is not before and own.end() and run.host._ready > run.host._end
    assert run.save_forecast is not None and run.save_forecast.is_ready
    hightide.unwrap(model)


def test_a_disk_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over, closed = threading.Event(), []

    class Hangs:
        def transfer(self, address: int, place: int, num_bytes: int, is_write: bool) -> None:
            over.wait(60.0)

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(prepare, "HANGS_S", 0.2)
    monkeypatch.setattr(prepare, "open_disk_file", lambda *args, **kwargs: Hangs())
    threads = OwnThreads()
    try:
        assert prepare._tried(tmp_path) is None
        assert not closed, "its number would be another file's, to which the thread that hangs might write"
    finally:
        over.set()
    assert threads.end()
