"""The exports to serve, before they are loaded."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from ..heads import GENERATORS, TRANSLATE, has_task
from ..inference.export_info import MANIFEST, check_has_manifest, json_object

NAME = re.compile(r"[\w.-]+", re.ASCII)


@dataclass(frozen=True)
class Source:
    """An export to serve. `languages` are the pairs of `--languages`."""

    name: str
    directory: Path
    architecture: str
    languages: list[tuple[str, str]]

    @property
    def generates(self) -> bool:
        return self.architecture in GENERATORS


def sources(
    exports: Sequence[str], languages: Sequence[tuple[str | None, str, str]]
) -> list[Source]:
    """Return the exports to serve. Each of `exports` is PATH or NAME=PATH of a directory with a
    manifest.

    `languages` are (model or None, source, target) of the flag --languages.

    Raises:
        UsageError: if a path is empty, or a name is not valid in a URL or occurs twice. Also if a
            pair of `languages` names a model that is missing or does not translate, or names none
            and not exactly one translates.
        FileNotFoundError, NotADirectoryError, ValueError: if a path is not an export.
    """
    by_name: dict[str, Source] = {}
    for text in exports:
        name, directory = parse_name(text)
        if name in by_name:
            raise UsageError(
                f"{by_name[name].directory} and {directory} both have the name {name!r}, expected "
                "NAME=PATH for one of them"
            )
        check_has_manifest(directory)
        path = directory / MANIFEST
        by_name[name] = Source(
            name, directory, str(json_object(path, path.read_bytes()).get("architecture")), []
        )
    for model, source, target in languages:
        find_translator(by_name, model, f"{source}-{target}").languages.append((source, target))
    return list(by_name.values())


def parse_name(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    if not separator or Path(text).is_dir():
        name, path = os.path.basename(os.path.abspath(text)), text
    if not path:
        raise UsageError(f"expected NAME=PATH, got {text!r}")
    if not NAME.fullmatch(name) or name in (".", ".."):
        raise UsageError(
            f"the name of an export is {name!r}, expected letters, digits, '.', '_' and '-': use "
            "NAME=PATH"
        )
    return name, Path(path)


def find_translator(sources: Mapping[str, Source], name: str | None, pair: str) -> Source:
    """Return the source that the language pair `pair` of --languages is for.

    It is that with this `name`, or for None the only one that translates. `pair` is for messages
    only. Raises UsageError if there is none or several, or that with the name does not translate.
    """
    if name is not None and name not in sources:
        raise UsageError(
            f"--languages {name}:{pair}: model is {name!r}, expected one of {', '.join(sources)}"
        )
    fitting = [
        source
        for source in sources.values()
        if has_task(source.architecture, TRANSLATE) and name in (None, source.name)
    ]
    if len(fitting) != 1:
        names = ", ".join(source.name for source in fitting) or "none"
        raise UsageError(
            f"--languages {pair}: the models that translate are {names}, expected one model; write "
            f"NAME:{pair} to select one of several"
        )
    return fitting[0]
