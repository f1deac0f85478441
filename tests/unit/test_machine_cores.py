"""What the machine has to give, also inside of a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from hightide import machine


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
    paths = [tmp_path / "cpu.max"] if version == 2 else [tmp_path / "quota_us", tmp_path / "period_us"]
    if quota is not None:
        texts = [quota] if version == 2 else [f"{word}\n" for word in quota.replace("max", "-1").split()]
        for path, text in zip(paths, texts, strict=False):
            path.write_text(text)
    missing = str(tmp_path / "missing")
    quotas = [missing, missing]
    quotas[2 - version] = ":".join(map(str, paths))
    monkeypatch.setattr(machine, "_CPU_QUOTAS", tuple(quotas))
    assert machine.usable_cores() == cores
