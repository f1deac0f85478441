"""Values are copied, summed and written by several threads: what is read is what was put, and nobody lets go too
early, too often, or never."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hightide.checkpoint.choosing import latest
from hightide.checkpoint.files import blocks, filesystem, manifest, writer
from hightide.checkpoint.files.folder import verify
from hightide.checkpoint.files.tensor_layout import Entry
from hightide.checkpoint.files.writer import CheckpointWriter, TensorFileWriter
from hightide.ir.save_sizes import NUM_BLOCKS
from waiting import OwnThreads, soon

SIZE = 4096
NUM_TILES, TILE_BYTES = 24, 5 * SIZE + 1000  # several blocks each, and never a whole number


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "PIECE_BYTES", 4 * SIZE)
    monkeypatch.setattr(writer, "BLOCK_BYTES", SIZE)
    monkeypatch.setattr(blocks, "SMALL_BYTES", 16)


def slowed(monkeypatch: pytest.MonkeyPatch, before: Callable[[], object]) -> None:
    """Each copy of a thread that writes, and of no other."""
    real = ctypes.memmove

    class Ctypes:
        def __getattr__(self, name: str) -> Any:
            return getattr(ctypes, name)

        def memmove(self, *args: Any) -> None:
            if threading.current_thread().name.startswith(blocks.THREAD):
                before()
            real(*args)

    monkeypatch.setattr(blocks, "ctypes", Ctypes())


def put_all(file: TensorFileWriter, checkpoint: CheckpointWriter, passed: Callable[[int, torch.Tensor], Any]) -> None:
    for number in range(NUM_TILES):
        tile = torch.randint(256, (TILE_BYTES,), dtype=torch.uint8)
        with checkpoint.copying(lambda number=number, tile=tile: passed(number, tile)):  # type: ignore[misc]
            for part in tile.split(TILE_BYTES // 3):
                file.put(part)


def entry() -> list[Entry]:
    return [Entry("a", torch.uint8, (NUM_TILES * TILE_BYTES,))]


def test_what_is_handed_over_is_copied_before_it_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that is passed is overwritten at once, as an update would. Copies end in any order."""
    draws = random.Random(1)
    slowed(monkeypatch, lambda: threading.Event().wait(draws.random() / 500))
    kept: dict[int, torch.Tensor] = {}

    def passed(number: int, tile: torch.Tensor) -> None:
        assert number not in kept, "once"
        kept[number] = tile.clone()
        tile.fill_(7)

    with CheckpointWriter(tmp_path, 1) as checkpoint:
        put_all(checkpoint.tensors("model.safetensors", entry()), checkpoint, passed)
        path = checkpoint.commit({})
    assert sorted(kept) == list(range(NUM_TILES)) and verify(path)
    expected = torch.cat([kept[number] for number in range(NUM_TILES)])
    assert torch.equal(load_file(path / "model.safetensors")["a"], expected)


def test_who_reads_goes_on_while_others_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as there are blocks."""
    goes_on, num_put = threading.Event(), 0
    slowed(monkeypatch, lambda: goes_on.wait(60))
    own = OwnThreads()
    done: list[int] = []

    def save() -> None:
        nonlocal num_put
        with CheckpointWriter(tmp_path, 1) as checkpoint:
            file = checkpoint.tensors("model.safetensors", [Entry("a", torch.uint8, (100 * SIZE,))])
            for number in range(100):
                with checkpoint.copying(lambda: done.append(1)):
                    file.put(torch.full((SIZE,), number, dtype=torch.uint8))
                num_put += 1
            checkpoint.commit({})

    thread = threading.Thread(target=save)
    thread.start()
    assert soon(lambda: num_put >= NUM_BLOCKS - 1)
    assert not done and num_put <= NUM_BLOCKS + 1
    goes_on.set()
    thread.join(60)
    assert len(done) == 100 and verify(tmp_path / "step-1") and own.end()


def test_what_cannot_be_let_go_of_is_no_checkpoint(tmp_path: Path) -> None:
    """A snapshot that was closed meanwhile says so to whoever has read a tile."""

    def passed(number: int, _: torch.Tensor) -> None:
        if number == NUM_TILES // 2:
            raise RuntimeError("the snapshot is closed")

    own = OwnThreads()
    with pytest.raises(RuntimeError, match="the snapshot is closed"), CheckpointWriter(tmp_path, 1) as checkpoint:
        put_all(checkpoint.tensors("model.safetensors", entry()), checkpoint, passed)
        checkpoint.commit({})
    assert latest(tmp_path) is None and not os.listdir(tmp_path) and own.end()


@pytest.mark.parametrize("number", [0, 7, NUM_TILES])
def test_a_disk_that_fails_while_tiles_are_with_others(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = filesystem.write, 0

    def failing(file: int, memory: memoryview, offset: int) -> int:
        nonlocal count
        count += 1
        if count > number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, memory, offset)

    monkeypatch.setattr(filesystem, "write", failing)
    own, tiles = OwnThreads(), set()
    with pytest.raises(ValueError, match="Input/output error"), CheckpointWriter(tmp_path, 1) as checkpoint:
        put_all(checkpoint.tensors("model.safetensors", entry()), checkpoint, lambda number, _: tiles.add(number))
        checkpoint.commit({})
    assert not os.listdir(tmp_path) and own.end()


def test_a_reader_that_fails_leaves_nobody_in_its_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the checkpoint is abandoned, no thread copies any more, and no tile is passed."""
    slowed(monkeypatch, lambda: threading.Event().wait(0.002))
    passed: list[int] = []
    own = OwnThreads()
    with pytest.raises(ZeroDivisionError), CheckpointWriter(tmp_path, 1) as checkpoint:
        file = checkpoint.tensors("model.safetensors", entry())
        with checkpoint.copying(lambda: passed.append(1)):
            file.put(torch.zeros(4 * SIZE, dtype=torch.uint8))
            raise ZeroDivisionError
    assert not passed and own.end() and not os.listdir(tmp_path)
