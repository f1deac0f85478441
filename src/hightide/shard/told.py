"""Messages that several ranks would tell the user are told once, by the rank that comes first.

[Note: who tells] Ranks that end with an error no longer exchange anything, so they meet in a store: torchrun's, which
is there from the first moment and outlives them, or else that of the process group. The first with a message tells it;
who has the same one waits until it is told, for torchrun ends all ranks as soon as one has ended. Where there is no
store, or it does not answer, everyone tells: twice is better than never.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from hightide.shard.attempt import is_kept

WITHIN_S = 5.0
_ANY = "any"


def in_company() -> bool:
    """Whether a launcher has started several ranks, as far as the environment tells."""
    world = os.environ.get("WORLD_SIZE", "")
    return "RANK" in os.environ and world.isascii() and world.isdigit() and int(world) > 1


def tell_once(message: str, code: int, say: Callable[[], object]) -> int:
    """`say`s it, unless another rank does. `code`: with which this rank ends, and those that end because of it."""
    store = _store()
    key = hashlib.sha256(message.encode("utf-8", "replace")).hexdigest()
    try:
        if store is not None and store.add(f"{key} told by", 1) > 1:
            store.wait([key], timedelta(seconds=WITHIN_S))
            return code
    except RuntimeError:  # of a store that is gone, or of a rank that went before it could tell
        store = None
    say()
    if store is not None:
        try:
            store.set(key, "")
            store.set(_ANY, str(code))
        except RuntimeError:
            pass
    return code


def told_elsewhere() -> int | None:
    """The code of a rank that has told why it ends; waits for it a little. None: nobody has."""
    store = _store()
    if store is None:
        return None
    try:
        store.wait([_ANY], timedelta(seconds=WITHIN_S))
        return int(store.get(_ANY))
    except RuntimeError:
        return None


def _store() -> dist.Store | None:
    """Of the present attempt: torchrun may start its ranks again."""
    if not in_company():
        return None
    prefix = f"hightide told {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if is_kept() and "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            return dist.PrefixStore(prefix, dist.TCPStore(host, port, None, False, timedelta(seconds=WITHIN_S)))
        except RuntimeError:
            return None
    if dist.is_available() and dist.is_initialized():
        return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
    return None
