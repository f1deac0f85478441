"""What a run leaves behind: settings, plan, one line of metrics per step, a summary."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from hightide.cli.config import TrainConfig

PLAN, TIMELINE = "plan.json", "timeline.json"


class RunFolder:
    """<out>/<name>-NNN with config.yaml, plan.json, metrics.jsonl, summary.json and, if recorded, timeline.json."""

    def __init__(self, config: TrainConfig) -> None:
        self.path = _new_folder(Path(config.out), config.name)
        (self.path / "config.yaml").write_text(config.to_yaml())
        self._metrics = self.metrics_path.open("w", buffering=1)  # by line: a killed run keeps what it logged

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def plan_path(self) -> Path:
        return self.path / PLAN

    @property
    def timeline_path(self) -> Path:
        return self.path / TIMELINE

    def log(self, metrics: dict[str, Any]) -> None:
        self._metrics.write(json.dumps(metrics) + "\n")

    def write_summary(self, summary: dict[str, Any]) -> None:
        (self.path / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._metrics.close()


def _new_folder(out: Path, name: str) -> Path:
    """The first number that is free. mkdir decides, so two runs that start at once get two folders."""
    number = 1 + max((_number(path, name) for path in out.glob(f"{name}-*")), default=0)
    while True:
        path = out / f"{name}-{number:03d}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ValueError(f"cannot create the run folder {path}: {error.strerror}; choose another --out") from error
        else:
            return path


def _number(path: Path, name: str) -> int:
    digits = path.name.removeprefix(f"{name}-")
    return int(digits) if digits.isdecimal() else 0
