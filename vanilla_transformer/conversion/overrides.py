"""Facts about a source that the caller states because its files lack them or have them wrong."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from ..checkpoint_files import shorten
from ..files import MODULES
from .tensors import TensorFiles


@dataclass(frozen=True)
class Overrides:
    """Changes to a source: config fields, and shell patterns of tensors to leave out.

    modules.json may be among the patterns.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    leave_out: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.config or self.leave_out)

    def apply(self, content: dict) -> dict:
        """Return the `content` of a config.json with the fields of these overrides in place of its
        own.

        `architectures` may be one name instead of a list. Raises ValueError if `model_type` or
        `architectures` is of another type.
        """
        fields = dict(self.config)
        name = fields.get("architectures")
        if isinstance(name, str):
            fields["architectures"] = [name]
        for name, kind in {"model_type": str, "architectures": list}.items():
            if name in fields and not isinstance(fields[name], kind):
                raise ValueError(f"{name} is {shorten(fields[name])}, expected a name")
        return content | fields

    def remove_tensors(self, files: TensorFiles, prefix: str) -> None:
        """Remove the tensors that a pattern of `leave_out` matches from `files`.

        A pattern is compared with the name alone, and with `prefix` (that of the base model, such
        as "bert.") before it.

        Raises:
            ValueError: for a pattern that matches no tensor.
        """
        for pattern in set(self.leave_out) - {MODULES}:
            names = [
                name
                for name in files.shapes
                if fnmatchcase(name, pattern) or fnmatchcase(f"{prefix}{name}", pattern)
            ]
            if not names:
                some = ", ".join(sorted(files.shapes)[:5])
                raise ValueError(
                    f"leave_out {pattern!r} matches no tensor of {files.path}, expected a name "
                    f"such as {some}"
                )
            files.remove(names)
