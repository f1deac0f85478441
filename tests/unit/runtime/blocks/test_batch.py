"""A batch may hold its tensors anywhere. All of them go to the accelerator; what holds none is left alone."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

import hightide
from hightide.runtime import model_passes
from hightide.runtime.blocks.batch import CpuCopies, map_tensors
from hightide.runtime.surgery import run_of

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Record:
    tensor: Tensor
    name: str = "record"
    rest: dict[str, Any] = field(default_factory=dict)


def ones() -> Tensor:
    return torch.ones(2)


HOLDERS: dict[str, Any] = {
    "dict": lambda: {"a": ones(), "b": 3},
    "ordered": lambda: OrderedDict(a=ones()),
    "user dict": lambda: UserDict(a=ones()),
    "list": lambda: [ones(), None],
    "tuple": lambda: (1, ones()),
    "namedtuple": lambda: Pair(ones(), "text"),
    "dataclass": lambda: Record(ones(), rest={"more": [ones()]}),
    "output": lambda: BaseModelOutput(last_hidden_state=ones(), hidden_states=(ones(),)),
    "deep": lambda: {"a": [({"b": Record(ones())},)]},
}


def seen(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


@pytest.mark.parametrize("kind", HOLDERS)
def test_tensors_change_and_the_original_does_not(kind: str) -> None:
    original = HOLDERS[kind]()
    before = seen(original)
    changed = map_tensors(original, lambda tensor: tensor + 1)
    assert before and type(changed) is type(original)
    assert all(bool((tensor == 2).all()) for tensor in seen(changed)) and len(seen(changed)) == len(before)
    assert all(one is other and bool((one == 1).all()) for one, other in zip(seen(original), before, strict=True))


@pytest.mark.parametrize("kind", HOLDERS)
def test_nothing_changed_is_the_same_object(kind: str) -> None:
    original = HOLDERS[kind]()
    assert map_tensors(original, lambda tensor: tensor) is original


def test_an_output_keeps_its_attributes() -> None:
    changed = map_tensors(HOLDERS["output"](), lambda tensor: tensor + 1)
    assert bool((changed.last_hidden_state == 2).all()) and changed["last_hidden_state"] is changed.last_hidden_state


def test_caches_and_other_objects_stay() -> None:
    cache, module = DynamicCache(), nn.Linear(2, 2)
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    batch = {"cache": cache, "module": module, "set": {1}, "nothing": None, "kind": Record}
    changed = map_tensors({**batch, "x": ones()}, lambda tensor: tensor + 1)
    assert all(changed[name] is value for name, value in batch.items())


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.received: list[Any] = []

    def forward(self, inputs: dict[str, Any], extra: Record, holder: list[Any]) -> Tensor:
        self.received = [inputs["x"], inputs["pair"].left, extra.tensor, holder[0]]
        hidden = inputs["x"] + inputs["pair"].left + extra.tensor + holder[0]
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.pow(2).mean()


def test_nested_tensors_are_on_the_accelerator_and_die_with_the_pass() -> None:
    def batch() -> dict[str, Any]:
        shared = torch.randn(4, 8)
        inputs = {"x": shared, "pair": Pair(shared, "same")}
        return {"inputs": inputs, "extra": Record(torch.randn(8)), "holder": [torch.randn(4, 8)]}

    model = Nested()
    limits = hightide.Limits(gpu="16MiB", host="16MiB")
    model, optimizer = hightide.wrap(model, torch.optim.AdamW(model.parameters()), batch(), limits=limits)
    run = run_of(model)
    assert run is not None
    mine = batch()
    model(**mine).backward()
    assert len(model.received) == 4 and all(run.gpu.holds(tensor) for tensor in model.received)
    assert model.received[0] is model.received[1], "one tensor is moved once"
    assert model.received[0] is not mine["inputs"]["x"] and not run.gpu.holds(mine["inputs"]["x"])
    assert run.gpu.breakdown()["batch"] == (4 * 8 + 8 + 4 * 8) * 4
    model.received.clear()
    optimizer.step()
    assert "batch" not in run.gpu.breakdown()
    hightide.unwrap(model)


def test_the_batch_goes_before_any_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine copies to a GPU: a batch behind the first fetches makes the first block wait for them all."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    batch = torch.randn(4, 64)
    limits = hightide.Limits(gpu="64KiB", host="16MiB")
    model, _ = hightide.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, limits=limits, device="cpu")
    run = run_of(model)
    assert run is not None
    order: list[str] = []
    submit, move = run.lanes.submit, model_passes.copy_to
    monkeypatch.setattr(run.lanes, "submit", lambda id, *rest: (order.append(id), submit(id, *rest))[1])
    monkeypatch.setattr(model_passes, "copy_to", lambda *rest: (order.append("batch"), move(*rest))[1])
    model(batch).sum().backward()
    assert order[0] == "batch" and order[1].startswith("fetch"), order[:4]
    hightide.unwrap(model)


def test_the_cpu_copy_of_a_batch_is_found_by_its_tensors_and_their_views() -> None:
    copies = CpuCopies()
    value = torch.arange(24).view(4, 6)[:, 1:]  # a view of more, as of a loader's buffer
    moved = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype).copy_(value)
    copies.note(moved, value)
    for view in (lambda t: t, lambda t: t[1:3], lambda t: t.t(), lambda t: t[:, ::2], lambda t: t.unsqueeze(0)):
        found = copies.find(view(moved))
        assert found is not None and torch.equal(found, view(value))
    value += 100  # a loader fills its buffer anew
    assert torch.equal(copies.find(moved), value - 100)
    value -= 100
    assert copies.find(moved.clone()) is None
    assert copies.find(moved.view(torch.int32)) is None
    moved[0, 0] = 99
    assert copies.find(moved) is None
    copies.note(moved, value)
    copies.clear()
    assert copies.find(moved) is None


def test_a_part_of_a_larger_batch_is_found_as_it_lies_on_the_gpu() -> None:
    copies, value = CpuCopies(), torch.arange(24).view(4, 6)[:, :-1]
    moved = value.contiguous()
    copies.note(moved, value)
    for view in (lambda t: t, lambda t: t[1:3, ::2], lambda t: t.flatten()):
        found = copies.find(view(moved))
        assert found is not None and torch.equal(found, view(moved))
