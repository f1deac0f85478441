"""Communicators: made, broken off under whoever waits, given up.

[Note: one communicator per lane] A communicator does its collectives in the order in which they are issued, which must
be the same on all ranks. Each lane has a thread of its own, so each has a communicator of its own: two lanes cannot
come between each other. `gather` and `reduce` are those of chunks, `step` has the few numbers that a step needs, and
`control` and `save`, for checkpoints that are written beside training, are always gloo: what is agreed on is on the
host.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from hightide.shard.signs import Patience

GATHER, REDUCE, STEP, CONTROL, SAVE = "gather", "reduce", "step", "control", "save"
LANES = (GATHER, REDUCE, STEP, CONTROL, SAVE)
ON_HOST = (CONTROL, SAVE)
ACROSS = "across"  # of replicas, where there are any
ALONE, GLOO, NCCL = "alone", "gloo", "nccl"
SETTING_UP_S = 60.0  # for a communicator, when all ranks are known to be there
AT_LAST_S = 300.0  # after the watchman's patience: torch's own timeout, if all else fails
_BREAK_OFF_TAG = 4242


def make_groups(members: tuple[int, ...], backend: str, patience: Patience) -> dict[str, dist.ProcessGroup]:
    made = {
        lane: make_group(members, GLOO if lane in ON_HOST else backend, lane, patience, len(members)) for lane in LANES
    }
    return {lane: group for lane, group in made.items() if group is not None}


def make_group(
    members: Sequence[int], backend: str, name: str, patience: Patience, num_makers: int
) -> dist.ProcessGroup | None:
    """None: this rank is not one of its members. `num_makers`: how many ranks call this; those of the world that do not
    know nothing of it."""
    group = dist.new_group(
        list(members),
        timeout=timedelta(seconds=SETTING_UP_S),
        backend=backend,
        use_local_synchronization=num_makers < dist.get_world_size(),
        group_desc=f"hightide {name}",
    )
    if not isinstance(group, dist.ProcessGroup):
        return None
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=patience.timeout_s + AT_LAST_S), group)
    return group


def break_off(groups: dict[str, dist.ProcessGroup], device: torch.device) -> None:
    """All collectives under way end with an error, and so does every later one. gloo closes all connections of a group
    when a receive of it comes too late, so one is made that does."""
    everyone = list(groups.values())
    nccl = [group for group in everyone if dist.get_backend(group) == NCCL]
    if nccl:
        backends = [group._get_backend(device) for group in nccl]
        with torch.cuda.device(device):  # this is another thread
            backends[0]._group_start()  # type: ignore[attr-defined]  # else one waits for another's kernel
            for backend in backends:
                backend.abort()
            backends[0]._group_end()  # type: ignore[attr-defined]
    for group in everyone:
        if group not in nccl:
            for other in dist.get_process_group_ranks(group):
                if other != dist.get_rank():
                    with suppress(RuntimeError):
                        receipt = dist.irecv(torch.empty(1), other, group=group, tag=_BREAK_OFF_TAG)
                        assert receipt is not None
                        receipt.wait(timedelta(milliseconds=1))
