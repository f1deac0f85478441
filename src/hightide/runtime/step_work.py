"""The work of a step: what its passes had to compute, to say how many operations that takes at least."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Computed:
    num_samples: int  # forward and backward
    autocast_dtype: str  # "": without autocast


class StepWork:
    """Batches of other shapes than the profiled one count as unknown, and so does a step with forwards that no
    backward followed, or several did."""

    def __init__(self) -> None:
        self.last_step: Computed | None = None  # None: not known
        self._passes: list[Computed | None] = []  # of the step so far
        self._num_backwards = 0

    def begin_pass(self, computed: Computed | None) -> None:
        self._passes.append(computed)

    def end_backward(self) -> None:
        self._num_backwards += 1

    def end_step(self) -> None:
        known = [one for one in self._passes if one is not None]
        self.last_step = None
        if len(known) == len(self._passes) == self._num_backwards and len({one.autocast_dtype for one in known}) == 1:
            self.last_step = Computed(sum(one.num_samples for one in known), known[0].autocast_dtype)
        self._passes.clear()
        self._num_backwards = 0
