"""metrics.jsonl: one line per step, each step once and in order, also where a run was killed and resumed."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from hightide.ir.foreign import open_regular, parse_json
from hightide.process import files

MAX_LINE = 64 * 1024  # bytes; real ones have some hundreds


class MetricsFile:
    """Lines are added to what is there. Where the disk is full they wait for room, and training does not."""

    def __init__(self, path: Path) -> None:
        """A link is refused: it may point to what is not ours."""
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        self._waiting = b""

    def log(self, metrics: dict[str, Any]) -> None:
        """At once, not by way of a buffer: a killed run keeps what it logged."""
        self._waiting += json.dumps(metrics).encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            if error.errno not in files.FULL:
                raise

    def sync(self) -> None:
        """To the disk, before a checkpoint is: what is behind a checkpoint is in the metrics, after a crash too."""
        self._write()
        try:
            os.fsync(self._file)
        except OSError as error:
            if error.errno not in files.NO_SYNC:
                raise

    def close(self) -> None:
        """Fails if lines are left over."""
        try:
            self._write()
        finally:
            os.close(self._file)

    def _write(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._file, self._waiting) :]
        except OSError as error:
            error.filename = str(self.path)
            raise


def cut(path: Path, num_steps: int) -> int:
    """Leaves the lines of steps 1 to `num_steps`, as a whole or not at all. Returns how many of them there are: fewer
    where somebody has removed some."""
    kept: list[bytes] = []
    is_changed, next_step = False, 1
    with suppress(FileNotFoundError):
        path.lstat()
        with open_regular(path, "metrics file", follow=False) as raw, open(raw.fileno(), "rb", closefd=False) as file:
            while line := file.readline(MAX_LINE):
                step = _step(line)
                if step is not None and next_step <= step <= num_steps:
                    kept.append(line)
                    next_step = step + 1
                else:
                    is_changed = True
        if is_changed:
            files.write_bytes(path, b"".join(kept))
    return len(kept)


def _step(line: bytes) -> int | None:
    """None: a line that was torn, or is none of ours."""
    if not line.endswith(b"\n"):
        return None
    try:
        data = parse_json(line.decode(), "a line")
    except ValueError:
        return None
    step = data.get("step") if isinstance(data, dict) else None
    return step if isinstance(step, int) and not isinstance(step, bool) else None
