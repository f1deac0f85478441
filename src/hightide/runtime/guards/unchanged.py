"""A block must not change after wrapping: which parameters it has, where, and whether they are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from hightide.ir.refusal import Refused
from hightide.runtime.chunks.absent import Disabled

EXCHANGED = (
    "the parameter {key!r} is not where it was when the model was wrapped: it was exchanged (functional_call, a new "
    "nn.Parameter, tied weights) or replaced by a parametrization (weight_norm, prune). Its values live in hightide's "
    "chunks and would not follow. Do this before hightide.wrap, or call hightide.unwrap(model), change it, and wrap "
    "again; functional_call works under torch.no_grad()"
)
FROZEN = (
    "requires_grad of the parameter {key!r} was {trainable} when the model was wrapped and is not any more; call "
    "hightide.unwrap(model), change it, and wrap again"
)
HOOKED = (
    "the parameter {key!r} has a gradient hook, which would see the gradient of each micro-batch and not their sum; "
    "remove it, and change gradients between backward() and step()"
)


class _Place(NamedTuple):
    slots: dict[str, nn.Parameter | None]  # of one module
    name: str
    param: nn.Parameter
    key: str
    trainable: bool


class Unchanged:
    """The parameters of one block. What is added to it is no business of ours: plain PyTorch has it."""

    def __init__(self, block: nn.Module, keys: Mapping[int, str]) -> None:
        self._places = [
            _Place(inside._parameters, name, param, keys[id(param)], param.requires_grad)
            for inside in block.modules()
            for name, param in inside._parameters.items()
            if param is not None
        ]

    @property
    def is_exchanged(self) -> bool:
        return any(place.slots.get(place.name) is not place.param for place in self._places)

    def check(self) -> None:
        with Disabled():  # parameters may be absent
            for slots, name, param, key, trainable in self._places:
                if name not in slots or slots[name] is not param:
                    raise Refused(EXCHANGED.format(key=key))
                if param.requires_grad is not trainable:
                    raise Refused(FROZEN.format(key=key, trainable=trainable))
                if param._backward_hooks or param._post_accumulate_grad_hooks:
                    raise Refused(HOOKED.format(key=key))
