"""Models in which no samples meet run in micro-batches, all of their calls: a false alarm costs memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from equal_or_refused import CLASSES, WIDTH, Block, Net, images, mean_square, sequences, unsplit
from harness import make_optimizer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import hightide
import models

PLENTY = hightide.Limits(gpu="64MiB", host="64MiB")
MICRO_BATCH = 2


class Convolution(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        return y * torch.sigmoid(self.linear(y.mean((2, 3))))[:, :, None, None]


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Convolution(3), Convolution(4), Convolution(4))
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": mean_square(self.head(self.blocks(x).mean((2, 3))), labels)}


class Recurrent(Block):
    def make(self) -> None:
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def mix(self, h: Tensor) -> Tensor:
        return self.recurrent(h)[0]


class Attention(Block):
    def make(self) -> None:
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def mix(self, h: Tensor) -> Tensor:
        return self.attention(h, h, h, need_weights=False)[0]


class Gated(Block):
    """Values that could be taken for coupled: cut, sorted, chosen and rounded, each sample by itself."""

    def mix(self, h: Tensor) -> Tensor:
        best = torch.zeros_like(h).scatter(-1, h.topk(3, dim=-1).indices, 1.0)
        return h * best + h.sort(-1).values + (h.round() - h).detach() + h / h.abs().amax(-1, keepdim=True)


class MaskedMean(Block):
    """A mean over valid tokens, each sample by itself; some have none."""

    def mix(self, h: Tensor) -> Tensor:
        valid = (h.sum(-1, keepdim=True) > 0).float()
        return h + (h * valid).sum(1, keepdim=True) / valid.sum(1, keepdim=True).clamp(min=1)


def stack(kind: type[Block]) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Net(kind(), kind(), kind()).train(), sequences(1)


def convolutions() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Convolutions().train(), images(1)


CLEAN: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "llama": partial(models.llama, num_layers=2),
    "gpt2": partial(models.gpt2, num_layers=2),
    "bert": partial(models.bert, num_layers=2),
    "vit": partial(models.vit, num_layers=2),
    "plain": partial(models.plain, num_layers=2),
    "hand_written": models.hand_written,
    "dropout": partial(models.hand_written, dropout=0.2),
    "padded": partial(models.llama, num_layers=2, padded=True),
    "linear": partial(stack, Block),
    "attention": partial(stack, Attention),
    "recurrent": partial(stack, Recurrent),
    "gated": partial(stack, Gated),
    "masked_mean": partial(stack, MaskedMean),
    "convolutions": convolutions,
}


@pytest.mark.parametrize("name", CLEAN)
def test_clean_models_are_split(name: str) -> None:
    """The plan has no call that runs unsplit, and no block sees more than a micro-batch."""
    model, batch = CLEAN[name]()
    model, optimizer = hightide.wrap(model, make_optimizer(model), batch, limits=PLENTY, micro_batch=MICRO_BATCH)
    seen: list[int] = []

    def note(_: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and not isinstance(args[0], FakeTensor):
            seen.append(len(args[0]))

    kinds = (nn.Linear, nn.LayerNorm, nn.Conv1d, nn.Conv2d, nn.MultiheadAttention, nn.LSTM)
    inside = [module for path, module in model.named_modules() if ".1." in path and isinstance(module, kinds)]
    handles = [module.register_forward_pre_hook(note) for module in inside]
    models.loss_of(model, batch).backward()
    optimizer.step()
    for handle in handles:
        handle.remove()
    assert seen and max(seen) <= MICRO_BATCH, seen
    plan = hightide.stats(model).plan
    assert "3 micro-batches" in plan.explain() and not unsplit(plan)


def test_the_reason_for_a_call_that_runs_unsplit_is_found() -> None:
    """Else this file could not fail."""

    class Centred(Block):
        def mix(self, h: Tensor) -> Tensor:
            return h - h.mean(0)

    model, batch = stack(Centred)
    plan = hightide.plan(model, make_optimizer(model), batch, limits=PLENTY, micro_batch=MICRO_BATCH)
    assert unsplit(plan)
