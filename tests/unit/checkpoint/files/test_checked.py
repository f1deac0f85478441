"""No byte of a damaged piece is handed out; each piece is read once from front to back."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import NoReturn

import pytest

from hightide.checkpoint.files import checked, manifest
from hightide.checkpoint.files.checked import CheckedFile, DamagedFile
from hightide.checkpoint.files.folder import manifest_of
from small_checkpoints import write

NAME = "model.safetensors"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(manifest, "PIECE_BYTES", 4096)
    monkeypatch.setattr(checked, "READ_BYTES", 1000)
    return write(tmp_path, 1)


def test_any_ranges(path: Path) -> None:
    expected = (path / NAME).read_bytes()
    with CheckedFile(path, manifest_of(path), NAME) as file:
        for _ in range(100):
            start, end = sorted(random.choices(range(len(expected) + 1), k=2))
            memory = bytearray(end - start)
            file.read_into(start, memoryview(memory))
            assert memory == expected[start:end]


def test_each_piece_is_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total, real = [0], os.preadv

    def preadv(file: int, buffers: list[memoryview], offset: int) -> int:
        count = real(file, [buffers[0][:700]], offset)  # short ones too
        total[0] += count
        return count

    monkeypatch.setattr(checked.os, "preadv", preadv)
    size = (path / NAME).stat().st_size
    with CheckedFile(path, manifest_of(path), NAME) as file:
        for start in range(0, size, 333):
            file.read_into(start, memoryview(bytearray(min(333, size - start))))
    assert total[0] == size


def test_threads_and_advice_that_are_not_to_be_had(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    def unknown(*_: object) -> NoReturn:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(checked, "background", refused)
    monkeypatch.setattr(checked.os, "posix_fadvise", unknown)
    memory = bytearray((path / NAME).stat().st_size)
    with CheckedFile(path, manifest_of(path), NAME) as file:
        file.read_into(0, memoryview(memory))
    assert memory == (path / NAME).read_bytes()


def test_a_damaged_piece_is_told_and_the_others_are_read(path: Path) -> None:
    data = bytearray((path / NAME).read_bytes())
    data[5000] ^= 1
    (path / NAME).write_bytes(data)
    memory = memoryview(bytearray(10))
    with CheckedFile(path, manifest_of(path), NAME) as file:
        for _ in range(2):
            file.read_into(4086, memory)
            with pytest.raises(DamagedFile, match=r"model.safetensors, piece 2 of 4 \(bytes 4096 to 8192\)"):
                file.read_into(4090, memory)
            file.read_into(8192, memory)


def test_a_file_that_became_shorter(path: Path) -> None:
    told = manifest_of(path)
    os.truncate(path / NAME, 4100)
    with (
        CheckedFile(path, told, NAME) as file,
        pytest.raises(DamagedFile, match=r"piece 2 of 4.* ends 4092 bytes too early"),
    ):
        file.read_into(4096, memoryview(bytearray(1)))


def test_what_is_not_in_the_file(path: Path) -> None:
    with (
        CheckedFile(path, manifest_of(path), "training.json") as file,
        pytest.raises(DamagedFile, match="no 8 bytes at 8"),
    ):
        file.read_into(8, memoryview(bytearray(8)))
    with pytest.raises(ValueError, match=r"there is no 'config\.json'"):
        CheckedFile(path, manifest_of(path), "config.json")
