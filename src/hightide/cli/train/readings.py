"""Numbers of a step, on their way from the accelerator to the log.

[Note: reading without waiting] `loss.item()` waits until the GPU is through with everything that was enqueued; until
the next step is enqueued it then has nothing to do. Here the numbers are copied into pinned memory in the order of the
stream, and read when the moment behind the copy has passed. The loop runs at most `MAX_LAG` steps ahead of them: if it
must wait, it waits for an old step, and the GPU has a whole younger one to work on meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

MAX_LAG = 2  # steps
MAX_VALUES = 2  # of a step: loss and gradient norm
TIMEOUT_S = 1800.0  # for the rest of one step
POLL_S = 0.001

Then = Callable[[list[float], float], None]  # the values, and the seconds since the step before


class Moment:
    """A point in the accelerator's work. Work on a CPU is done when it returns."""

    def __init__(self, device: torch.device) -> None:
        self._at_s, self._event = time.perf_counter(), None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def passed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def seconds_since(self, earlier: Moment) -> float:
        """Both have passed, and both are of one device."""
        if self._event is None or earlier._event is None:
            return self._at_s - earlier._at_s
        return float(earlier._event.elapsed_time(self._event)) / 1e3


@dataclass(frozen=True)
class _Pending:
    values: Tensor
    moment: Moment
    then: Then


class Readings:
    """While entered, takes the numbers of steps and hands them on in the same order, when they are there: at the latest
    `MAX_LAG` steps later, and all of them before it is left. See [Note: reading without waiting]."""

    def __init__(
        self, device: torch.device, now: Callable[[], Moment] | None = None, *, is_steady: bool = False
    ) -> None:
        """`now` makes the moments: of the device, unless a test has its own. `is_steady`: always as late as they may
        be, so that several ranks hand on the same step at the same moment, whoever is faster."""
        self._is_steady = is_steady
        self._now = now or partial(Moment, device)
        # Pinned once: a place is used again after its numbers were read. float64 holds every dtype's values exactly.
        self._places = torch.empty(MAX_LAG + 1, MAX_VALUES, dtype=torch.float64, pin_memory=device.type == "cuda")
        self._num_added = 0
        self._pending: deque[_Pending] = deque()

    def __enter__(self) -> Readings:
        self._last = self._now()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self._take(0)
            return
        try:
            self._take(0)
        except Exception as second:  # the first one is the cause; a broken GPU gives no numbers
            error.add_note(f"the metrics of the last steps before it could not be read: {second!r}")

    def add(self, values: Sequence[Tensor], then: Then) -> None:
        """Numbers of a step, each a 0-dimensional tensor; `then` gets them."""
        place = self._places[self._num_added % len(self._places)][: len(values)]
        for number, value in zip(place, values, strict=True):
            # Converted where it is: a copy that has to convert goes through memory that is not pinned.
            number.copy_(value.detach().to(number.dtype), non_blocking=True)
        self._pending.append(_Pending(place, self._now(), then))
        self._num_added += 1
        self._take(MAX_LAG)

    def wait(self) -> None:
        """Hands on all that was added."""
        self._take(0)

    def restart(self) -> None:
        """What the accelerator has done since the last step, all of which is handed on, belongs to no step."""
        assert not self._pending
        self._last = self._now()

    def _take(self, num_left: int) -> None:
        """Hands on what has arrived. Waits if more than `num_left` steps would be left over."""
        while self._pending:
            if len(self._pending) > num_left:
                _wait(self._pending[0].moment)
            elif self._is_steady or not self._pending[0].moment.passed():
                return
            arrived = self._pending.popleft()
            step_s = arrived.moment.seconds_since(self._last)
            self._last = arrived.moment
            arrived.then(arrived.values.tolist(), step_s)


def _wait(moment: Moment) -> None:
    """Asks again and again, and not the event's own wait: that has no time limit and cannot be interrupted."""
    give_up_s = time.monotonic() + TIMEOUT_S
    while not moment.passed():
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"the accelerator did not finish a step within {TIMEOUT_S:g} s")
        time.sleep(POLL_S)
