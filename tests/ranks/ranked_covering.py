"""What each rank does in these tests: trains any model of the zoo with hightide, which is told nothing but limits, and
with DDP of plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranked_loop import optimizer_of, peaks_above, steps
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hightide
import hightide.profiler.model.model_profile
import hightide.wrapping
from architectures import ARCHITECTURES, build
from hightide.ir.tier import Tier
from hightide.planner.infeasible import InfeasiblePlan
from known_profiles import KnownProfiles

NUM_STEPS, NUM_SAMPLES = 3, 4
HOST_BYTES = 64 << 20
ROOMY = hightide.Limits(gpu="32MiB", host=HOST_BYTES)
ROOM = 1.02

# A refusal and the plan that follows are of one profile.
KNOWN = KnownProfiles(hightide.profiler.model.model_profile.profile_calls)
for module in (hightide.wrapping, hightide.profiler.model.model_profile):
    module.profile_calls = KNOWN  # type: ignore[attr-defined]


def train(
    rank: int, world: int, model: str, trained: str, update: str, clip: float | None, accumulate: int, limits: str
) -> dict[str, Any]:
    """`differences`: of each weight that differs, in what the parity tests allow."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batch = ARCHITECTURES[model].batch
    batches = [batch(seed=100 * rank + number, num_samples=NUM_SAMPLES) for number in range(NUM_STEPS * accumulate)]

    mine, example = build(model, trained, num_samples=NUM_SAMPLES)
    options = {"update": update, "accumulate": accumulate}
    optimizer = optimizer_of(mine)
    chosen = ROOMY if limits == "roomy" else least_limits(mine, optimizer, example, options)
    wrapped, stepping = hightide.wrap(mine, optimizer, example, limits=chosen, **options)
    found = steps(wrapped, stepping, batches, clip, accumulate)
    stats = hightide.stats(wrapped)
    found |= {"above": peaks_above(wrapped), "ranks": stats.plan.ranks, "deviations": stats.deviations}
    found["moved"] = sum(stats.moved_bytes.values())
    hightide.unwrap(wrapped)
    weights = mine.state_dict()

    plain, _ = build(model, trained, num_samples=NUM_SAMPLES)
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    found["plain"] = steps(ddp, optimizer_of(plain), batches, clip, accumulate)
    del ddp  # before the group: see ranked_training.py
    found["differences"] = differences(plain.state_dict(), weights)
    dist.destroy_process_group()
    return found


def least_limits(
    model: nn.Module, optimizer: torch.optim.Optimizer, example: Any, options: dict[str, Any]
) -> hightide.Limits:
    """Little more than what refusals say is enough: of the GPU, and then of the host."""
    sizes = {Tier.GPU: 1, Tier.HOST: HOST_BYTES}
    for tier in sizes:
        sizes[tier] = 1
        with pytest.raises(InfeasiblePlan) as refused:
            hightide.wrap(model, optimizer, example, limits=limits_of(sizes), **options)
        alone = next(enough for enough in refused.value.enough if list(enough) == [tier])
        sizes[tier] = int(ROOM * alone[tier])
    return limits_of(sizes)


def limits_of(sizes: dict[Tier, int]) -> hightide.Limits:
    return hightide.Limits(gpu=sizes[Tier.GPU], host=sizes[Tier.HOST])


def differences(plain: dict[str, Tensor], weights: dict[str, Tensor]) -> dict[str, float]:
    """As `assert_close_weights` of the parity tests has them."""
    assert list(plain) == list(weights)
    allowed = {name: 1e-5 * float(value.abs().max()) + 1e-6 for name, value in plain.items()}
    off = {name: float((weights[name] - value).abs().max()) / allowed[name] for name, value in plain.items()}
    return {name: by for name, by in off.items() if by}
