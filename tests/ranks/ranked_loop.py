"""The training loop that ranks run, wrapped and in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import hightide
import models

EPS = 1e-4  # see parity/harness.py


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    trained = [param for param in model.parameters() if param.requires_grad]
    matrices = [param for param in trained if param.dim() > 1]
    vectors = [param for param in trained if param.dim() <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=3e-3, eps=EPS)


def steps(
    model: Any, optimizer: Any, batches: list[Any], clip: float | None, accumulate: int, cleared: bool = True
) -> dict[str, Any]:
    losses, norms = [], []
    for at in range(0, len(batches), accumulate):
        for batch in batches[at : at + accumulate]:
            loss = models.loss_of(model, batch) / accumulate
            loss.backward()
            losses.append(loss.item())
        if clip is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(list(model.parameters()), clip)))
        optimizer.step()
        if cleared:
            optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


def peaks_above(wrapped: nn.Module) -> dict[str, list[int]]:
    """Of tiers of this rank that ever held more than their limit: both."""
    stats = hightide.stats(wrapped)
    limits = stats.plan.limits
    return {str(tier): [peak, limits[tier]] for tier, peak in stats.peak_bytes.items() if peak > limits[tier]}
