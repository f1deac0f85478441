"""A model's own gradient checkpointing, off while hightide decides what is recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

from torch import nn

FLAG = "gradient_checkpointing"  # of modules of transformers, and of many others
_were_on: WeakSet[nn.Module] = WeakSet()


def switch_off(model: nn.Module) -> None:
    """The flags alone: which layers recompute, and with what function, stays for `switch_on_again`."""
    for module in is_on(model):
        _were_on.add(module)
        setattr(module, FLAG, False)


def switch_on_again(model: nn.Module) -> None:
    """As it was before `switch_off`."""
    for module in model.modules():
        if module in _were_on:
            _were_on.discard(module)
            setattr(module, FLAG, True)


@contextmanager
def off(model: nn.Module) -> Iterator[None]:
    switch_off(model)
    try:
        yield
    finally:
        switch_on_again(model)


@contextmanager
def off_unless_it_fails(model: nn.Module) -> Iterator[None]:
    """Off, also afterwards; as before if the body fails."""
    switch_off(model)
    try:
        yield
    except BaseException:
        switch_on_again(model)
        raise


def is_on(model: nn.Module) -> list[nn.Module]:
    """The modules that recompute."""
    return [module for module in model.modules() if getattr(module, FLAG, False) is True]


def was_on(module: nn.Module) -> bool:
    """Before it was switched off: plain PyTorch would still recompute it."""
    return module in _were_on
