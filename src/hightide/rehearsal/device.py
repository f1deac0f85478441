"""Rates of simple kernels and updates on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from hightide.ir.block import ModelProfile
from hightide.optim.operands import Operands
from hightide.optim.registry import rule_for
from hightide.rehearsal.stopwatch import Lap, time_laps
from hightide.runtime.chunks.homes import DTYPES

COPIED_BYTES = {"cuda": 1 << 28, "cpu": 1 << 24}  # beyond any cache of a GPU
UPDATED_NUMEL = {"cuda": 1 << 25, "cpu": 1 << 18}


def memory_rate(device: torch.device) -> float:
    """Bytes read and written per second by a copy."""
    source = torch.ones(COPIED_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)

    def once(lap: Lap) -> None:
        target.copy_(source)
        lap()

    return 2 * source.nbytes / time_laps(once, device).seconds[0]


def update_rate(optimizer: torch.optim.Optimizer, profile: ModelProfile, device: torch.device) -> float:
    """Bytes touched per second, as an UPDATE counts them: each array once."""
    rule = rule_for(optimizer)
    hyper = rule.read(optimizer.param_groups[0])
    numel = UPDATED_NUMEL[device.type]
    dtype = getattr(torch, max(profile.params, key=lambda spec: spec.numel).dtype)
    in_parts = dtype == torch.bfloat16

    def array(kind: torch.dtype, per_numel: int = 1) -> Tensor:
        return torch.zeros(-(-numel // per_numel), dtype=kind, device=device)

    operands = Operands(
        None if in_parts else array(torch.float32),
        array(torch.float32),
        tuple(array(DTYPES[state.dtype], state.per_numel) for state in rule.states),
        None if dtype == torch.float32 else array(dtype),
        array(torch.int16) if in_parts else None,
        tuple(state.per_numel for state in rule.states),
    )

    def once(lap: Lap) -> None:
        rule.update(operands, 1, hyper)
        lap()

    return operands.touched_bytes / time_laps(once, device).seconds[0]
