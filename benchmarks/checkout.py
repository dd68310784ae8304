"""Our two packages from this checkout, for a Python that has not installed them."""

import importlib.util
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def make_importable(folder: Path) -> None:
    """Make our packages of this checkout importable, unless they are installed.

    `folder` gets what an installation would create: packages and version. This process and those
    that `multiprocessing` spawns import from there.
    """
    if importlib.util.find_spec("vanilla_transformer_export"):
        return
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    renamed = project["tool"]["setuptools"]["package-dir"]
    for package in project["tool"]["setuptools"]["packages"]:
        if "." not in package:
            (folder / package).symlink_to(ROOT / renamed.get(package, package))
    name, version = project["project"]["name"], project["project"]["version"]
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    sys.path.insert(0, str(folder))
