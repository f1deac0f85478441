"""Where the user's program is, as another thread sees it: its line, and collectives that are the user's own.

[Note: the user's own collectives] A rank that waits in `torch.distributed.barrier()` while another one waits for it in
a block looks like one that works. The frames of its thread tell: the innermost one is that function of torch, and its
argument the group. Looked for are functions that end nowhere before all members have come to them, and those that wait
for one rank, whose source is another argument. What is begun with `async_op=True`, or waited for on a GPU, is not seen:
such a rank works, as far as anybody knows. So does the source.
"""

from __future__ import annotations

import itertools
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

from hightide.shard.signs import OUTSIDE

TOGETHER = frozenset(  # of torch.distributed: no member leaves it before all have come
    (
        *("barrier", "monitored_barrier", "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single"),
        *("all_gather", "all_gather_single", "all_gather_into_tensor", "all_gather_coalesced"),
        *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
    )
)
FROM_ONE = frozenset(("broadcast", "scatter"))  # no member leaves it before the source has come
_OF_TORCH = dist.distributed_c10d.__file__ if dist.is_available() else ""
_OURS, _TORCH = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
_CALL, _calls = "hightide's number of this call", itertools.count(1)
_INSTALLED = tuple({_OURS, *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))})


class Outside(NamedTuple):
    """A collective of the user's own that is under way, or one of another model."""

    call: int  # another number is another call
    name: str
    members: tuple[int, ...]  # who must come; what torch.distributed calls them
    lane: str = OUTSIDE  # or ELSEWHERE


def frame_of(thread: int) -> FrameType | None:
    return sys._current_frames().get(thread)


def line_of(frame: FrameType | None) -> str:
    """The innermost of the user's own program, in no package that is installed."""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((*_INSTALLED, "<frozen")):
            return f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def outside(frame: FrameType | None) -> Outside | None:
    """None: the thread is not in one, or it is hightide's."""
    if frame is None or frame.f_code.co_filename != _OF_TORCH or frame.f_code.co_name not in TOGETHER | FROM_ONE:
        return None
    caller = frame.f_back
    while caller is not None and caller.f_code.co_filename.startswith(_TORCH):
        caller = caller.f_back
    if caller is not None and caller.f_code.co_filename.startswith(_OURS):
        return None
    group = frame.f_locals.get("group") or dist.group.WORLD
    try:
        members = tuple(dist.get_process_group_ranks(group))
    except (RuntimeError, ValueError, KeyError, AttributeError, TypeError):  # it is being destroyed
        return None
    if frame.f_code.co_name in FROM_ONE:
        source, own = frame.f_locals.get("group_src"), dist.get_rank()
        if not isinstance(source, int) or not 0 <= source < len(members) or members[source] == own:
            return None
        members = (members[source], own)
    # Beside its variables, and gone with them. To keep the frame would keep all that the user's functions hold, and the
    # next call's frame has the same address as a rule.
    call = frame.f_locals.setdefault(_CALL, next(_calls))
    return Outside(call, frame.f_code.co_name, members)
