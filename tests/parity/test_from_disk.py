"""Blocks that live on disk: equal to plain PyTorch, and the same bits wherever parameters and states are."""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import race_detector
import torch
import torch.nn.functional as F
from harness import EPS, assert_close_weights
from test_slow_lanes import slow_down
from torch import Tensor, nn

import hightide
import models
from disk_plans import HOMES, Homes, folder, placed
from each_value import each_value
from hightide.ir.action import Mode
from hightide.ir.activation import Activation
from hightide.ir.plan import BlockPlan
from hightide.ir.refusal import Refused
from hightide.ir.tier import Lane, Tier
from hightide.planner.chunk_place import RING_COUNTS
from hightide.planner.placement import Placement
from hightide.planner.solution import Solution
from hightide.planner.verify.compare_records import compare
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of
from hightide.stores import disk_file
from hightide.stores.disk_requests import ChangedBytes
from waiting import OwnThreads, soon

ROOMY = hightide.Limits(gpu="16MiB", host="64MiB")
VOCABULARY, WIDTH, NUM_SAMPLES, LENGTH = 40, 16, 4, 6
BF16 = torch.bfloat16
UPDATES = ("deferred", "in_backward")
LONG = pytest.mark.long
ON_DISK = [name for name in HOMES if name not in ("gpu", "host")]
Trained = tuple[list[float], dict[str, Tensor]]


class Words(nn.Module):
    """Five blocks; in some order, if it is told one."""

    def __init__(self, tied: bool = False, frozen: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 72), nn.Dropout(dropout), nn.Tanh(), nn.Linear(72, WIDTH)) for _ in "abc"
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.layers[1].requires_grad_(False)
        self.order = [0, 1, 2]

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.embed(ids)
        for index in self.order:
            hidden = hidden + self.layers[index](hidden)
        logits = self.head(hidden).float()
        return (
            {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}
        )


def batch_of(seed: int, num_samples: int = NUM_SAMPLES) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (num_samples, LENGTH), generator=draw)
    return {"ids": ids, "labels": torch.randint(0, VOCABULARY, (num_samples, LENGTH), generator=draw)}


def adamw(model: nn.Module, groups: int = 1) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    if groups == 1:
        return torch.optim.AdamW(trained, lr=3e-3, eps=EPS)
    slow = {"params": [param for param in trained if param.dim() < 2], "lr": 1e-3, "weight_decay": 0.0}
    return torch.optim.AdamW([{"params": [param for param in trained if param.dim() > 1]}, slow], lr=3e-3, eps=EPS)


def sgd(model: nn.Module, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


def wrapped(
    model: nn.Module,
    homes: str | Homes,
    path: Path,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    num_buffers: int = 2,
    micro_batch: int = 2,
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer, Run]:
    made, batch = optimizer(model), batch_of(0)
    where = {name: options.pop(name) for name in ("sums", "inputs") if name in options}
    plan = hightide.plan(model, made, batch, limits=ROOMY, micro_batch=micro_batch, **options)
    plan = placed(plan, homes, num_buffers, **where)
    limits = folder(path) if plan.uses_disk else None
    model, made = hightide.wrap(model, made, batch, plan=plan, limits=limits)
    run = run_of(model)
    assert run is not None
    return model, made, run


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 5, accumulate: int = 1, clip: bool = False
) -> Trained:
    seen = []
    for step in range(num_steps):
        for part in range(accumulate):
            loss = model(**batch_of(100 * step + part))["loss"] / accumulate
            loss.backward()
            seen.append(loss.item())
        if clip:
            seen.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
        optimizer.zero_grad()
    return seen, {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(found: Trained, plain: Trained) -> None:
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(plain[0]), rtol=3e-6, atol=0)
    assert_close_weights(plain[1], found[1])


def assert_same_bits(found: Trained, first: Trained) -> None:
    assert found[0] == first[0]
    assert found[1].keys() == first[1].keys()
    for name, value in first[1].items():
        assert torch.equal(found[1][name], value), f"{name} differs"


def lora(dropout: float = 0.0) -> nn.Module:
    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=r".*layers\.\d\.(0|3)")
    model = Words(dropout=dropout)
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


IN_BACKWARD = {"update": "in_backward"}
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]] = {  # model, wrap, loop
    "plain": (Words, {}, {}),
    "clipped": (Words, {}, {"clip": True}),
    "in backward": (Words, IN_BACKWARD, {}),
    "in backward, one buffer": (Words, {**IN_BACKWARD, "num_buffers": 1}, {}),
    "clipped, one buffer": (Words, {"num_buffers": 1}, {"clip": True}),
    "many buffers": (Words, {"num_buffers": 7}, {"clip": True}),
    "tied": (partial(Words, tied=True), {}, {"clip": True, "num_steps": 20}),
    "tied, in backward": (partial(Words, tied=True), IN_BACKWARD, {}),
    "frozen": (partial(Words, frozen=True), {}, {"clip": True}),
    "frozen, in backward": (partial(Words, frozen=True), IN_BACKWARD, {}),
    "accumulated": (Words, {}, {"accumulate": 3, "clip": True}),
    "accumulated, tied, one buffer": (
        partial(Words, tied=True),
        {"num_buffers": 1},
        {"accumulate": 2},
    ),
    "groups": (Words, {"optimizer": partial(adamw, groups=2)}, {"clip": True}),
    "groups, in backward": (Words, {"optimizer": partial(adamw, groups=2), **IN_BACKWARD}, {}),
    "SGD": (Words, {"optimizer": sgd}, {"clip": True}),
    "SGD with momentum, in backward": (Words, {"optimizer": partial(sgd, momentum=0.9), **IN_BACKWARD}, {}),
    "LoRA": (lora, {}, {"clip": True}),
    "LoRA, in backward": (lora, IN_BACKWARD, {}),
}


FEW = ("gpu", "all on disk", "every tier")
QUICK = {
    "clipped",
    "in backward, one buffer",
    "tied",
    "tied, in backward",
    "frozen, in backward",
    "accumulated, tied, one buffer",
    "groups",
    "SGD with momentum, in backward",
    "LoRA",
    "bf16, rounded",
    "bf16, rounded, in backward",
    "dropout",
}


def everywhere(cases: Iterable[str]) -> list[Any]:
    """Some with a few homes, and in the long tests all with all of them."""
    quick = [pytest.param(case, FEW, id=case) for case in cases if case in QUICK]
    return quick + [pytest.param(case, tuple(HOMES), id=f"{case}, all homes", marks=pytest.mark.long) for case in cases]


@pytest.mark.parametrize(("case", "places"), everywhere(CASES))
def test_equal_to_plain_pytorch_and_to_the_bit_to_other_plans(
    case: str, places: tuple[str, ...], tmp_path: Path
) -> None:
    build, options, loop = CASES[case]
    plain = build()
    expected = train(plain, options.get("optimizer", adamw)(plain), **loop)
    first: Trained | None = None
    for homes in places:
        model, optimizer, run = wrapped(build(), homes, tmp_path, **options)
        found = train(model, optimizer, **loop)
        if first is None:
            first = found
            assert_equal(found, expected)
        assert_same_bits(found, first)
        stats = hightide.stats(model)
        assert stats.deviations == 0
        assert stats.peak_bytes["gpu"] <= stats.forecast.gpu_peak_bytes
        assert stats.peak_bytes["host"] <= stats.forecast.host_peak_bytes
        assert (run.disk is not None) == (homes in ON_DISK)
        if run.disk is not None:
            assert stats.peak_bytes["disk"] == stats.forecast.disk_peak_bytes
            is_frozen = "LoRA" in case
            assert stats.moved_bytes["disk_read"] > 0 and (stats.moved_bytes.get("disk_write", 0) > 0 or is_frozen)
        hightide.unwrap(model)
        assert_close_weights(found[1], dict(model.state_dict()))


@pytest.mark.parametrize("case", ["LoRA", "LoRA, in backward"])
def test_what_is_frozen_streams_from_disk_beside_adapters_that_stay(case: str, tmp_path: Path) -> None:
    """A search finds such plans where the GPU has room for adapters and their states."""
    build, options, loop = CASES[case]
    found = []
    for homes in ("gpu", lambda index: (Tier.DISK, Tier.GPU) if 0 < index < 5 else (Tier.GPU, Tier.GPU)):
        model, optimizer, run = wrapped(build(), homes, tmp_path, **options)
        found.append(train(model, optimizer, **loop))
        assert_same_bits(found[-1], found[0])
    moved = hightide.stats(model).moved_bytes
    assert run.disk is not None and moved["disk_read"] > 0 and not moved.get("disk_write")
    hightide.unwrap(model)


VARIANTS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]] = {  # not as in plain PyTorch
    "dropout": (partial(Words, dropout=0.3), {}, {"clip": True}),
    "bf16": (lambda: Words().to(BF16), {}, {"clip": True}),
    "bf16, rounded": (lambda: Words().to(BF16), {"gradients": "param"}, {"clip": True}),
    "bf16, rounded, in backward": (lambda: Words().to(BF16), {"gradients": "param", **IN_BACKWARD}, {}),
    "bf16, rounded, tied, accumulated": (
        lambda: Words(tied=True).to(BF16),
        {"gradients": "param"},
        {"accumulate": 2, "clip": True},
    ),
    "fp16": (lambda: Words().to(torch.float16), {"gradients": "param"}, {"clip": True}),
}


@pytest.mark.parametrize(("case", "places"), everywhere(VARIANTS))
def test_the_same_bits_wherever_states_are(case: str, places: tuple[str, ...], tmp_path: Path) -> None:
    build, options, loop = VARIANTS[case]
    first: Trained | None = None
    for homes in places:
        torch.manual_seed(5)
        model, optimizer, run = wrapped(build(), homes, tmp_path, **options)
        found = train(model, optimizer, **loop)
        masters = {key: run.chunks.master_of(key) for key in run.chunks.places}
        found[1].update({f"master of {key}": value.clone() for key, value in masters.items() if value is not None})
        assert bool(len(found[1]) > len(run.chunks.places)) == (case != "dropout")
        first = first or found
        assert_same_bits(found, first)
        hightide.unwrap(model)


# -- the schedule -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("homes", "update"), each_value(ON_DISK, UPDATES))
def test_executed_equals_scheduled(homes: str, update: str, tmp_path: Path) -> None:
    model, optimizer, run = wrapped(Words(tied=True), homes, tmp_path, update=update)
    train(model, optimizer, 3)
    run.executor.wait_for_updates()
    schedule = run.executor.programs[Mode.TRAIN].schedule
    for back in range(3):
        records = run.lanes.records_of(run.lanes.pass_index - back)
        assert compare(schedule, records) == []
        moved = {record.id: record.num_bytes for record in records if record.lane in (Lane.DISK_READ, Lane.DISK_WRITE)}
        assert moved == {a.id: a.num_bytes for lane in (Lane.DISK_READ, Lane.DISK_WRITE) for a in schedule.lane(lane)}
    parks = any(place.parks for place in run.chunks.placed)
    assert parks == (update == "in_backward") and "parked gradients" not in run.host.breakdown()
    with torch.no_grad():
        model(**batch_of(1, num_samples=2))
    evaluated = run.executor.programs[Mode.EVAL].schedule
    assert compare(evaluated, run.lanes.records_of(run.lanes.pass_index)) == []
    hightide.unwrap(model)


@pytest.mark.parametrize("tied", [False, True])
def test_an_accumulating_pass_reads_again_what_was_in_other_buffers(tied: bool, tmp_path: Path) -> None:
    """Only when backward begins is it known that sums come back from disk: then buffers are for others."""
    model, optimizer, run = wrapped(Words(tied=tied), "all on disk", tmp_path, num_buffers=3)
    for part in range(2):
        model(**batch_of(part))["loss"].backward()
    optimizer.step()
    run.executor.wait_for_updates()
    schedule = run.executor.programs[Mode.ACCUMULATE].schedule
    lines = compare(schedule, run.lanes.records_of(run.lanes.pass_index))
    assert all(line.startswith("disk_read: read.param") and line.endswith("ran more than once") for line in lines)
    assert 1 <= len(lines) <= 3, "as many as there are buffers"
    hightide.unwrap(model)


@pytest.mark.parametrize(
    "case",
    [
        "in backward",
        "accumulated",
        "off the plan",
        *(pytest.param(case, marks=LONG) for case in ("clipped", "evaluated")),
    ],
)
def test_a_slow_lane_changes_nothing(case: str, tmp_path: Path) -> None:
    _, options, loop = CASES.get(case, CASES["plain"])
    results = []
    for lane in (None, Lane.DISK_READ, Lane.DISK_WRITE, Lane.H2D, Lane.D2H, Lane.CPU):
        with pytest.MonkeyPatch.context() as patch:
            delayed = slow_down(patch, lane) if lane is not None else ["nothing"]
            model, optimizer, _ = wrapped(Words(tied=True), "every tier", tmp_path, **options)
            if case == "off the plan":
                results.append(out_of_order(model, optimizer))
            elif case == "evaluated":
                results.append(evaluated_between(model, optimizer))
            else:
                results.append(train(model, optimizer, **{**loop, "num_steps": 3}))
            hightide.unwrap(model)
        assert delayed
    for result in results[1:]:
        assert_same_bits(result, results[0])


def out_of_order(model: Any, optimizer: torch.optim.Optimizer, num_steps: int = 6) -> Trained:
    """Layers in any order, left out, or several times."""
    draw, seen = random.Random(3), []
    for step in range(num_steps):
        model.order = [draw.randrange(3) for _ in range(draw.randint(1, 4))]
        loss = model(**batch_of(step))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen, {name: value.clone() for name, value in model.state_dict().items()}


def dropped(model: Any, optimizer: torch.optim.Optimizer, num_steps: int = 6) -> Trained:
    """Layers are left out, and those that are not come in another order, but each once: as in-backward asks for."""
    draw, seen = random.Random(4), []
    for step in range(num_steps):
        model.order = draw.sample(range(3), draw.randint(1, 3))
        loss = model(**batch_of(step))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen, {name: value.clone() for name, value in model.state_dict().items()}


def evaluated_between(
    model: Any, optimizer: torch.optim.Optimizer, num_steps: int = 3, in_backward: bool = False
) -> Trained:
    """Between forward and backward, where what backward needs was read ahead; and, unless updates are `in_backward`,
    between backward and step()."""
    seen = []
    for step in range(num_steps):
        loss = model(**batch_of(step))["loss"]
        for _ in range(step):
            with torch.no_grad():
                seen.append(model(**batch_of(7))["loss"].item())
        loss.backward()
        if in_backward:
            optimizer.step()
        with torch.no_grad():
            seen.append(model(**batch_of(8))["loss"].item())
        if not in_backward:
            optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:block .* was called in an order")
@pytest.mark.parametrize(
    ("loop", "homes", "update"),
    each_value((out_of_order, evaluated_between, dropped), ("all on disk", "every tier"), UPDATES),
)
def test_off_the_plan_it_is_slower_and_right(loop: Any, homes: str, update: str, tmp_path: Path) -> None:
    if loop is out_of_order and update == "in_backward":
        pytest.skip("a block that runs twice is not what that promises")
    if loop is evaluated_between:
        loop = partial(loop, in_backward=update == "in_backward")
    plain = Words()
    expected = loop(plain, adamw(plain))
    model, optimizer, run = wrapped(Words(), homes, tmp_path, update=update)
    found = loop(model, optimizer)
    assert_equal(found, expected)
    assert run.chunks.disk is not None and not run.chunks.disk.strays
    hightide.unwrap(model)


@pytest.mark.filterwarnings("ignore:block .* was called in an order")
@pytest.mark.parametrize(("homes", "update"), each_value(ON_DISK, UPDATES))
def test_no_stream_overtakes_another(homes: str, update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    detector = race_detector.install(monkeypatch)
    model, optimizer, run = wrapped(Words(tied=True), homes, tmp_path, update=update, num_buffers=1)
    for step in range(4):
        model.order = [0, 2] if step == 2 else [0, 1, 2]
        model(**batch_of(step))["loss"].backward()
        steps_first = step % 2 == 1 or update == "in_backward"  # where the weights are the next ones by then
        if steps_first:
            optimizer.step()
        with torch.no_grad():
            model(**batch_of(7, num_samples=9))
        if not steps_first:
            optimizer.step()
        optimizer.zero_grad()
    run.executor.wait_for_updates()
    hightide.unwrap(model)
    used = {"buffer for updates", *(["buffer towards the GPU"] if homes in ("all on disk", "every tier") else [])}
    assert min(detector.num_uses[kind] for kind in used | {"buffer away"}) > 5
    assert not detector.races, "\n".join(sorted(set(detector.races)))


@pytest.mark.parametrize(("num_buffers", "update"), each_value((1, 3), UPDATES))
def test_what_the_plan_sets_aside_is_what_is_taken(update: str, num_buffers: int, tmp_path: Path) -> None:
    for homes in ON_DISK:
        model, _, run = wrapped(Words(), homes, tmp_path, update=update, num_buffers=num_buffers)
        schedule, placement = run.executor.programs[Mode.TRAIN].schedule, Placement(run.plan)
        assert run.disk is not None
        assert run.disk.used_bytes == schedule.disk_base_bytes == placement.bytes_on[Tier.DISK]
        assert run.host.used_bytes == schedule.host_base_bytes
        rings = sum(placement.buffer_bytes[ring] * count for ring, count in placement.num_buffers.items())
        assert run.host.breakdown()["buffers of the disk"] == rings > 0
        hightide.unwrap(model)


def test_what_was_changed_behind_our_back_is_told_by_its_block(tmp_path: Path) -> None:
    model, optimizer, run = wrapped(Words(), "all on disk", tmp_path)
    train(model, optimizer, 1)
    run.executor.wait_for_updates()
    assert run.disk is not None
    chunk = next(place.chunk for place in run.chunks.placed if run.plan.blocks[place.chunk.block].name == "layers.1")
    region = run.chunks.home(chunk.index).region
    descriptor = os.open(f"/proc/self/fd/{run.disk._disks[0].file._descriptor}", os.O_WRONLY)
    os.pwrite(descriptor, b"changed", region.offset + 9)
    os.close(descriptor)
    words = rf"'parameters of layers\.1 \(chunk {chunk.index}\)': the 4096 bytes at {region.offset} of .* {tmp_path} "
    with pytest.raises(ChangedBytes, match=words):
        train(model, optimizer, 1)
    run.discard()


@pytest.mark.filterwarnings("ignore:block .* was called in an order")
@pytest.mark.parametrize("num_buffers", [1, 4])
def test_sums_that_leave_off_the_plan_are_those_that_go_on(num_buffers: int, tmp_path: Path) -> None:
    """What was read of them ahead, for a call that the plan knows, is an older sum."""
    orders = [[0, 1, 2], [0, 1, 0, 1, 1], [2, 1, 2, 1, 1], [2, 0, 2, 0]]
    results = []
    for homes in ("host", "all on disk", "states on disk"):
        model, optimizer, _ = wrapped(Words(), homes, tmp_path, num_buffers=num_buffers)
        for step in range(2):
            for part, order in enumerate(orders):
                model.order = order  # type: ignore[assignment]
                model(**batch_of(10 * step + part))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append({name: value.clone() for name, value in model.state_dict().items()})
        hightide.unwrap(model)
    for found in results[1:]:
        assert_same_bits(([], found), ([], results[0]))


@pytest.mark.filterwarnings("ignore:block .* was called in an order")
@pytest.mark.parametrize(
    ("homes", "orders"),
    each_value(("host", "states on disk", "all on disk", "every tier"), ("as planned", "off the plan")),
)
def test_what_parks_where_inputs_lay_overtakes_nobody(
    homes: str, orders: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    detector = race_detector.install(monkeypatch)
    model, optimizer, run = parking(Words(), homes, tmp_path)
    draw = random.Random(2)
    for step in range(5):
        if orders == "off the plan":
            model.order = draw.sample(range(3), draw.randint(1, 3))  # type: ignore[assignment]
        loss = model(**batch_of(step, num_samples=32))["loss"]
        if step % 2:
            with torch.no_grad():
                model(**batch_of(7, num_samples=9))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.executor.wait_for_updates()
    hightide.unwrap(model)
    assert detector.num_uses[race_detector.COMES_AND_GOES] > 300
    assert not detector.races, "\n".join(sorted(set(detector.races)))


def parking(
    model: nn.Module,
    homes: str,
    path: Path,
    draw: random.Random | None = None,
    num_samples: int = 32,
    sums: str = "on the host",
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer, Run]:
    """With inputs of blocks on the host, and gradients that park, in as much memory as the forecast tells and no more.
    `draw`: chooses what is held, what parks and what is late."""
    batch, made = batch_of(0, num_samples), adamw(model)
    plan = hightide.plan(model, made, batch, limits=ROOMY, micro_batch=num_samples // 2, **(options or IN_BACKWARD))
    plan = placed(plan, homes, sums=sums)
    blocks = [replace(block, inputs=Tier.HOST, parks=True, late=False) for block in plan.blocks]
    if draw is not None:
        blocks = [drawn(block, draw) for block in blocks]
    plan = replace(plan, blocks=tuple(blocks))
    sizes = Placement(plan).buffer_bytes
    counts = {name: draw.randint(1, 3) if draw else 2 for name in RING_COUNTS.values()}
    plan = replace(plan, **{name: counts[name] if sizes[ring] else 0 for ring, name in RING_COUNTS.items()})
    assert plan.profile is not None
    plan = replace(plan, host_limit_bytes=Solution.of(plan.profile, plan).peaks.host_peak_bytes)
    limits = folder(path) if Placement(plan).uses_disk else None
    model, made = hightide.wrap(model, made, batch, plan=plan, limits=limits)
    run = run_of(model)
    assert run is not None
    return model, made, run


def drawn(block: BlockPlan, draw: random.Random) -> BlockPlan:
    parks = draw.random() < 0.8
    late = parks and block.states is Tier.DISK and draw.random() < 0.5
    activation = draw.choice(list(Activation)) if block.name else block.activation
    held = Tier.HOST if activation is not Activation.RECOMPUTE and block.name and draw.random() < 0.7 else Tier.GPU
    inputs = Tier.GPU if activation is Activation.KEEP and held is Tier.GPU else Tier.HOST
    return replace(block, parks=parks, late=late, activation=activation, held=held, inputs=inputs)


# -- what users do ----------------------------------------------------------------------------------------------------


def test_states_are_read_and_written_as_in_plain_pytorch(tmp_path: Path) -> None:
    def act(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        params = dict(model.named_parameters())
        first, second = params["layers.0.0.weight"], params["layers.1.3.weight"]
        seen = []
        for step in range(5):
            model(**batch_of(step))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += [optimizer.state[first]["exp_avg"].clone(), optimizer.state[first]["step"].clone()]
            if step == 1:
                optimizer.state[first]["exp_avg"].mul_(0.5)  # nobody keeps the tensor
            if step == 2:
                held = optimizer.state[second]["exp_avg_sq"]
                held.view(-1)[3:9].add_(1.0)
                seen.append(optimizer.state[second]["exp_avg_sq"].clone())
            if step == 3:
                optimizer.state[second]["exp_avg"] = torch.ones_like(optimizer.state[second]["exp_avg"])
                del optimizer.state[first]
        return [*seen, *(value.clone() for value in model.state_dict().values())]

    plain = Words()
    expected = act(plain, adamw(plain))
    model, optimizer, _ = wrapped(Words(), "states on disk", tmp_path)
    for found, other in zip(act(model, optimizer), expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-6)
    hightide.unwrap(model)


def test_a_state_that_was_taken_before_a_step_is_not_written_to_after_it(tmp_path: Path) -> None:
    model, optimizer, _ = wrapped(Words(), "states on disk", tmp_path)
    train(model, optimizer, 1)
    held = optimizer.state[dict(model.named_parameters())["layers.0.0.weight"]]["exp_avg"]
    train(model, optimizer, 1)
    held.zero_()
    model(**batch_of(0))["loss"].backward()
    with pytest.raises(Refused, match=r"Take it from optimizer\.state again"):
        optimizer.step()
    optimizer.step()
    hightide.unwrap(model)


def test_a_state_that_is_written_to_after_forward_counts_in_backward(tmp_path: Path) -> None:
    """By then states were read ahead for their updates."""
    results = []
    for homes in ("host", "states on disk"):
        model, optimizer, _ = wrapped(Words(), homes, tmp_path, num_buffers=7, **IN_BACKWARD)
        train(model, optimizer, 1)
        held = [optimizer.state[param]["exp_avg"] for param in model.parameters()]
        loss = model(**batch_of(1))["loss"]
        for moment in held:
            moment.fill_(1.0)
        loss.backward()
        optimizer.step()
        results.append({name: value.clone() for name, value in model.state_dict().items()})
        hightide.unwrap(model)
    assert_same_bits(([], results[1]), ([], results[0]))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_state_dicts_go_from_disk_to_memory_and_back(dtype: torch.dtype, tmp_path: Path) -> None:
    """Half of the steps here, the other half there, are all of them in one place."""
    whole = train(*wrapped(Words().to(dtype), "host", tmp_path)[:2], num_steps=6)
    for before, after in (("all on disk", "gpu"), ("gpu", "all on disk"), ("every tier", "states on disk")):
        model, optimizer, _ = wrapped(Words().to(dtype), before, tmp_path)
        seen = train(model, optimizer, 3)[0]
        saved = model.state_dict(), optimizer.state_dict()
        hightide.unwrap(model)
        model, optimizer, _ = wrapped(Words().to(dtype), after, tmp_path)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        rest = []
        for step in range(3, 6):
            loss = model(**batch_of(100 * step))["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rest.append(loss.item())
        found = {name: value.clone() for name, value in model.state_dict().items()}
        assert_same_bits((seen + rest, found), whole)
        hightide.unwrap(model)


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_values_loaded_after_forward_are_those_that_backward_finds(update: str, tmp_path: Path) -> None:
    """What was read ahead by then is read again."""

    def act(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        train(model, optimizer, 1)
        other = {name: value * 0.5 for name, value in model.state_dict().items()}
        loss = model(**batch_of(1))["loss"]
        model.load_state_dict(other)
        for index in range(3):
            moments = optimizer.state[dict(model.named_parameters())[f"layers.{index}.0.weight"]]
            moments["exp_avg"] = torch.ones_like(moments["exp_avg"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return train(model, optimizer, 1)[1]

    results = [
        act(*wrapped(Words(), homes, tmp_path, update=update, num_buffers=5)[:2]) for homes in ("host", *ON_DISK)
    ]
    for found in results[1:]:
        assert_same_bits(([], found), ([], results[0]))


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_a_run_moves_from_and_to_a_disk(update: str, tmp_path: Path) -> None:
    expected = train(*wrapped(Words(tied=True), "host", tmp_path, update=update)[:2], num_steps=len(HOMES))
    model, optimizer, run = wrapped(Words(tied=True), "all on disk", tmp_path, update=update)
    assert run.plan.profile is not None
    held = None
    seen: list[float] = []
    for step, homes in enumerate(HOMES):
        run.move_to(Solution.of(run.plan.profile, placed(run.plan, homes)))
        loss = model(**batch_of(100 * step))["loss"]
        loss.backward()
        if update == "deferred" and step % 2:  # with gradients that are under way
            run.move_to(Solution.of(run.plan.profile, placed(run.plan, list(HOMES)[-step])))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
        held = optimizer.state[model.layers[0][0].weight]["exp_avg"]  # type: ignore[index]
    run.move_to(Solution.of(run.plan.profile, placed(run.plan, "states on disk")))
    assert held is not None
    held.add_(0.0)  # a copy by now, as any other
    found = {name: value.clone() for name, value in model.state_dict().items()}
    assert_same_bits((seen, found), expected)
    hightide.unwrap(model)


def test_evaluation_and_generate_go_through_the_disk(tmp_path: Path) -> None:
    results = []
    for homes in ("host", "all on disk", "every tier"):
        model, batch = models.llama(tied=False, num_layers=2)
        optimizer = adamw(model)
        plan = placed(hightide.plan(model, optimizer, batch, limits=ROOMY, micro_batch=2), homes)
        limits = folder(tmp_path) if plan.uses_disk else None
        model, optimizer = hightide.wrap(model, optimizer, batch, plan=plan, limits=limits)
        models.loss_of(model, batch).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            results.append((model(**batch).logits, model.generate(batch["input_ids"][:1, :3], max_new_tokens=6)))
        hightide.unwrap(model)
    for found in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found, results[0], strict=True))


def test_gradients_on_disk_are_read_scaled_and_replaced(tmp_path: Path) -> None:
    def act(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        model(**batch_of(0))["loss"].backward()
        params = dict(model.named_parameters())
        first, second, third = (params[f"layers.{index}.0.weight"] for index in range(3))
        seen = [first.grad.clone(), second.grad.norm()]
        first.grad = first.grad * 0.5
        second.grad.mul_(3.0)
        third.grad.add_(torch.ones(72, WIDTH))
        model(**batch_of(1))["loss"].backward()
        seen += [param.grad.clone() for param in (first, second, third)]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
        return [*seen, *(value.clone() for value in model.state_dict().values())]

    plain = Words()
    expected = act(plain, adamw(plain))
    for homes in ON_DISK:
        model, optimizer, _ = wrapped(Words(), homes, tmp_path)
        for found, other in zip(act(model, optimizer), expected, strict=True):
            torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-6)
        hightide.unwrap(model)


def test_gradients_that_are_replaced_before_a_step_are_those_that_it_uses(tmp_path: Path) -> None:
    """The step looks at them one by one, and by then others were read for their updates."""
    results = []
    for homes in ("host", *ON_DISK):
        model, optimizer, _ = wrapped(Words(), homes, tmp_path, num_buffers=7)
        for step in range(2):
            model(**batch_of(step))["loss"].backward()
            for param in model.parameters():
                assert param.grad is not None
                param.grad = param.grad * 0.5 + 1e-3
            optimizer.step()
            optimizer.zero_grad()
        results.append({name: value.clone() for name, value in model.state_dict().items()})
        hightide.unwrap(model)
    for found in results[1:]:
        assert_same_bits(([], found), ([], results[0]))


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], None]]:
    """Lets every read or write of a file fail from the given one on."""

    def fail(name: str, after: int = 0) -> None:
        move, counted = getattr(os, name), iter(range(10**9))

        def moved(*args: Any) -> int:
            if next(counted) >= after:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return move(*args)

        monkeypatch.setattr(disk_file.os, name, moved)

    yield fail


@pytest.mark.parametrize(
    ("homes", "name", "update"), each_value(("all on disk", "states on disk"), ("preadv", "pwritev"), UPDATES)
)
def test_an_error_of_the_disk_ends_the_step_as_itself(
    homes: str, name: str, update: str, failing: Callable[..., None], tmp_path: Path
) -> None:
    model, optimizer, run = wrapped(Words(), homes, tmp_path, update=update)
    train(model, optimizer, 2)
    run.executor.wait_for_updates()
    failing(name, 5)
    began_s = time.monotonic()
    with pytest.raises(OSError, match=r"Input/output error") as caught:
        train(model, optimizer, 3)
    assert caught.value.errno == errno.EIO and "bytes at" in str(caught.value)
    with pytest.raises(OSError, match=r"Input/output error"):  # values on disk may be half of an update
        model(**batch_of(0))
    with pytest.raises(OSError, match=r"Input/output error"):
        model.state_dict()
    assert time.monotonic() - began_s < 20
    run.discard()


def test_a_lane_that_has_failed_is_told_before_a_step_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That is missing because it failed."""
    model, _, run = wrapped(Words(), "states on disk", tmp_path, update="in_backward")
    model(**batch_of(0))["loss"].backward()
    with pytest.raises(hightide.Refused, match=r"between backward and optimizer\.step"):
        model(**batch_of(0))

    def failed() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(run.lanes, "check", failed)
    with pytest.raises(OSError, match="Input/output error"):
        model(**batch_of(0))
    monkeypatch.undo()
    run.discard()


def test_a_model_that_is_not_wrapped_after_all_is_as_before(failing: Callable[..., None], tmp_path: Path) -> None:
    model = Words()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    failing("pwritev", 2)  # one has tried whether the file works
    with pytest.raises(OSError, match="Input/output error"):
        wrapped(model, "all on disk", tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "loss" in model(**batch_of(0)) and not list(tmp_path.iterdir())


def test_an_exception_in_a_block_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    def act(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
        train(model, optimizer, 2)
        for at in ("forward", "backward"):
            handle = failing_at(model, at)
            with pytest.raises(ZeroDivisionError):
                model(**batch_of(9))["loss"].backward()
            handle.remove()
            optimizer.zero_grad()
        return train(model, optimizer, 3, clip=True)

    def failing_at(model: Any, at: str) -> Any:
        def fail(*_: Any) -> None:
            raise ZeroDivisionError

        layer = model.layers[1]
        return layer.register_forward_pre_hook(fail) if at == "forward" else layer.register_full_backward_hook(fail)

    results = {homes: act(*wrapped(Words(), homes, tmp_path)[:2]) for homes in ("host", *ON_DISK)}
    for found in results.values():
        assert_same_bits(found, results["host"])


@pytest.mark.filterwarnings("ignore:block .* was called in an order", "ignore:block .* runs the whole batch")
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]], ids=["as planned", "off the plan"])
def test_gradients_of_a_backward_that_was_cut_off_are_for_nobody(order: list[int], tmp_path: Path) -> None:
    """Neither does an update take them for those of a later pass, nor do they keep their places on the host."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    def act(homes: str) -> Trained:
        model, optimizer, run = wrapped(Words(), homes, tmp_path, num_buffers=1, **IN_BACKWARD)
        train(model, optimizer, 1)
        run.executor.wait_for_updates()
        standing_bytes = run.host.used_bytes
        saved = {name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict()
        model.order = order  # type: ignore[assignment]
        inside = model.layers[order[0]][2]  # type: ignore[index]
        handle = inside.register_full_backward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model(**batch_of(9))["loss"].backward()
        handle.remove()
        model.order = [0, 1, 2]  # type: ignore[assignment]
        optimizer.zero_grad()
        optimizer.step()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        model(**batch_of(0))
        assert run.host.used_bytes == standing_bytes
        found = train(model, optimizer, 2)
        hightide.unwrap(model)
        return found

    expected = act("gpu")
    for homes in ("host", "states on disk", "all on disk"):
        assert_same_bits(act(homes), expected)


# -- limits -----------------------------------------------------------------------------------------------------------


def test_a_plan_with_a_disk_needs_a_folder_that_can_hold_it(tmp_path: Path) -> None:
    model = Words()
    optimizer = adamw(model)
    plan = placed(hightide.plan(model, optimizer, batch_of(0), limits=ROOMY, micro_batch=2), "all on disk")
    for limits in (None, hightide.Limits(disk=f"{tmp_path}:16KiB")):
        with pytest.raises(ValueError, match=r"bytes .* on disk, and the folders of Limits\(disk=...\) may have"):
            hightide.wrap(model, optimizer, batch_of(0), plan=plan, limits=limits)
    with pytest.raises(ValueError, match="pass either plan= or these"):
        hightide.wrap(model, optimizer, batch_of(0), plan=plan, limits=hightide.Limits(gpu="1MiB"))


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_limits_alone_lead_to_a_plan_that_uses_the_disk(update: str, tmp_path: Path) -> None:
    """On two disks, because that is where it differs."""
    (tmp_path / "other").mkdir()
    plain, model = Words(), Words()
    expected = train(plain, adamw(plain), 4)
    optimizer = adamw(model)
    disks = [f"{tmp_path}:64KiB", f"{tmp_path / 'other'}:1MiB"]
    limits = hightide.Limits(gpu="64KiB", host="64KiB", disk=disks)
    model, optimizer = hightide.wrap(model, optimizer, batch_of(0), limits=limits, micro_batch=2, update=update)
    stats = hightide.stats(model)
    assert Tier.DISK in {block.states for block in stats.plan.blocks}
    assert_equal(train(model, optimizer, 4), expected)
    stats = hightide.stats(model)
    for tier, limit_bytes in (("gpu", 64 << 10), ("host", 64 << 10), ("disk", (64 << 10) + (1 << 20))):
        assert stats.peak_bytes[tier] <= limit_bytes
    hightide.unwrap(model)


def descriptors(folder: Path) -> list[str]:
    """Files in a folder that this process has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # of the listing itself
            found.append(os.readlink(link))
    return [target for target in found if str(folder) in target]


@pytest.mark.parametrize("how", ["unwrapped", "dropped", "dropped in the middle"])
def test_no_file_and_no_thread_is_left(how: str, tmp_path: Path) -> None:
    threads = OwnThreads()
    model, optimizer, run = wrapped(Words(), "all on disk", tmp_path, update="in_backward")
    train(model, optimizer, 1)
    assert descriptors(tmp_path) and not list(tmp_path.iterdir())
    assert threads.alive()
    if how == "unwrapped":
        hightide.unwrap(model)
    elif how == "dropped in the middle":
        model(**batch_of(0))["loss"].backward()
    del model, optimizer, run

    def is_gone() -> bool:
        gc.collect()  # what is under way is finished first
        return not descriptors(tmp_path) and not threads.alive()

    assert soon(is_gone)


def test_a_fork_neither_uses_nor_closes_what_is_its_parents(tmp_path: Path) -> None:
    model, optimizer, _ = wrapped(Words(), "all on disk", tmp_path)
    train(model, optimizer, 1)
    child = os.fork()
    if child == 0:
        refused = 1
        try:
            model(**batch_of(0))
        except BaseException as error:
            refused = 0 if isinstance(error, RuntimeError) and "fork" in str(error) else 2
        finally:
            os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    expected = train(*wrapped(Words(), "host", tmp_path)[:2], num_steps=1)
    assert_same_bits(([], {name: value.clone() for name, value in model.state_dict().items()}), ([], expected[1]))
    hightide.unwrap(model)


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_ctrl_c_while_a_disk_hangs_interrupts_at_once_and_training_goes_on(
    update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(*wrapped(Words(), "host", tmp_path, update=update)[:2], num_steps=3)
    model, optimizer, run = wrapped(Words(), "all on disk", tmp_path, update=update)
    seen = train(model, optimizer, 1)[0]
    run.executor.wait_for_updates()
    read, goes_on, asked = os.preadv, threading.Event(), threading.Lock()

    def hang(*args: Any) -> int:
        if asked.acquire(blocking=False):  # once: the forward that is interrupted has begun
            os.kill(os.getpid(), signal.SIGINT)
        goes_on.wait(60)
        return read(*args)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    monkeypatch.setattr(disk_file.os, "preadv", hang)
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        model(**batch_of(9))
    assert time.monotonic() - began_s < 10
    signal.signal(signal.SIGINT, before)
    goes_on.set()
    for step in (1, 2):
        loss = model(**batch_of(100 * step))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    found = {name: value.clone() for name, value in model.state_dict().items()}
    assert_same_bits((seen, found), expected)
    hightide.unwrap(model)


QUICK_EXACT = {  # what always runs: each home and each loop twice, with its slow lane
    *(("host", "in backward", Lane.CPU), ("every tier", "in backward", Lane.CPU)),
    *(("states on disk", "clipped", None), ("all on disk", "clipped", None)),
    *(("host", "accumulated", Lane.D2H), ("all on disk", "accumulated", Lane.D2H)),
}
EXACT = ("host", "states on disk", "all on disk", "every tier")


@pytest.mark.parametrize(
    ("homes", "loop", "lane"),
    [
        pytest.param(homes, loop, lane, marks=() if (homes, loop, lane) in QUICK_EXACT else pytest.mark.long)
        for homes in EXACT
        for loop in ("in backward", "clipped", "accumulated")
        for lane in (None, Lane.CPU, Lane.D2H)
    ],
)
def test_the_host_needs_no_byte_more_than_is_told(
    homes: str, loop: str, lane: Lane | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients park where inputs of blocks lay that have had their backward, and what blocks hold lies there too: a
    real GPU's host memory is exactly as large as the forecast, however slow the lanes are."""
    draw = random.Random(f"{homes} {loop}")
    if lane is not None:
        slow_down(monkeypatch, lane)
    _, options, doing = CASES[loop]
    for build in (Words, partial(Words, tied=True), partial(Words, dropout=0.3)):
        model, optimizer, run = parking(build(), homes, tmp_path, draw, **(options or {"update": "deferred"}))
        for step in range(3):
            for part in range(doing.get("accumulate", 1)):
                loss = model(**batch_of(10 * step + part, num_samples=32))["loss"]
                with torch.no_grad():
                    model(**batch_of(7, num_samples=32))
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert hightide.stats(model).peak_bytes["host"] <= run.plan.host_limit_bytes
        hightide.unwrap(model)
