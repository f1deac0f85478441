"""The folder of a run: settings, plan, one line of metrics per step, a summary."""

from __future__ import annotations

import itertools
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from hightide.cli.config import TrainConfig
from hightide.process import files

PLAN, TIMELINE = "plan.json", "timeline.json"


class RunFolder:
    """<out>/<name>-NNN with config.yaml, plan.json, metrics.jsonl, summary.json and, if recorded, timeline.json."""

    def __init__(self, config: TrainConfig) -> None:
        self.path = _new_folder(Path(config.out), config.name)
        files.write_text(self.path / "config.yaml", config.to_yaml())
        self.plan_path, self.timeline_path = self.path / PLAN, self.path / TIMELINE
        self.metrics_path = self.path / "metrics.jsonl"
        # By line: a killed run keeps what it logged.
        self._metrics = self.metrics_path.open("w", buffering=1, encoding="utf-8")

    def log(self, metrics: dict[str, Any]) -> None:
        self._metrics.write(json.dumps(metrics) + "\n")

    def write_summary(self, summary: dict[str, Any]) -> None:
        files.write_text(self.path / "summary.json", json.dumps(summary, indent=1) + "\n")

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.close()


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
        what = "is a link to nothing" if out.is_symlink() else "is no folder"
        raise ValueError(f"cannot create the run folder in {out}: it {what}; choose another --out") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in it
        problem = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"cannot create the run folder {str(path)!r}: {problem}; choose another --out") from error
    raise AssertionError("numbers do not end")


def _number(path: Path, name: str) -> int:
    digits = path.name.removeprefix(f"{name}-")
    return int(digits) if digits != path.name and digits.isdecimal() else 0
