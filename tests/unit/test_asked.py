"""What the user asks for, where it can be right and not what was meant."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from hightide import asked
from hightide.doctor.disk_speed import Filesystem
from hightide.ir.limits import DiskLimit


@pytest.mark.parametrize(("kind", "is_told"), [("tmpfs", True), ("ext4", False)])
def test_a_folder_in_memory_is_no_disk(
    kind: str, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked, "filesystem_of", lambda folder: Filesystem(kind, "device"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(2):  # by the command, and by `wrap`
            asked.check_disks([DiskLimit(str(tmp_path), 1 << 20)])
    assert [str(one.message) for one in told] == is_told * [
        f"Limits(disk) names '{tmp_path}', which is a tmpfs: what is put there lies in host memory, beside the host's "
        "limit; name a folder on a real disk"
    ]
