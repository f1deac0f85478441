"""Plans for several ranks that put the same model at different places."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

import hightide
from hightide.ir.activation import Activation
from hightide.ir.plan import BlockPlan, Plan, Sharing
from hightide.ir.tier import Tier
from hightide.planner.chunk_place import RING_COUNTS
from hightide.planner.layout import pack
from hightide.planner.placement import Placement
from hightide.profiler.model.model_profile import profile_model

NUM_SAMPLES = 4
ON_GPU = "2GiB"  # of which libraries take 100 MiB or more
G, H, D = Tier.GPU, Tier.HOST, Tier.DISK
SHARDED, WHOLE_PARAMS, REPLICATED = Sharing
Way = tuple[Tier, Tier, Sharing]  # of a block: params, states, sharing
WAYS: dict[str, tuple[Way, ...]] = {  # blocks take them in turn
    "sharded on the gpu": ((G, G, SHARDED),),
    "whole parameters": ((G, G, WHOLE_PARAMS),),
    "replicated": ((G, G, REPLICATED),),
    "streamed": ((H, H, SHARDED),),
    "states on the host": ((G, H, WHOLE_PARAMS),),
    "from disk": ((D, D, SHARDED), (H, D, SHARDED), (G, D, WHOLE_PARAMS)),
    "mixed": ((H, H, SHARDED), (G, G, WHOLE_PARAMS), (G, H, WHOLE_PARAMS), (G, G, SHARDED), (G, G, REPLICATED)),
}


class Plans:
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Any,
        num_micro_batches: int = 2,
        gpu: str = "32MiB",
        **options: Any,
    ) -> None:
        """Made without a GPU, also for one: its driver does not outlive a fork. `gpu`: its limit,
        which is more than enough."""
        limits = hightide.Limits(gpu=gpu, host="64MiB")
        size = NUM_SAMPLES // num_micro_batches
        on_cpu = {"limits": limits, "micro_batch": size, "device": "cpu"}
        self._base = hightide.plan(model, optimizer, batch, **on_cpu, **options)
        self._profile, _ = profile_model(model, optimizer, batch, options.get("blocks"))

    def of(self, ranks: int, where: str, sums: str = "host", replicas: int = 1, slot_part: int = 1) -> Plan:
        """One of WAYS. `sums`: where those of gradients are between the passes of a step. `slot_part`: slots are so
        many times smaller, and chunks are others."""
        base, profile, ways = self._base, self._profile, WAYS[where]
        states = next(chunk.rule_states for chunk in base.layout.chunks if chunk.optimised_numel)
        layout = pack(profile, base.layout.slot_numel // slot_part, states, ranks // replicas)
        blocks = []
        for spec, block in zip(profile.blocks, base.blocks, strict=True):
            params, of_states, sharing = (G, G, REPLICATED) if spec.loose else ways[spec.index % len(ways)]
            activation = Activation.RECOMPUTE if spec.lazy_head else block.activation
            told = {"sums": Tier(sums), "sharing": sharing, "settles": spec.index % 2 == 1}
            blocks.append(BlockPlan(spec.name, params, of_states, activation, block.inputs, **told))
        plan = replace(base, layout=layout, blocks=tuple(blocks), ranks=ranks, replicas=replicas)
        placement = Placement(plan)
        slots, grad_slots = placement.widest_tick({call.block for call in profile.calls})
        rings = {name: 2 if placement.buffer_bytes[ring] else 0 for ring, name in RING_COUNTS.items()}
        disk_bytes = placement.bytes_on[Tier.DISK]
        counts = {"num_slots": slots + 1 if slots else 0, "num_grad_slots": grad_slots + 1 if grad_slots else 0}
        return replace(plan, disk_limit_bytes=disk_bytes, **counts, **rings)
