"""What simple kernels and updates reach on the device."""

from __future__ import annotations

import torch

from hightide.ir.block import ModelProfile
from hightide.ir.chunk import STATE_BYTES
from hightide.optim.operands import Operands
from hightide.optim.registry import rule_for
from hightide.rehearsal.stopwatch import Lap, time_laps

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
    grad, master, *moments = (torch.zeros(numel, device=device) for _ in range(2 + rule.num_moments))
    dtype = getattr(torch, max(profile.params, key=lambda spec: spec.numel).dtype)
    param = None if dtype == torch.float32 else torch.zeros(numel, dtype=dtype, device=device)
    operands = Operands(master, grad, tuple(moments), param)
    narrow_bytes = 0 if param is None else param.element_size()

    def once(lap: Lap) -> None:
        rule.update(operands, 1, hyper)
        lap()

    touched = numel * (grad.element_size() + STATE_BYTES * (1 + rule.num_moments) + narrow_bytes)
    return touched / time_laps(once, device).seconds[0]
