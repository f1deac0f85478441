"""Steps of several passes (`accumulate=`) of blocks that live on disk: the bits of every other plan, whether the loop
keeps its promise or not, and bytes as they are told."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import race_detector
import torch
from test_from_disk import (
    BF16,
    IN_BACKWARD,
    ON_DISK,
    Trained,
    Words,
    adamw,
    assert_equal,
    assert_same_bits,
    batch_of,
    lora,
    parking,
    train,
    wrapped,
)
from test_slow_lanes import slow_down
from torch import nn

import hightide
from disk_plans import HOMES, SUMS, placed
from each_value import each_value
from hightide.ir.action import Mode
from hightide.ir.tier import ChunkKind, Lane, Tier
from hightide.planner.predict.peaks import step_peaks
from hightide.planner.solution import Solution
from hightide.planner.verify.compare_records import compare
from hightide.runtime.run import Run

FEW = [("gpu", "stay"), ("host", "on the host"), ("all on disk", "on disk"), ("every tier", "everywhere")]
ALL = [(homes, sums) for homes in HOMES for sums in SUMS]


def long(*values: Any, **options: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long, **options)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]] = {  # model, wrap, loop
    "clipped": (Words, {"accumulate": 3}, {"clip": True}),
    "clipped, four, one buffer": (Words, {"accumulate": 4, "num_buffers": 1}, {"clip": True}),
    "clipped, two, many buffers": (Words, {"accumulate": 2, "num_buffers": 7}, {"clip": True}),
    "in backward": (Words, {"accumulate": 3, **IN_BACKWARD}, {}),
    "in backward, four, one buffer": (Words, {"accumulate": 4, "num_buffers": 1, **IN_BACKWARD}, {}),
    "tied": (partial(Words, tied=True), {"accumulate": 3}, {"clip": True}),
    "tied, in backward": (partial(Words, tied=True), {"accumulate": 4, **IN_BACKWARD}, {}),
    "frozen, in backward": (partial(Words, frozen=True), {"accumulate": 3, **IN_BACKWARD}, {}),
    "groups": (Words, {"accumulate": 3, "optimizer": partial(adamw, groups=2)}, {"clip": True}),
    "LoRA": (lora, {"accumulate": 3}, {"clip": True}),
    "LoRA, in backward": (lora, {"accumulate": 4, **IN_BACKWARD}, {}),
    "bf16, rounded": (lambda: Words().to(BF16), {"accumulate": 3, "gradients": "param"}, {"clip": True}),
    "bf16, rounded, tied, in backward": (
        lambda: Words(tied=True).to(BF16),
        {"accumulate": 3, "gradients": "param", **IN_BACKWARD},
        {},
    ),
}
QUICK = (
    "clipped, four, one buffer",
    "in backward",
    "tied, in backward",
    "LoRA",
    "bf16, rounded",
    "bf16, rounded, tied, in backward",
)


@pytest.mark.parametrize(
    ("case", "places"),
    [
        *((case, FEW[number % 2 :: 2]) for number, case in enumerate(QUICK)),
        *(long(case, ALL, id=f"{case}, everywhere") for case in CASES),
    ],
)
def test_the_bits_of_every_other_plan(case: str, places: list[tuple[str, str]], tmp_path: Path) -> None:
    build, options, loop = CASES[case]
    number, first = options["accumulate"], None
    expected: Trained | None = None
    if "bf16" not in case:
        plain = build()
        expected = train(plain, options.get("optimizer", adamw)(plain), 4, number, **loop)
    for homes, sums in places:
        model, optimizer, run = wrapped(build(), homes, tmp_path, sums=sums, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = train(model, optimizer, 4, number, **loop)
        first = first or found
        assert_same_bits(found, first)
        if expected is not None:
            assert_equal(found, expected)
        assert_followed(run, number)
        stats = hightide.stats(model)
        assert stats.deviations == 0
        for tier in ("gpu", "host"):
            assert stats.peak_bytes[tier] <= getattr(stats.forecast, f"{tier}_peak_bytes"), (homes, sums, tier)
        if run.disk is not None:
            assert stats.peak_bytes["disk"] == stats.forecast.disk_peak_bytes
        hightide.unwrap(model)


def assert_followed(run: Run, number: int) -> None:
    """The passes of the last step did what their schedules say, to the byte."""
    run.executor.wait_for_updates()
    modes = [Mode.FIRST, *([Mode.MIDDLE] * (number - 2)), Mode.LAST]
    for back, mode in enumerate(reversed(modes[-3:])):
        schedule = run.executor.programs[mode].schedule
        records = run.lanes.records_of(run.lanes.pass_index - back)
        lines = compare(schedule, records)
        assert [line for line in lines if mode is Mode.LAST or ": step " not in line] == [], mode
        for lane in (Lane.DISK_READ, Lane.DISK_WRITE):
            moved = {record.id: record.num_bytes for record in records if record.lane is lane}
            assert moved == {action.id: action.num_bytes for action in schedule.lane(lane)}, (mode, lane)


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_parameters_cross_twice_a_call_and_states_once_a_step(update: str, tmp_path: Path) -> None:
    """One call of all samples against four: what the disk has read and written, told and found."""
    moved = {}
    for calls in (1, 4):
        model, optimizer, run = wrapped(
            Words(), "all on disk", tmp_path, update=update, accumulate=calls, micro_batch=1
        )
        train(model, optimizer, 3, calls)
        run.executor.wait_for_updates()
        passes = Solution.of(run.profile, run.plan).passes
        stats = hightide.stats(model)
        for lane in (Lane.DISK_READ, Lane.DISK_WRITE):
            assert stats.moved_bytes[lane] == 3 * passes.moved_bytes(lane)
        reads = [
            (action.kind, count * action.num_bytes)
            for schedule, count in passes.runs
            for action in schedule.lane(Lane.DISK_READ)
        ]
        moved[calls] = {kind: sum(size for one, size in reads if one is kind) for kind in ChunkKind}
        written = stats.disk_written_bytes_per_step
        once = sum(place.chunk.param_bytes for place in run.chunks.placed)
        states = sum(place.written_bytes for place in run.chunks.placed)
        gradients = sum(place.grad_bytes for place in run.chunks.placed if place.grad is Tier.DISK)
        assert written == states + gradients
        hightide.unwrap(model)
    assert once < moved[1][ChunkKind.PARAM] <= 2 * once
    assert 3 * moved[1][ChunkKind.PARAM] < moved[4][ChunkKind.PARAM] <= 4 * moved[1][ChunkKind.PARAM]
    assert moved[4][ChunkKind.STATE] <= moved[1][ChunkKind.STATE], "sums wait on the host, where they are not read"


@pytest.mark.parametrize(
    ("sums", "per_step"),
    [
        *zip(SUMS, ([1, 1, 3], [2, 5, 3], [3, 1, 4], [2, 5, 3]), strict=True),
        *(long(sums, per_step) for sums in SUMS for per_step in ([1, 1, 3], [2, 5, 3], [3, 1, 4])),
    ],
)
def test_a_loop_that_does_not_keep_its_promise(sums: str, per_step: list[int], tmp_path: Path) -> None:
    results = []
    for homes in ("host", "all on disk", "every tier"):
        model, optimizer, run = wrapped(Words(tied=True), homes, tmp_path, sums=sums, accumulate=3)
        with pytest.warns(UserWarning, match="accumulate=3"):
            results.append(broken(model, optimizer, per_step))
        assert run.chunks.disk is None or not run.chunks.disk.strays
        hightide.unwrap(model)
    for found in results[1:]:
        assert_same_bits(found, results[0])


def broken(model: nn.Module, optimizer: torch.optim.Optimizer, per_step: list[int], clip: bool = True) -> Trained:
    seen = []
    for step, number in enumerate(per_step):
        for part in range(number):
            loss = model(**batch_of(100 * step + part))["loss"]
            loss.backward()
            seen.append(loss.item())
        if clip:
            seen.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
        optimizer.zero_grad()
    return seen, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("sums", ["on disk", "stay", *(long(sums) for sums in ("on the host", "everywhere"))])
def test_in_backward_a_step_may_come_early_and_a_backward_too_many_is_refused(sums: str, tmp_path: Path) -> None:
    results = []
    for homes in ("host", "all on disk", "every tier"):
        model, optimizer, run = wrapped(Words(), homes, tmp_path, sums=sums, accumulate=3, **IN_BACKWARD)
        with pytest.warns(UserWarning, match="step\\(\\) came after 2"):
            results.append(broken(model, optimizer, [3, 2, 3], clip=False))
        assert not run.chunks.parked
        with pytest.raises(hightide.Refused, match="in_backward"):
            broken(model, optimizer, [4], clip=False)
        run.discard()
    for found in results[1:]:
        assert_same_bits(found, results[0])


def evaluated(model: Any) -> None:
    with torch.no_grad():
        model(**batch_of(7, num_samples=9))


def read_and_scaled(model: Any) -> None:
    params = [param for param in model.parameters() if param.grad is not None]
    if params:
        torch.nn.utils.clip_grad_norm_(params, 0.2)
        params[-1].grad = params[-1].grad * 0.5
        assert params[0].grad.norm() > 0 and params[1].grad.clone().abs().sum() > 0


def cut_off(model: Any) -> None:
    """A forward without a backward, and one whose backward fails: sums may have been added to in part, so both go."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    model(**batch_of(8))
    handle = model.layers[1][2].register_full_backward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(**batch_of(9))["loss"].backward()
    handle.remove()
    model.zero_grad()


@pytest.mark.filterwarnings("ignore:.*accumulate=3")
@pytest.mark.parametrize(
    ("sums", "between"), each_value(("on disk", "everywhere"), (evaluated, read_and_scaled, cut_off))
)
def test_what_a_loop_does_between_passes(sums: str, between: Callable[[Any], None], tmp_path: Path) -> None:
    results = []
    for homes in ("host", "all on disk", "every tier"):
        model, optimizer, _ = wrapped(Words(tied=True), homes, tmp_path, sums=sums, accumulate=3)
        for step in range(3):
            for part in range(3):
                if part == step:
                    between(model)
                model(**batch_of(10 * step + part))["loss"].backward()
                if part == 1:
                    between(model)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
        results.append({name: value.clone() for name, value in model.state_dict().items()})
        hightide.unwrap(model)
    for found in results[1:]:
        assert_same_bits(([], found), ([], results[0]))


@pytest.mark.filterwarnings("ignore:block .* was called in an order")
@pytest.mark.parametrize(("sums", "update"), each_value(("on the host", "everywhere"), ("deferred", "in_backward")))
def test_layers_that_a_pass_leaves_out(sums: str, update: str, tmp_path: Path) -> None:
    results = []
    for homes in ("host", "all on disk", "every tier"):
        model, optimizer, run = wrapped(Words(), homes, tmp_path, sums=sums, accumulate=3, update=update)
        draw = random.Random(4)
        for step in range(4):
            for part in range(3):
                model.order = draw.sample(range(3), draw.randint(1, 3))  # type: ignore[assignment]
                model(**batch_of(10 * step + part))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append({name: value.clone() for name, value in model.state_dict().items()})
        assert not run.chunks.parked
        hightide.unwrap(model)
    for found in results[1:]:
        assert_same_bits(([], found), ([], results[0]))


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_a_move_to_another_plan_between_passes(update: str, tmp_path: Path) -> None:
    options = {"accumulate": 3, "update": update}
    expected = train(*wrapped(Words(tied=True), "host", tmp_path, **options)[:2], num_steps=4, accumulate=3)
    model, optimizer, run = wrapped(Words(tied=True), "all on disk", tmp_path, sums="on disk", **options)
    assert run.plan.profile is not None
    order = iter([(homes, sums) for homes in ("every tier", "host", "all on disk") for sums in SUMS])
    seen = []
    for step in range(4):
        for part in range(3):
            run.move_to(Solution.of(run.plan.profile, placed(run.plan, (one := next(order))[0], sums=one[1])))
            loss = model(**batch_of(100 * step + part))["loss"] / 3
            loss.backward()
            seen.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    found = {name: value.clone() for name, value in model.state_dict().items()}
    assert_same_bits((seen, found), expected)
    hightide.unwrap(model)


@pytest.mark.parametrize(
    ("update", "lane"),
    [
        *(("deferred", Lane.DISK_READ), ("in_backward", Lane.CPU)),
        *(long("deferred", lane) for lane in (Lane.CPU, Lane.DISK_WRITE, Lane.D2H)),
        *(long("in_backward", lane) for lane in (Lane.DISK_READ, Lane.DISK_WRITE, Lane.D2H)),
    ],
)
def test_the_host_needs_no_byte_more_than_is_told(
    update: str, lane: Lane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow a lane is; and what is told is no more than the schedules of the passes say."""
    draw = random.Random(f"{update} {lane}")
    slow_down(monkeypatch, lane)
    for build, homes, sums in (
        (Words, "every tier", "everywhere"),
        (partial(Words, tied=True), "all on disk", "stay"),
        (Words, "states on disk", "on disk"),
    ):
        options = {"update": update, "accumulate": 3, "sums": sums}
        model, optimizer, run = parking(build(), homes, tmp_path, draw, **options)
        for step in range(2):
            for part in range(3):
                model(**batch_of(10 * step + part, num_samples=32))["loss"].backward()
                if update == "deferred" or part < 2:  # else the weights are the next ones by now
                    evaluated(model)
            optimizer.step()
            optimizer.zero_grad()
        assert hightide.stats(model).peak_bytes["host"] <= run.plan.host_limit_bytes
        assert run.plan.host_limit_bytes == step_peaks(Solution.of(run.profile, run.plan).passes).host_peak_bytes
        hightide.unwrap(model)


@pytest.mark.parametrize(("homes", "update"), each_value(("all on disk", "every tier"), ("deferred", "in_backward")))
def test_no_stream_overtakes_another(homes: str, update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    detector = race_detector.install(monkeypatch)
    options = {"accumulate": 3, "num_buffers": 1, "sums": "everywhere"}
    model, optimizer, run = wrapped(Words(tied=True), homes, tmp_path, update=update, **options)
    for step in range(3):
        for part in range(3):
            model(**batch_of(10 * step + part))["loss"].backward()
            if part == step and (update == "deferred" or part < 2):
                evaluated(model)
        optimizer.step()
        optimizer.zero_grad()
    run.executor.wait_for_updates()
    hightide.unwrap(model)
    assert min(detector.num_uses[f"buffer {where}"] for where in ("for updates", "towards the GPU", "away")) > 5
    assert not detector.races, "\n".join(sorted(set(detector.races)))


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_limits_alone_lead_to_a_plan(update: str, tmp_path: Path) -> None:
    plain, model = Words(), Words()
    expected = train(plain, adamw(plain), 3, 4)
    limits = hightide.Limits(gpu="64KiB", host="56KiB", disk=f"{tmp_path}:1MiB")
    model, optimizer = hightide.wrap(
        model, adamw(model), batch_of(0), limits=limits, micro_batch=2, update=update, accumulate=4
    )
    plan = hightide.stats(model).plan
    assert Tier.DISK in {block.states for block in plan.blocks} and plan.accumulate == 4
    assert_equal(train(model, optimizer, 3, 4), expected)
    stats = hightide.stats(model)
    assert stats.deviations == 0
    for tier, limit_bytes in (("gpu", 64 << 10), ("host", 56 << 10), ("disk", 1 << 20)):
        assert stats.peak_bytes[tier] <= limit_bytes
    hightide.unwrap(model)


def test_every_home_is_tried() -> None:
    assert {homes for homes, _ in ALL} >= {*ON_DISK}
