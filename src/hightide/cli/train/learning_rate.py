"""The learning rate of each step, a function of the step alone."""

from __future__ import annotations

import math

from hightide.cli.train.config import LrSchedule, OptimizerConfig

MOST_WARMUP, WARMUP_SHARE = 100, 10  # steps; a tenth


def warmup_steps(num_steps: int, config: OptimizerConfig) -> int:
    return config.warmup_steps if config.warmup_steps is not None else min(MOST_WARMUP, num_steps // WARMUP_SHARE)


def lr_factor(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """Share of the peak learning rate at a step (from 0): linear warm-up, then a curve down to the final share."""
    warmup = warmup_steps(num_steps, config)
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    left = {
        LrSchedule.COSINE: (1 + math.cos(math.pi * progress)) / 2,
        LrSchedule.LINEAR: 1 - progress,
        LrSchedule.CONSTANT: 1.0,
    }[config.schedule]
    return config.final_lr_fraction + (1 - config.final_lr_fraction) * left
