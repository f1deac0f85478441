"""What the machine has to give, also inside of a container, and where this user's files are kept."""

from __future__ import annotations

import os
import pwd
import resource
from pathlib import Path

import pytest

from hightide.process import control_groups
from hightide.process import system as machine


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("200000 100000\n", 2),
        ("250000 100000\n", 3),  # what is begun counts: the rest of a core is worth a thread
        ("50000 100000\n", 1),
        ("6400000 100000\n", 16),  # the affinity is smaller
        ("max 100000\n", 16),
        ("", 16),
        ("0 100000\n", 1),
        (None, 16),  # no such file
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_usable_cores_are_those_of_the_control_groups_quota(
    version: int, quota: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(16)))
    folder = tmp_path / "sys/fs/cgroup" / ("cpu" if version == 1 else "")
    names = ["cpu.cfs_quota_us", "cpu.cfs_period_us"] if version == 1 else ["cpu.max"]
    if quota is not None:
        folder.mkdir(parents=True)
        texts = [quota] if version == 2 else [f"{word}\n" for word in quota.replace("max", "-1").split()]
        for name, text in zip(names, texts, strict=False):
            (folder / name).write_text(text)
    quota_cores, allowed_cpus = control_groups.quota_cores, control_groups.allowed_cpus
    monkeypatch.setattr(control_groups, "quota_cores", lambda: quota_cores(tmp_path))
    monkeypatch.setattr(control_groups, "allowed_cpus", lambda: allowed_cpus(tmp_path))
    assert machine.usable_cores() == cores


@pytest.mark.parametrize(("allowed", "cpus"), [({1, 2, 9}, {1, 2}), (None, {0, 1, 2, 3}), ({64, 65}, {0, 1, 2, 3})])
def test_usable_cpus_are_those_of_the_control_groups_set(
    allowed: set[int] | None, cpus: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(control_groups, "allowed_cpus", lambda: allowed)
    assert machine.usable_cpus() == cpus


def test_without_proc_memory_is_what_the_system_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise FileNotFoundError("/proc/meminfo")

    total = machine.total_bytes()
    monkeypatch.setattr(machine.psutil, "virtual_memory", fail)
    assert 0.9 * total < machine.total_bytes() < 1.1 * total
    assert 0 < machine.available_bytes() <= machine.total_bytes()


def test_a_limit_of_the_address_space_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = machine.free_host_bytes()
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (1 << 20, resource.RLIM_INFINITY))
    assert machine.free_host_bytes() == 0 < unlimited


@pytest.mark.parametrize("named", [None, "", "cache", "./cache", "../cache"])
def test_a_relative_cache_folder_is_not_used(
    named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if named is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", named)
    assert machine.cache_folder() == tmp_path / ".cache/hightide"


def test_an_absolute_cache_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine.cache_folder() == tmp_path / "hightide"


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_a_user_without_a_home_has_no_cache(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(OSError, match="no home folder"):
        machine.cache_folder()


@pytest.mark.parametrize("umask", [0, 0o077])
def test_new_folders_are_private_whatever_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        machine.make_private(tmp_path / "one/two")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "one", tmp_path / "one/two")] == [0o700, 0o700]
    assert machine.is_private(tmp_path / "one/two")


@pytest.mark.parametrize(
    ("mode", "above", "private"),
    [(0o700, 0o755, True), (0o755, 0o755, True), (0o775, 0o755, False), (0o757, 0o755, False), (0o700, 0o777, False),
     (0o700, 0o1777, True)],
)  # fmt: skip
def test_a_folder_is_private_if_nobody_else_may_change_it(mode: int, above: int, private: bool, tmp_path: Path) -> None:
    (tmp_path / "above/folder").mkdir(parents=True)
    (tmp_path / "above/folder").chmod(mode)
    (tmp_path / "above").chmod(above)
    assert machine.is_private(tmp_path / "above/folder") is private


def test_a_folder_of_another_user_is_not_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "geteuid", lambda: 4321)
    assert not machine.is_private(tmp_path)
