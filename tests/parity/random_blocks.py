"""Small stacks of blocks made of pieces, as data: harmless pieces, and pieces in which samples meet, which keep state,
draw random numbers or read shapes. Hypothesis draws a Sketch, which builds the model; its repr reproduces it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from equal_or_refused import mean_square
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

WIDTH = 8
OUTPUTS = 3


@dataclass(frozen=True)
class Drawn:
    """A block: what happens to its values, one piece after the other."""

    pieces: tuple[str, ...]
    same_as: int | None = None  # an earlier block, of which this is another call
    residual: bool = True


@dataclass(frozen=True)
class Sketch:
    blocks: tuple[Drawn, ...]
    time_first: bool
    turned: bool  # the inputs are the other way around, and the model turns them
    tokens: int
    container: str  # list or sequential
    seed: int

    @property
    def kinds(self) -> set[str]:
        return {piece for block in self.blocks for piece in block.pieces}

    @property
    def draws_by_sample(self) -> bool:
        """Micro-batches draw other numbers than one batch, by design."""
        return bool(self.kinds & {"dropout", "noise"})

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return Model(self).train()

    def batch(self, num_samples: int, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(num_samples, self.tokens, WIDTH, generator=generator)
        labels = torch.randn(num_samples, self.tokens, OUTPUTS, generator=generator)
        if self.time_first != self.turned:
            x, labels = x.transpose(0, 1).contiguous(), labels.transpose(0, 1).contiguous()
        return {"x": x, "labels": labels}


class Piece(nn.Module):
    """`apply` gets (samples, tokens, features), however the values lie."""

    def __init__(self) -> None:
        super().__init__()
        self.make()

    def make(self) -> None: ...

    def apply_to(self, h: Tensor) -> Tensor:
        raise NotImplementedError


PIECES: dict[str, type[Piece]] = {}
FAMILIES: dict[str, list[str]] = {"harmless": [], "meeting": [], "state": [], "random": [], "shape": []}


def piece(family: str) -> Callable[[type[Piece]], type[Piece]]:
    def register(kind: type[Piece]) -> type[Piece]:
        name = "".join("_" + letter.lower() if letter.isupper() else letter for letter in kind.__name__).strip("_")
        PIECES[name] = kind
        FAMILIES[family].append(name)
        return kind

    return register


# --- harmless ---


@piece("harmless")
class Linear(Piece):
    def make(self) -> None:
        self.linear = nn.Linear(WIDTH, WIDTH)

    def apply_to(self, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(h))


@piece("harmless")
class Norm(Piece):
    def make(self) -> None:
        self.norm = nn.LayerNorm(WIDTH)

    def apply_to(self, h: Tensor) -> Tensor:
        return self.norm(h)


@piece("harmless")
class Attention(Piece):
    def make(self) -> None:
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def apply_to(self, h: Tensor) -> Tensor:
        query, key, value = self.mix(h).chunk(3, dim=-1)
        return torch.softmax(query @ key.transpose(1, 2) / 3, -1) @ value


@piece("harmless")
class Conv(Piece):
    def make(self) -> None:
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, bias=False)

    def apply_to(self, h: Tensor) -> Tensor:
        return self.conv(h.transpose(1, 2)).transpose(1, 2)


@piece("harmless")
class Gate(Piece):
    def make(self) -> None:
        self.gate = nn.Parameter(torch.zeros(WIDTH))

    def apply_to(self, h: Tensor) -> Tensor:
        return h * torch.sigmoid(self.gate + h.mean(1, keepdim=True))


@piece("harmless")
class Scan(Piece):
    def apply_to(self, h: Tensor) -> Tensor:
        return h.cumsum(1) / torch.arange(1, h.shape[1] + 1).unsqueeze(1)


# --- samples meet ---


@piece("meeting")
class Centre(Piece):
    def apply_to(self, h: Tensor) -> Tensor:
        return h - h.mean(0)


@piece("meeting")
class Largest(Piece):
    def apply_to(self, h: Tensor) -> Tensor:
        return h / (0.5 + h.abs().max())


@piece("meeting")
class AttendSamples(Piece):
    def apply_to(self, h: Tensor) -> Tensor:
        flat = h.flatten(1)
        return (torch.softmax(flat @ flat.T / 8, 1) @ flat).view_as(h)


@piece("meeting")
class FirstSample(Piece):
    def apply_to(self, h: Tensor) -> Tensor:
        return h - 0.5 * h[:1]


@piece("meeting")
class RollSamples(Piece):
    def apply_to(self, h: Tensor) -> Tensor:
        return h + 0.5 * h.roll(1, 0)


@piece("meeting")
class Capacity(Piece):
    """Only the first two samples of each sign get through."""

    def apply_to(self, h: Tensor) -> Tensor:
        positive = h.detach().sum((1, 2)) > 0
        rank = torch.where(positive, positive.cumsum(0), (~positive).cumsum(0))
        return h * (rank <= 2)[:, None, None]


@piece("meeting")
class OnlyLarge(Piece):
    def apply_to(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if len(h) > 3 else h


class _Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(0)


@piece("meeting")
class CentreGradient(Piece):
    def apply_to(self, h: Tensor) -> Tensor:
        return _Centred.apply(h)


@piece("meeting")
class ScaleGradient(Piece):
    def apply_to(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda grad: grad / (0.1 + grad.abs().max()))
        return h


# --- state ---


@piece("state")
class BatchNorm(Piece):
    def make(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH, eps=0.1)

    def apply_to(self, h: Tensor) -> Tensor:
        return self.norm(h.transpose(1, 2)).transpose(1, 2)


@piece("state")
class Average(Piece):
    """Used in evaluation only."""

    def make(self) -> None:
        self.register_buffer("average", torch.zeros(WIDTH))

    def apply_to(self, h: Tensor) -> Tensor:
        if self.training:
            self.average.lerp_(h.detach().mean((0, 1)), 0.2)
            return h
        return h - self.average


@piece("state")
class AverageUsed(Piece):
    def make(self) -> None:
        self.register_buffer("average", torch.zeros(WIDTH))

    def apply_to(self, h: Tensor) -> Tensor:
        self.average = 0.8 * self.average + 0.2 * h.detach().mean((0, 1))
        return h - self.average


@piece("state")
class CountCalls(Piece):
    def make(self) -> None:
        self.calls = 0

    def apply_to(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * (1 + 1 / self.calls)


@piece("state")
class ByTurns(Piece):
    def make(self) -> None:
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def apply_to(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * (0.5 + self.calls % 2)


@piece("state")
class Log(Piece):
    def make(self) -> None:
        self.log: list[float] = []

    def apply_to(self, h: Tensor) -> Tensor:
        self.log.append(float(h.detach().square().mean()))
        return h


@piece("state")
class Spectral(Piece):
    def make(self) -> None:
        self.linear = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def apply_to(self, h: Tensor) -> Tensor:
        return self.linear(h)


@piece("state")
class Started(Piece):
    def make(self) -> None:
        self.scale: Tensor | None = None

    def apply_to(self, h: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = h.detach().std() + 0.5
        return h / self.scale


# --- random numbers ---


@piece("random")
class Dropout(Piece):
    def make(self) -> None:
        self.dropout = nn.Dropout(0.3)

    def apply_to(self, h: Tensor) -> Tensor:
        return self.dropout(h)


@piece("random")
class Noise(Piece):
    def apply_to(self, h: Tensor) -> Tensor:
        return h + 0.1 * torch.randn_like(h) if self.training else h


@piece("random")
class DropAll(Piece):
    """Decided for all samples at once."""

    def apply_to(self, h: Tensor) -> Tensor:
        return h * float(random.random() < 0.6) if self.training else h


@piece("random")
class ScaleByNumpy(Piece):
    def apply_to(self, h: Tensor) -> Tensor:
        return h * float(np.random.uniform(0.5, 1.5)) if self.training else h


@piece("random")
class ScaleByTorch(Piece):
    def apply_to(self, h: Tensor) -> Tensor:
        return h * (0.5 + torch.rand(WIDTH)) if self.training else h


@piece("random")
class OwnGenerator(Piece):
    def make(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def apply_to(self, h: Tensor) -> Tensor:
        return h * (0.5 + torch.rand((), generator=self.generator))


@piece("random")
class Permute(Piece):
    def apply_to(self, h: Tensor) -> Tensor:
        return 0.7 * h + 0.3 * h[torch.randperm(len(h))] if self.training else h


# --- shapes ---


@piece("shape")
class DivideBySamples(Piece):
    def apply_to(self, h: Tensor) -> Tensor:
        return h * (1 + 1 / len(h))


@piece("shape")
class DivideByTokens(Piece):
    def apply_to(self, h: Tensor) -> Tensor:
        return h * (1 + 1 / h.shape[1])


@piece("shape")
class Places(Piece):
    def make(self) -> None:
        self.places = nn.Embedding(16, WIDTH)

    def apply_to(self, h: Tensor) -> Tensor:
        return h + self.places(torch.arange(len(h))).unsqueeze(1)


@piece("shape")
class Branch(Piece):
    def apply_to(self, h: Tensor) -> Tensor:
        return 1.5 * h if float(h.detach().mean()) > 0 else h


class Mixed(nn.Module):
    def __init__(self, drawn: Drawn, time_first: bool) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(PIECES[name]() for name in drawn.pieces)
        self.residual, self.time_first = drawn.residual, time_first
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = x.transpose(0, 1) if self.time_first else x
        for part in self.pieces:
            h = part.apply_to(h)
        h = (h.transpose(0, 1) if self.time_first else h) * self.scale
        return x + h if self.residual else h


class Model(nn.Module):
    def __init__(self, sketch: Sketch) -> None:
        super().__init__()
        self.turned = sketch.turned
        self.first = nn.Linear(WIDTH, WIDTH)
        blocks: list[nn.Module] = []
        for drawn in sketch.blocks:
            known = drawn.same_as is not None
            blocks.append(blocks[drawn.same_as] if known else Mixed(drawn, sketch.time_first))  # type: ignore[index]
        self.blocks = nn.Sequential(*blocks) if sketch.container == "sequential" else nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.first(x.transpose(0, 1) if self.turned else x)
        if isinstance(self.blocks, nn.Sequential):
            h = self.blocks(h)
        else:
            for block in self.blocks:  # type: ignore[union-attr]
                h = block(h)
        prediction = self.head(h.transpose(0, 1) if self.turned else h)
        return {"loss": mean_square(prediction, labels), "prediction": prediction}


@st.composite
def sketches(draw: st.DrawFn) -> Sketch:
    """Mostly harmless pieces, with one or two others somewhere."""
    families = st.sampled_from(["harmless", "harmless", *FAMILIES])
    pieces = families.flatmap(lambda family: st.sampled_from(FAMILIES[family]))
    blocks: list[Drawn] = []
    for index in range(draw(st.integers(1, 4))):
        same_as = draw(st.sampled_from([None, None, None, *range(index)])) if index else None
        if same_as is not None:
            blocks.append(Drawn(blocks[same_as].pieces, same_as, blocks[same_as].residual))
        else:
            blocks.append(Drawn(tuple(draw(st.lists(pieces, min_size=1, max_size=3))), None, draw(st.booleans())))
    return Sketch(
        blocks=tuple(blocks),
        time_first=draw(st.sampled_from([False, False, True])),
        turned=draw(st.sampled_from([False, False, True])),
        tokens=draw(st.sampled_from([3, 5, 6])),
        container=draw(st.sampled_from(["list", "sequential"])),
        seed=draw(st.integers(0, 3)),
    )
