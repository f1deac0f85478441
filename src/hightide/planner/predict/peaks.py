"""The most bytes that a schedule may hold at once on each tier.

[Note: what a GPU reserves] Peaks are bytes of tensors. On a real GPU torch reserves more from the driver, and that is
what others cannot have: a workspace of its matrix library for each thread that multiplies (the user's and autograd's),
the rest of the last page of each of its two pools, and holes between tensors that come and go in different sizes, which
are a share of what comes and goes. Blocks that run eagerly have more of them inside: see [Note: holes of one block].
Block inputs that wait on the host leave holes of their own size, because they are let go when the link is done with
them, in between the tensors of other blocks; what blocks hold that swap leaves such holes too, but fewer: it is in
many tensors, and large holes fill up. The CUDA context itself is outside of torch's count, as of every limit.
The constants were fitted to bench/measured.json, whose blocks are compiled.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

from hightide.ir.action import TICK_OPS, Action, Op, Schedule
from hightide.ir.machine import Machine
from hightide.ir.passes import Passes
from hightide.ir.plan import Forecast
from hightide.ir.tier import Lane, Tier
from hightide.planner.verify.precedence import Precedence

WORKSPACE_BYTES = 2 * 32 * 1024**2  # of cuBLAS, as torch sizes it on Hopper; 8 MiB each elsewhere
PAGE_BYTES = 20 * 1024**2  # by which the allocator's growing segments grow
HOLES_SHARE = 0.025
NUM_STASH_HOLES = 3
NUM_HELD_HOLES = 1.25


@dataclass(frozen=True)
class Peaks:
    gpu_peak_bytes: int
    gpu_peak_at: str  # id of the action; "" if the peak is what is always there
    host_peak_bytes: int
    host_peak_at: str
    disk_peak_bytes: int = 0

    @property
    def by_tier(self) -> dict[Tier, tuple[int, str]]:
        """With the action at which it is."""
        gpu, host = (self.gpu_peak_bytes, self.gpu_peak_at), (self.host_peak_bytes, self.host_peak_at)
        return {Tier.GPU: gpu, Tier.HOST: host, Tier.DISK: (self.disk_peak_bytes, "")}


def peaks(schedule: Schedule, precedence: Precedence | None = None, last: Schedule | None = None) -> Peaks:
    """Walks the actions in order: takes at the start, transient during, gives at the end.

    Transfers run beside compute and may be as slow as they like: what they take counts from the moment they are issued,
    what they give only from the first tick that surely follows their end. So the peak holds whatever the lanes'
    speeds. An update may go on beside the next pass, until that uses its chunk: what it gives is there until then.
    `last`: for the first pass of several, that with which the step before has ended."""
    if precedence is None and any(_gives_later(action) for action in schedule.actions):
        precedence = Precedence(schedule)
    num_ticks = len(schedule.ticks)
    before = schedule if schedule.mode.is_alone else last
    updates = [] if before is None else before.actions
    late = [action for action in updates if action.host_gives and action.tick >= num_ticks]
    gpu, host = _Level(schedule.gpu_base_bytes), _Level(schedule.host_base_bytes)
    host.rise(sum(action.host_gives for action in late), 0, "")  # of the pass before
    due: dict[int, int] = defaultdict(int)
    for action in late:
        due[action.tick - num_ticks] += action.host_gives
    in_flight: list[Action] = []
    for action in schedule.actions:
        if action.op in TICK_OPS:
            host.fall(due.pop(action.tick, 0))
        if in_flight and action.op in TICK_OPS:
            assert precedence is not None
            for done in [other for other in in_flight if precedence.before(other.id, action.id)]:
                in_flight.remove(done)
                gpu.fall(done.gpu_gives)
                host.fall(done.host_gives)
        gpu.rise(action.gpu_takes, action.gpu_transient, action.id)
        host.rise(action.host_takes, 0, action.id)
        if action.lane is Lane.COMPUTE:
            gpu.fall(action.gpu_gives)
            host.fall(action.host_gives)
        elif _gives_later(action) and action.tick < num_ticks:
            in_flight.append(action)
    return Peaks(gpu.peak_bytes, gpu.peak_at, host.peak_bytes, host.peak_at, schedule.disk_base_bytes)


def step_peaks(passes: Passes) -> Peaks:
    """Of all passes of a step."""
    found = [peaks(schedule, last=passes.last if schedule is passes.first else None) for schedule in passes]
    gpu, host = max(found, key=lambda one: one.gpu_peak_bytes), max(found, key=lambda one: one.host_peak_bytes)
    return replace(gpu, host_peak_bytes=host.host_peak_bytes, host_peak_at=host.host_peak_at)


def _gives_later(action: Action) -> bool:
    """It runs beside compute, and holds until its end."""
    return (action.gpu_gives or action.host_gives) > 0 and action.lane is not Lane.COMPUTE


def reserved_bytes(schedule: Schedule | Passes, peak: Peaks | None = None) -> int:
    """At most, by torch on a real GPU. See [Note: what a GPU reserves]. `peak`: the schedule's, if it is known."""
    passes = Passes.of(schedule)
    base_bytes, peak_bytes = passes.last.gpu_base_bytes, (peak or step_peaks(passes)).gpu_peak_bytes
    stashes = [action for action in passes.last.actions if action.op is Op.STASH]
    left = max((stash_holes(action.gpu_gives - action.gpu_kept, action.gpu_kept) for action in stashes), default=0)
    inside = max((action.gpu_holes for action in passes.last.actions), default=0)
    return base_bytes + reserved_beside(peak_bytes - base_bytes, left + inside)


def stash_holes(input_bytes: int, held_bytes: int) -> int:
    """That a block leaves whose inputs, and what it holds, wait on the host."""
    return NUM_STASH_HOLES * input_bytes + math.ceil(NUM_HELD_HOLES * held_bytes)


def bytes_forecast(schedule: Schedule | Passes, peak: Peaks, machine: Machine | None) -> Forecast:
    """Without a time. What torch reserves is said of a real GPU only, not where the machine is unknown."""
    reserved = reserved_bytes(schedule, peak) if machine is not None and is_real(machine) else None
    tiers = peak.gpu_peak_bytes, peak.host_peak_bytes, peak.disk_peak_bytes
    return Forecast(*tiers, gpu_reserved_bytes=reserved)


def needed_bytes(schedule: Schedule | Passes, peak: Peaks, machine: Machine) -> int:
    """That a limit of the GPU must allow. Of a real one what torch reserves; of a simulated one, and where nothing is
    known, what tensors take."""
    return bytes_forecast(schedule, peak, machine).gpu_bytes


def is_real(machine: Machine) -> bool:
    return machine.gpu is not None and not machine.is_simulated


def reserved_beside(passing_bytes: int, holes_bytes: int) -> int:
    """For tensors that come and go, at most so many bytes at once; `holes_bytes`: that the copies of one block leave,
    and that are inside of one that runs eagerly."""
    holes = math.ceil(HOLES_SHARE * passing_bytes) + holes_bytes
    return passing_bytes + holes + WORKSPACE_BYTES + 2 * PAGE_BYTES


class _Level:
    def __init__(self, base_bytes: int) -> None:
        self.now_bytes = self.peak_bytes = base_bytes
        self.peak_at = ""

    def rise(self, num_bytes: int, transient_bytes: int, at: str) -> None:
        self.now_bytes += num_bytes
        if self.now_bytes + transient_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_at = self.now_bytes + transient_bytes, at

    def fall(self, num_bytes: int) -> None:
        self.now_bytes -= num_bytes
