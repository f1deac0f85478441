"""The folder of a run: settings, plan, one line of metrics per step, a summary, checkpoints. One process has it, by a
lock that dies with its process, however that ends."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from hightide.cli.train.config import TrainConfig
from hightide.cli.train.metrics_file import MetricsFile, cut
from hightide.ir.foreign import shown
from hightide.process import files

LOCK = "lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # some network and user-space file systems


class FolderLock:
    """Held until it is closed. A POSIX lock: children that are forked do not hold it, so none that outlives a killed
    run keeps the folder from the next one. Where the file system has no locks nothing is held, and `is_held` says so.
    """

    def __init__(self, folder: Path) -> None:
        """Refused while another process has it."""
        path = folder / LOCK
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise ValueError(
                f"cannot lock the run folder {folder}: {error.strerror} ({LOCK}); make it writable, or begin anew "
                "elsewhere with --no-resume and --out"
            ) from error
        self.is_held = True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                self.is_held = False
                return
            os.close(self._file)
            raise ValueError(
                f"another process trains in {folder}; wait for its end, or begin anew: --no-resume or another --name"
            ) from error

    def close(self) -> None:
        """Letting go is for who goes on living: the file stays, for a lock on a file that is gone excludes nobody."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


PLAN, TIMELINE, METRICS, SUMMARY = "plan.json", "timeline.json", "metrics.jsonl", "summary.json"
SETTINGS, CHECKPOINTS, EVALUATIONS = "config.yaml", "checkpoints", "evaluations.jsonl"
MODEL, ADAPTER = "model", "adapter"  # what was trained, for other libraries


class RunFolder:
    """<out>/<name>-NNN with config.yaml, plan.json, metrics.jsonl, summary.json, the trained model in model/ or
    adapter/ and, if recorded, timeline.json. One that saves has checkpoints/step-N too, and a lock: it may be resumed,
    by one process at a time."""

    def __init__(self, config: TrainConfig, resumed: Path | None = None, num_steps: int = 0) -> None:
        """`resumed`: the folder of a run that goes on after `num_steps`, which its caller has locked."""
        self.path = _new_folder(Path(config.out), config.name) if resumed is None else resumed
        self._lock: FolderLock | None = None
        self.checkpoints = self.path / CHECKPOINTS
        if resumed is None and config.save.every is not None:
            self._lock = FolderLock(self.path)
            self.checkpoints.mkdir()
        for name in (SETTINGS, PLAN, METRICS, SUMMARY, TIMELINE, EVALUATIONS, MODEL, ADAPTER):
            if (self.path / name).is_symlink():
                raise ValueError(f"{self.path / name} is a link, which a run does not write through; remove it")
        self.num_lost = num_steps - cut(self.path / METRICS, num_steps)  # lines that should be there
        cut(self.path / EVALUATIONS, num_steps)
        if resumed is not None:
            (self.path / SUMMARY).unlink(missing_ok=True)
        files.write_text(self.path / SETTINGS, config.to_yaml())
        self.plan_path, self.timeline_path = self.path / PLAN, self.path / TIMELINE
        self.model_path = self.path / (MODEL if config.lora is None else ADAPTER)
        self._metrics = MetricsFile(self.path / METRICS)
        self.metrics_path = self._metrics.path

    def log(self, metrics: dict[str, Any]) -> None:
        self._metrics.log(metrics)

    def log_evaluation(self, numbers: dict[str, Any]) -> None:
        """A few in a run: the file is opened for each."""
        file = MetricsFile(self.path / EVALUATIONS)
        file.log(numbers)
        file.close()

    def sync(self) -> None:
        self._metrics.sync()

    def write_summary(self, summary: dict[str, Any]) -> None:
        files.write_text(self.path / SUMMARY, json.dumps(summary, indent=1) + "\n")

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.close()
        if self._lock is not None:
            self._lock.close()


def newest_saved(out: Path, name: str) -> Path | None:
    """The run folder of this name with the highest number, of those that have checkpoints, whatever lies there under
    that name."""
    with suppress(FileNotFoundError, NotADirectoryError):
        numbered = sorted((_number(path, name), path) for path in out.iterdir())
        for number, path in reversed(numbered):
            if number and path.is_dir() and os.path.lexists(path / CHECKPOINTS):
                return path
    return None


def check_place(out: Path) -> None:
    """Whether run folders can be made there, as far as that can be told: a model is read first, which may take long."""
    there = next(path for path in (out.absolute(), *out.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise _no_folder(there)
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"cannot create run folders in {shown(there)}: it cannot be written; choose another --out")


def _no_folder(path: Path) -> ValueError:
    what = "is a link to nothing" if path.is_symlink() else "is no folder"
    return ValueError(f"cannot create the run folder in {shown(path)}: it {what}; choose another --out")


def _new_folder(out: Path, name: str) -> Path:
    """The first number that is free. mkdir decides, so two runs that start at once get two folders."""
    path = out
    try:
        out.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1 + max((_number(path, name) for path in out.iterdir()), default=0)):
            path = out / f"{name}-{number:03d}"
            with suppress(FileExistsError):
                path.mkdir()
                return path
    except FileExistsError:  # of `out`
        raise _no_folder(out) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in it
        problem = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"cannot create the run folder {str(path)!r}: {problem}; choose another --out") from error
    raise AssertionError("numbers do not end")


def _number(path: Path, name: str) -> int:
    digits = path.name.removeprefix(f"{name}-")
    return int(digits) if digits != path.name and digits.isdecimal() else 0
