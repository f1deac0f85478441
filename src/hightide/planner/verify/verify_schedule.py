"""A schedule is checked before it runs: capacity, every use after its fetch, every gradient written back."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from hightide.ir.action import Schedule
from hightide.ir.block import ModelProfile
from hightide.ir.passes import Passes
from hightide.ir.tier import Tier
from hightide.ir.units import exactly, format_bytes
from hightide.planner.advice.remedy import remedy
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.placement import Placement
from hightide.planner.predict.peaks import peaks
from hightide.planner.verify.disk_replay import DiskReplay
from hightide.planner.verify.precedence import Disorder, Precedence
from hightide.planner.verify.replay import Replay


def verify_step(profile: ModelProfile, placement: Placement, passes: Passes) -> None:
    """Each of its passes, that each finds in the slots what it takes for granted, and that none fills a buffer on the
    host that another has not emptied."""
    last = passes.last if passes.number > 1 else None
    left = {one.mode: verify(profile, placement, one, last if one is passes.first else None) for one in passes}
    order = [schedule for schedule, count in passes.runs for _ in range(min(2, count))]
    replays = [left[schedule.mode].disk for schedule in order]
    for at, replay in enumerate(replays):
        replay.check_followed([*reversed(replays[:at]), *reversed(replays[at:])])
    for before, after in pairwise(order):
        if missing := set(after.standing) - set(left[before.mode].standing):
            raise InfeasiblePlan(
                f"the schedule is wrong: its {after.mode} pass expects chunks in slots {sorted(missing)} (chunk, slot) "
                f"that its {before.mode} pass does not leave there"
            )


class Verified(NamedTuple):
    standing: tuple[tuple[int, int], ...]  # chunks that it leaves in slots, and where
    disk: DiskReplay


def verify(profile: ModelProfile, placement: Placement, schedule: Schedule, last: Schedule | None = None) -> Verified:
    """Raises InfeasiblePlan, also where it exceeds the plan's own limits. The capacity of an evaluation pass is left to
    the stores: its batch and its outputs are the user's affair, and a block runs unsplit there. `last`: for the first
    pass of several, that with which the step before has ended."""
    plan = placement.plan
    try:
        precedence = Precedence(schedule)
    except Disorder as disorder:
        raise InfeasiblePlan(f"the schedule cannot run: {disorder}", disorder.at) from None
    replay = Replay(profile, placement, schedule, precedence)
    replay.run()
    disk = DiskReplay(placement, schedule, precedence)
    disk.run()
    if not schedule.mode.trains:
        return Verified(replay.params.standing, disk)
    peak = peaks(schedule, precedence, last)
    for tier, (peak_bytes, moment) in peak.by_tier.items():
        if peak_bytes > plan.limits[tier]:
            change = remedy(profile, placement, schedule, tier, peak_bytes, moment)
            raise _too_many(tier, peak_bytes, plan.limits[tier], moment, change)
    return Verified(replay.params.standing, disk)


def _too_many(tier: Tier, peak_bytes: int, limit_bytes: int, moment: str, change: str) -> InfeasiblePlan:
    room = str(tier) if tier is Tier.DISK else f"{tier} memory"
    when = f"during {moment}" if moment else "from the beginning"
    return InfeasiblePlan(
        f"the plan needs {exactly(peak_bytes)} of {room} {when}, the limit is "
        f"{limit_bytes} ({format_bytes(limit_bytes)}): {peak_bytes - limit_bytes} bytes too many; use {change}, or "
        f"raise the plan's {tier}_limit_bytes",
        moment,
        tier,
        peak_bytes,
    )
