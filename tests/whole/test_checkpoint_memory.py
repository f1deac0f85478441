"""Peaks of resident memory, in a process of its own: a checkpoint is written and read, and nothing exists twice."""

from __future__ import annotations

import pytest

from hightide.checkpoint.files.checked import NUM_AHEAD, PART_BYTES
from hightide.ir.save_sizes import NUM_BLOCKS
from resident_memory import reported

SLACK_BYTES = 32 * 2**20
PIECE_BYTES, BLOCK_BYTES = 16 * 2**20, 4 * 2**20  # smaller than they are, so that values stand out
SAVE_BYTES = (NUM_BLOCKS + 2) * BLOCK_BYTES + SLACK_BYTES  # and one of each file that is open
LOAD_BYTES = (1 + NUM_AHEAD) * PIECE_BYTES + PART_BYTES + SLACK_BYTES

SCRIPT = """
import gc, json, sys
from pathlib import Path
import torch
from torch import nn
import hightide
import hightide.checkpoint.files.writer as writer
from hightide.checkpoint.files import manifest
from hightide.runtime.surgery import run_of

manifest.PIECE_BYTES, writer.BLOCK_BYTES = int(sys.argv[2]), int(sys.argv[3])

folder = Path(sys.argv[1])
torch.set_num_threads(1)

class Net(nn.Module):
    def __init__(self, width, num_layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()

def pair(width, num_layers, limits):
    model = Net(width, num_layers)
    batch = torch.randn(4, width)
    model, optimizer = hightide.wrap(model, torch.optim.AdamW(model.parameters()), batch, limits=limits, micro_batch=2)
    step(model, optimizer, width)
    return model, optimizer

def step(model, optimizer, width):
    model(torch.randn(4, width)).backward()
    optimizer.step()
    optimizer.zero_grad()
    run_of(model).executor.wait_for_updates()

def rss_bytes(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

def measure(work):
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts from here
    before = rss_bytes("VmRSS:")
    result = work()
    return result, rss_bytes("VmHWM:") - before

report = {}
small = pair(64, 2, hightide.Limits(gpu="8MiB", host="8MiB"))  # all that is loaded lazily
hightide.load(*small, hightide.save(*small, folder / "small").wait())
del small
model, optimizer = pair(1024, 20, hightide.Limits(gpu="40MiB", host="340MiB"))
report["values"] = sum(3 * param.nbytes for param in model.parameters())

def beside():
    saving = hightide.save(model, optimizer, folder / "large", step=2)
    step(model, optimizer, 1024)
    saving.wait()
    return saving

saving, report["beside"] = measure(beside)
stats = hightide.stats(model)
report["copied"], report["above"] = saving.copied_bytes, stats.peak_bytes["host"] - stats.plan.host_limit_bytes
saving, report["save"] = measure(lambda: hightide.save(model, optimizer, folder / "large", step=3, wait=True))
assert saving.num_bytes == report["values"] and saving.error is None
_, report["load"] = measure(lambda: hightide.load(model, optimizer, folder / "large"))
step(model, optimizer, 1024)
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    report = reported(SCRIPT, str(tmp_path_factory.mktemp("folders")), str(PIECE_BYTES), str(BLOCK_BYTES))
    assert report["values"] > 2 * max(SAVE_BYTES, LOAD_BYTES), "they must stand out from the slack"
    return report


def test_a_save_copies_nothing_but_what_is_about_to_change(measured: dict[str, int]) -> None:
    assert measured["save"] <= SAVE_BYTES, measured
    assert measured["beside"] <= measured["copied"] + SAVE_BYTES, measured
    assert 0 < measured["copied"] < measured["values"] and measured["above"] <= 0, "it is within the host's limit"


def test_a_load_has_a_few_pieces_beside_the_places(measured: dict[str, int]) -> None:
    assert measured["load"] <= LOAD_BYTES, measured
