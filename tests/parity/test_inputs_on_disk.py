"""Block inputs that wait for their backward on disk: the bits of every other plan, in any loop, and bytes as told."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import race_detector
import torch
import torch.nn.functional as F
from test_from_disk import (
    BF16,
    IN_BACKWARD,
    ROOMY,
    VOCABULARY,
    WIDTH,
    Trained,
    Words,
    adamw,
    assert_same_bits,
    batch_of,
    dropped,
    evaluated_between,
    out_of_order,
    train,
    wrapped,
)
from test_slow_lanes import slow_down
from torch import Tensor, nn

import hightide
from disk_plans import D, G, H, folder, placed
from hightide.ir.action import Mode
from hightide.ir.tier import Lane, Tier
from hightide.planner.disk_inputs import passing_calls, stored_bytes
from hightide.planner.solution import Solution
from hightide.planner.verify.compare_records import compare
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of

INPUTS: dict[str, Callable[[int], Tier]] = {
    "gpu": lambda _: G,
    "host": lambda _: H,
    "disk": lambda _: D,
    "mixed": lambda index: [D, H, D, G][index % 4],
}
DROPOUT = partial(Words, dropout=0.3)


class Long(Words):
    """Nine layers, so that inputs of several wait on disk."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        torch.manual_seed(4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.Dropout(0.2), nn.Tanh(), nn.Linear(24, WIDTH)) for _ in range(9)
        )
        self.order = list(range(9))


class Crossed(nn.Module):
    """Each block reads the first block's result too, as decoders do: an input that many calls share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Joined() for _ in range(6))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = memory = self.first(self.embed(ids))
        for layer in self.layers:
            hidden = layer(hidden, memory)
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:
        return hidden + torch.tanh(self.wide(torch.cat([hidden, memory], -1)))


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]] = {  # model, wrap, loop
    "clipped": (Long, {}, {"clip": True}),
    "clipped, one buffer": (Long, {"num_buffers": 1}, {"clip": True}),
    "in backward, many buffers": (Long, {"num_buffers": 4, **IN_BACKWARD}, {}),
    "tied, in backward": (partial(Long, tied=True), IN_BACKWARD, {}),
    "shared inputs": (Crossed, {}, {"clip": True}),
    "accumulated off the plan": (Long, {}, {"accumulate": 3, "clip": True}),
    "several passes": (Long, {"accumulate": 3, "sums": "everywhere"}, {"accumulate": 3, "clip": True}),
    "several passes, in backward": (Long, {"accumulate": 4, **IN_BACKWARD}, {"accumulate": 4}),
    "bf16": (lambda: Long().to(BF16), {"gradients": "param"}, {"clip": True}),
    "whole batches": (Long, {"micro_batch": 4}, {"clip": True}),
}


QUICK = ("clipped, one buffer", "tied, in backward", "shared inputs", "several passes", "bf16")
STORED, MIXED = (("disk", "host"),), (("mixed", "all on disk"),)
OTHERS = (("host", "host"), ("disk", "gpu"), ("disk", "all on disk"), ("mixed", "every tier"))


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("case", "others"),
    [  # two of the other plans each, by turns
        *(pytest.param(case, OTHERS[number % 2 :: 2], id=case) for number, case in enumerate(QUICK)),
        *(pytest.param(case, OTHERS, id=f"{case}, all plans", marks=pytest.mark.long) for case in CASES),
    ],
)
def test_the_bits_of_every_other_plan(case: str, others: tuple[tuple[str, str], ...], tmp_path: Path) -> None:
    build, options, loop = CASES[case]
    first: Trained | None = None
    for inputs, homes in (("gpu", "host"), *others):
        torch.manual_seed(7)
        model, optimizer, run = wrapped(build(), homes, tmp_path, inputs=INPUTS[inputs], **options)
        found = train(model, optimizer, 4, **loop)
        first = first or found
        assert_same_bits(found, first)
        stats = hightide.stats(model)
        assert stats.deviations == 0
        for tier in ("gpu", "host"):
            assert stats.peak_bytes[tier] <= getattr(stats.forecast, f"{tier}_peak_bytes"), (inputs, homes, tier)
        if run.disk is not None:
            assert stats.peak_bytes["disk"] == stats.forecast.disk_peak_bytes
        assert (run.disk is not None) == (inputs in ("disk", "mixed"))
        if "off the plan" not in case and run.disk is not None:
            assert_moved(run, 4)
        assert "block inputs" not in run.host.breakdown()
        hightide.unwrap(model)


def assert_moved(run: Run, num_steps: int) -> None:
    """What the disk has read and written is what was told, and so are the actions of the last pass."""
    run.executor.wait_for_updates()
    passes = Solution.of(run.profile, run.plan).passes
    for lane in (Lane.DISK_READ, Lane.DISK_WRITE):
        assert run.performer.moved_bytes[lane] == num_steps * passes.moved_bytes(lane)
    records = run.lanes.records_of(run.lanes.pass_index)
    assert compare(passes.last, records) == []
    of_inputs = [a for a in passes.last.actions if a.lane in (Lane.DISK_READ, Lane.DISK_WRITE) and a.call is not None]
    calls = {action.call for action in of_inputs}
    assert len(of_inputs) == 2 * len(calls)
    assert calls == stored_bytes(run.profile, run.plan).keys() < {*passing_calls(run.profile, run.plan)}


def two_forwards(model: Any, optimizer: torch.optim.Optimizer) -> Trained:
    """Then two backwards, the older one last: its inputs may not be overwritten."""
    seen = []
    for step in range(3):
        first, second = (model(**batch_of(10 * step + part))["loss"] for part in range(2))
        (second if step % 2 else first).backward()
        (first if step % 2 else second).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [first.item(), second.item()]
    return seen, {name: value.clone() for name, value in model.state_dict().items()}


def without_backward(model: Any, optimizer: torch.optim.Optimizer) -> Trained:
    """Forwards whose graphs are dropped, at once or while the next one runs."""
    held = None
    for step in range(4):
        model(**batch_of(50 + step))
        held = model(**batch_of(60 + step)) if step % 2 else held
        loss = model(**batch_of(step))["loss"]
        held = None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [], {name: value.clone() for name, value in model.state_dict().items()}


def cut_off(model: Any, optimizer: torch.optim.Optimizer) -> Trained:
    """Exceptions in forward and in backward."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    for at in ("forward", "backward", "forward"):
        layer = model.layers[4][2]
        handle = layer.register_forward_hook(fail) if at == "forward" else layer.register_full_backward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model(**batch_of(9))["loss"].backward()
        handle.remove()
        optimizer.zero_grad()
    return train(model, optimizer, 2, clip=True)


@pytest.mark.filterwarnings("ignore:block .* was called in an order", "ignore:block .* runs the whole batch")
@pytest.mark.parametrize(
    ("loop", "num_buffers", "others"),
    [
        *((loop, 1, MIXED) for loop in (out_of_order, two_forwards, without_backward)),
        *((loop, 3, STORED) for loop in (evaluated_between, two_forwards, cut_off)),
        *(long(loop, 1, STORED) for loop in (out_of_order, two_forwards, without_backward)),
        *(long(loop, 3, MIXED) for loop in (evaluated_between, two_forwards, cut_off)),
        *(long(loop, 1, MIXED + STORED) for loop in (dropped, evaluated_between, cut_off)),
        *(long(loop, 3, MIXED + STORED) for loop in (out_of_order, dropped, without_backward)),
    ],
)
def test_any_loop(loop: Any, num_buffers: int, others: tuple[tuple[str, str], ...], tmp_path: Path) -> None:
    results = []
    for inputs, homes in (("gpu", "host"), *others):
        torch.manual_seed(7)
        model, optimizer, run = wrapped(Long(), homes, tmp_path, inputs=INPUTS[inputs], num_buffers=num_buffers)
        results.append(loop(model, optimizer))
        model.order = list(range(9))
        gc.collect()
        train(model, optimizer, 1)  # of what was left before nothing is left
        run.executor.come_to_rest()
        assert "block inputs" not in run.host.breakdown()
        hightide.unwrap(model)
    for found in results[1:]:
        assert_same_bits(found, results[0])


@pytest.mark.filterwarnings("ignore:block .* was called in an order")
@pytest.mark.parametrize("lane", [Lane.DISK_WRITE, Lane.H2D, long(Lane.DISK_READ), long(Lane.D2H)])
def test_a_slow_lane_changes_nothing_and_the_host_has_no_byte_more(
    lane: Lane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for slow in (False, True):
        torch.manual_seed(7)
        if slow:
            slow_down(monkeypatch, lane)
        model, optimizer, run = tight(Long(tied=True), tmp_path)
        results.append(train(model, optimizer, 2, clip=True))
        assert hightide.stats(model).peak_bytes["host"] <= run.plan.host_limit_bytes
        hightide.unwrap(model)
    assert_same_bits(results[1], results[0])


def tight(model: nn.Module, path: Path, num_buffers: int = 2) -> tuple[nn.Module, torch.optim.Optimizer, Run]:
    """With as much of the host as is told, and no more."""
    optimizer = adamw(model)
    plan = hightide.plan(model, optimizer, batch_of(0), limits=ROOMY, micro_batch=2)
    plan = placed(plan, "every tier", num_buffers, inputs=INPUTS["disk"])
    assert plan.profile is not None
    plan = replace(plan, host_limit_bytes=Solution.of(plan.profile, plan).peaks.host_peak_bytes)
    model, optimizer = hightide.wrap(model, optimizer, batch_of(0), plan=plan, limits=folder(path))
    run = run_of(model)
    assert run is not None
    return model, optimizer, run


@pytest.mark.filterwarnings("ignore:block .* was called in an order")
@pytest.mark.parametrize("homes", ["host", "all on disk"])
def test_no_stream_overtakes_another(homes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    detector = race_detector.install(monkeypatch)
    model, optimizer, run = wrapped(Long(), homes, tmp_path, inputs=INPUTS["disk"], num_buffers=2)
    draw = random.Random(2)
    for step in range(5):
        model.order = draw.sample(range(9), draw.randint(4, 9)) if step == 3 else list(range(9))  # type: ignore[assignment]
        loss = model(**batch_of(step))["loss"]
        if step % 2:
            with torch.no_grad():
                model(**batch_of(7, num_samples=9))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.executor.wait_for_updates()
    hightide.unwrap(model)
    assert detector.num_uses["buffer of inputs"] > 50
    assert not detector.races, "\n".join(sorted(set(detector.races)))


def test_a_smaller_and_a_larger_batch(tmp_path: Path) -> None:
    results = []
    for inputs in ("gpu", "disk"):
        torch.manual_seed(7)
        model, optimizer, _ = wrapped(Long(), "host", tmp_path, inputs=INPUTS[inputs])
        seen = []
        for step, size in enumerate((4, 1, 3, 4)):
            loss = model(**batch_of(step, num_samples=size))["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        results.append((seen, {name: value.clone() for name, value in model.state_dict().items()}))
        hightide.unwrap(model)
    assert_same_bits(results[1], results[0])


def test_a_run_moves_from_and_to_inputs_on_disk(tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = train(*wrapped(Long(), "host", tmp_path, inputs=INPUTS["gpu"])[:2], num_steps=4)
    torch.manual_seed(7)
    model, optimizer, run = wrapped(Long(), "host", tmp_path, inputs=INPUTS["disk"])
    assert run.plan.profile is not None
    seen = []
    for step, inputs in enumerate(("mixed", "gpu", "disk", "host")):
        homes = "every tier" if inputs == "mixed" else "host"
        run.move_to(Solution.of(run.plan.profile, placed(run.plan, homes, inputs=INPUTS[inputs])))
        loss = model(**batch_of(100 * step))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    found = {name: value.clone() for name, value in model.state_dict().items()}
    assert_same_bits((seen, found), expected)
    hightide.unwrap(model)


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_limits_alone_lead_to_inputs_on_disk(update: str, tmp_path: Path) -> None:
    """The inputs of all layers are too many for the GPU and for the host."""
    batch = batch_of(0, num_samples=64)
    results = []
    for limits in (ROOMY, hightide.Limits(gpu="500KiB", host="80KiB", disk=f"{tmp_path}:4MiB")):
        model = Long()
        optimizer = adamw(model)
        model, optimizer = hightide.wrap(model, optimizer, batch, limits=limits, micro_batch=8, update=update)
        torch.manual_seed(7)
        for step in range(2):
            model(**batch_of(step, num_samples=64))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = hightide.stats(model)
        results.append({name: value.clone() for name, value in model.state_dict().items()})
        for tier, peak_bytes in stats.peak_bytes.items():
            assert peak_bytes <= getattr(stats.plan, f"{tier}_limit_bytes"), tier
        inputs = {block.inputs for block in stats.plan.blocks}
        if limits is not ROOMY:
            assert D in inputs, stats.plan.explain()
            assert stats.disk_written_bytes_per_step > 0 and "KiB block inputs" in stats.plan.explain()
        hightide.unwrap(model)
    assert_same_bits(([], results[1]), ([], results[0]))


def test_what_the_plan_sets_aside_is_what_is_taken(tmp_path: Path) -> None:
    model, _, run = wrapped(Long(), "host", tmp_path, inputs=INPUTS["disk"], num_buffers=3)
    schedule = run.executor.programs[Mode.TRAIN].schedule
    assert run.disk is not None and run.disk.used_bytes == schedule.disk_base_bytes > 0
    assert run.host.used_bytes == schedule.host_base_bytes
    assert run.disk.used_bytes == sum(stored_bytes(run.profile, run.plan).values())
    hightide.unwrap(model)
