"""Crashes, faults and damages leave the newest checkpoint whole, and training that goes on from it as if nothing had
happened. Many more: `bench/checkpoint_crashes.py`."""

from __future__ import annotations

import importlib
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hightide.checkpoint import filesystem, folder, leftovers

BENCH = Path(__file__).resolve().parents[2] / "bench"
TIERS = ("host", "disk")
NUM_REPLAYS = 18
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
def test_a_thousand_crashes(crashes: Any, tier: str, tmp_path: Path) -> None:
    found = list(crashes.rounds(tier, tmp_path / tier, num_replays=450, num_kills=50, num_faults=150, num_damages=50))
    print(crashes.table(found))
    assert [problem for one in found for problem in one.problems] == []


# -- the driver would see it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["files", "parent", "folder", "marker first", "manifest first"])
def test_the_driver_finds_saves_that_may_be_lost(
    crashes: Any, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same crashes, of saves that leave out one step."""
    subject = crashes.Subject.make("host", tmp_path / "host", num_losses=12)
    real = filesystem.sync

    def sync(file: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{file}")).name
        kind = "folder" if name.endswith((".tmp", ".gone")) else "parent" if name == "recorded" else "files"
        if kind != what:
            real(file)

    if what == "marker first":
        monkeypatch.setattr(leftovers, "remove_unfinished", remove_marker_first)
        monkeypatch.setattr(leftovers, "check_replaceable", lambda *_: None)
    elif what == "manifest first":
        monkeypatch.setattr(leftovers, "remove_checkpoint", remove_manifest_first)
    monkeypatch.setattr(filesystem, "sync", sync)
    log = crashes.record(subject, subject.folder / "recorded")
    monkeypatch.undo()
    found = [
        crashes.replay(subject, log, num_calls, way, 5 * num_calls + 1)
        for num_calls in range(0, len(log.calls), 9)
        for way in ("names only", "nothing", "any")
    ]
    problems = [problem for one in found for problem in one.problems]
    assert problems, what


def remove_marker_first(name: str, folder: int, parent: int) -> None:
    for entry in sorted(os.listdir(folder), key=lambda entry: entry != leftovers.MARKER):
        filesystem.unlink(entry, folder)
    filesystem.remove_folder(name, parent)


def remove_manifest_first(name: str, parent: int, path: Path) -> None:
    descriptor = filesystem.open_below(name, parent)
    for entry in sorted(os.listdir(descriptor), key=lambda entry: entry != leftovers.NAME):
        filesystem.unlink(entry, descriptor)
    filesystem.close(descriptor)
    filesystem.remove_folder(name, parent)


def test_the_driver_finds_damages_that_nobody_sees(
    crashes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = crashes.Subject.make("host", tmp_path / "host", num_losses=12)
    monkeypatch.setattr(folder.zlib, "crc32", lambda data, start=0: 0)
    found = [crashes.damage(subject, "bit changed", seed) for seed in range(6)]
    assert any("silent" in problem for one in found for problem in one.problems)


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
