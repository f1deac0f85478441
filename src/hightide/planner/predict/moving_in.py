"""Host memory while `wrap` moves a model's values into their places.

A model that was made on the CPU is in host memory as a whole when that begins, wherever its values will live: with a
plan that leaves nothing on the host, this is the most that the process will ever have there. Values go parameter by
parameter, and what each was is freed right away; but the C library gives pages back only when it is asked to, which
takes a moment and is done every RETURN_BYTES."""

from __future__ import annotations

from collections.abc import Collection

from hightide.ir.block import DTYPE_BYTES
from hightide.ir.state_spec import MASTER
from hightide.ir.tier import Tier
from hightide.planner.placement import Placement

RETURN_BYTES = 2**27


def moving_in_bytes(placement: Placement, on_host: Collection[str], waiting_bytes: int = 0) -> int:
    """At most, beside what the process has without the model. `on_host`: parameters whose values are there before, as
    plain tensors; `waiting_bytes`: of others there that move in later, such as moments."""
    originals = {
        entry.param: entry.numel * DTYPE_BYTES[place.chunk.dtype]
        for place in placement.chunks
        for entry in place.chunk.params
        if entry.param in on_host
    }
    now = sum(originals.values()) + waiting_bytes
    most, freed, num_shards = now, 0, placement.plan.num_shards
    for place in placement.chunks:
        for entry in place.chunk.params:
            now += entry.numel * DTYPE_BYTES[place.chunk.dtype] // num_shards if place.home is Tier.HOST else 0
            most = max(most, now + min(freed, RETURN_BYTES))
            moved = originals.get(entry.param, 0)
            now, freed = now - moved, freed + moved
        if MASTER in place.chunk.states and place.states is Tier.HOST:
            now += MASTER.num_bytes(place.shard.optimised_numel)
            most = max(most, now + min(freed, RETURN_BYTES))
    return most
