"""Where a run goes on: the newest whole checkpoint in the newest folder of its name, if it is of the same run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from hightide.checkpoint.files.folder import DamagedCheckpoint, Found, found
from hightide.checkpoint.files.names import GONE, TMP
from hightide.checkpoint.training import read_plan, read_training
from hightide.cli.train.config import TrainConfig
from hightide.cli.train.run_folder import CHECKPOINTS, SUMMARY, FolderLock, newest_saved
from hightide.cli.train.run_state import RunState, changes, difference
from hightide.ir.foreign import shown
from hightide.ir.plan import Plan
from hightide.ir.units import counted

_ANEW = "begin anew with --no-resume, or with another --name"


@dataclass(frozen=True)
class Resumed:
    """A checkpoint of this run, in a folder that is locked."""

    folder: Path
    lock: FolderLock | None  # None: another rank has it
    checkpoints: tuple[Path, ...]  # whole ones by their names and sizes, the newest first; this is the first
    step: int
    plan: Plan | None
    state: RunState
    console: Console

    @property
    def path(self) -> Path:
        return self.checkpoints[0]

    def is_finished(self, num_steps: int) -> bool:
        """One that was ended between its last step and its summary is not."""
        return self.step >= num_steps and (self.folder / SUMMARY).exists()

    def finished_text(self, num_steps: int) -> str:
        asked = "all of them" if num_steps == self.step else f"{num_steps} asked for"
        return (
            f"nothing to do: {self.folder} has done {counted(self.step, 'step')}, {asked}; "
            "go on with more --steps, or begin anew with --no-resume"
        )

    def check(self, now: dict[str, object]) -> None:
        """`now`: the settings of the run that is to go on. What may not have changed is refused, what may is told."""
        other = difference(self.state.deciding, now)
        if other is not None:
            raise ValueError(f"{self.path} is of another run: {other}; go on with what it was, or {_ANEW}")
        changed = changes(self.state.deciding, now)
        if changed:
            text = f"resuming with changed settings: {', '.join(changed)}"
            self.console.print(text, style="yellow", markup=False, soft_wrap=True)

    def to_text(self) -> str:
        """For other ranks."""
        return json.dumps([str(self.folder), [str(path) for path in self.checkpoints]])

    def older(self, error: DamagedCheckpoint) -> Resumed:
        """The one before this one, which is damaged."""
        return _passed_over(self.folder, self.lock, self.checkpoints, self.console, error)


def find_checkpoint(config: TrainConfig, console: Console) -> Resumed | None:
    """None: the run begins at its first step. One that is damaged and has no whole one before it is refused: who began
    anew by himself would do again what may have taken days. Whether it is of this run, `check` tells."""
    if not (config.save.every is not None if config.resume is None else config.resume):
        return None
    folder = newest_saved(Path(config.out), config.name)
    resumed = None if folder is None else _in_folder(folder, console)
    if resumed is None and config.resume:
        raise ValueError(
            f"nothing to resume: {config.out} has no checkpoint of a run named {config.name}; leave --resume out to "
            "begin one, or say where it is with --out and --name"
        )
    return resumed


def beside_first(text: str, console: Console) -> Resumed | None:
    """What the first rank has found, on another one."""
    if not text:
        return None
    folder, checkpoints = json.loads(text)
    return _read(Path(folder), None, tuple(map(Path, checkpoints)), console)


def _in_folder(folder: Path, console: Console) -> Resumed | None:
    lock = FolderLock(folder)
    try:
        if not lock.is_held:
            _warn(console, f"{folder} cannot be locked; start one run in it at a time")
        checkpoints = _whole_ones(folder, console)
        if checkpoints:
            return _read(folder, lock, checkpoints, console)
    except BaseException:
        lock.close()
        raise
    lock.close()
    return None


def _whole_ones(folder: Path, console: Console) -> tuple[Path, ...]:
    """The newest first; none where the run ended before its first save."""
    checkpoints = folder / CHECKPOINTS
    if checkpoints.is_symlink() or not checkpoints.is_dir():
        what = "a link" if checkpoints.is_symlink() else "no folder"
        raise ValueError(f"cannot resume {folder}: {CHECKPOINTS} in it is {what}; put the folder back, or {_ANEW}")
    there = [one for one in reversed(found(checkpoints)) if one.path.suffix not in (TMP, GONE)]
    whole = [one for one in there if one.is_whole]
    damaged = [one for one in there if not one.is_whole and (not whole or one.step > whole[0].step)]
    if damaged and not whole:
        raise ValueError(f"cannot resume {folder}: {_damaged_text(damaged[0])}; {_ANEW}")
    for one in damaged:
        _warn(console, _damaged_text(one))
    return tuple(one.path for one in whole)


def _damaged_text(one: Found) -> str:
    return f"{shown(one.path)} is damaged: {shown(one.problem)}"


def _read(folder: Path, lock: FolderLock | None, checkpoints: tuple[Path, ...], console: Console) -> Resumed:
    path = checkpoints[0]
    try:
        training, plan = read_training(path), read_plan(path)
    except DamagedCheckpoint as error:
        return _passed_over(folder, lock, checkpoints, console, error)
    try:
        state = RunState.from_extra(training.extra, training.step)
    except ValueError as error:
        raise ValueError(f"cannot resume from {path}: {error}; {_ANEW}") from error
    return Resumed(folder, lock, checkpoints, training.step, plan, state, console)


def _passed_over(
    folder: Path,
    lock: FolderLock | None,
    checkpoints: tuple[Path, ...],
    console: Console,
    error: DamagedCheckpoint,
) -> Resumed:
    if len(checkpoints) == 1:
        raise error
    _warn(console, str(error))
    return _read(folder, lock, checkpoints[1:], console)


def _warn(console: Console, what: str) -> None:
    console.print(f"warning: {what}", style="yellow", markup=False, soft_wrap=True)
