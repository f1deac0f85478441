"""Which state of a block is which."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hightide.runtime.guards.later_changes import MOST_EPOCHS, BlockChanges, CodeChanges, Epochs

FLAGS: dict[str, Any] = {"centre": False}
RATE = 0.5
SETTINGS = SimpleNamespace(rate=0.5)
MASK = torch.ones(3)
KERNEL = type("JITFunction", (), {"__module__": "triton.runtime.jit"})()
KERNEL.device_caches = {0: {"bfloat16": object()}}
UNRELATED = 1


class Config:
    rate = 0.5


def helped(h: Tensor) -> Tensor:
    return h * RATE


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(3, 3), nn.Tanh()
        self.rate = 0.1
        self.register_buffer("share", torch.zeros(()))

    def mix(self, h: Tensor) -> Tensor:
        return helped(h) if FLAGS["centre"] else h * SETTINGS.rate * Config.rate * MASK

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.act(self.linear(x)))

    def never_called(self) -> int:
        return UNRELATED


class Held(nn.Module):
    """A block with a part that forward calls by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.function = helped

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_what_modules_keep_has_a_number_for_each_state() -> None:
    block = Block()
    changes = BlockChanges(block, [])
    first = changes.epoch(0)
    assert changes.epoch(0) == first
    block.rate = 0.2
    second = changes.epoch(0)
    block.rate = 0.1
    assert changes.epoch(0) == first != second
    block.act = nn.ReLU()
    third = changes.epoch(0)
    assert block.act in changes.inside
    block.share.fill_(1)
    fourth = changes.epoch(0)
    block.register_buffer("more", torch.zeros(2))
    fifth = changes.epoch(0)
    assert len({first, second, third, fourth, fifth}) == 5
    assert changes.num_taken == 4  # the first, and all but numbers


def test_a_hook_in_the_place_of_another_is_a_change() -> None:
    block = Block()
    handle, changes = block.linear.register_forward_hook(lambda *_: None), BlockChanges(block, [])
    first = changes.epoch(1)
    handle.remove()
    block.linear.register_forward_hook(lambda *_: None)
    assert changes.epoch(1) != first


def test_parameters_and_tapped_attributes_do_not_count() -> None:
    block = Block()
    changes = BlockChanges(block, [("act", "last"), ("gone", "last")])
    first = changes.epoch(0)
    block.act.last = torch.zeros(3)
    with torch.no_grad():
        block.linear.weight.add_(1)
    assert changes.epoch(0) == first


def test_a_state_at_every_step_has_ever_fewer_epochs() -> None:
    epochs = Epochs()
    numbers = []
    for step in range(100):
        epochs.change_to(step)
        numbers.append(epochs.now)
    assert numbers[:MOST_EPOCHS] == list(range(1, MOST_EPOCHS + 1))
    assert len(set(numbers)) == MOST_EPOCHS + 2  # at 32 and at 64
    epochs.change_to(3)
    assert epochs.now == numbers[3]


def patch(name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setitem(globals(), name, value)


def replace_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Block.mix, "__code__", (lambda self, h: h).__code__)


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a method": lambda monkeypatch: monkeypatch.setattr(Block, "mix", lambda self, h: h),
    "the code of a method": replace_code,
    "a method of torch's": lambda monkeypatch: monkeypatch.setattr(nn.Tanh, "forward", lambda self, h: h),
    "a function that it calls": patch("helped", lambda h: h),
    "the code of a function": lambda monkeypatch: monkeypatch.setattr(helped, "__code__", (lambda h: h).__code__),
    "a dict": lambda monkeypatch: monkeypatch.setitem(FLAGS, "centre", True),
    "another dict": patch("FLAGS", dict(FLAGS)),
    "a number that a function reads": patch("RATE", 0.7),
    "an object": lambda monkeypatch: monkeypatch.setattr(SETTINGS, "rate", 0.7),
    "a class as a namespace": lambda monkeypatch: monkeypatch.setattr(Config, "rate", 0.7),
    "a tensor": patch("MASK", torch.ones(3)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_code_and_what_it_reads(change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block()
    code = CodeChanges(block.modules())
    patch("UNRELATED", 2)(monkeypatch)
    assert code.are_same()
    change(monkeypatch)
    assert not code.are_same()
    assert CodeChanges(block.modules()).key() != code.key()


def test_functions_that_modules_keep_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    code = CodeChanges(Held().modules())
    patch("RATE", 0.7)(monkeypatch)
    assert not code.are_same()


class Fused(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return KERNEL(x)


def test_what_a_kernel_remembers_of_its_calls_is_no_change() -> None:
    """Else each compilation of one would have all blocks looked at again, which waits for the GPU."""
    code = CodeChanges([Fused()])
    KERNEL.device_caches[0]["float32"] = object()
    assert code.are_same()
