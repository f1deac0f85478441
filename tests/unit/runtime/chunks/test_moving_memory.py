"""While a run moves to another plan, host memory holds no more than the larger plan takes, and what waits."""

from __future__ import annotations

import json
import os

import pytest

from forked import run_forked

IMPORTS = """
import json
import sys
import torch
from torch import nn
import hightide
from hightide.process.system import return_freed_memory
from hightide.runtime.chunks.moving import waiting_bytes
from hightide.runtime.surgery import run_of
from unit.runtime.real_pages import pin_for_real
from unit.runtime.chunks.test_moving import move, placed

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Model(nn.Module):
    def __init__(self, width, num_layers):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()

def wrapped(width, num_layers, kind, dtype):
    model, batch = Model(width, num_layers).to(dtype), torch.randn(2, width).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    limits = hightide.Limits(gpu="2GiB", host="2GiB")
    plan = placed(hightide.plan(model, optimizer, batch, limits=limits), kind)
    return *hightide.wrap(model, optimizer, batch, plan=plan), batch

def step(model, optimizer, batch):
    model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()

def rss_bytes(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024
"""
SCRIPT = """
pin_for_real()
before, after, dtype, has_gradients = sys.argv[1], sys.argv[2], getattr(torch, sys.argv[3]), sys.argv[4] == "True"
torch.set_num_threads(1)
model, optimizer, batch = wrapped(16, 2, before, dtype)  # all that is loaded lazily
step(model, optimizer, batch)
move(run_of(model), placed(run_of(model).plan, after))
step(model, optimizer, batch)
hightide.unwrap(model)
del model, optimizer
bare_bytes = rss_bytes("VmRSS:")

model, optimizer, batch = wrapped(384, 24, before, dtype)
run = run_of(model)
step(model, optimizer, batch)
if has_gradients:
    model(batch).backward()
loss = model(batch)  # its graph stays
waiting = waiting_bytes(run.chunks.placed)
return_freed_memory()
before_bytes = rss_bytes("VmRSS:") - bare_bytes
with open("/proc/self/clear_refs", "w") as peaks:
    peaks.write("5")  # the peak begins anew
move(run, placed(run.plan, after))
print(json.dumps({
    "model_bytes": sum(spec.param_bytes for spec in run.chunks.specs),
    "peak_bytes": rss_bytes("VmHWM:") - bare_bytes,
    "before_bytes": before_bytes,
    "after_bytes": run.host.used_bytes + run.gpu.used_bytes,  # the simulated GPU is in RAM, too
    "waiting_bytes": waiting,
}))
"""
SLACK_BYTES = 8 * 2**20  # a tile, and what Python needs


CASES = (  # before, after, dtype, with gradients
    ("resident", "streamed", "float32", "True"),
    ("streamed", "resident", "float16", "True"),
    ("streamed", "streamed", "float16", "False"),
)


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="reads the peak of resident memory from /proc")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cases", [CASES[:2], pytest.param(CASES[2:], marks=pytest.mark.long)])
def test_host_memory_is_bounded_while_a_run_moves(cases: tuple[tuple[str, ...], ...]) -> None:
    for case, done in zip(cases, run_forked(IMPORTS, SCRIPT, cases, timeout_s=280), strict=True):
        assert done.status == 0, done.stderr
        measured = json.loads(done.stdout.splitlines()[-1])
        assert measured["model_bytes"] > 5 * SLACK_BYTES, "the model must stand out from the slack"
        bound_bytes = max(measured["before_bytes"], measured["after_bytes"]) + measured["waiting_bytes"]
        assert measured["peak_bytes"] <= bound_bytes + SLACK_BYTES, (case, measured)
