"""Each step once and in order, whatever a killed run has left."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hightide.cli.train.metrics_file import MAX_LINE, MetricsFile, cut


def line(step: object) -> bytes:
    return json.dumps({"step": step, "loss": 1.5}).encode() + b"\n"


def steps(path: Path) -> list[int]:
    return [json.loads(text)["step"] for text in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (b"", []),
        (line(1) + line(2), [1, 2]),
        (line(1) + line(2) + line(3) + line(4), [1, 2, 3]),
        (line(1) + line(2) + line(3) + line(4)[:9], [1, 2, 3]),
        (line(1) + line(2) + line(3)[:9], [1, 2]),
        (line(1) + line(2) + line(3)[:-1], [1, 2]),  # the next one would be behind it
        (line(1) + line(2) + line(2) + line(3), [1, 2, 3]),
        (line(1) + line(3) + line(2), [1, 3]),
        (line(1) + b"\0\0\0\n" + line(2) + b"[]\n" + line("3") + line(True), [1, 2]),
        (b"\xff\n" + line(1), [1]),
        (line(1) + b"x" * (2 * MAX_LINE) + b"\n" + line(2), [1, 2]),
        (line(0) + line(-1) + line(1), [1]),
    ],
)
def test_only_steps_behind_the_checkpoint_stay(tmp_path: Path, content: bytes, kept: list[int]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    assert cut(path, 3) == len(kept)
    assert steps(path) == kept
    file = MetricsFile(path)
    file.log({"step": 4})
    file.close()
    assert steps(path) == [*kept, 4]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_file_that_is_missing_has_no_lines(tmp_path: Path) -> None:
    assert cut(tmp_path / "metrics.jsonl", 3) == 0


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(line(9))
    (tmp_path / "metrics.jsonl").symlink_to("mine")
    with pytest.raises(ValueError, match="it is a link"):
        cut(tmp_path / "metrics.jsonl", 3)
    with pytest.raises(OSError, match="symbolic links"):
        MetricsFile(tmp_path / "metrics.jsonl")
    assert (tmp_path / "mine").read_bytes() == line(9)


def test_lines_wait_while_the_disk_is_full_and_are_whole_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    write, free_bytes = os.write, 40

    def full(descriptor: int, content: bytes) -> int:
        nonlocal free_bytes
        if not free_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, content[:free_bytes])
        free_bytes -= written
        return written

    monkeypatch.setattr(os, "write", full)
    for step in (1, 2, 3):
        file.log({"step": step, "loss": 1.5})
    with pytest.raises(OSError, match="No space left"):
        file.sync()
    free_bytes = 10**6
    file.log({"step": 4, "loss": 1.5})
    file.sync()
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]
    free_bytes = 0
    file.log({"step": 5})
    with pytest.raises(OSError, match=r"No space left.*metrics.jsonl"):
        file.close()


def test_other_errors_are_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    file = MetricsFile(tmp_path / "metrics.jsonl")
    monkeypatch.setattr(os, "write", failing)
    with pytest.raises(OSError, match=r"Input/output error.*metrics.jsonl"):
        file.log({"step": 1})
