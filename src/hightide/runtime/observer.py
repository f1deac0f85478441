"""Who looks at a run's passes and may move it to another plan, and how a forward is done once more."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from hightide.ir.action import Mode, Op
from hightide.ir.tier import Tier
from hightide.profiler.trial.state import GlobalRandom
from hightide.stores.store import OutOfMemory

if TYPE_CHECKING:
    from hightide.runtime.run import Run


class Observer(Protocol):
    """Called in the user's thread. Nothing here waits for the GPU."""

    @property
    def is_watching(self) -> bool:
        """Whether it may still change the plan."""

    def begin_pass(self) -> None:
        """Before a training pass."""

    def begin_tick(self, op: Op) -> None:
        """A block begins to compute."""

    def begin_again(self) -> None:
        """What the block that computes has done so far is no part of its step."""

    def end_tick(self, op: Op, call: int | None) -> None:
        """It has ended."""

    def end_forward(self) -> bool:
        """Whether the pass must not go on like this: it would run out of memory."""

    def may_repeat(self, can: bool) -> bool:
        """Whether a forward can be done once more; of several ranks, that of each."""

    def ran_out(self, error: OutOfMemory) -> bool:
        """In forward, or in backward. Whether it can do something about it: in `replan`, or when the next pass
        begins."""

    def replan(self, must: bool = True) -> None:
        """The pass was given up. Moves the run to a plan under which it can go on; if there is none and it `must`,
        raises. If it cannot be moved, it goes on as it is."""

    def end_step(self) -> None:
        """After optimizer.step()."""

    def settle(self) -> None:
        """Goes over to a plan that is due: before a larger batch is held against the one that there is."""

    def let_in_larger(self) -> None:
        """A batch comes that is larger than the one of the forecast, and the plan stays."""


def watched_pass(
    run: Run, observer: Observer, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A training pass that is begun once more under another plan, where this one has not memory enough."""
    observer.begin_pass()
    start = Start(run)
    try:
        result = run.passes.run_pass(Mode.TRAIN, original, args, kwargs)
        if not observer.end_forward() or not observer.may_repeat(start.can_repeat):
            return result
        del result
    except OutOfMemory as error:
        if not observer.ran_out(error) or not start.can_repeat:
            raise
    gc.collect()  # what the failed forward has left: outside of the handler, whose traceback holds its tensors
    observer.replan()
    start.restore()
    run.num_passes -= 1
    return run.passes.run_pass(Mode.TRAIN, original, args, kwargs)


class Start:
    """What a forward begins with, so that it can be done once more: the random numbers of torch, Python and numpy. Of
    generators that the user has made nobody knows."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._random = GlobalRandom(run.gpu.device)
        self._buffers = [(buffer, buffer._version) for buffer in run.buffers]

    @property
    def can_repeat(self) -> bool:
        """A buffer that the forward has changed in place (running means) it would change twice. So it would whatever
        its modules keep in plain attributes (a counter, a list that grows): nobody sees this, and it is done twice."""
        lanes_are_well = self._run.lanes.failure is None
        return lanes_are_well and all(buffer._version == version for buffer, version in self._buffers)

    def restore(self) -> None:
        self._random.restore()


def is_short(error: BaseException) -> bool:
    """Whether it says that the GPU is too small for the plan."""
    return isinstance(error, OutOfMemory) and error.tier is Tier.GPU
