"""Graphs of more than one forward, before the first backward.

[Note: several graphs] A plan has room for the graph of one forward. A loop that calls the model twice before it goes
back (real and made samples, two views of an image) has two. Before a forward for which the GPU has no room beside the
graphs that there are, what their blocks have there, inputs and what they hold, goes to the host's free memory, below
its limit and off the plan, and comes back block by block in backward: the same bytes, later. Then the forward and its
backward find what the plan had for them. Between two steps the run is planned again, once, for all samples whose graphs
were alive at a time: under such a plan nothing has to go.

What the model's own code between blocks has saved stays where it is."""

from __future__ import annotations

import gc
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakSet

from hightide.ir.action import Mode
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier
from hightide.ir.units import exactly
from hightide.planner.lower import lower
from hightide.planner.placement import Placement
from hightide.planner.predict.peaks import peaks
from hightide.stores.store import OutOfMemory

if TYPE_CHECKING:
    from hightide.runtime.blocks.block_function import BlockCall
    from hightide.runtime.run import Run

SEVERAL_GRAPHS = (
    "The graph of an earlier forward is still there, beside that of the latest, and the plan has room for one such "
    "batch. If both are needed for one backward, wrap the model with an example batch that has the samples of all "
    "forwards of a step. If nobody needs the earlier one (a step that was skipped), drop what came of it (del loss) "
    "before the next forward."
)
PUT_AWAY = (
    "a forward begins while the graph of an earlier one still waits for its backward, and the plan has room for one: "
    "{put} of the earlier graph went to the host, and come back in backward. Results are the same; it is slower. To "
    "plan for both from the beginning, wrap the model with an example batch that has the samples of all forwards of a "
    "step"
)


class SeveralGraphs:
    def __init__(self, run: Run) -> None:
        self._run = run
        self.open_calls: WeakSet[BlockCall] = WeakSet()  # of blocks, in the latest training pass
        self._earlier_calls: WeakSet[BlockCall] = WeakSet()  # in passes whose backward had not begun at the next one
        self.are_alive = False  # of more than one forward, perhaps
        self._alive_samples = 0  # in passes whose backward had not begun, with the latest
        self._wanted_samples = 0  # the most that were alive at a time, where the plan had no room for them
        self._asked_samples = 0  # for which a plan was asked for
        self._has_told = False
        self._growths: tuple[Plan | None, dict[int, int]] = (None, {})  # of the plan, by samples

    def begin_pass(self, are_several: bool, num_samples: int | None) -> None:
        self.are_alive = are_several
        if are_several:
            self._earlier_calls.update(self.open_calls)
        samples = self._run.plan.num_samples if num_samples is None else num_samples
        self._alive_samples = samples + (self._alive_samples if are_several else 0)
        self.open_calls.clear()

    def _waiting(self) -> list[BlockCall]:
        return [call for call in {*self.open_calls, *self._earlier_calls} if not call.is_spent]

    # -- room for another forward ----------------------------------------------------------------------------------

    def make_room(self, num_samples: int | None) -> None:
        """For a forward of so many samples, and its backward, beside the graphs that there are."""
        if not self._waiting() or not self._is_short(num_samples):
            return
        if not self._has_told:
            gc.collect()  # some may be there for nobody
            if not self._waiting() or not self._is_short(num_samples):
                return
        waiting, gpu = self._waiting(), self._run.gpu
        before_bytes = gpu.device_used_bytes
        try:
            for call in waiting:
                call.put_away()
        except OutOfMemory as error:
            if error.tier is not Tier.HOST:
                raise
        put_bytes = before_bytes - gpu.device_used_bytes
        samples = self._run.plan.num_samples if num_samples is None else num_samples
        self._wanted_samples = max(self._wanted_samples, self._alive_samples + samples)
        if put_bytes > 0 and not self._has_told:
            self._has_told = True
            warnings.warn(PUT_AWAY.format(put=exactly(put_bytes)), stacklevel=5)

    def plan_for_all(self) -> None:
        """Between two steps."""
        wanted, self._wanted_samples = self._wanted_samples, 0
        if wanted:
            gc.collect()  # outputs of a model that refer to themselves keep the graphs of the step before
        is_new = wanted > max(self._run.plan.num_samples, self._asked_samples)
        if is_new and self._run.admission is not None:
            self._asked_samples = wanted
            self._run.admission.hold_together(wanted)

    def _is_short(self, num_samples: int | None) -> bool:
        gpu, plan = self._run.gpu, self._run.plan
        there_bytes = gpu.device_used_bytes - gpu.outside_bytes
        return there_bytes + self._growth_bytes(num_samples) > plan.gpu_limit_bytes

    def _growth_bytes(self, num_samples: int | None) -> int:
        """What a pass takes at most, beside what is always there."""
        plan, profile = self._run.plan, self._run.profile
        count = plan.num_samples if num_samples is None else min(num_samples, plan.num_samples)
        if self._growths[0] is not plan:
            self._growths = plan, {}
        known = self._growths[1]
        if count not in known:
            batch_bytes = -(-profile.batch_bytes * count // profile.num_samples)
            fewer = replace(plan, num_samples=count, micro_batch=min(plan.micro_batch, count))
            sized = replace(profile, num_samples=count, batch_bytes=batch_bytes)
            schedule = lower(sized, fewer, Mode.TRAIN, Placement(fewer))
            reserved = max(0, plan.forecast.gpu_bytes - plan.forecast.gpu_peak_bytes)
            known[count] = peaks(schedule).gpu_peak_bytes - schedule.gpu_base_bytes + batch_bytes + reserved
        return known[count]

    # -- what an error says ----------------------------------------------------------------------------------------

    def explain(self, error: OutOfMemory) -> bool:
        """Whether more graphs than one are what has taken the memory."""
        if error.tier is Tier.DISK or all(call.is_spent for call in self._earlier_calls):
            return False
        error.add_note(SEVERAL_GRAPHS)
        return True
