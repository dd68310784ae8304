"""The minimum version of each package that pyproject.toml names, printed as constraints for pip."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement


def floors(project: dict) -> dict[str, str]:
    """Return the minimum version of each required package, by name.

    The project itself is left out, which its extras name.
    """
    lines = sum(project["optional-dependencies"].values(), project["dependencies"])
    found = [
        requirement
        for requirement in map(Requirement, lines)
        if requirement.name != project["name"]
    ]
    return {
        each.name: next(bound.version for bound in each.specifier if bound.operator == ">=")
        for each in found
    }


if __name__ == "__main__":
    path = Path(__file__).parents[1] / "pyproject.toml"
    for name, version in floors(tomllib.loads(path.read_text(encoding="utf-8"))["project"]).items():
        print(f"{name}=={version}")
