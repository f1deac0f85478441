"""The speed of light of a step: what its needed operations would take if the GPU did nothing but large products.

Needed are the operations of the model's forward and backward, once each; what is recomputed is not. As the profile
counts them, the backward of attention makes its scores again: no kernel keeps them."""

from __future__ import annotations

from collections import Counter

from hightide.ir.block import ModelProfile
from hightide.ir.machine import Machine


def needed_flop(profile: ModelProfile, num_samples: int) -> int:
    """Of matrix products, convolutions and attention, the head's included. 0: none was counted."""
    return sum(
        call.forward.flop.at(num_samples) + (call.backward.flop.at(num_samples) if call.needs_backward else 0)
        for call in profile.calls
    )


def main_dtype(profile: ModelProfile) -> str:
    """Of most parameters, and so of products, unless the loop uses autocast."""
    numel: Counter[str] = Counter()
    for spec in profile.params:
        numel[spec.dtype] += spec.numel
    return numel.most_common(1)[0][0]


def light_s(profile: ModelProfile, num_samples: int, machine: Machine) -> float | None:
    """Seconds, of a step with so many samples. None: there is no GPU whose rate is known, or nothing was counted. The
    simulated accelerator is none: what it would reach says nothing about any GPU."""
    if machine.gpu is None or machine.is_simulated:
        return None
    return seconds_at(needed_flop(profile, num_samples), machine.gpu.matmul_flop_per_s.of(main_dtype(profile)))


def seconds_at(flop: int, flop_per_s: float | None) -> float | None:
    return flop / flop_per_s if flop and flop_per_s else None
