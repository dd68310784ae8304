"""Certification of an export: the checks of its files and of each of its dtypes, and the report."""

import dataclasses
import gc
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..engine.model import find_target, open_export
from ..errors import UsageError
from ..inference.devices import facts
from ..inference.export_info import ExportInfo, check_hash, is_rewritable
from ..inference.session import SessionChanges
from ..runtime import Runtime
from .checks import FAILURES, Subject, attempt, compare_manifests, failed, stored_tolerance
from .compare import Comparison
from .kernels import Kernels, read_kernels
from .reference import Reference, manifest_facts

MACHINE = ("python", "packages", "threads", "processor", "instructions", "providers", "gpus")


class Check(NamedTuple):
    """A check of an export. `dtype` is empty if the check is not about a dtype."""

    dtype: str
    name: str
    comparison: Comparison

    @property
    def ok(self) -> bool:
        return self.comparison.ok

    @property
    def title(self) -> str:
        return f"{self.dtype} {self.name}".lstrip()

    def __str__(self) -> str:
        passed = "warn" if self.comparison.is_weak else "ok"
        return f"{passed if self.ok else 'FAILED':<6} {self.title}: {self.comparison}"

    def report(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "name": self.name, **self.comparison._asdict()}


@dataclass
class Certificate:
    """The checks of an export on a device, run with `changes`. `kernels` and `speed` are by dtype
    of the weights."""

    info: ExportInfo
    changes: SessionChanges
    device: str = ""
    checks: list[Check] = field(default_factory=list)
    kernels: dict[str, Kernels] = field(default_factory=dict)
    speed: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if not check.ok]

    def report(self) -> dict[str, Any]:
        """Return the checks with all that is known about the export and the machine, for a file
        that somebody else reads."""
        machine, manifest = facts(), self.info.manifest
        return {
            "export": self.info.directory.name,
            "certified": not self.failures,
            "device": self.device,
            **dataclasses.asdict(self.changes),
            "machine": {name: machine[name] for name in MACHINE},
            "checks": [check.report() for check in self.checks],
            "speed": self.speed,
            "kernels": self.kernels,
            **manifest_facts(manifest),
            "default_dtype": manifest["default_dtype"],
            "versions": manifest.get("versions"),
            "files": manifest["files"],
        }


def certify(
    directory: str | os.PathLike,
    device: str | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    without: Sequence[str] = (),
    attention: str | None = None,
    tell: Callable[[Check], None] = lambda check: None,
) -> Certificate:
    """Check an export on `device` against the reference that was written with it.

    Checks that fail are in the certificate and raise no error.

    Args:
        directory: an export.
        device: see `Runtime`.
        dtype: dtype of the weights; by default each of the export in turn.
        threads: CPU threads per operator; by default all that this process may use.
        without, attention: changes to how onnxruntime runs the graphs, see `SessionChanges`. What
            fails without them and not with them has its cause there.
        tell: called with each check when it is done.

    Raises:
        FileNotFoundError, ValueError: if the directory is no export, if a file is missing or is not
            the one that was exported, and for an export without a reference.
        UsageError: for a dtype or a device that the export does not have, for `threads` out of
            range, and for a change that is unknown or has no effect on the device.
        OSError: if the device is not available.
    """
    info = open_export(directory, dtype)
    changes = SessionChanges(tuple(without), attention)
    changes.check(device or find_target(info).default_device)
    check_files(info)
    reference = Reference.read(info.directory)
    certificate = Certificate(info, changes)
    open_runtime = partial(Runtime, info.directory, device=device, threads=threads, changes=changes)
    dtypes = info.dtypes if dtype is None else [dtype]
    for check in run_checks(certificate, reference, open_runtime, dtypes):
        certificate.checks.append(check)
        tell(check)
    return certificate


def check_files(info: ExportInfo) -> None:
    """Raise ValueError for a file that differs from its hash in the manifest, and FileNotFoundError
    for one that is missing."""
    info.check_hashes()
    for name, expected in info.manifest["files"].items():
        if is_rewritable(name):  # its hash is not checked when an export is opened
            path = info.directory / name
            check_hash(open(path, "rb"), expected, path)  # noqa: SIM115 - check_hash closes it


def run_checks(
    certificate: Certificate,
    reference: Reference,
    open_runtime: Callable[..., Runtime],
    dtypes: list[str],
) -> Iterator[Check]:
    """Yield the checks of the export of `certificate`, then those of each dtype.

    It sets the device, kernels and speed of `certificate`; the caller adds the checks. A check that
    fails is yielded too. `open_runtime` opens the export with a `dtype`.
    """
    manifest = certificate.info.manifest
    files = f"{len(manifest['files'])} with the hashes of manifest.json"
    yield Check("", "files", Comparison(True, files))
    yield Check("", "manifest", compare_manifests(manifest, reference))
    for dtype in dtypes:
        yield from check_dtype(certificate, reference, open_runtime, dtype)


def check_dtype(
    certificate: Certificate,
    reference: Reference,
    open_runtime: Callable[..., Runtime],
    dtype: str,
) -> Iterator[Check]:
    """Yield the checks of one dtype: a single failed one if the export cannot be opened or run.

    Raises UsageError for arguments of `open_runtime` that it does not support, and OSError for a
    device that is not available.
    """
    try:
        runtime = open_runtime(dtype=dtype)
        subject = Subject(runtime, reference, stored_tolerance(reference, dtype))
        _ = subject.results
    except (UsageError, OSError):
        raise
    except FAILURES as error:
        yield Check(dtype, "run", failed(error))
        return
    certificate.device = runtime.device
    with tempfile.TemporaryDirectory() as directory:
        profiles = Path(directory)
        yield Check(dtype, "separate sessions", attempt(subject.check_profiled, profiles))
        gc.collect()  # closes the sessions, which then have written their profiles
        certificate.kernels[dtype] = kernels = read_kernels(profiles)
    yield Check(dtype, "kernels", attempt(subject.check_kernels, kernels))
    for name, check in (subject.checks | subject.checks_of_machine).items():
        yield Check(dtype, name, attempt(check))
    yield Check(dtype, "speed", attempt(subject.measure_speed, certificate.speed))
