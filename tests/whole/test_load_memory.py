"""While a model is wrapped it must not exist twice: neither as freed memory that the C library keeps, nor beside a host
arena that was made real (pinned) before the values moved in."""

from __future__ import annotations

import json
import os

import pytest

from forked import run_script

SCRIPT = """
import json
import torch
from torch import nn
import hightide
from hightide.runtime.chunks.chunks import RETURN_BYTES
from hightide.runtime.surgery import run_of
from unit.runtime.real_pages import pin_for_real

pin_for_real()

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self, width, num_layers):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()

guards = []

def wrapped(width, num_layers, limits):
    model = Model(width, num_layers)
    guards.append(torch.ones(1000))  # above the model on the heap: what is freed below it stays resident
    optimizer = torch.optim.AdamW(model.parameters())
    return hightide.wrap(model, optimizer, torch.randn(2, width), limits=limits)[0]

def rss_bytes(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

torch.set_num_threads(1)
hightide.unwrap(wrapped(32, 2, hightide.Limits(gpu="32MiB", host="32MiB")))  # all that is loaded lazily
freed = torch.ones(30 * 2**18)  # teaches the C library to keep tensors of up to 30 MiB on its heap
del freed
bare_bytes = rss_bytes("VmRSS:")
run = run_of(wrapped(512, 36, hightide.Limits(gpu="160MiB", host="2GiB")))
print(json.dumps({
    "above_bare_bytes": rss_bytes("VmHWM:") - bare_bytes,
    "model_bytes": sum(spec.param_bytes for spec in run.chunks.specs),
    "tier_bytes": run.host.used_bytes + run.gpu.used_bytes,
    "slack_bytes": RETURN_BYTES + 2**25,
}))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads the peak of resident memory from /proc")
def test_a_model_does_not_exist_twice_while_it_is_wrapped() -> None:
    done = run_script(SCRIPT, [], timeout_s=100, quick_end=True)
    assert done.status == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["slack_bytes"] < 0.6 * measured["model_bytes"], "the model must stand out from the slack"
    assert measured["above_bare_bytes"] <= measured["tier_bytes"] + measured["slack_bytes"], measured
