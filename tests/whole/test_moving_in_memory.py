"""What is told of the host while `wrap` moves values in is what a process has, in one of its own. What goes to the
accelerator is left out: a real one has memory of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hightide
from hightide import wrapping
from hightide.asked import Asked
from hightide.planner.predict.moving_in import RETURN_BYTES
from hightide.planner.solution import Solution
from resident_memory import reported

SLACK_BYTES = 24 * 2**20

SCRIPT = """
import gc, json, sys
import torch
from torch import nn
import hightide
from hightide.ir.tier import Tier
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of
from hightide.stores.array import Array

torch.set_num_threads(1)

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((width, width), 1e-3)) for _ in range(8))

    def forward(self, x):
        for weight in self.weights:
            x = x + x @ weight
        return x

def rss_bytes(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

put, set_up = Array.put, Run._set_up

def put_on_host(self, values):
    if self.store.tier is Tier.HOST:
        put(self, values)

def counted_set_up(self, *args):
    Array.put = put_on_host
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts from here
    set_up(self, *args)
    Array.put = put

def wrapped(width, num_blocks, dtype, gpu):
    model = nn.Sequential(*(Block(width) for _ in range(num_blocks))).to(dtype)
    gc.collect()
    optimizer = torch.optim.AdamW(model.parameters())
    limits = hightide.Limits(gpu=gpu, host="4GiB")
    return hightide.wrap(model, optimizer, torch.ones(2, width, dtype=dtype), limits=limits)[0]

hightide.unwrap(wrapped(32, 2, torch.float32, "32MiB"))  # all that is loaded lazily
Run._set_up = counted_set_up
report = {}
for name, dtype, gpu in (
    ("resident", torch.float32, "3GiB"), ("streamed", torch.float32, "300MiB"), ("masters", torch.float16, "200MiB")
):
    gc.collect()
    bare_bytes = rss_bytes("VmRSS:")
    model = wrapped(512, 16, dtype, gpu)
    run = run_of(model)
    report[name] = {
        "found": rss_bytes("VmHWM:") - bare_bytes,
        "left": rss_bytes("VmRSS:") - bare_bytes,
        "told": run.plan.forecast.moving_host_bytes,
        "host": run.plan.forecast.host_peak_bytes,
        "model": sum(spec.param_bytes for spec in run.chunks.specs),
        "line": "while wrap moves the values in" in run.plan.explain(),
    }
    hightide.unwrap(model)
    del model, run
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, int]]:
    return reported(SCRIPT)


@pytest.mark.parametrize("way", ["resident", "streamed", "masters"])
def test_the_host_has_what_is_told_while_values_move_in(way: str, measured: dict[str, dict[str, int]]) -> None:
    of = measured[way]
    assert of["found"] <= of["told"] + SLACK_BYTES, of
    kept_bytes = RETURN_BYTES if way != "resident" else 0  # by the C library, unless it is steady, as here
    assert of["told"] <= of["found"] + kept_bytes + SLACK_BYTES, of


def test_with_everything_on_the_gpu_the_model_is_the_peak_and_is_told(measured: dict[str, dict[str, int]]) -> None:
    of = measured["resident"]
    assert of["told"] >= of["model"] > of["host"] + 4 * SLACK_BYTES
    assert of["line"] and of["left"] < SLACK_BYTES


def test_what_the_process_has_beside_the_model_is_told_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python, torch and kernels; not the values, which will be in their places. On the simulated accelerator a plan
    must not depend on what the process has done before."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model[0].weight]["exp_avg"] = torch.zeros(64, 64)
    values_bytes = sum(param.nbytes for param in model.parameters()) + 4 * 64 * 64
    plan = hightide.plan(model, torch.optim.AdamW(model.parameters()), torch.ones(2, 64))
    assert plan.profile is not None and plan.forecast.process_bytes == 0
    monkeypatch.setattr(wrapping, "resident_bytes", lambda: 7 * 2**20 + values_bytes)
    asked = Asked(model, optimizer, torch.ones(2, 64), device=torch.device("cuda"))
    told = wrapping._moving_in(Solution.of(plan.profile, plan), asked).plan
    assert told.forecast.process_bytes == 7 * 2**20
    assert "beside it 7.0 MiB of the process: Python, torch, code" in told.explain()
