"""Whether what modules keep is what it was."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hightide.runtime.guards.contents import MOST_VALUES, ObjectContents


@dataclass
class Config:
    rate: float = 0.1
    layers: list[Any] = field(default_factory=lambda: [{"centre": False}, (1, [2])])


@dataclass(slots=True)
class Slotted:
    rate: float = 0.1
    more: Any = None


def closure() -> Callable[[], Any]:
    share, options = 0.5, {"centre": False}

    def function(new: float | None = None) -> Any:
        nonlocal share
        if new is not None:
            share = new
        return share, options

    return function


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config, self.slotted = Config(), Slotted(more={"deep": 1})
        self.space = SimpleNamespace(flag=False)
        self.queue, self.some = deque([1, 2]), {1, 2}
        self.tensor, self.array = torch.zeros(2), np.zeros(2)
        self.tensors = [torch.zeros(2)]
        self.function = closure()
        self.many = list(range(1000))  # equal numbers, other objects
        self.loop = self
        self.config.itself = self.config  # type: ignore[attr-defined]


def replace_equal(module: Module) -> None:
    module.config.layers[0] = {"centre": False}


CHANGES: dict[str, Callable[[Module], Any]] = {
    "an attribute": lambda module: setattr(module, "training", False),
    "one more": lambda module: setattr(module, "more", 1),
    "one less": lambda module: delattr(module, "many"),
    "a config": lambda module: setattr(module.config, "rate", 0.2),
    "another config that is equal": lambda module: setattr(module, "config", Config()),
    "a dict in a list": lambda module: module.config.layers[0].update(centre=True),
    "another dict that is equal": replace_equal,
    "a list in a tuple": lambda module: module.config.layers[1][1].append(3),
    "a slot": lambda module: setattr(module.slotted, "rate", 0.2),
    "a dict in a slot": lambda module: module.slotted.more.update(deep=2),
    "a namespace": lambda module: setattr(module.space, "flag", True),
    "a queue": lambda module: module.queue.append(3),
    "a set": lambda module: module.some.add(3),
    "a tensor": lambda module: module.tensor.add_(1),
    "another tensor": lambda module: setattr(module, "tensor", torch.zeros(2)),
    "a tensor in the place of a number": lambda module: setattr(module.config, "rate", torch.ones(3)),
    "a tensor in a list": lambda module: module.tensors[0].add_(1),
    "an array": lambda module: module.array.__setitem__(0, 1.0),
    "an array in the place of a number": lambda module: setattr(module.space, "flag", np.ones(3)),
    "a closure": lambda module: module.function(0.7),
    "a dict in a closure": lambda module: module.function()[1].update(centre=True),
    "a number in a list": lambda module: module.many.__setitem__(7, 8),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_is_seen(change: Callable[[Module], Any]) -> None:
    module = Module()
    contents = ObjectContents([module.__dict__])
    assert contents.are_same()
    change(module)
    assert not contents.are_same()
    assert ObjectContents([module.__dict__]).key() != contents.key()


def test_the_same_again_is_no_change() -> None:
    module = Module()
    contents = ObjectContents([module.__dict__])
    module.many[:] = [int(str(number)) for number in module.many]
    module.config.rate = float("0.1")
    assert contents.are_same()


@pytest.mark.parametrize("kind", ["a config", "a number in a list", "a namespace"])
def test_numbers_alone_are_taken_over(kind: str) -> None:
    module = Module()
    contents = ObjectContents([module.__dict__])
    CHANGES[kind](module)
    other = contents.with_other_numbers()
    assert other is not None
    assert other.are_same()
    assert not contents.are_same()
    assert other.key() == ObjectContents([module.__dict__]).key() != contents.key()


@pytest.mark.parametrize("kind", ["another config that is equal", "one more", "a tensor", "another dict that is equal"])
def test_what_is_more_than_numbers_is_gathered_anew(kind: str) -> None:
    module = Module()
    contents = ObjectContents([module.__dict__])
    CHANGES[kind](module)
    assert contents.with_other_numbers() is None


def test_values_are_put_back_and_then_what_they_were() -> None:
    module = Module()
    contents, config = ObjectContents([module.__dict__]), module.config
    config.rate, module.config, module.extra = 0.2, Config(rate=0.3), 1  # type: ignore[assignment]
    module.many[7], kept = 0, module.tensor.add_(1)
    with contents.put_back():
        assert module.config is config
        assert (config.rate, module.many[7]) == (0.1, 7)
        assert not hasattr(module, "extra")
        assert module.tensor is kept
    assert (config.rate, module.config.rate, module.extra, module.many[7]) == (0.2, 0.3, 1, 0)


def test_what_others_change_meanwhile_stays() -> None:
    module = nn.Module()
    module.log, module.counts, module.rate = [1, 2], {"a": 1, "b": 1}, 0.1
    contents = ObjectContents([module.__dict__])
    module.log.append(3)
    module.counts["a"], module.rate = 2, 0.2
    with contents.put_back():
        assert (module.log, module.counts, module.rate) == ([1, 2], {"a": 1, "b": 1}, 0.1)
        module.log.append(4)
        module.counts["b"], module.counts["c"], module.other = 3, 4, 5
    assert module.log == [1, 2, 3, 4]
    assert (module.counts, module.rate, module.other) == ({"a": 2, "b": 3, "c": 4}, 0.2, 5)


def test_tensors_are_not_kept_alive() -> None:
    module = nn.Module()
    module.last = torch.zeros(2)
    contents, died = ObjectContents([module.__dict__]), list[bool]()
    weakref.finalize(module.last, died.append, True)
    module.last = None
    assert died
    assert not contents.are_same()


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "in a tuple": lambda result: (result,),
    "in dicts": lambda result: {"output": {"logits": result}},
    "in an object": lambda result: SimpleNamespace(output=[result]),
    "in a closure": lambda result: lambda: result,
}


@pytest.mark.parametrize("made", RESULTS.values(), ids=RESULTS)
def test_what_leads_to_results_is_not_kept_alive(made: Callable[[Tensor], Any]) -> None:
    module, trainer = nn.Module(), SimpleNamespace(rate=0.1)
    result = torch.ones(2, requires_grad=True) * 2
    graph = weakref.ref(result)
    module.trainer, trainer.last = trainer, made(result)
    contents = ObjectContents([module.__dict__])
    assert contents.are_same()
    trainer.rate = 0.2
    assert not contents.are_same()
    with contents.put_back():
        assert trainer.rate == 0.1
    assert trainer.rate == 0.2
    del result
    trainer.rate, trainer.last = 0.1, None
    assert graph() is None
    assert not contents.are_same()
    assert contents.tensors() == []


def test_a_result_that_is_another_one_is_seen() -> None:
    module = nn.Module()
    module.outputs = [(torch.ones(2, requires_grad=True) * 2,)]
    contents = ObjectContents([module.__dict__])
    module.outputs[0][0].detach().add_(1)
    assert not contents.are_same()


class Opaque:
    """A lazy proxy, which must not be woken up."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class Unhashable(str):
    __slots__ = "more"
    __hash__ = None  # type: ignore[assignment]


class Guarded(dict[str, int]):
    def items(self) -> Any:
        raise TypeError


class Owned(deque[int]):
    def __init__(self, _owner: object, _name: str) -> None:
        super().__init__([1])


ODD: dict[str, Callable[[], Any]] = {
    "a proxy of what is gone": lambda: weakref.proxy(Config()),
    "an opaque object": Opaque,
    "an unhashable string": lambda: Unhashable("x"),
    "a dict that does not tell": lambda: Guarded(number=1),
    "a queue with an owner": lambda: Owned(None, "odd"),
}


@pytest.mark.parametrize("made", ODD.values(), ids=ODD)
def test_odd_values_fail_nobody(made: Callable[[], Any]) -> None:
    module = nn.Module()
    module.__dict__.update(odd=made(), rate=0.1)
    contents = ObjectContents([module.__dict__])
    assert contents.are_same()
    assert contents.key() in {contents.key()}
    module.rate = 0.2
    assert not contents.are_same()
    with contents.put_back():
        assert module.rate == 0.1


def test_data_hides_nothing() -> None:
    module = nn.Module()
    module.data, module.config = list(range(2 * MOST_VALUES)), Config()
    contents = ObjectContents([module.__dict__])
    module.config.rate = 0.2
    assert not contents.are_same()


def test_what_does_not_count() -> None:
    module, inner = nn.Module(), {"number": 1}
    module.tapped, module.other, module.inner = torch.zeros(2), 1, inner
    contents = ObjectContents([module.__dict__], {id(module.__dict__): ["tapped"]}, [id(inner)])
    module.tapped, inner["number"] = torch.ones(3), 2
    assert contents.are_same()
    module.other = 2
    assert not contents.are_same()


def test_data_is_not_followed() -> None:
    module = nn.Module()
    module.data = [[number] for number in range(3 * MOST_VALUES)]
    assert len(ObjectContents([module.__dict__])._places) < 10


def test_a_look_is_a_few_calls_however_many_modules_there_are() -> None:
    config, block = Config(), nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))
    for module in block:
        module.config = config
    contents, calls = ObjectContents([module.__dict__ for module in block.modules()], closed=own(block)), 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        assert contents.are_same()
    finally:
        sys.setprofile(None)
    assert calls < 120  # one for each of the 40 links to the config, to and fro; none for each module and attribute


def own(block: nn.Module) -> list[int]:
    return [id(one) for module in block.modules() for one in (module, module._parameters)]


def test_a_tensor_in_the_place_of_a_number_is_a_change_whatever_its_value() -> None:
    """Its value is not asked for: on a GPU each call of a block would wait for it."""
    kept = {"dropped": 0, "names": ["a"]}
    contents = ObjectContents([kept])
    kept["dropped"] = torch.zeros((), dtype=torch.int64)
    assert not contents.are_same() and contents.with_other_numbers() is None
    kept["dropped"] = 0
    assert contents.are_same()
