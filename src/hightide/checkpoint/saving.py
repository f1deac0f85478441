"""A save that is under way: its thread, its end, and what becomes of its failure.

[Note: the end of the process] The thread that writes is a daemon, and a process that ends normally, or by an exception
such as Ctrl-C, waits for it: a checkpoint that was asked for is there. Not for ever: only while something is written.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from hightide.ir.foreign import shown
from hightide.ir.refusal import Refused
from hightide.planner.predict.save_forecast import SaveForecast
from hightide.process.forks import Birthplace
from hightide.process.interrupts import safe_point
from hightide.runtime.saving.tiles import SaveCost
from hightide.stores.threads import background

THREAD = "hightide-save"  # writes a checkpoint while training goes on
IDLE_S = 120.0  # nothing was written for so long: a process that ends does not wait any more
LOOK_S = 0.1


class Abandoned(Exception):
    """By the user: no failure."""


class OnError(StrEnum):
    WARN = "warn"
    RAISE = "raise"  # at the next occasion
    HOLD = "hold"  # until somebody asks


class Saving:
    """A checkpoint that is being written, or was."""

    def __init__(
        self, path: Path, step: int, on_error: OnError = OnError.WARN, forecast: SaveForecast | None = None
    ) -> None:
        """`forecast`: what it was told to cost; None: nobody simulated it."""
        self.path, self.step = path, step  # where it is, once it is done
        self.forecast = forecast
        self.num_bytes = 0  # of values that were written so far
        self.seconds = 0.0  # that it took
        self.error: BaseException | None = None
        self.cost: Callable[[], SaveCost] = SaveCost
        self.is_abandoned = False
        self.on_error = on_error
        self._done = threading.Event()
        self._birthplace = Birthplace()

    @property
    def done(self) -> bool:
        """Whether it was written or has failed."""
        return self._done.is_set()

    @property
    def waited_s(self) -> float:
        """That training has waited for it so far."""
        return self.cost().waited_s

    @property
    def copied_bytes(self) -> int:
        """That went to free host memory first, so far."""
        return self.cost().copied_bytes

    def wait(self, timeout_s: float | None = None) -> Path:
        """Until it is on the disk. Raises what went wrong, or TimeoutError."""
        self.join(timeout_s)
        self.on_error = OnError.HOLD
        if self.error is not None:
            raise self.error
        return self.path

    def join(self, timeout_s: float | None = None) -> None:
        """Until it was written or has failed. Ctrl-C leaves it at once; the save goes on."""
        self._birthplace.check()
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._done.wait(min(LOOK_S, max(0.0, deadline_s - time.monotonic()))):
            safe_point()
            if time.monotonic() >= deadline_s:
                raise TimeoutError(f"{shown(self.path)} is still being written after {timeout_s:g} s")

    def abandon(self) -> None:
        """Gives it up: what was written is removed, and nobody waits for it, not at the end of the process either."""
        self.is_abandoned = True

    def raise_if_failed(self) -> None:
        """Once, where that was asked for."""
        if self.done and self.error is not None and self.on_error is OnError.RAISE:
            self.on_error = OnError.HOLD
            raise self.error

    def __repr__(self) -> str:
        state = "being written" if not self.done else "done" if self.error is None else "failed"
        return f"Saving({str(self.path)!r}, {state})"

    # -- the work -------------------------------------------------------------------------------------------------

    def perform(self, work: Callable[[Saving], None]) -> None:
        """Here and now. Whatever goes wrong is its own."""
        began_s = time.perf_counter()
        try:
            work(self)
        except BaseException as error:
            self.error = error
        self.seconds = time.perf_counter() - began_s
        if isinstance(self.error, Exception) and self.on_error is OnError.WARN and not self.is_abandoned:
            self._warn()
        self._done.set()

    def perform_beside(self, work: Callable[[Saving], None]) -> None:
        """In a thread of its own."""
        _under_way.add(self)
        atexit.unregister(_finish)
        atexit.register(_finish)  # the last one is called first: before the lanes end

        def live() -> None:
            try:
                self.perform(work)
            finally:
                _under_way.discard(self)

        try:
            background(THREAD, live)
        except BaseException:
            _under_way.discard(self)
            raise

    def _warn(self) -> None:
        with suppress(Warning):  # where warnings are errors: it is kept here anyway
            warnings.warn(
                f"the checkpoint {shown(self.path)} was not saved: {self.error}. Training goes on", stacklevel=2
            )

    def raise_after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """What goes wrong, at the end of the next step()."""
        if optimizer not in _looked_at:
            optimizer.register_step_post_hook(_look)  # it stays: torch iterates over hooks while it calls them
        _looked_at[optimizer] = self


_under_way: set[Saving] = set()
_looked_at: weakref.WeakKeyDictionary[torch.optim.Optimizer, Saving] = weakref.WeakKeyDictionary()


def _look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    saving = _looked_at.get(optimizer)  # the user's own optimizer shares the hooks of the wrapped one
    if saving is not None:
        saving.raise_if_failed()


def await_turn(before: Saving | None, refuses: bool) -> None:
    """One save of a model at a time: the memory that a plan leaves free is for one."""
    if before is None:
        return
    if refuses and not before.done:
        raise Refused(f"{shown(before.path)} is still being written; save later, or with busy='wait'")
    before.join()
    before.raise_if_failed()


def _finish() -> None:
    """See [Note: the end of the process]."""
    for saving in [one for one in _under_way if one._birthplace.is_here]:
        written_bytes, since_s = -1, time.monotonic()
        while not saving.is_abandoned and not saving._done.wait(LOOK_S):
            if saving.num_bytes != written_bytes:
                written_bytes, since_s = saving.num_bytes, time.monotonic()
            if time.monotonic() - since_s > IDLE_S:
                warnings.warn(f"{shown(saving.path)} was not saved: nothing was written for {IDLE_S:g} s", stacklevel=2)
                break
