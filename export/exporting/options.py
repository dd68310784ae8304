"""The options of `export`, other than the checkpoint and the output directory.

An option is one field of `ExportOptions`, with its default, its flag, its help and its check. The
flags of the command, the docstring of `export` and the table of the documentation come from here.
"""

import argparse
import dataclasses
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..arguments import (
    LEAVE_OUT_HELP,
    VARIANT_HELP,
    Parser,
    choice_type,
    key_value,
    path,
    positive,
    source,
    unicode,
)
from ..errors import UsageError, did_you_mean
from ..inference.options import FLAG, Kind
from ..one_graph import MODES
from ..specs.sequences import IMAGE_SIZES
from ..targets.registry import default_target, get_target, known_targets, targets

File = str | os.PathLike | None
PATH = Kind("a path", lambda value: isinstance(value, str | os.PathLike))
NAME = Kind("a name", lambda value: isinstance(value, str))
NAMES = Kind(
    "a list of names", lambda value: isinstance(value, Iterable) and not isinstance(value, str)
)
FIELDS_BY_NAME = Kind("a dict of fields by name", lambda value: isinstance(value, Mapping))
PATH_OR_TOKENS = Kind(
    "the path of a text or a list of token ids",
    lambda value: PATH.holds(value) or isinstance(value, Iterable),
)


# ------------------------------------------------------------------- help, of registered targets


def target_help() -> str:
    return ", ".join(f"{target.name} ({target.help})" for target in targets())


def dtype_help() -> str:
    several = " and ".join(target.name for target in targets() if target.is_standard)
    return (
        f"dtype of the weights: {known_targets()}; default: fp32, on GPUs fp16, or bf16 or fp32 if "
        f"float16 overflows or differs from torch; {several}: also several in one directory, as "
        "fp32,int8"
    )


def opset_help() -> str:
    opsets = [
        f"{target.name} {min(target.opsets)} to {max(target.opsets)}"
        for target in targets()
        if len(target.opsets) > 1
    ]
    return f"opset of the graphs: {', '.join(opsets)}; default: the lowest"


# -------------------------------------------------------------------------------- types of flags


def target_name(text: str) -> str:
    return choice_type("target", [target.name for target in targets()])(text)


def dtype_names(text: str) -> str | list[str]:
    known = dict.fromkeys(dtype for target in targets() for dtype in target.dtypes)
    dtype = choice_type("dtype", known)
    return [dtype(name) for name in text.split(",")] if "," in text else dtype(text)


# ---------------------------------------------------------------------------------------- checks


def check_kind(name: str, value: Any, kind: Kind | None) -> None:
    if not (value is None or kind is None or kind.holds(value)):
        raise UsageError(f"{name} is {value!r:.100}, expected {kind.expected}", name)


def check_target(options: "ExportOptions") -> None:
    try:
        get_target(options.target)
    except ValueError as error:
        raise UsageError(str(error)) from None


def check_dtypes(options: "ExportOptions") -> None:
    target, dtypes = get_target(options.target), options.dtypes
    for dtype in dtypes or [""]:
        if ("fp32" if dtype is None else dtype) not in target.dtypes:
            raise UsageError(
                f"the target {target.name!r} does not support dtype {dtype!r}, expected one of: "
                f"{known_targets()}"
            )
    if len(dtypes) > 1 and not target.is_standard:
        raise UsageError(
            f"dtype is {dtypes}, expected one for the target {target.name!r}: only "
            f"{default_target()!r} takes several"
        )
    if len(set(dtypes)) < len(dtypes):
        raise UsageError(f"dtype is {dtypes}, expected no duplicates")


def check_opset(options: "ExportOptions") -> None:
    target = get_target(options.target)
    if options.opset not in (None, *target.opsets):
        expected = " to ".join(dict.fromkeys(map(str, (target.opsets[0], target.opsets[-1]))))
        raise UsageError(
            f"opset is {options.opset}, expected {expected} for the target {target.name!r}"
        )


def check_image_size(options: "ExportOptions") -> None:
    if options.image_size not in (None, *IMAGE_SIZES):
        raise UsageError(
            f"image_size is {options.image_size!r}, expected one of {', '.join(IMAGE_SIZES)}"
        )


def check_calibrate(options: "ExportOptions") -> None:
    """Raise UsageError for `calibrate` if no matrix multiplication computes in integers, and
    ImportError for `calibrate` without torch."""
    if options.calibrate is None:
        return
    from vanilla_transformer import HAS_TORCH
    from vanilla_transformer.errors import torch_missing

    dtype = options.dtypes[0]
    if dtype in get_target(options.target).integer_dtypes:
        if not HAS_TORCH:
            raise torch_missing("calibrate runs the model, which")
        return
    problem = (
        f"calibrate={os.fspath(options.calibrate)!r} is not supported by the target "
        f"{options.target!r} with dtype {dtype!r}"
    )
    fits = [
        f"{known.name!r} with {supported!r}"
        for known in targets()
        for supported in known.integer_dtypes
    ]
    raise UsageError(f"{problem}, expected {', '.join(fits)}")


def check_alignments(options: "ExportOptions") -> None:
    """Raise UsageError for `alignments` of a target without an alignment graph."""
    supporting = [target.name for target in targets() if target.shares_weights]
    if options.alignments is not None and options.target not in supporting:
        raise UsageError(
            f"alignments={os.fspath(options.alignments)!r} is not supported by the target "
            f"{options.target!r}, expected {' or '.join(supporting)}"
        )


def check_generate(options: "ExportOptions") -> None:
    """Raise UsageError for an unknown mode, for a target whose decoder does not go into a loop, and
    with `image_size` or `alignments`."""
    mode = options.generate
    if mode is None:
        return
    if mode not in MODES:
        raise UsageError(f"generate is {mode!r}, expected one of {', '.join(MODES)}")
    supporting = [target.name for target in targets() if target.generation_step is not None]
    if options.target not in supporting:
        raise UsageError(
            f"generate={mode!r} is not supported by the target {options.target!r}, expected "
            f"{' or '.join(supporting)}"
        )
    if options.image_size is not None:
        raise UsageError(
            f"generate={mode!r} is not supported with image_size={options.image_size!r}: "
            "images are not generated"
        )
    if options.alignments is not None:
        raise UsageError(
            f"generate={mode!r} is not supported with alignments={os.fspath(options.alignments)!r}"
            ": one graph returns no alignments, expected None"
        )


def check_cases(options: "ExportOptions") -> None:
    """Raise UsageError if `cases` is not at least 1: an export that was not compared is not
    done."""
    if not isinstance(options.cases, int) or options.cases < 1:
        raise UsageError(f"cases is {options.cases!r}, expected a whole number of at least 1")


# --------------------------------------------------------------------------------------- options


def option(
    default: Any,
    help: str | Callable[[], str],
    read: Callable[[str], Any] | None = None,
    check: Callable[["ExportOptions"], None] | None = None,
    kind: Kind | None = None,
    is_repeated: bool = False,
    flag: str | None = None,
    metavar: str | None = None,
) -> Any:
    """Return a field of `ExportOptions`.

    Args:
        default: the value without the option.
        help: text, or a function that returns it if it names the targets that are registered.
        read: reads the text of its flag, and raises ArgumentTypeError; None for a flag without a
            value.
        check: gets all options, and raises UsageError for a wrong value of this one.
        kind: the type of its values, if `check` does not check it.
        is_repeated: True if the flag may be repeated.
        flag: name of the flag; by default that of the field, such as `--leave-out`.
        metavar: name of the flag's value in the help.
    """
    metadata: dict[str, Any] = {"help": help, "read": read, "check": check, "kind": kind}
    metadata |= {"is_repeated": is_repeated, "flag": flag, "metavar": metavar}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ExportOptions:
    """The options of an export. `None` stands for the default of any field.

    Raises:
        UsageError: for an invalid value, and for values that cannot be combined.
        ImportError: for `calibrate` without torch.
    """

    target: str = option(default_target(), target_help, target_name, check_target)
    dtype: str | Sequence[str] | None = option(None, dtype_help, dtype_names, check_dtypes)
    opset: int | None = option(None, opset_help, positive, check_opset, metavar="N")
    image_size: str | None = option(
        None,
        "images of a vision model: trained (only the size of the config) or free (any size); "
        "default: by the model's config",
        choice_type("image size", IMAGE_SIZES),
        check_image_size,
    )
    shortlist: Iterable[int] | str | os.PathLike | None = option(
        None,
        "text in the output language; only its tokens and special tokens are generated",
        path,
        kind=PATH_OR_TOKENS,
        metavar="FILE",
    )
    calibrate: File = option(
        None,
        "text file to calibrate int8 on the cpu target: one activation scale for all rows "
        "instead of one per row; faster",
        path,
        check_calibrate,
        PATH,
        metavar="FILE",
    )
    alignments: File = option(
        None,
        "parallel text of at least 100 lines to choose the heads that align words, on the cpu "
        "target: a source, a tab and its translation in each line",
        path,
        check_alignments,
        PATH,
        metavar="FILE",
    )
    generate: str | None = option(
        None,
        "write one graph with the whole generation loop, from token ids to sequences: greedy, "
        "sample or beam",
        choice_type("mode", MODES),
        check_generate,
        metavar="MODE",
    )
    keep: File = option(
        None,
        "directory for the converted CHECKPOINT of another family; default: temporary",
        path,
        kind=PATH,
        metavar="DIR",
    )
    config: Mapping[str, Any] | None = option(
        None,
        "field of config.json in JSON or text, for a CHECKPOINT of another family: "
        "architectures=BertModel ...; may be repeated",
        key_value,
        kind=FIELDS_BY_NAME,
        is_repeated=True,
        flag="--set",
        metavar="KEY=VALUE",
    )
    leave_out: Iterable[str] = option(
        (), LEAVE_OUT_HELP, unicode, kind=NAMES, is_repeated=True, metavar="PATTERN"
    )
    variant: str | None = option(None, VARIANT_HELP, source, kind=NAME, metavar="NAME")
    triton: File = option(
        None,
        "directory for a Triton model, a folder of a model repository; for models that do not "
        "generate, or with --generate",
        path,
        kind=PATH,
        metavar="DIR",
    )
    force: bool = option(False, "replace OUTPUT if vanilla-transformer wrote it", kind=FLAG)
    cases: int = option(
        12, "number of random inputs on which the graphs are compared with torch", check=check_cases
    )

    def __post_init__(self) -> None:
        for name, field in FIELDS.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, field.default)
        for name, field in FIELDS.items():
            check_kind(name, getattr(self, name), field.metadata["kind"])
            if check := field.metadata["check"]:
                check(self)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "ExportOptions":
        """Return the options for {name: value}; others have their defaults. Raises UsageError for
        an unknown name or an invalid value, and ImportError for `calibrate` without torch."""
        for name in options.keys() - FIELDS.keys():
            raise UsageError(
                f"export has no option {name!r}, expected one of "
                f"{', '.join(FIELDS)}{did_you_mean(name, FIELDS)}"
            )
        return cls(**options)

    @property
    def dtypes(self) -> list[str | None]:
        """Dtypes of the weights, in order; `None` is the default of the target."""
        is_list = isinstance(self.dtype, Sequence) and not isinstance(self.dtype, str)
        return list(self.dtype) if is_list else [self.dtype]  # type: ignore[list-item, arg-type]

    @property
    def texts(self) -> list[str | os.PathLike]:
        """Paths of the text files that export reads besides the checkpoint: `shortlist`,
        `calibrate` and `alignments`. A shortlist of token ids is not among them."""
        texts = (self.shortlist, self.calibrate, self.alignments)
        return [text for text in texts if isinstance(text, str | os.PathLike)]


FIELDS = {field.name: field for field in dataclasses.fields(ExportOptions)}
WITHOUT_FLAG = ("cases",)


def flag_name(field: dataclasses.Field) -> str:
    return field.metadata["flag"] or f"--{field.name.replace('_', '-')}"


def flag_help(field: dataclasses.Field) -> str:
    help = field.metadata["help"]
    return help if isinstance(help, str) else help()


def add_options(parser: Parser) -> None:
    """Add the flag of each field to `parser`, in the order of the fields."""
    for name, field in FIELDS.items():
        if name in WITHOUT_FLAG:
            continue
        settings: dict[str, Any] = {"dest": name, "help": flag_help(field).replace("%", "%%")}
        if field.default is False:
            settings |= {"action": "store_true"}
        else:
            settings |= {"type": field.metadata["read"], "metavar": field.metadata["metavar"]}
            settings |= {"default": field.default}
        if field.metadata["is_repeated"]:
            settings |= {"action": "append", "default": []}
        elif field.default:
            settings["help"] += "; default: %(default)s"
        parser.add_argument(flag_name(field), **settings)


def options_from_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return {name: value} of the options of `export` in the parsed flags `args`."""
    options = {name: getattr(args, name) for name in FIELDS if name not in WITHOUT_FLAG}
    return options | {"config": dict(options["config"])}


def options_text(indent: str = "") -> str:
    """Return a line "name: help (default)" for each field, for a docstring, wrapped at 100 columns.
    Lines begin with `indent`."""
    hanging = textwrap.TextWrapper(100, initial_indent=indent, subsequent_indent=f"{indent}    ")
    return "\n".join(
        hanging.fill(f"{name}: {flag_help(field)} ({field.default!r})")
        for name, field in FIELDS.items()
    )


def options_table() -> str:
    """Return a table of the fields in Markdown, for the documentation."""
    lines = ["| option | flag | default | meaning |", "|---|---|---|---|"]
    for name, field in FIELDS.items():
        metavar = field.metadata["metavar"] or name.upper()
        value = "" if field.default is False else f" {metavar}"
        flag = "" if name in WITHOUT_FLAG else f"`{flag_name(field)}{value}`"
        default = "" if field.default in (None, (), False) else f"`{field.default}`"
        lines.append(f"| `{name}` | {flag} | {default} | {flag_help(field)} |")
    return "\n".join(lines)
