"""Small models of any build, as data: hypothesis draws a Sketch, which builds the model; its repr reproduces it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

WORDS = 40
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Layer:
    kind: str  # linear, mlp, attention or conv
    inner: int  # width inside an mlp
    same_as: int | None = None  # an earlier layer, of which this is another call
    tied_to: int | None = None  # an earlier layer of the same kind and width, whose first weight this one shares
    frozen: str = ""  # "all", "first": its first parameter only, "rest": all but the first


@dataclass(frozen=True)
class Sketch:
    layers: tuple[Layer, ...]
    width: int
    tokens: int
    ids: bool  # integer inputs, through an embedding
    tied_head: bool  # the head's weight is the embedding's
    frozen_embedding: bool
    loose: bool  # a scale that the model's own code uses between blocks
    gate: bool  # blocks also get the scale, as a keyword
    pair: bool  # blocks take and return two tensors
    twice: bool  # the first one gets one tensor as both
    container: str  # list or sequential
    dropout: float
    buffers: bool
    unused: bool  # a layer that is never called
    dtype: str
    seed: int

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return Model(self).train().to(DTYPES[self.dtype])

    def batch(self, num_samples: int, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        outputs = torch.randn(num_samples, self.tokens, WORDS, generator=generator)
        if self.ids:
            x = torch.randint(0, WORDS, (num_samples, self.tokens), generator=generator)
        else:
            x = torch.randn(num_samples, self.tokens, self.width, generator=generator).to(DTYPES[self.dtype])
        return {"x": x, "labels": outputs.to(DTYPES[self.dtype])}


class Mix(nn.Module):
    """A residual layer of one of several kinds, called in one of several ways."""

    def __init__(self, layer: Layer, sketch: Sketch) -> None:
        super().__init__()
        width, inner = sketch.width, layer.inner
        self.kind, self.pair = layer.kind, sketch.pair
        self.norm = nn.LayerNorm(width)
        if layer.kind == "linear":
            self.mix: nn.Module = nn.Linear(width, width)
        elif layer.kind == "mlp":
            self.mix = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width, bias=False))
        elif layer.kind == "conv":
            # Without bias: for a trainable bias beside a frozen weight the CPU's kernel returns the gradient of both,
            # which torch's own shape function, and so the forecast, does not know. CUDA's has them apart.
            self.mix = nn.Conv1d(width, width, 3, padding=1, bias=False)
        else:
            # Without bias: softmax does not see that of the keys, so its gradient is rounding, which Adam makes a walk.
            self.mix = nn.Linear(width, 3 * width, bias=False)
            self.out = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(sketch.dropout)
        if sketch.buffers:
            self.register_buffer("shift", torch.linspace(-0.1, 0.1, width))

    def forward(self, x: Any, carry: Tensor | None = None, gate: Tensor | None = None) -> Any:
        if isinstance(x, tuple):  # from the layer before, in a sequential
            x, carry = x
        y = self.norm(x)
        if self.kind == "conv":
            y = self.mix(y.transpose(1, 2)).transpose(1, 2)
        elif self.kind == "attention":
            query, key, value = (part.unsqueeze(1) for part in self.mix(y).chunk(3, dim=-1))
            y = self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1))
        else:
            y = self.mix(y)
        y = self.dropout(y)
        if hasattr(self, "shift"):
            y = y + self.shift
        if gate is not None:
            y = y * gate
        if not self.pair:
            return x + y
        return x + y, y if carry is None else carry * 0.5 + y


class Model(nn.Module):
    def __init__(self, sketch: Sketch) -> None:
        super().__init__()
        self.sketch = sketch
        if sketch.ids:
            self.embedding = nn.Embedding(WORDS, sketch.width)
            self.embedding.weight.requires_grad_(not sketch.frozen_embedding)
        if sketch.loose:
            self.scale = nn.Parameter(torch.full((sketch.width,), 0.9))
        layers: list[Mix] = []
        for layer in sketch.layers:
            made = layers[layer.same_as] if layer.same_as is not None else Mix(layer, sketch)
            if layer.same_as is None and layer.tied_to is not None:
                first_linear(made).weight = first_linear(layers[layer.tied_to]).weight
            layers.append(made)
        for layer, made in zip(sketch.layers, layers, strict=True):
            for index, param in enumerate(made.parameters()):
                if layer.frozen == "all" or layer.frozen == ("rest" if index else "first"):
                    param.requires_grad_(False)
        self.layers: nn.Module = nn.Sequential(*layers) if sketch.container == "sequential" else nn.ModuleList(layers)
        if sketch.unused:
            self.never = nn.Linear(sketch.width, 3)
        self.head = nn.Linear(sketch.width, WORDS, bias=not sketch.tied_head)
        if sketch.tied_head and sketch.ids:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.embedding(x) if self.sketch.ids else x
        if self.sketch.loose:
            hidden = hidden * self.scale
        options = {"gate": self.scale} if self.sketch.loose and self.sketch.gate else {}
        if isinstance(self.layers, nn.Sequential):
            hidden = self.layers(hidden)
        else:
            carry = hidden if self.sketch.pair and self.sketch.twice else None
            for layer in self.layers:  # type: ignore[union-attr]
                hidden = layer(hidden, carry, **options)
                hidden, carry = hidden if self.sketch.pair else (hidden, None)
            hidden = (hidden, carry) if self.sketch.pair else hidden
        if isinstance(hidden, tuple):
            hidden = hidden[0] + hidden[1]
        prediction = self.head(hidden)
        if labels is None:
            return {"prediction": prediction}
        # Not mse_loss's own mean: that number lies in memory for all the squares, which shape functions do not know.
        return {"loss": F.mse_loss(prediction, labels, reduction="none").mean()}


def first_linear(layer: Mix) -> Any:
    return layer.mix[0] if isinstance(layer.mix, nn.Sequential) else layer.mix


@st.composite
def sketches(draw: st.DrawFn) -> Sketch:
    layers: list[Layer] = []
    for index in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["linear", "mlp", "attention", "conv"]))
        inner = draw(st.sampled_from([5, 16, 48]))
        same_as = draw(st.sampled_from([None, None, None, *range(index)])) if index else None
        if same_as is not None:
            kind, inner = layers[same_as].kind, layers[same_as].inner
        alike = [n for n, other in enumerate(layers) if other.kind == kind and (kind != "mlp" or other.inner == inner)]
        tied_to = draw(st.sampled_from([None, *alike])) if alike and same_as is None else None
        frozen = draw(st.sampled_from(["", "", "", "all", "first", "rest"]))
        layers.append(Layer(kind, inner, same_as, tied_to, frozen))
    ids = draw(st.booleans())
    container = draw(st.sampled_from(["list", "sequential"]))
    # Attention to a single token has no gradient for queries and keys, only rounding, which Adam makes a walk.
    attends = any(layer.kind == "attention" for layer in layers)
    return Sketch(
        layers=tuple(layers),
        width=draw(st.sampled_from([6, 17, 32])),
        tokens=draw(st.sampled_from([3, 8] if attends else [1, 3, 8])),
        ids=ids,
        tied_head=ids and draw(st.booleans()),
        frozen_embedding=draw(st.booleans()),
        loose=draw(st.booleans()),
        gate=container == "list" and draw(st.booleans()),
        pair=draw(st.booleans()),
        twice=draw(st.booleans()),
        container=container,
        dropout=draw(st.sampled_from([0.0, 0.0, 0.2])),
        buffers=draw(st.booleans()),
        unused=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float32", "float32", "float32", "bfloat16"])),
        seed=draw(st.integers(0, 3)),
    )
