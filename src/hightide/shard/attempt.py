"""A store of which nothing is from before.

[Note: restarts] torchrun that starts its processes again keeps its store, and what they had put there: addresses of
processes that are gone, for one. How often it has started them the nodes may count differently. So ranks find out who
is there now: each puts a number there that nobody has used, the first makes one name of all that it sees, and says it
until each rank has said it back. A name in which a rank's own number is not is of before it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable

import torch.distributed as dist

from hightide.process.interrupts import safe_point

OURS = "hightide attempt"
LOOK_S = 0.02


def is_kept() -> bool:
    """Whether the store outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def fresh(store: dist.Store, rank: int, world: int, timeout_s: float) -> dist.Store:
    """Of these ranks alone. All must call it."""
    kept = dist.PrefixStore(OURS, store)
    own = os.urandom(8).hex()
    kept.set(f"here/{rank}", own)
    look = _deadline(rank, timeout_s)
    name = _named(kept, own, world, look) if rank == 0 else _told(kept, rank, own, world, look)
    return dist.PrefixStore(f"{OURS} {name}", store)


def _named(kept: dist.Store, own: str, world: int, look: Callable[[str], None]) -> str:
    others, before = range(1, world), ""
    while True:
        here = [own, *(_read(kept, f"here/{other}") for other in others)]
        name = hashlib.sha256(" ".join(here).encode()).hexdigest()[:16]
        if all(here) and name != before:
            kept.set("name", json.dumps([name, here]))
            before = name
        if all(here) and all(_read(kept, f"said/{other}") == name for other in others):
            kept.set("agreed", name)
            return name
        look("the other ranks")


def _told(kept: dist.Store, rank: int, own: str, world: int, look: Callable[[str], None]) -> str:
    said = ""
    while True:
        name, here = json.loads(_read(kept, "name") or '["", []]')
        if len(here) == world and here[rank] == own and name != said:
            kept.set(f"said/{rank}", name)
            said = name
        if said and said == name and _read(kept, "agreed") == name:
            return said
        look("rank 0")


def _read(store: dist.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _deadline(rank: int, timeout_s: float) -> Callable[[str], None]:
    since_s = time.monotonic()

    def look(whom: str) -> None:
        if time.monotonic() - since_s > timeout_s:
            raise ValueError(
                f"rank {rank} has waited {timeout_s:g} s for {whom} in hightide.wrap: all ranks must call it. One that "
                "may take longer needs a larger timeout_s"
            )
        safe_point()
        time.sleep(LOOK_S)

    return look
