"""One rank that talks to itself over NCCL runs the whole path of several, and gives the bits that it gives without."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import hightide
import models
from even_alone import NUM_SAMPLES, check, talking, train, with_collectives
from gpu.streamed import LIMITS, everything_moves
from gpu.test_cuda_loops import deterministic
from hightide.ir.plan import Plan

pytestmark = pytest.mark.gpu


def planned(update: str) -> Plan:
    model, example = models.llama(num_samples=NUM_SAMPLES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    half = NUM_SAMPLES // 2
    return hightide.plan(model, optimizer, example, limits=LIMITS, micro_batch=half, update=update, device="cuda")


@pytest.mark.parametrize("moves", [True, False], ids=["streamed", "everything fits"])
@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_the_same_plan_with_collectives(update: str, moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = everything_moves(planned(update)) if moves else planned(update)
    with deterministic(monkeypatch):
        plain = train("cuda:0", update, plan=plan)
        with talking():
            forced = train("cuda:0", update, plan=with_collectives(plan))
    check(plain, forced, "nccl")
    assert not dist.is_initialized()


def test_a_searched_plan_with_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    with deterministic(monkeypatch):
        plain = train("cuda:0", plan=planned("deferred"), clip=0.5)
        with talking():
            forced = train("cuda:0", limits=LIMITS, micro_batch=NUM_SAMPLES // 2, clip=0.5)
    check(plain, forced, "nccl")
