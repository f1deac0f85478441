"""One rank that talks to itself runs the whole path of several, and gives the bits that it gives without."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import hightide
import models
from even_alone import NUM_SAMPLES, check, talking, train, with_collectives
from hightide.ir.plan import Plan
from hightide.shard.meeting import EVEN_ALONE_SWITCH
from waiting import OwnThreads

LIMITS = {"lean": "250KiB", "half": "500KiB", "everything fits": "32MiB"}


def planned(where: str, update: str) -> Plan:
    model, example = models.llama(num_samples=NUM_SAMPLES)
    optimizer, limits = torch.optim.AdamW(model.parameters(), lr=3e-3), hightide.Limits(gpu=LIMITS[where], host="64MiB")
    return hightide.plan(model, optimizer, example, limits=limits, micro_batch=NUM_SAMPLES // 2, update=update)


@pytest.mark.parametrize(
    ("where", "update"), [("lean", "in_backward"), ("half", "deferred"), ("everything fits", "deferred")]
)
def test_the_same_plan_with_collectives(where: str, update: str) -> None:
    threads, plan = OwnThreads(), planned(where, update)
    plain = train("cpu", update, plan=plan)
    with talking():
        forced = train("cpu", update, plan=with_collectives(plan))
    check(plain, forced, "gloo")
    assert not dist.is_initialized() and threads.end()


@pytest.mark.parametrize(
    "where",
    [pytest.param("lean", marks=pytest.mark.long), pytest.param("half", marks=pytest.mark.long), "everything fits"],
)
def test_a_searched_plan_with_collectives(where: str) -> None:
    limits = hightide.Limits(gpu=LIMITS[where], host="64MiB")
    plain = train("cpu", plan=planned(where, "deferred"), clip=0.5)
    with talking():
        forced = train("cpu", limits=limits, micro_batch=NUM_SAMPLES // 2, clip=0.5)
    check(plain, forced, "gloo")
    assert "which gathers and reduces as each of several does" in forced.plan.explain()


def test_a_plan_goes_with_the_switch() -> None:
    plan = planned("lean", "deferred")
    with pytest.raises(ValueError, match=f"even_alone=True, which goes with {EVEN_ALONE_SWITCH}=1"):
        train("cpu", plan=with_collectives(plan))
    with talking(), pytest.raises(ValueError, match=f"even_alone=False, which goes with {EVEN_ALONE_SWITCH}=0"):
        train("cpu", plan=plan)
    assert not dist.is_initialized()
