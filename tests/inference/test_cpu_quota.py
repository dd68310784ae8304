"""Tests of CPU quotas of control groups, with the files that Linux shows in containers, pods and
services."""

import json

import pytest

from vanilla_transformer_export import Runtime
from vanilla_transformer_export.cli import doctor
from vanilla_transformer_export.inference import devices
from vanilla_transformer_export.inference.cpu_quota import cpu_quota

V1 = "33 32 0:29 {mounted} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
V1_MEMORY = "36 32 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
V2 = "31 23 0:28 {mounted} /sys/fs/cgroup rw shared:9 - cgroup2 cgroup rw,nsdelegate"
HYBRID = "42 32 0:39 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
CPU = "sys/fs/cgroup/cpu,cpuacct"
GROUP = "sys/fs/cgroup"


def write_files(root, groups, mounts, files):
    """Write what /proc says about `groups` and `mounts`, and `files` by path."""
    files = files | {"proc/self/cgroup": groups, "proc/self/mountinfo": "\n".join(mounts)}
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content + "\n")


def v1(folder, quota, period=100000):
    return {
        f"{folder}/cpu.cfs_quota_us": str(quota),
        f"{folder}/cpu.cfs_period_us": str(period),
    }


HERE = V2.format(mounted="/")
CASES = {
    "container, version 2": ("0::/", [HERE], {f"{GROUP}/cpu.max": "200000 100000"}, 2),
    "no limit, version 2": ("0::/", [HERE], {f"{GROUP}/cpu.max": "max 100000"}, None),
    "host without limits": ("0::/init.scope", [HERE], {}, None),
    "half a CPU": ("0::/", [HERE], {f"{GROUP}/cpu.max": "50000 100000"}, 0.5),
    "another period": ("0::/", [HERE], {f"{GROUP}/cpu.max": "50000 20000"}, 2.5),
    "service with a smaller group around it": (
        "0::/pod/app",
        [HERE],
        {f"{GROUP}/pod/app/cpu.max": "400000 100000", f"{GROUP}/pod/cpu.max": "150000 100000"},
        1.5,
    ),
    "service with a larger group around it": (
        "0::/pod/app",
        [HERE],
        {f"{GROUP}/pod/app/cpu.max": "100000 100000", f"{GROUP}/pod/cpu.max": "800000 100000"},
        1,
    ),
    "a sibling's limit": (
        "0::/pod/app", [HERE], {f"{GROUP}/pod/other/cpu.max": "100000 100000"}, None,
    ),
    "container, version 1": (
        "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n0::/docker/abc",
        [V1.format(mounted="/docker/abc"), V1_MEMORY],
        v1(CPU, 300000),
        3,
    ),
    "no limit, version 1": (
        "4:cpu,cpuacct:/", [V1.format(mounted="/"), HYBRID], v1(CPU, -1), None,
    ),
    "groups in groups, version 1": (
        "4:cpu,cpuacct:/a/b",
        [V1.format(mounted="/")],
        v1(f"{CPU}/a/b", -1) | v1(f"{CPU}/a", 250000) | v1(CPU, 900000),
        2.5,
    ),
    "both versions": (
        "4:cpu,cpuacct:/a\n0::/a",
        [V1.format(mounted="/"), HYBRID],
        v1(f"{CPU}/a", 150000) | {"sys/fs/cgroup/unified/a/cpu.max": "100000 100000"},
        1,
    ),
    "group outside of the mounted one": (
        "0::/../other", [HERE], {f"{GROUP}/cpu.max": "100000 100000"}, 1,
    ),
    "mount of another group": (
        "0::/kubepods/x", [V2.format(mounted="/docker/y")], {f"{GROUP}/cpu.max": "70000 100000"},
        0.7,
    ),
    "space in a path": (
        "0::/", [HERE.replace("/sys/fs/cgroup", r"/mnt/c\040g")],
        {"mnt/c g/cpu.max": "100000 100000"}, 1,
    ),
    "colon in a path": (
        "0::/a:b", [HERE], {f"{GROUP}/a:b/cpu.max": "100000 100000"}, 1,
    ),
    "memory alone": (
        "3:memory:/", [V1_MEMORY], v1("sys/fs/cgroup/memory", 100000), None,
    ),
    "unreadable": ("0::/", [HERE], {f"{GROUP}/cpu.max": "many"}, None),
    "empty": ("0::/", [HERE], {f"{GROUP}/cpu.max": ""}, None),
    "lines of another form": (
        "nothing\n0:/\n0::/", ["cgroup2 cgroup2", HERE], {f"{GROUP}/cpu.max": "150000 100000"}, 1.5,
    ),
    "no period": ("0::/", [HERE], {f"{GROUP}/cpu.max": "100000 0"}, None),
}  # fmt: skip


@pytest.mark.parametrize("groups, mounts, files, expected", CASES.values(), ids=CASES)
def test_quota_is_smallest_of_groups_around_process(groups, mounts, files, expected, tmp_path):
    write_files(tmp_path, groups, mounts, files)
    assert cpu_quota(tmp_path) == expected


def test_no_quota_without_files_of_linux(tmp_path):
    assert cpu_quota(tmp_path) is None


@pytest.mark.parametrize(
    "quota, visible, threads",
    [(None, 8, 8), (0.5, 8, 1), (1, 8, 1), (2.5, 8, 2), (3, 8, 3), (16, 8, 8), (0.01, 1, 1)],
)
def test_threads_are_quota_rounded_down_or_visible_cpus(monkeypatch, quota, visible, threads):
    monkeypatch.setattr(devices, "cpu_quota", lambda: quota)
    monkeypatch.setattr(devices, "visible_cpus", lambda: visible)
    assert devices.available_cpus() == threads


def test_runtime_obeys_quota_unless_threads_are_given(monkeypatch, exported):
    monkeypatch.setattr(devices, "visible_cpus", lambda: 64)
    monkeypatch.setattr(devices, "cpu_quota", lambda: 2.5)
    directory = exported("encoder").directory
    assert Runtime(directory).threads == 2
    assert Runtime(directory, threads=5).threads == 5


def test_doctor_reports_quota(monkeypatch):
    monkeypatch.setattr(devices, "visible_cpus", lambda: 64)
    monkeypatch.setattr(devices, "cpu_quota", lambda: 2.5)
    facts = json.loads(json.dumps(devices.facts()))
    assert (facts["threads"], facts["cpus"], facts["cpu_quota"]) == (2, 64, 2.5)
    lines = doctor.report(facts).splitlines()
    assert "cpu quota    2.5 of 64 CPUs" in lines
    assert "target cpu runs on the CPU, with 2 threads" in lines
    assert "quota" not in doctor.report(facts | {"cpu_quota": None})
