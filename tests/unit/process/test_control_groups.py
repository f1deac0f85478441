"""Limits are read from the process's own group up to the root of the mount, of both versions; the least one counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hightide.process import system as machine
from hightide.process.control_groups import MemoryLimit, allowed_cpus, memory_limits, quota_cores

MIB, GIB = 1 << 20, 1 << 30
NONE_V1 = "9223372036854771712\n"
UNIFIED = "35 24 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
MEMORY_V1 = "41 32 0:36 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
CPU_V1 = "42 32 0:37 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"


def tree(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    """A system as it looks from inside: /proc/self and the files of groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/self/mountinfo").write_text(mounts)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def least(root: Path) -> MemoryLimit:
    limits = memory_limits(root)
    return MemoryLimit(min(one.limit_bytes for one in limits), min(one.free_bytes for one in limits))


def test_systemd_slices_are_walked_up_and_each_groups_own_use_counts(tmp_path: Path) -> None:
    """The slice above has the smaller limit, and others in it use most of that."""
    root = tree(
        tmp_path,
        "0::/user.slice/user-1000.slice/run.scope\n",
        UNIFIED,
        {
            "user.slice/user-1000.slice/run.scope/memory.max": f"{8 * GIB}\n",
            "user.slice/user-1000.slice/run.scope/memory.current": f"{1 * GIB}\n",
            "user.slice/user-1000.slice/memory.max": f"{6 * GIB}\n",
            "user.slice/user-1000.slice/memory.current": f"{5 * GIB}\n",
            "user.slice/user-1000.slice/memory.stat": f"anon {4 * GIB}\nactive_file {256 * MIB}\n"
            f"inactive_file {256 * MIB}\n",
            "user.slice/memory.max": "max\n",
        },
    )
    assert memory_limits(root) == [MemoryLimit(8 * GIB, 7 * GIB), MemoryLimit(6 * GIB, 6 * GIB - 5 * GIB + 512 * MIB)]
    assert least(root) == MemoryLimit(6 * GIB, GIB + 512 * MIB)


def test_slurm_on_version_1_has_a_tree_per_controller(tmp_path: Path) -> None:
    job = "slurm/uid_1000/job_7"
    root = tree(
        tmp_path,
        f"9:memory:/{job}/step_0/task_0\n5:cpu,cpuacct:/{job}\n4:cpuset:/{job}/step_0\n1:name=systemd:/init\n0::/\n",
        MEMORY_V1 + CPU_V1 + "43 32 0:38 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n",
        {
            f"memory/{job}/step_0/task_0/memory.limit_in_bytes": NONE_V1,
            f"memory/{job}/memory.limit_in_bytes": f"{4 * GIB}\n",
            f"memory/{job}/memory.usage_in_bytes": f"{3 * GIB}\n",
            f"memory/{job}/memory.stat": f"cache 5\ntotal_active_file 0\ntotal_inactive_file {GIB}\nactive_file 9\n",
            f"cpu,cpuacct/{job}/cpu.cfs_quota_us": "-1\n",
            f"cpu,cpuacct/{job}/cpu.cfs_period_us": "100000\n",
            "cpu,cpuacct/slurm/cpu.cfs_quota_us": "250000\n",
            "cpu,cpuacct/slurm/cpu.cfs_period_us": "100000\n",
            f"cpuset/{job}/step_0/cpuset.cpus": "0-1,8\n",
            f"cpuset/{job}/cpuset.cpus": "0-15\n",
        },
    )
    assert least(root) == MemoryLimit(4 * GIB, 2 * GIB)
    assert quota_cores(root) == 3
    assert allowed_cpus(root) == {0, 1, 8}


def test_docker_of_version_1_mounts_its_own_group_as_the_root(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "9:memory:/docker/abc\n",
        "41 32 0:36 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        {"memory/memory.limit_in_bytes": f"{2 * GIB}\n", "memory/memory.usage_in_bytes": f"{GIB}\n"},
    )
    assert memory_limits(root) == [MemoryLimit(2 * GIB, GIB)]


@pytest.mark.parametrize("path", ["/", "/../../other", "/kubepods/burstable/pod1/abc"])
def test_docker_with_a_namespace_sees_its_own_group_as_the_root(path: str, tmp_path: Path) -> None:
    """Also where the path says something that the mount does not have."""
    root = tree(tmp_path, f"0::{path}\n", UNIFIED, {"memory.max": f"{2 * GIB}\n", "memory.current": "0\n"})
    assert least(root) == MemoryLimit(2 * GIB, 2 * GIB)


def test_kubernetes_on_version_1_hides_the_pods_limit_but_says_it(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "9:memory:/kubepods/pod1/abc\n",
        "41 32 0:36 /kubepods/pod1/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        {
            "memory/memory.limit_in_bytes": NONE_V1,
            "memory/memory.usage_in_bytes": f"{GIB}\n",
            "memory/memory.stat": f"hierarchical_memory_limit {3 * GIB}\n",
        },
    )
    assert memory_limits(root) == [MemoryLimit(3 * GIB, 2 * GIB)]


def test_hybrid_systems_have_limits_in_the_old_tree(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "9:memory:/job\n0::/user.slice\n",
        MEMORY_V1 + UNIFIED.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
        {"memory/job/memory.limit_in_bytes": f"{GIB}\n", "unified/user.slice/cgroup.procs": "1\n"},
    )
    assert memory_limits(root) == [MemoryLimit(GIB, GIB)]


def test_a_group_that_would_be_slowed_down_is_limited_there(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/\n", UNIFIED, {"memory.max": f"{2 * GIB}\n", "memory.high": f"{GIB}\n"})
    assert least(root).limit_bytes == GIB


def test_a_group_above_its_limit_has_nothing_free(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/\n", UNIFIED, {"memory.high": "1000\n", "memory.current": "5000\n"})
    assert memory_limits(root) == [MemoryLimit(1000, 0)]


def test_a_mount_with_a_space_in_its_name_is_found(tmp_path: Path) -> None:
    mounts = UNIFIED.replace("/sys/fs/cgroup", "/sys/fs/cgroup/my\\040groups")
    root = tree(tmp_path, "0::/\n", mounts, {"my groups/memory.max": f"{GIB}\n"})
    assert memory_limits(root) == [MemoryLimit(GIB, GIB)]


@pytest.mark.parametrize("mounts", ["", "junk\n - cgroup2\n1 2 3 4 relative - cgroup2 x\n"])
def test_without_a_list_of_mounts_the_usual_folder_is_read(mounts: str, tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/job\n", mounts, {"job/memory.max": f"{GIB}\n", "job/cpu.max": "150000 100000\n"})
    assert memory_limits(root) == [MemoryLimit(GIB, GIB)] and quota_cores(root) == 2


@pytest.mark.parametrize("text", ["", "junk", "²", "-5", "1 2 3", "max"])
def test_what_makes_no_sense_is_no_limit(text: str, tmp_path: Path) -> None:
    names = ("memory.max", "memory.high", "memory.current", "memory.stat", "cpu.max", "cpuset.cpus.effective")
    root = tree(tmp_path, f"0::/\n{text}\n:::\n", UNIFIED + text, dict.fromkeys(names, text))
    assert memory_limits(root) == [] and quota_cores(root) is None and allowed_cpus(root) is None


def test_a_system_that_says_nothing_has_no_limits(tmp_path: Path) -> None:
    assert memory_limits(tmp_path) == [] and quota_cores(tmp_path) is None and allowed_cpus(tmp_path) is None


def test_the_machine_takes_the_least_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path, "0::/a/b\n", UNIFIED, {"a/memory.max": f"{64 * MIB}\n", "a/memory.current": f"{14 * MIB}\n"})
    monkeypatch.setattr(machine.control_groups, "memory_limits", lambda: memory_limits(root))
    assert machine.host_bytes() == machine.cgroup_limit_bytes() == 64 * MIB
    assert machine.free_host_bytes() == int(50 * MIB * machine.HEADROOM)
