"""Killed and restarted: a run that resumes in another process has the losses of one that was never stopped, to the bit.
And a process that ends in any other way finishes the save that is under way."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

import hightide
from forked import Ended, run_script

COMMON = """
import json, os, random, signal, sys, time
from pathlib import Path
import numpy, torch
torch.set_num_threads(1)
from torch import nn
import hightide
from disk_plans import folder as disk_limit, placed

what, folder = sys.argv[1], Path(sys.argv[2])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 40), nn.Dropout(0.2), nn.Tanh(), nn.Linear(40, 16)) for _ in range(4))

    def forward(self, x, y):
        for layer in self.layers:
            x = x + layer(x)
        return ((x - y).float() ** 2).mean()

class Loop:
    def __init__(self, name, homes="host", dtype=torch.float32, accumulate=1, update="deferred"):
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(11)
        self.dtype, self.accumulate, self.step = dtype, accumulate, 0
        model = Net().to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        planned = accumulate if homes == "host" else 1
        limits = hightide.Limits(gpu="16MiB", host="64MiB")
        plan = hightide.plan(
            model, optimizer, self.batch(0), limits=limits, micro_batch=2, update=update, accumulate=planned)
        plan, disk = placed(plan, homes), folder / "disk" / what / name
        disk.mkdir(parents=True)
        self.model, self.optimizer = hightide.wrap(
            model, optimizer, self.batch(0), plan=plan, limits=disk_limit(disk) if plan.uses_disk else None)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=dtype == torch.float16)
        self.parts = {"scheduler": self.scheduler, "scaler": self.scaler}

    def batch(self, seed):
        draw = torch.Generator().manual_seed(seed)
        return {name: torch.randn(4, 16, generator=draw).to(self.dtype) for name in "xy"}

    def train(self):
        # What a data pipeline draws between steps must not be drawn again.
        seen = [float(torch.rand(1)), random.random(), float(numpy.random.rand())]
        for part in range(self.accumulate):
            loss = self.model(**self.batch(100 * self.step + part)) / self.accumulate
            self.scaler.scale(loss).backward()
            seen.append(loss.item())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1
        return seen

    def save(self, to, **options):
        extra = {name: part.state_dict() for name, part in self.parts.items()} | {"step": self.step}
        return hightide.save(self.model, self.optimizer, to, extra=extra, **options)

    def load(self, source):
        loaded = hightide.load(self.model, self.optimizer, source)
        for name, part in self.parts.items():
            part.load_state_dict(loaded.extra[name])
        self.step = loaded.extra["step"]

def end_with_a_save(loop):
    # One that takes its time.
    from hightide.checkpoint.files import writer
    at_once = writer.CheckpointWriter.tensors

    def tensors(self, *args, **kwargs):
        time.sleep(0.5)
        return at_once(self, *args, **kwargs)

    writer.CheckpointWriter.tensors = tensors
    assert not loop.save(folder / "last").done
"""

RESUMING = """
LOOPS = {
    "host": dict(dtype=torch.bfloat16),
    "host, accumulated": dict(accumulate=2, update="in_backward"),
    "disk": dict(homes="every tier", dtype=torch.float16, accumulate=2),
    "disk, in backward": dict(homes="all on disk", update="in_backward"),
}
report = {}
for name, options in LOOPS.items():
    loop, saved = Loop(name, **options), folder / "saved" / name
    seen = report[name] = []
    if what == "second":
        loop.load(saved)
        report["first step of " + name] = loop.step
    while loop.step < (4 if what == "first" else 8):
        seen.append(loop.train())
        if what == "first" and loop.step in (2, 3):
            loop.save(saved, keep=1)
if what == "first":
    os.kill(os.getpid(), signal.SIGKILL)
print(json.dumps(report))
end_with_a_save(loop)
del loop
"""

INTERRUPTED = """
loop = Loop("interrupted")
loop.train()
end_with_a_save(loop)
raise KeyboardInterrupt
"""


def run(script: str, *arguments: object) -> Ended:
    return run_script(COMMON + script, [*map(str, arguments)], timeout_s=55)


@pytest.mark.long  # in CI, tests/faults/test_killed_runs.py kills, and round trips compare bits
@pytest.mark.timeout(180)
def test_killed_and_resumed_is_as_if_never_stopped(tmp_path: Path) -> None:
    """Dropout, a scheduler, a scaler, the position in the data and all random numbers included; states on the host and
    on disk, both timings, several backwards a step."""
    killed = run(RESUMING, "first", tmp_path)
    assert killed.status == -signal.SIGKILL, killed.stderr
    reports: list[dict[str, Any]] = []
    for what in ("second", "straight"):
        done = run(RESUMING, what, tmp_path)
        assert done.status == 0, done.stderr
        reports.append(json.loads(done.stdout.splitlines()[-1]))
    resumed, straight = reports
    for name, expected in straight.items():
        first_step = resumed["first step of " + name]
        assert first_step in (2, 3), "the last save may have been cut off by the kill, or not"
        assert len(expected) == 8 and resumed[name] == expected[first_step:], name
    assert hightide.latest(tmp_path / "last") == tmp_path / "last" / "step-8", "a save that was under way at the end"


def test_an_interrupted_process_finishes_its_save(tmp_path: Path) -> None:
    done = run(INTERRUPTED, "interrupted", tmp_path)
    assert done.status == -signal.SIGINT and "KeyboardInterrupt" in done.stderr, done.stderr
    assert hightide.latest(tmp_path / "last") == tmp_path / "last" / "step-1"
