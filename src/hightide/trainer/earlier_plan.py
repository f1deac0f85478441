"""The plan of a run that goes on.

[Note: a plan goes on] With the plan of its checkpoint a run has the same bits, and nobody waits for another search. It
is used if all that it was made for is as it was, which a checkpoint therefore has too. Of several ranks the first one
looks, and all do the same. A larger batch may have led to another plan than that for the example: then the checkpoint
has that one, and the length that it holds.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection
from typing import Any, NamedTuple

from hightide.checkpoint.training import read_plan, read_training
from hightide.ir.foreign import quoted
from hightide.ir.limits import Limits
from hightide.ir.plan import Plan
from hightide.profiler.model.block_finder import BlockChoice

NAME = "trainer"  # in a checkpoint's `extra`

logger = logging.getLogger("hightide")


class Earlier(NamedTuple):
    plan: Plan
    length: int  # in tokens, of the longest batch it holds


def asked_of(args: Any, options: dict[str, Any], length: int, cuts: bool) -> dict[str, Any]:
    """All that decides about a plan beside the model and its optimizer, by name. `length`: of the example; `cuts`: the
    plan decides in how many calls a step's samples come."""
    limits = options["limits"] or Limits()
    own, calls = args.per_device_train_batch_size, args.gradient_accumulation_steps
    return {
        "limits.gpu": limits.gpu_bytes,
        "limits.host": limits.host_bytes,
        "limits.disk": [f"{disk.path}:{disk.num_bytes}" for disk in limits.disks],
        "device": args.device.type,
        "ranks": args.world_size,
        "samples of a step": own * calls,
        "calls of a step": None if cuts else calls,
        "length": length,
        "micro_batch": options["micro_batch"],
        "update": str(options["update"]),
        "gradients": str(options["gradients"]),
        "compile": options["compile"],
        "blocks": _named(options["blocks"]),
    }


def _named(blocks: BlockChoice | None) -> list[str] | None:
    if blocks is None:
        return None
    one_by_one = [blocks] if isinstance(blocks, str) or not isinstance(blocks, Collection) else blocks
    return sorted(one if isinstance(one, str) else f"{one.__module__}.{one.__qualname__}" for one in one_by_one)


def extra_of(asked: dict[str, Any] | None, length: int) -> dict[str, Any] | None:
    """For the checkpoint. None: the plan is the user's, or nobody knows what it was made for."""
    return None if asked is None else {NAME: {"asked": asked, "length": length}}


def earlier_plan(checkpoint: str, asked: dict[str, Any]) -> Earlier | None:
    """None: another is to be made."""
    try:
        extra = read_training(checkpoint).extra
        own = extra.get(NAME) if isinstance(extra, dict) else None
        before, length = (own.get("asked"), own.get("length")) if isinstance(own, dict) else (None, None)
        if not isinstance(before, dict) or not isinstance(length, int):  # of another version, or of hightide.save
            return None
        changed = [name for name in {**before, **asked} if before.get(name) != asked.get(name)]
        if changed:
            texts = (f"{name} was {quoted(before.get(name))} and is {quoted(asked.get(name))}" for name in changed)
            logger.info("another plan than that of %s is made: %s", checkpoint, ", ".join(texts))
            return None
        plan = read_plan(checkpoint)
    except (ValueError, OSError) as error:
        told = str(error).splitlines()[0]
        warnings.warn(f"the plan that the run had cannot be read, another is made: {told}", stacklevel=5)
        return None
    return None if plan is None else Earlier(plan, length)
