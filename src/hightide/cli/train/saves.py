"""The checkpoints that a run saves while it goes on: when one is due, a line for each, and what they cost together."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

import hightide
from hightide.cli.train.company import Company
from hightide.cli.train.config import OnSaveError, SaveConfig
from hightide.cli.train.run_folder import RunFolder
from hightide.cli.train.run_state import RunState
from hightide.ir.units import format_bytes

if TYPE_CHECKING:
    from hightide.checkpoint.saving import Saving


class SaveFailed(OSError):
    """The run was to end where a save fails."""


class Saves:
    """A save runs beside the steps that follow it. `poll` says when it is through, `finish` waits for that. One that
    fails is one warning, or the end of the run, as the settings say."""

    def __init__(
        self,
        config: SaveConfig,
        checkpoints: Path,
        folder: RunFolder | None,
        company: Company,
        console: Console,
        newest: int = 0,
    ) -> None:
        """`folder`: of the run, which the first rank has. `newest`: the step of the checkpoint that it goes on from."""
        self._config, self._checkpoints, self._console = config, checkpoints, console
        self._folder, self._company = folder, company
        self._present: Saving | None = None
        self._step, self._asking_s = 0, 0.0  # of the present one; what the call itself took
        self.newest = newest  # the step that is whole
        self.num_saved, self.waited_s = 0, 0.0

    def prepare(self, model: Any) -> None:
        """Before the first step, where some will be saved."""
        if self._config.every is not None and (told := hightide.prepare_saves(model, self._checkpoints)) is not None:
            self._console.print(told.in_words, markup=False)

    def is_due(self, step: int, is_last: bool) -> bool:
        every = self._config.every
        return every is not None and (is_last or step % every == 0)

    def begin(self, model: Any, optimizer: torch.optim.Optimizer, step: int, state: RunState) -> None:
        began_s = time.perf_counter()
        self.finish()  # of the one before: two at once would only share the disk
        self._step = step
        try:
            self._company.all_or_none("metrics.jsonl", self._sync)  # the disk is full: nobody saves
            self._present = hightide.save(
                model,
                optimizer,
                self._checkpoints,
                step=step,
                extra=state.to_extra(),
                keep=self._config.keep or None,
                keep_every=self._config.keep_every if self._config.keep else None,  # all stay anyway
                on_error="hold",
            )
        except (OSError, ValueError) as error:
            self._failed(error)
        self._asking_s = time.perf_counter() - began_s

    def _sync(self) -> None:
        if self._folder is not None:
            self._folder.sync()

    def poll(self) -> None:
        if self._present is not None and self._present.done:
            self.finish()

    def finish(self) -> None:
        saving = self._present
        if saving is None:
            return
        try:
            saving.wait()
        except (OSError, ValueError) as error:
            self._present = None
            self._failed(error)
            return
        self._present = None
        waited_s = self._asking_s + saving.waited_s
        self.num_saved, self.newest, self.waited_s = self.num_saved + 1, self._step, self.waited_s + waited_s
        self._console.print(
            f"step {self._step} saved: {format_bytes(saving.num_bytes)} in {saving.seconds:.1f} s, "
            f"training waited {waited_s:.1f} s"
        )

    def abandon(self) -> None:
        """Of who cannot wait: what was written of the present one is no checkpoint."""
        if self._present is not None:
            self._present.abandon()

    def summary(self) -> str:
        """One line, or none where nothing was saved."""
        if not self.num_saved:
            return ""
        times = "once" if self.num_saved == 1 else f"{self.num_saved} times"
        return f"saved {times}, last at step {self.newest}; training waited {self.waited_s:.1f} s"

    def _failed(self, error: OSError | ValueError) -> None:
        newest = f"step {self.newest} is" if self.newest else "no step is"
        what = f"step {self._step} is not saved ({newest}): {error}"
        if self._config.on_error is OnSaveError.STOP:
            raise SaveFailed(what) from error
        self._console.print(f"warning: {what}; training goes on", style="yellow", markup=False)
