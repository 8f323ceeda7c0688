"""The memory limits of nested control groups, of versions 1 and 2, in made-up trees of /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.memory.allocators import control_groups, measure
from lowtide.memory.allocators.control_groups import Limit, memory_limits

MIB, GIB = 1 << 20, 1 << 30
V2 = "30 23 0:26 {shown} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 {shown} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
UNLIMITED_V1 = 9223372036854771712


def write(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def group_v2(path: str, most: object, used: int = 0, idle: int = 0) -> dict[str, object]:
    folder = f"sys/fs/cgroup{path}"
    return {
        f"{folder}/memory.max": most,
        f"{folder}/memory.current": used,
        f"{folder}/memory.stat": f"anon {used - idle}\ninactive_file {idle}",
    }


def group_v1(path: str, most: int, used: int = 0, above: int | None = None, counted: int = 1) -> dict[str, object]:
    folder = f"sys/fs/cgroup/memory{path}"
    stat = "" if above is None else f"cache 0\nhierarchical_memory_limit {above}\ntotal_inactive_file 0"
    return {
        f"{folder}/memory.limit_in_bytes": most,
        f"{folder}/memory.usage_in_bytes": used,
        f"{folder}/memory.use_hierarchy": counted,
        f"{folder}/memory.stat": stat,
    }


def least(root: Path) -> int:
    return min(limit.most for limit in memory_limits(root))


def test_version_2_the_smallest_limit_of_all_groups_above_holds(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/self/mountinfo": V2.format(shown="/"),
            "proc/self/cgroup": "0::/slurm.slice/job_7/step_0",
            **group_v2("/slurm.slice", 64 * GIB, 9 * GIB),
            **group_v2("/slurm.slice/job_7", 2 * GIB, 600 * MIB, idle=100 * MIB),
            **group_v2("/slurm.slice/job_7/step_0", "max", 500 * MIB),
            **group_v2("/slurm.slice/job_8", 1 * MIB),
        },
    )
    assert memory_limits(root) == [Limit(2 * GIB, 500 * MIB), Limit(64 * GIB, 9 * GIB)]


def test_version_2_a_container_with_a_namespace_of_its_own(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/self/mountinfo": V2.format(shown="/"),
            "proc/self/cgroup": "0::/",
            **group_v2("", 3 * GIB, GIB),
        },
    )
    assert memory_limits(root) == [Limit(3 * GIB, GIB)]


@pytest.mark.parametrize("shown", ["/", "/docker/abc", "/../.."])
@pytest.mark.parametrize("named", ["/docker/abc", "/../sibling", "/kubepods/pod1/gone"])
def test_where_the_group_that_is_named_cannot_be_seen_the_mounted_one_counts(tmp_path, shown, named):
    files = {"proc/self/mountinfo": V2.format(shown=shown), "proc/self/cgroup": f"0::{named}"}
    assert least(write(tmp_path, files | group_v2("", 3 * GIB))) == 3 * GIB


def test_a_part_of_the_hierarchy_is_mounted(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/self/mountinfo": V2.format(shown="/docker/abc"),
            "proc/self/cgroup": "0::/docker/abc/worker",
            **group_v2("", 8 * GIB),
            **group_v2("/worker", 3 * GIB),
        },
    )
    assert [limit.most for limit in memory_limits(root)] == [3 * GIB, 8 * GIB]


def test_version_1_a_limit_above_counts_seen_or_not(tmp_path):
    named = "11:cpu,cpuacct:/elsewhere\n5:memory:/slurm/job_7/step_0\n0::/"
    files = {"proc/self/mountinfo": V1.format(shown="/"), "proc/self/cgroup": named}
    seen = files | group_v1("/slurm/job_7/step_0", UNLIMITED_V1) | group_v1("/slurm", 4 * GIB, GIB)
    assert Limit(4 * GIB, GIB) in memory_limits(write(tmp_path / "seen", seen))
    assert least(tmp_path / "seen") == 4 * GIB
    hidden = files | group_v1("/slurm/job_7/step_0", UNLIMITED_V1, above=2 * GIB)
    assert least(write(tmp_path / "hidden", hidden)) == 2 * GIB


def test_version_1_in_a_container(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/self/mountinfo": V1.format(shown="/docker/abc"),
            "proc/self/cgroup": "5:memory:/docker/abc",
            **group_v1("", 3 * GIB, GIB),
        },
    )
    assert memory_limits(root) == [Limit(3 * GIB, GIB)]


def test_version_1_a_group_above_that_does_not_count_its_children_limits_nothing(tmp_path):
    files = {"proc/self/mountinfo": V1.format(shown="/"), "proc/self/cgroup": "5:memory:/a/b"}
    assert least(write(tmp_path, files | group_v1("/a", GIB, counted=0) | group_v1("/a/b", 3 * GIB))) == 3 * GIB


def test_both_versions_at_once(tmp_path):
    """Version 1 limits memory; version 2 is mounted beside it for the names of services alone."""
    unified = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    others = "36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"
    root = write(
        tmp_path,
        {
            "proc/self/mountinfo": f"{V1.format(shown='/')}\n{unified}\n{others}",
            "proc/self/cgroup": "5:memory:/job\n0::/job",
            "sys/fs/cgroup/unified/job/cgroup.procs": 1,
            **group_v1("/job", GIB),
        },
    )
    assert [limit.most for limit in memory_limits(root)] == [GIB]


def test_a_mount_with_a_space_in_its_path(tmp_path):
    files = {"proc/self/mountinfo": V2.format(shown="/").replace("/sys/fs/cgroup", r"/sys/fs/c\040group")}
    files |= {"proc/self/cgroup": "0::/x", "sys/fs/c group/x/memory.max": GIB}
    assert least(write(tmp_path, files)) == GIB


def test_where_nothing_limits_there_is_nothing(tmp_path):
    assert memory_limits(tmp_path) == []
    files = {"proc/self/mountinfo": V2.format(shown="/"), "proc/self/cgroup": "0::/a", **group_v2("/a", "max")}
    assert memory_limits(write(tmp_path, files)) == []


def test_the_machine_and_what_is_free_of_it_are_those_of_the_groups(monkeypatch, tmp_path):
    whole, free = measure.system_memory_bytes(), measure.unused_bytes()
    assert 0 < free < whole
    for said, expected in (("max", whole), (64 * MIB, 64 * MIB), (1 << 60, whole)):
        files = {"proc/self/mountinfo": V2.format(shown="/"), "proc/self/cgroup": "0::/a/b"}
        files |= group_v2("/a", said, 60 * MIB, idle=10 * MIB) | group_v2("/a/b", "max")
        root = write(tmp_path / str(said), files)
        monkeypatch.setattr(measure, "memory_limits", lambda root=root: memory_limits(root))
        assert measure.system_memory_bytes() == expected
        if expected == 64 * MIB:
            monkeypatch.setattr(measure, "resident_bytes", lambda: 50 * MIB)
            assert measure.unused_bytes() == 14 * MIB
            monkeypatch.undo()


def test_this_process_is_read():
    assert all(limit.most > 0 <= limit.used for limit in control_groups.memory_limits())
