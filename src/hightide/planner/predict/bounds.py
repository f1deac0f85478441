"""The least that a step takes, without lowering the plan.

[Note: the turn of a step] Each lane for itself, at its best speed, takes some time for all that it moves. But an update
waits for its gradient, and the next forward for the update: from the first use of a chunk to its last in backward its
update cannot run. Of the blocks up to some one, the updates run while compute is not between that one's forward and its
backward. So compute from there to there, and what the lanes have to do for all those updates, are one after the other;
but for what waits in buffers at the turn, read ahead or not yet written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import accumulate

from hightide.ir.action import Mode, Op
from hightide.ir.machine import Links, Machine
from hightide.ir.plan import Update
from hightide.ir.tier import Lane, Tier
from hightide.planner.chunk_place import Buffer, ChunkPlace
from hightide.planner.disk_inputs import stored_bytes
from hightide.planner.lookup import is_looked_up, rows_bytes
from hightide.planner.lower.draft import Draft
from hightide.planner.lower.lay_ticks import lay_ticks
from hightide.planner.placement import Placement
from hightide.planner.predict.collective_seconds import collective_s, links_of
from hightide.planner.predict.step_seconds import seconds_of
from hightide.planner.problem import Problem
from hightide.planner.waiting import away


def least_step_s(problem: Problem, placement: Placement) -> float:
    """No simulation of this plan is lastingly shorter. What slots may hold from forward to backward, and frozen chunks,
    which they may hold from pass to pass, cross the link once."""
    profile, costs, machine, plan = problem.profile, problem.costs, problem.machine, placement.plan
    draft = Draft(profile, plan, Mode.TRAIN, placement)
    lay_ticks(draft)
    links = links_of(machine, plan)
    seconds = seconds_of(profile, plan, costs, draft.placement)
    ticks_s = [seconds(tick) for tick in draft.ticks]
    compute_s = plan.accumulate * sum(ticks_s)
    moved: Counter[Lane] = Counter()
    uses_disk = draft.placement.uses_disk  # elsewhere the rest is hardly more than the longest lane alone
    again_bytes: Counter[Lane] = Counter()  # fetched in backward, unless they are in slots still
    backward = {call.block for call in profile.calls if call.needs_backward}
    for place in draft.placement.chunks:
        chunk = place.chunk
        if place.is_looked_up:
            if chunk.optimised_numel and not backward.isdisjoint(chunk.users):
                moved[Lane.CPU] += place.update_bytes
            continue
        if draft.uses.get(chunk.index) and place.home is not Tier.GPU:
            again = uses_disk and chunk.optimised_numel and place.is_streamed and draft.backward_uses[chunk.index]
            for lane in (Lane.H2D, Lane.DISK_READ) if place.home is Tier.DISK else (Lane.H2D,):
                moved[lane] += place.shard.param_bytes
                again_bytes[lane] += place.shard.param_bytes if again else 0
        if backward.isdisjoint(chunk.users):
            continue
        if place.states is Tier.GPU:
            compute_s += place.update_bytes / costs.update_bytes_per_s if chunk.optimised_numel else 0.0
            continue
        between = 0 if place.stays else (plan.accumulate - 1) * place.grad_bytes
        moved[Lane.D2H] += place.grad_bytes + between
        moved[Lane.H2D] += between
        if place.grad is Tier.DISK:
            moved[Lane.DISK_WRITE] += place.grad_bytes + between
            moved[Lane.DISK_READ] += between
        if chunk.optimised_numel:
            _add_update(moved, place)
    stored = stored_bytes(profile, plan)
    for index, call in enumerate(profile.calls):
        num_bytes = plan.accumulate * away(plan, call).num_bytes
        moved[Lane.D2H] += num_bytes
        moved[Lane.H2D] += num_bytes
        if index in stored:
            moved[Lane.DISK_WRITE] += num_bytes
            moved[Lane.DISK_READ] += num_bytes
        if is_looked_up(plan, call):
            rows = plan.accumulate * rows_bytes(plan, call)
            moved[Lane.H2D] += rows
            moved[Lane.D2H] += rows if call.needs_backward else 0
    slot_bytes = plan.num_slots * draft.placement.buffer_bytes[Buffer.SLOT] // plan.num_shards
    for lane, num_bytes in again_bytes.items():
        moved[lane] += plan.accumulate * max(0, num_bytes - slot_bytes)
    on_disk_s = disk_s(machine, moved[Lane.DISK_READ], moved[Lane.DISK_WRITE])
    turn_s = _turn_s(draft, machine, ticks_s) if uses_disk else 0.0
    together_s = (0.0, 0.0) if links is None else _collectives_s(draft, links)
    return max(compute_s, on_disk_s, turn_s, *together_s, *lanes_alone(moved, machine.best_speed).values())


def _add_update(moved: Counter[Lane], place: ChunkPlace) -> None:
    """On the host, and what it reads and writes of a disk."""
    moved[Lane.CPU] += place.update_bytes + place.settle_bytes
    if place.states is Tier.DISK:
        moved[Lane.DISK_WRITE] += place.written_bytes
        moved[Lane.DISK_READ] += place.read_bytes


def _collectives_s(draft: Draft, links: Links) -> tuple[float, float]:
    """Each chunk that is used is gathered at least once a step, and its gradient reduced once."""
    gathered_s = reduced_s = 0.0
    for place in draft.placement.chunks:
        if place.is_gathered and draft.uses.get(place.chunk.index):
            gathered_s += collective_s(links, draft.plan, Op.GATHER, place)
        if place.is_reduced and draft.backward_uses.get(place.chunk.index):
            reduced_s += collective_s(links, draft.plan, Op.REDUCE, place)
    return gathered_s, reduced_s


def _turn_s(draft: Draft, machine: Machine, ticks_s: list[float]) -> float:
    """See [Note: the turn of a step]."""
    plan, at_step = draft.plan, draft.plan.update is Update.DEFERRED
    buffers, sizes = draft.placement.num_buffers, draft.placement.buffer_bytes
    state_bytes = buffers[Buffer.UPDATED] * sizes[Buffer.UPDATED]
    ahead_bytes = state_bytes + buffers[Buffer.READ] * sizes[Buffer.READ] + plan.num_slots * sizes[Buffer.SLOT]
    until_s = [0.0, *accumulate(ticks_s)]  # each tick's begin
    moved: Counter[Lane] = Counter()
    again: Counter[int] = Counter()  # by first tick: read for backward too
    last, longest_s = math.inf, 0.0
    for first, place in sorted(_updated_away(draft), key=lambda one: one[0]):
        last = min(last, len(ticks_s) - 1 if at_step else draft.backward_uses[place.chunk.index][-1])
        _add_update(moved, place)
        if place.home is Tier.DISK:
            moved[Lane.DISK_READ] += place.shard.param_bytes
            again[first] += place.shard.param_bytes if place.is_streamed and not at_step else 0
        between_s = plan.accumulate * until_s[-1] - until_s[first] - (until_s[-1] - until_s[int(last) + 1])
        read_bytes = moved[Lane.DISK_READ] + again.total() - again[first] - ahead_bytes
        on_disk_s = disk_s(machine, max(0, read_bytes), max(0, moved[Lane.DISK_WRITE] - state_bytes))
        longest_s = max(longest_s, between_s + max(on_disk_s, moved[Lane.CPU] / machine.best_speed(Lane.CPU)))
    return longest_s


def _updated_away(draft: Draft) -> list[tuple[int, ChunkPlace]]:
    """Chunks with updates that are not on the GPU, each with the tick that uses it first."""
    uses, backward = draft.uses, draft.backward_uses
    return [
        (uses[place.chunk.index][0], place)
        for place in draft.placement.chunks
        if place.chunk.optimised_numel and place.states is not Tier.GPU and backward.get(place.chunk.index)
    ]


def lanes_alone(moved_bytes: Mapping[Lane, int], speed: Callable[[Lane], float]) -> dict[Lane, float]:
    """The seconds that each lane would need if it were alone."""
    return {lane: num_bytes / speed(lane) if num_bytes else 0.0 for lane, num_bytes in moved_bytes.items()}


def disk_s(machine: Machine, read_bytes: int, written_bytes: int) -> float:
    """Both at once while there is something of both, the rest alone; or one after the other, if that is faster."""
    if not read_bytes + written_bytes:
        return 0.0
    lanes = (Lane.DISK_READ, Lane.DISK_WRITE)
    both = machine.speeds_of(set(lanes))
    reads, writes = ((both[lane], machine.speeds_of({lane})[lane]) for lane in lanes)
    together_s = min(read_bytes / reads[0], written_bytes / writes[0])
    read_s = (read_bytes - together_s * reads[0]) / reads[1]
    written_s = (written_bytes - together_s * writes[0]) / writes[1]
    return min(together_s + read_s + written_s, read_bytes / reads[1] + written_bytes / writes[1])
