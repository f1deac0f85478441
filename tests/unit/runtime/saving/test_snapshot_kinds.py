"""All kinds of values: masters in one part and in two, states of other rules, frozen and tied parameters, tables on the
host, parameters in no group."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import disk_plans
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier
from hightide.planner.placement import Placement
from hightide.runtime import run_values as run_module
from snapshot_readers import Case, Reader, Values, assert_same_bits, with_spare

WIDTH, WORDS = 16, 40


class Kinds(nn.Module):
    """A table, blocks of which one is frozen in part and one has a parameter that no optimizer knows, an empty
    parameter, a head that is tied to the table or not, and a loose parameter."""

    def __init__(self, tied: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH)) for _ in "abc")
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers[0][2].requires_grad_(False)
        self.layers[1].empty = nn.Parameter(torch.empty(0, 3))
        self.layers[2].extra = nn.Linear(WIDTH, WIDTH)
        self.layers[2].extra.requires_grad_(False)
        self.to(dtype)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden * self.scale)
        return {"loss": nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), labels.flatten())}


def batch() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, WORDS, (4, 9), generator=draw) for _ in range(2))
    return {"ids": ids, "labels": labels}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}


def but_one(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Of all parameters but a bias that trains and is in no group."""
    return lambda model: make([param for name, param in model.named_parameters() if name != "layers.1.0.bias"])


def looked_up(plan: Plan) -> Plan:
    """The table is on the host."""
    table = {"params": Tier.HOST, "states": Tier.HOST, "compute": Tier.HOST}
    blocks = tuple(replace(block, **table) if block.name == "embed" else block for block in plan.blocks)
    plan = replace(plan, blocks=blocks)
    assert plan.profile is not None
    slots, grad_slots = Placement(plan).widest_tick({call.block for call in plan.profile.calls})
    return replace(plan, num_slots=slots + (slots > 0), num_grad_slots=grad_slots + (grad_slots > 0))


CASES = [
    (torch.bfloat16, "adamw", "every tier", True),
    (torch.bfloat16, "momentum", "host", False),
    (torch.float16, "adamw", "every tier", False),
    (torch.float16, "momentum", "gpu", True),
    (torch.float32, "sgd", "every tier", True),
    (torch.float32, "momentum", "all on disk", False),
    (torch.bfloat16, "adamw", "looked up", False),
    (torch.float32, "sgd", "looked up", False),
]


@pytest.mark.parametrize(("dtype", "optimizer", "homes", "tied"), CASES)
def test_all_of_them_are_read_as_they_were(
    dtype: torch.dtype, optimizer: str, homes: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "TILE_BYTES", 1024)
    monkeypatch.setattr(run_module, "SMALL_TILE_BYTES", 1024)
    on_disk = homes in ("every tier", "all on disk")

    def placed(plan: Plan) -> Plan:
        edited = disk_plans.placed(plan, "host" if homes == "looked up" else homes)
        return with_spare(looked_up(edited) if homes == "looked up" else edited, 2**20)

    case = Case(
        lambda: (Kinds(tied, dtype), batch()),
        placed,
        {"update": "in_backward" if optimizer == "momentum" else "deferred"},
        {"disk": f"{tempfile.gettempdir()}:64MiB"} if on_disk else {},
        but_one(OPTIMIZERS[optimizer]),
    )
    results: list[Values] = []
    for is_saved in (False, True):
        training = case.begin()
        training.steps(2)
        if is_saved:
            reader = Reader(training.run.snapshot(), pause_s=0.001)
        else:
            results.append(training.at_rest())
        training.steps(2)
        if is_saved:
            results.append(reader.values())
        results.append(training.at_rest())
        tables = training.run.chunks.tables
        assert bool(tables) == (homes == "looked up")
        training.close()
    saved, end, found, final = results
    assert_same_bits(found, saved)
    assert_same_bits(final, end)
    kinds = {kind for _, kind in found}
    assert ("master" in kinds, "remainder" in kinds) == (dtype == torch.float16, dtype == torch.bfloat16)
    assert ("momentum_buffer" in kinds, "exp_avg" in kinds) == (optimizer == "momentum", optimizer == "adamw")
    assert ("head.weight", "param") not in found or not tied, "once"
    assert any(not torch.equal(end[name], value) for name, value in saved.items()), "training went on"
    for name in ("layers.0.2.weight", "layers.2.extra.weight", "layers.1.0.bias"):
        assert [kind for key, kind in found if key == name] == ["param"], name
