"""Crashes, faults and damages leave the newest checkpoint whole, and training that goes on from it as if nothing had
happened. Many more: `bench/checkpoint_crashes.py`."""

from __future__ import annotations

import importlib
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hightide.checkpoint.files import filesystem, leftovers, writer
from hightide.checkpoint.files.checked import CheckedFile
from hightide.checkpoint.files.folder import newest_whole
from hightide.checkpoint.files.keeping import keep_only
from hightide.checkpoint.files.writer import CheckpointWriter
from small_checkpoints import content, write

BENCH = Path(__file__).resolve().parents[2] / "bench"
TIERS = ("host", "disk")
NUM_REPLAYS = 12
FAULTS = 3  # of each call one of the three errors, and of both kinds of short writes
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files and processes of Linux")


@pytest.fixture(scope="module")
def crashes() -> Iterator[Any]:
    before = list(sys.path)
    sys.path.insert(0, str(BENCH))
    try:
        yield importlib.import_module("checkpoint_crashes")
    finally:
        sys.path[:] = before


@pytest.fixture(scope="module", params=TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def subject(crashes: Any, tier: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return crashes.Subject.make(tier, tmp_path_factory.mktemp("crashes") / tier, num_losses=12)


def test_after_a_crash_the_newest_checkpoint_is_whole(crashes: Any, subject: Any, tier: str) -> None:
    found = list(crashes.replays(subject, NUM_REPLAYS, seed=TIERS.index(tier)))
    assert [one.problems for one in found] == [[]] * NUM_REPLAYS
    assert {one.kind for one in found} == {*crashes.WAYS, "twice"}


@pytest.mark.filterwarnings("ignore:.*an old checkpoint cannot be removed")
def test_faults_are_told_or_made_good(crashes: Any, subject: Any, tier: str) -> None:
    kinds = [
        kind for index, kind in enumerate(crashes.FAULTS) if index % FAULTS == TIERS.index(tier) or " in " not in kind
    ]
    found = [crashes.fault(subject, kind, seed) for seed, kind in enumerate(kinds)]
    assert [one.problems for one in found] == [[]] * len(kinds)
    assert sum(one.hit for one in found) >= len(kinds) - 1


def test_damaged_files_name_themselves_and_the_newest_whole_checkpoint(crashes: Any, subject: Any) -> None:
    found = [crashes.damage(subject, kind, seed) for seed, kind in enumerate(crashes.DAMAGES)]
    assert [one.problems for one in found] == [[]] * len(crashes.DAMAGES)
    assert sum(one.hit for one in found) >= len(crashes.DAMAGES) - 1


@pytest.mark.parametrize("kind", ["full tmpfs", "file size limit", "read-only"])
def test_faults_of_the_system_itself(crashes: Any, subject: Any, kind: str, tier: str) -> None:
    if kind == "file size limit" and tier == "disk":
        pytest.skip("what lives on a disk would not be allowed to grow either")
    found = crashes.real_fault(subject, kind, 0)
    if found.skipped:
        pytest.skip(found.skipped)
    assert found.problems == []


def test_killed_processes(crashes: Any, tmp_path: Path) -> None:
    subject = crashes.Subject.make("host", tmp_path / "host", num_losses=60)
    found = list(crashes.kills(subject, "host", 2, seed=3))
    assert [one.problems for one in found] == [[], []] and all(one.hit for one in found)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_thousand_crashes(crashes: Any, tier: str, memory: Path) -> None:
    found = list(crashes.rounds(tier, memory / tier, num_replays=450, num_kills=50, num_faults=150, num_damages=50))
    print(crashes.table(found))
    assert [problem for one in found for problem in one.problems] == []


# -- saves of made-up contents: all moments, and what the driver would see -------------------------------------------


def record(folder: Path, not_synced: str = "") -> Any:
    """A step twice, one that fails, others that go; as if some of it were never synced."""
    model = importlib.import_module("crash_model")
    folder.mkdir()
    with model.recording(folder) as log, pytest.MonkeyPatch.context() as patch:
        real = filesystem.sync

        def sync(file: int) -> None:
            name = Path(os.readlink(f"/proc/self/fd/{file}")).name
            if not_synced != ("folder" if name.endswith(".tmp") else "parent" if name == folder.name else "files"):
                real(file)

        patch.setattr(filesystem, "sync", sync)
        for step, numel in ((1, 300), (2, 300), (2, 200), (3, 300)):
            write(folder, step, numel)
            log.commit(step)
        keep_only(folder, 2, None, 3)
        with CheckpointWriter(folder, 4) as given_up:
            given_up.bytes("training.json", b"{}")
        write(folder, 5, 300)
        log.commit(5)
        keep_only(folder, 1, None, 5)
    return log


def problem_after(log: Any, num_calls: int, way: str, place: Path, goes_on: bool) -> str | None:
    """What is wrong after a crash; `goes_on`: with another save too."""
    model = importlib.import_module("crash_model")
    model.write_tree(place, model.crashed(log, num_calls, way, random.Random(num_calls)))
    try:
        committed, newest = log.committed_step(num_calls), newest_whole(place)[0]
        if newest != newest_whole(place, verify=True)[0]:
            return f"{newest} is not whole"
        if committed is not None and (newest is None or int(newest.name[5:].partition(".")[0]) < committed):
            return f"{committed} was saved, {newest} is the newest"
        if newest is not None and content(newest)["training.json"] != b'{"step": %s}' % newest.name[5:6].encode():
            return f"{newest} has another content"
        if goes_on:
            write(place, 6, 10)
            wrong = [name for name in os.listdir(place) if "." in name]
            return f"{wrong} is left" if wrong or newest_whole(place, verify=True)[0] != place / "step-6" else None
        return None
    finally:
        shutil.rmtree(place)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder on a disk that needs no time to sync."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield Path(folder)


@pytest.fixture
def recorded(crashes: Any, memory: Path) -> Any:
    return record(memory / "recorded")


def test_at_every_moment(crashes: Any, recorded: Any, memory: Path) -> None:
    for num_calls in range(len(recorded.calls) + 1):
        for way in crashes.WAYS[num_calls % 2 :: 2]:
            problem = problem_after(recorded, num_calls, way, memory / "crashed", goes_on=num_calls % 3 == 0)
            assert problem is None, (num_calls, way, problem)


@pytest.mark.parametrize("what", ["files", "folder", "parent", "exchange"])
def test_the_driver_finds_saves_that_leave_out_a_step(
    crashes: Any, what: str, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "exchange":
        monkeypatch.setattr(writer.leftovers, "exists", remove_first)
    log = record(memory / "recorded", not_synced=what)
    monkeypatch.undo()
    moments = ((num_calls, way) for num_calls in range(len(log.calls)) for way in crashes.WAYS)
    assert any(problem_after(log, *moment, memory / "crashed", goes_on=False) for moment in moments)


def remove_first(name: str, parent: int) -> bool:
    """A step that is saved again, before the other one has its name."""
    with suppress(ValueError):
        leftovers.remove_checkpoint(name, parent, Path())
    return False


def test_the_driver_finds_damages_that_nobody_sees(
    crashes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = crashes.Subject.make("host", tmp_path / "host", num_losses=12)
    monkeypatch.setattr(CheckedFile, "looked_through", lambda _: iter(()))
    assert "silent" in crashes.damage(subject, "bit changed", 0).problems[0]


# -- the model of a disk ---------------------------------------------------------------------------------------------


def test_what_was_synced_stays_and_the_rest_may_be_lost(crashes: Any, tmp_path: Path) -> None:
    model = importlib.import_module("crash_model")
    (tmp_path / "old").write_bytes(b"old")
    with model.recording(tmp_path) as log:
        parent = filesystem.open_folder(tmp_path)
        filesystem.make_folder("sub", parent)
        sub = filesystem.open_below("sub", parent)
        file = filesystem.create("file", sub)
        filesystem.write(file, memoryview(b"x" * 2000), 0)
        filesystem.sync(file)
        filesystem.write(file, memoryview(b"y" * 2000), 1000)
        filesystem.sync(sub)
        filesystem.rename("old", "new", parent)
        for descriptor in (parent, sub, file):
            os.close(descriptor)

    def state(way: str, seed: int = 0, num_calls: int = len(log.calls)) -> Any:
        return model.crashed(log, num_calls, way, random.Random(seed))

    whole = b"x" * 1000 + b"y" * 2000
    assert state("everything") == {"new": b"old", "sub": {"file": whole}} == model.read_tree(tmp_path)
    assert state("nothing") == {"old": b"old"}
    assert state("names only") == {"new": b"old", "sub": {"file": b"x" * 2000}}
    assert state("data only") == {"old": b"old"}
    assert state("names only", num_calls=2) == {"old": b"old", "sub": {"file": b""}}
    seen = [state("any", seed) for seed in range(200)]
    assert {tuple(sorted(tree)) for tree in seen} == {("old",), ("new",), ("old", "sub"), ("new", "sub")}
    torn = [tree["sub"]["file"] for tree in seen if "sub" in tree]
    assert {b"x" * 2000, whole} < set(torn) and len(set(torn)) > 5
    assert all(content[:1000] == b"x" * 1000 for content in torn)
