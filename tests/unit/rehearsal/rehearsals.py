"""A model that is profiled and rehearsed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hightide.ir.block import ModelProfile
from hightide.ir.costs import Costs
from hightide.posing import rehearsed_sizes
from hightide.profiler.model.model_profile import profile_calls
from hightide.rehearsal.rehearse import measure_costs


def rehearse(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    device: torch.device,
    compile: bool = False,
    sizes: Sequence[int] | None = None,
) -> tuple[ModelProfile, Costs]:
    profile, probed, records = profile_calls(model, optimizer, batch, device=None, runs_on=device, source=None)
    sizes = rehearsed_sizes(profile, 2**62) if sizes is None else sizes
    return profile, measure_costs(profile, probed, records, optimizer, device, compile, sizes)
