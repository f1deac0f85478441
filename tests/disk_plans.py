"""Plans that keep chosen blocks on disk, whatever a search would do, and the limits that they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import hightide
from hightide.ir.activation import Activation
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier
from hightide.planner.chunk_place import RING_COUNTS
from hightide.planner.disk_inputs import passing_calls
from hightide.planner.placement import Placement

G, H, D = Tier.GPU, Tier.HOST, Tier.DISK
Homes = Callable[[int], tuple[Tier, Tier]]  # number of a block -> where its parameters and its states are

HOMES: dict[str, Homes] = {
    "gpu": lambda _: (G, G),
    "host": lambda _: (H, H),
    "states on disk": lambda _: (H, D),
    "states on disk, parameters on gpu": lambda _: (G, D),
    "all on disk": lambda _: (D, D),
    "every tier": lambda index: [(D, D), (H, D), (G, G), (H, H), (G, D)][index % 5],
}

SUMS: dict[str, Callable[[int], Tier]] = {  # number of a block -> where its sums wait between passes
    "on the host": lambda _: H,
    "on disk": lambda _: D,
    "stay": lambda _: G,
    "everywhere": lambda index: [D, H, G][index % 3],
}


def placed(
    plan: Plan,
    homes: str | Homes,
    num_buffers: int = 2,
    spare: int = 1,
    sums: str = "on the host",
    inputs: Callable[[int], Tier] = lambda _: G,
) -> Plan:
    """The same plan with its blocks there, everything recomputed; `spare` slots more than the widest block needs. With
    updates in backward, gradients of every third block go through the ring; of the others every second is late. `sums`
    that are to be on disk are there where states are. `inputs`: number of a block -> where its inputs wait."""
    choose = HOMES[homes] if isinstance(homes, str) else homes
    blocks = tuple(
        replace(
            block,
            params=choose(index)[0],
            states=choose(index)[1],
            activation=Activation.RECOMPUTE,
            inputs=inputs(index),
        )
        if block.name
        else block
        for index, block in enumerate(plan.blocks)
    )
    blocks = tuple(
        replace(block, held=G, compute=G, parks=index % 3 != 1, late=index % 3 == 2 and block.states is D)
        for index, block in enumerate(blocks)
    )
    homes_of_sums = [
        H if SUMS[sums](at) is D is not block.states else SUMS[sums](at) for at, block in enumerate(blocks)
    ]
    blocks = tuple(replace(block, sums=home) for block, home in zip(blocks, homes_of_sums, strict=True))
    limits = {"gpu_limit_bytes": 2**26, "host_limit_bytes": 2**26, "disk_limit_bytes": 2**26}
    plan = replace(plan, blocks=blocks, loss_kept_tokens=0, loss_in_forward=False, **limits)
    sizes = Placement(plan).buffer_bytes
    plan = replace(plan, **{name: num_buffers if sizes[ring] else 0 for ring, name in RING_COUNTS.items()})
    assert plan.profile is not None
    plan = replace(plan, num_input_buffers=num_buffers if passing_calls(plan.profile, plan) else 0)
    slots, grad_slots = Placement(plan).widest_tick({call.block for call in plan.profile.calls})
    return replace(plan, num_slots=slots + spare * (slots > 0), num_grad_slots=grad_slots + spare * (grad_slots > 0))


def folder(path: Path) -> hightide.Limits:
    """For a plan that uses a disk."""
    return hightide.Limits(disk=f"{path}:64MiB")
