"""What is set up badly is said, with the remedy; what is well is not."""

from __future__ import annotations

import os
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from hightide.doctor import conditions
from hightide.doctor.conditions import (
    Conditions,
    OtherProcesses,
    Others,
    PciLink,
    host_conditions,
    pci_link_at,
    warnings_of,
)
from hightide.doctor.disk_speed import Filesystem

GIB = 1 << 30
WELL = Conditions(
    num_cores=16,
    omp_threads=None,
    memory_bytes=128 * GIB,
    cgroup_bytes=None,
    swapped_bytes=0,
    huge_pages="madvise",
    update_kernel="c",
    kernels_allowed=True,
    pci=PciLink(32.0, 16, 32.0, 16),
    h2d_bytes_per_s=55e9,
    filesystem=Filesystem("ext4", "/dev/nvme0n1"),
)


def test_a_machine_that_is_well_has_no_warnings() -> None:
    assert warnings_of(WELL) == []
    near = replace(
        WELL, omp_threads="16", cgroup_bytes=120 * GIB, swapped_bytes=1000, gpu_others_bytes=GIB, others=Others(2, 16)
    )
    assert warnings_of(near) == []


@pytest.mark.parametrize(
    ("change", "problem", "remedy"),
    [
        ({"omp_threads": "1"}, "OMP_NUM_THREADS=1 of 16 cores", "unset it"),
        ({"cgroup_bytes": 8 * GIB}, "control group allows 8.0 GiB of 128 GiB", "--mem"),
        ({"swapped_bytes": 3 * GIB}, "3.0 GiB are swapped out", "Limits(host"),
        ({"others": Others(3.0, 16)}, "other processes kept 3.0 of 16 cores busy", "measure again"),
        ({"num_cores": 2}, "2 cores: the host's update has 1", "--cpus"),
        ({"update_kernel": "torch"}, "C kernel is not there", "install a C compiler"),
        ({"update_kernel": "torch", "kernels_allowed": False}, "C kernel is not there", "unset HIGHTIDE_KERNELS"),
        ({"huge_pages": "never"}, "huge pages are off", "echo madvise"),
        ({"pin_problem": "5 bytes could not be pinned"}, "5 bytes could not", "ulimit -l"),
        ({"pci": PciLink(32.0, 4, 32.0, 16)}, "×4 wide and could be ×16", "slot"),
        ({"pci": PciLink(8.0, 16, 32.0, 16)}, "8 GT/s while it is busy and could run at 32", "firmware"),
        ({"h2d_bytes_per_s": 20e9}, "reaches 20.0 GB/s of the link's 63", "numactl"),
        ({"gpu_others_bytes": 10 * GIB}, "10.0 GiB of the GPU's memory are in use", "nvidia-smi"),
        ({"filesystem": Filesystem("overlay", "overlay")}, "container's overlay", "volume"),
        ({"filesystem": Filesystem("tmpfs", "tmpfs"), "is_direct": False}, "lies in host memory", "real disk"),
        ({"filesystem": Filesystem("nfs4", "server:/x")}, "on the network", "local disk"),
        ({"is_direct": False}, "no direct access", "ext4 or xfs"),
    ],
)
def test_each_problem_is_said_with_its_remedy(change: dict[str, object], problem: str, remedy: str) -> None:
    (found,) = warnings_of(replace(WELL, **change))
    assert problem in found.problem
    assert remedy in found.remedy


def test_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HIGHTIDE_KERNELS", "0")
    now = host_conditions("torch")
    assert now.omp_threads == "1" and not now.kernels_allowed and now.num_cores >= 1 and now.memory_bytes > GIB
    assert now.pci is None and now.filesystem is None


def test_cores_that_other_processes_use_are_counted_and_our_own_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Cores 1 and 6 of those that are online; in ten seconds we use 12 of their seconds, and a compiler of ours 2."""
    at, per_s = 0, os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"

    def write(core_s: int) -> None:
        busy = f"{core_s * per_s // 2} 0 {core_s * per_s // 2} 99{core_s} 7{core_s} 0 0 0 0 0"
        stat.write_text(f"cpu  1 2 3 4\ncpu0 {500 * per_s * at} 0 0 0 0 0 0 0 0 0\ncpu1 {busy}\ncpu6 {busy}\nintr 5\n")

    ours = namedtuple("ours", "user system children_user children_system")
    monkeypatch.setattr(conditions, "usable_cpus", lambda: {1, 6})
    monkeypatch.setattr(os, "times", lambda: ours(30 + 10 * at, 2 * at, at, at))
    monkeypatch.setattr(time, "perf_counter", lambda: 50.0 + 10 * at)
    write(100)
    others = OtherProcesses(stat)
    at = 1
    write(110)
    assert others.seen() == Others(pytest.approx((2 * 10 - 14) / 10), 2)
    write(100)
    assert others.seen() is None, "nothing is counted here"
    assert OtherProcesses(tmp_path / "nothing").seen() is None


def test_a_quota_smaller_than_the_machine_does_not_look_disturbed() -> None:
    """docker --cpus=8 on 64 cores, of which 9 are busy elsewhere."""
    assert not replace(WELL, num_cores=8, others=Others(9.0, 64)).are_cores_shared
    assert replace(WELL, num_cores=8, others=Others(10.0, 64)).are_cores_shared
    assert not replace(WELL, others=None).are_cores_shared


def test_a_pci_link_is_read(tmp_path: Path) -> None:
    for name, text in {
        "current_link_speed": "16.0 GT/s PCIe",
        "current_link_width": "8",
        "max_link_speed": "32.0 GT/s PCIe",
        "max_link_width": "16",
    }.items():
        (tmp_path / name).write_text(text + "\n")
    link = pci_link_at(tmp_path)
    assert link == PciLink(16.0, 8, 32.0, 16) and link.most_bytes_per_s == pytest.approx(63e9, rel=0.01)
    (tmp_path / "current_link_speed").write_text("Unknown\n")
    assert pci_link_at(tmp_path) is None
    assert pci_link_at(tmp_path / "nowhere") is None
