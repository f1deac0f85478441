"""Dropout. In several micro-batches a block draws other masks than plain PyTorch would for the whole batch, which is no
error (read [Note: dropout and plans] in runtime/blocks/rng.py), and nothing can be compared while it is on."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from hightide.profiler.model.call_tree import Arguments
from hightide.profiler.trial.state import GlobalRandom
from hightide.verification.observed_training import call

NAMES = ("dropout", "pdrop", "drop_prob", "drop_path", "layerdrop", "drop_rate")  # parts of attributes' names


def drawing_blocks(model: nn.Module, blocks: tuple[str, ...], batch: Arguments) -> list[str]:
    """The blocks that draw random numbers in one forward, from any generator that is not their own."""
    device = next(model.parameters()).device
    before: dict[str, GlobalRandom] = {}
    found: dict[str, None] = {}

    def enter(block: str) -> None:
        before[block] = GlobalRandom(device)

    def leave(block: str) -> None:
        if before[block].drawn():
            found[block] = None

    with ExitStack() as hooks, torch.no_grad():
        for block in blocks:
            module = model.get_submodule(block)
            hooks.enter_context(module.register_forward_pre_hook(lambda _, __, block=block: enter(block)))
            hooks.enter_context(module.register_forward_hook(lambda _, __, ___, block=block: leave(block)))
        call(model, batch)
    return list(found)


def switch_off(model: nn.Module) -> None:
    """Dropout, wherever a module or its configuration says how much of it there is."""
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        _clear(module)
        config = getattr(module, "config", None)
        configs = [config, *(vars(config).values() if hasattr(config, "to_dict") else ())]
        for one in configs:
            if hasattr(one, "to_dict") and id(one) not in seen:
                seen.add(id(one))
                _clear(one)


def _clear(owner: Any) -> None:
    for name, value in list(vars(owner).items()):
        if isinstance(value, float) and 0 < value <= 1 and any(part in name for part in NAMES):
            setattr(owner, name, 0.0)
