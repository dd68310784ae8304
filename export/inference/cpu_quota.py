"""The CPU time that Linux allows this process, such as that of `docker run --cpus 2`.

Control groups limit it, in version 2 by `cpu.max` and in version 1 by `cpu.cfs_quota_us`. The
limit of a group counts for all groups inside.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")  # of the file system
CONTROLLER = "cpu"  # of version 1
# place in a line of /proc/self/mountinfo: the mounted folder of the hierarchy, and where it is
MOUNTED, MOUNT_POINT = 3, 4


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return how many CPUs' time this process may use, such as 2.5. None is no limit.

    `root` has the folders proc and sys.
    """
    limits = [read_limit(folder) for folder in group_folders(root)]
    return min((limit for limit in limits if limit is not None), default=None)


def group_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of the control groups that this process is in, from the inside out."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:  # not Linux
        return
    # a line of a group is number:controllers:path, without controllers in version 2
    fields = (line.split(":", 2) for line in groups if line.count(":") > 1)
    paths = {kind: path for _, kind, path in fields}
    for line in mounts:
        before, separator, after = line.partition(" - ")
        for kind in paths:
            if separator and limits_cpus(kind, after):
                mount = [unescape(field) for field in before.split()]
                top = root / mount[MOUNT_POINT].lstrip("/")
                yield from (top / part for part in group_and_parents(paths[kind], mount[MOUNTED]))


def limits_cpus(controllers: str, mount: str) -> bool:
    """Return True if `mount`, the end of a line of mountinfo, is the hierarchy of `controllers`
    and limits CPUs."""
    kind, *_, options = mount.split(" ")
    if not controllers:
        return kind == "cgroup2"
    return kind == "cgroup" and all(
        CONTROLLER in names.split(",") for names in (controllers, options)
    )


def group_and_parents(path: str, mounted: str) -> list[Path]:
    """Return the group `path` and the groups around it, relative to the `mounted` one.

    A group outside of what is mounted, as a container may see it, is the mounted one.
    """
    try:
        inner = Path(path).relative_to(mounted)
    except ValueError:
        return [Path()]
    return [Path()] if ".." in inner.parts else [inner, *inner.parents]


def unescape(field: str) -> str:
    """Return `field` of mountinfo, in which a space is \\040, as text."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def read_limit(folder: Path) -> float | None:
    """Return the CPUs that the control group in `folder` may use, or None without a limit."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        # a file is missing, or has "max" in place of a number
        with contextlib.suppress(OSError, ValueError):
            texts = [(folder / name).read_text() for name in names]
            quota, period = map(int, " ".join(texts).split())
            return quota / period if quota > 0 and period > 0 else None
    return None
