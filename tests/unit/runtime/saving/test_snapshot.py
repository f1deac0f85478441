"""A snapshot's values are those after its step, to the bit, wherever they live and however slow the reader is; and
training's own are what they would have been."""

from __future__ import annotations

import functools
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import disk_plans
import models
from each_value import each_value
from hightide.ir.tier import Lane, Tier
from hightide.runtime import run_values as run_module
from hightide.runtime.lanes import thread_lives
from hightide.runtime.saving.tiles import PARAM
from snapshot_readers import Case, Reader, Values, assert_same_bits, with_spare

STEPS_BEFORE, STEPS_BESIDE = 2, 3
PLENTY, LITTLE, NONE = 2**22, 6 * 1024, 0
TILE_BYTES = 2048  # far less than a block's array


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "TILE_BYTES", TILE_BYTES)
    monkeypatch.setattr(run_module, "SMALL_TILE_BYTES", TILE_BYTES)


@functools.cache
def case(homes: str, update: str, spare: int, accumulate: int = 1) -> Case:
    return Case(
        lambda: models.hand_written(num_layers=4),
        lambda plan: with_spare(disk_plans.placed(plan, homes), spare),
        {"update": update},
        {"disk": f"{tempfile.gettempdir()}:64MiB"} if "disk" in homes or homes == "every tier" else {},
        accumulate=accumulate,
    )


@functools.cache
def expected(homes: str, update: str, accumulate: int = 1) -> tuple[Values, Values]:
    """After the step that is saved, and at the end, of a run that nobody has saved."""
    training = case(homes, update, PLENTY, accumulate).begin()
    training.steps(STEPS_BEFORE)
    saved = training.at_rest()
    training.steps(STEPS_BESIDE)
    found = saved, training.at_rest()
    training.close()
    return found


CASES = each_value(list(disk_plans.HOMES), ("deferred", "in_backward"), (PLENTY,))
CASES += [("gpu", "deferred", NONE), ("gpu", "in_backward", LITTLE), ("host", "in_backward", NONE)]
CASES += [("host", "deferred", LITTLE), ("all on disk", "in_backward", NONE), ("states on disk", "deferred", LITTLE)]
CASES += [("every tier", "deferred", NONE), ("every tier", "in_backward", LITTLE)]


@pytest.mark.parametrize(("homes", "update", "spare"), CASES)
def test_training_goes_on_while_it_is_read(homes: str, update: str, spare: int) -> None:
    """With plenty of memory the reader may stand still, unless it has values where they lie on the host."""
    training = case(homes, update, spare).begin()
    training.steps(STEPS_BEFORE)
    snapshot = training.run.snapshot()
    stands_still = spare == PLENTY and homes in ("gpu", "all on disk")
    reader = Reader(snapshot, num_parts=0) if stands_still else Reader(snapshot, pause_s=0.002)
    training.steps(STEPS_BESIDE)
    found, cost = reader.values(), snapshot.cost
    final = training.at_rest()
    saved, end = expected(homes, update)
    assert_same_bits(found, saved)
    assert_same_bits(final, end)
    host = training.run.host
    assert host.peak_bytes <= host.capacity_bytes and "copies for a checkpoint" not in host.breakdown()
    assert training.run.performer.updating.saving is None
    assert cost.copied_bytes > 0 or (homes == "host" and spare == NONE)
    assert cost.waited_s > 0 or spare == PLENTY
    assert cost.waited_s == 0 or not stands_still
    training.close()


@pytest.mark.parametrize(
    ("homes", "update", "spare"),
    [("host", "deferred", NONE), ("gpu", "in_backward", LITTLE), ("every tier", "deferred", PLENTY)],
)
def test_a_reader_may_have_several_tiles_and_give_them_back_in_any_order(homes: str, update: str, spare: int) -> None:
    """Each by a thread of its own, later. Nothing that it has changes; what waits for one of two buffers gets it."""
    training = case(homes, update, spare).begin()
    training.steps(STEPS_BEFORE)
    snapshot = training.run.snapshot()
    found: dict[tuple[str, str], dict[int, Any]] = {}
    pauses = random.Random(0)
    num_there, most, lock = 0, 0, threading.Lock()

    def give_back(parts: Any, passed: Any, pause_s: float) -> None:
        nonlocal num_there
        time.sleep(pause_s)
        for tensor, first, part in parts:
            found.setdefault((tensor.key, tensor.kind), {})[first] = (tensor, part.clone())
        with lock:
            num_there -= 1
        passed()

    def read() -> None:
        nonlocal num_there, most
        with ThreadPoolExecutor(4) as others:
            for parts, passed in snapshot.tiles():
                with lock:
                    num_there += 1
                    most = max(most, num_there)
                waiting.append(others.submit(give_back, parts, passed, pauses.random() / 200))

    waiting: list[Any] = []
    reader = threading.Thread(target=read)
    reader.start()
    training.steps(STEPS_BESIDE)
    reader.join(60)
    for one in waiting:
        one.result(60)
    snapshot.close()
    saved, end = expected(homes, update)
    assert most > 1, "else this shows nothing"
    joined = {
        name: torch.cat([parts[first][1] for first in sorted(parts)]).view(next(iter(parts.values()))[0].shape)
        for name, parts in found.items()
    }
    assert_same_bits(joined, saved)
    assert_same_bits(training.at_rest(), end)
    training.close()


def test_updates_on_the_host_go_on_while_the_reader_has_a_part_of_another_chunk() -> None:
    training = case("host", "deferred", PLENTY).begin()
    training.steps(STEPS_BEFORE)
    order = training.run.executor.update_order()
    last = {entry.param for entry in training.run.chunks.specs[order[-1]].params}
    snapshot = training.run.snapshot(lambda key, kind: key in last)
    assert {tensor.key for tensor in snapshot.tensors} == last
    snapshot.close()
    snapshot = training.run.snapshot()
    first = next(number for number, tensor in enumerate(snapshot.tensors) if tensor.key in last)
    reader = Reader(snapshot, num_parts=first)
    while reader.num_read < first:
        time.sleep(0.001)
    training.steps(1)  # but for the last chunk, whose update waits for the reader, everything was read
    waited_s = snapshot.cost.waited_s
    assert_same_bits(reader.values(), expected("host", "deferred")[0])
    assert snapshot.cost.waited_s >= waited_s
    training.close()


@pytest.mark.parametrize(("homes", "spare"), [("gpu", LITTLE), ("host", PLENTY), ("host", NONE)])
def test_several_passes_before_a_step(homes: str, spare: int) -> None:
    training = case(homes, "deferred", spare, 2).begin()
    training.steps(STEPS_BEFORE)
    reader = Reader(training.run.snapshot(), pause_s=0.001)
    training.steps(STEPS_BESIDE)
    found, final = reader.values(), training.at_rest()
    saved, end = expected(homes, "deferred", 2)
    assert_same_bits(found, saved)
    assert_same_bits(final, end)
    training.close()


@pytest.mark.parametrize(("homes", "update"), [("host", "deferred"), ("all on disk", "in_backward")])
def test_updates_that_are_under_way_belong_to_it(homes: str, update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes that change values at home are late when the reader is there already."""
    run, late = thread_lives._run, []

    def slowly(task: Any, *rest: Any) -> None:
        if task.lane in (Lane.CPU, Lane.DISK_WRITE):
            late.append(task.id)
            time.sleep(0.02)
        run(task, *rest)

    training = case(homes, update, PLENTY).begin()
    training.steps(STEPS_BEFORE - 1)
    training.run.executor.wait_for_updates()
    monkeypatch.setattr(thread_lives, "_run", slowly)
    training.steps(1)
    num_late = len(late)
    reader = Reader(training.run.snapshot())
    training.steps(STEPS_BESIDE)
    found, final = reader.values(), training.at_rest()
    assert num_late < len(training.run.chunks.specs), "all was done when the reader began"
    saved, end = expected(homes, update)
    assert_same_bits(found, saved)
    assert_same_bits(final, end)
    training.close()


def test_it_is_told_beforehand_what_comes() -> None:
    training = case("every tier", "deferred", PLENTY).begin()
    snapshot = training.run.snapshot()
    assert {tensor.kind for tensor in snapshot.tensors} == {PARAM}, "nothing was updated yet"
    snapshot.close()
    training.steps(1)
    snapshot = training.run.snapshot()
    assert {tensor.kind for tensor in snapshot.tensors} == {PARAM, "exp_avg", "exp_avg_sq"}
    assert {tensor.key for tensor in snapshot.tensors} == set(training.run.parameters)
    assert snapshot.num_bytes == sum(value.nbytes for value in training.at_rest().values())
    order = [training.run.chunks.places[tensor.key][0] for tensor in snapshot.tensors]
    assert list(dict.fromkeys(order)) == training.run.executor.update_order()
    snapshot.close()
    training.close()


def test_chunks_are_read_in_the_order_of_their_updates() -> None:
    """In backward the last block's update comes first; else that of the block which the next forward uses first."""
    for update, backwards in (("deferred", False), ("in_backward", True)):
        training = case("host", update, PLENTY).begin()
        order = [training.run.chunks.specs[chunk] for chunk in training.run.executor.update_order()]
        blocks = [spec.block for spec in order if training.run.profile.blocks[spec.block].name]  # not what is loose
        assert blocks == sorted(blocks, reverse=backwards) and len(order) == len(training.run.chunks.specs)
        training.close()


def test_only_what_is_wanted_is_kept() -> None:
    training = case("gpu", "deferred", PLENTY).begin()
    training.steps(STEPS_BEFORE)
    snapshot = training.run.snapshot(lambda key, kind: kind == PARAM and key.endswith("weight"))
    reader = Reader(snapshot, num_parts=0)
    training.steps(STEPS_BESIDE)
    saved = expected("gpu", "deferred")[0]
    wanted = {name: value for name, value in saved.items() if name[1] == PARAM and name[0].endswith("weight")}
    assert_same_bits(reader.values(), wanted)
    assert snapshot.cost.copied_bytes < 1.1 * sum(value.nbytes for value in wanted.values())
    training.close()


@pytest.fixture(scope="module", autouse=True)
def forget() -> Iterator[None]:
    yield
    expected.cache_clear()
    case.cache_clear()


def test_every_tier_has_its_place_in_the_plans() -> None:
    placed = case("every tier", "deferred", PLENTY).begin()
    assert {place.states for place in placed.run.chunks.placed} == set(Tier)
    placed.close()
