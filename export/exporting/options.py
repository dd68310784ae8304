"""The options of `export`, other than the checkpoint and the output directory. Each is one field of
`ExportOptions`."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..arguments import (
    DIRECTORY,
    KEY_VALUE,
    LEAVE_OUT_HELP,
    PATH,
    SET_HELP,
    TEXT,
    VARIANT_HELP,
    choices,
)
from ..errors import UsageError, did_you_mean
from ..one_graph import MODES
from ..shared.options import COUNT, FLAG, Kind, as_list, check_option, fields_by_name, option
from ..specs.sequences import IMAGE_SIZES
from ..targets.registry import default_target, get_target, known_targets, targets

File = str | os.PathLike | None
NAMES = Kind(
    "a list of names",
    lambda value: isinstance(value, Iterable) and not isinstance(value, str),
    TEXT.read,
    "PATTERN",
    list,
)
FIELDS_BY_NAME = KEY_VALUE._replace(
    expected="a dict of fields by name", holds=lambda value: isinstance(value, Mapping)
)
PATH_OR_FLAG = PATH._replace(
    expected="the path of a text, True or False",
    holds=lambda value: PATH.holds(value) or FLAG.holds(value),
    metavar="FILE",
    alone=True,
)
PATH_OR_TOKENS = PATH._replace(
    expected="the path of a text or a list of token ids",
    holds=lambda value: PATH.holds(value) or isinstance(value, Iterable),
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


def alignments_help() -> str:
    always = " and ".join(target.name for target in targets() if target.shares_weights)
    return (
        f"write the graph of word alignments, which {always} always has; with FILE, parallel text "
        "of at least 100 lines with a source, a tab and its translation in each, choose the heads "
        "that align words on it"
    )


def opset_help() -> str:
    opsets = [
        f"{target.name} {min(target.opsets)} to {max(target.opsets)}"
        for target in targets()
        if len(target.opsets) > 1
    ]
    return f"opset of the graphs: {', '.join(opsets)}; default: the lowest"


# -------------------------------------------------------------------------- targets and dtypes


def dtype_names(text: str) -> str | list[str]:
    return text.split(",") if "," in text else text


# their values are checked together
TARGET = Kind("a target", lambda value: True, str, "TARGET")
DTYPES = Kind("a dtype, or several", lambda value: True, dtype_names, "DTYPE")


# ---------------------------------------------------------------------------------------- checks


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
                f"{known_targets()}{did_you_mean(str(dtype), target.dtypes)}"
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


def check_calibrate(options: "ExportOptions") -> None:
    """Raise UsageError for `calibrate` if no matrix multiplication computes in integers."""
    dtype = options.dtypes[0]
    if options.calibrate is None or dtype in get_target(options.target).integer_dtypes:
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


def check_generate(options: "ExportOptions") -> None:
    """Raise UsageError for a target whose decoder does not go into a loop, and with `image_size` or
    `alignments`."""
    mode = options.generate
    if mode is None:
        return
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
    if options.alignments:
        raise UsageError(
            f"generate={mode!r} is not supported with alignments={options.alignments!r}: one graph "
            "returns no alignments, expected False"
        )


# --------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class ExportOptions:
    """The options of an export. `None` stands for the default of any field.

    Raises UsageError for an invalid value, and for values that cannot be combined.
    """

    target: str = option(TARGET, default_target(), target_help, check=check_target)
    dtype: str | Sequence[str] | None = option(DTYPES, None, dtype_help, check=check_dtypes)
    opset: int | None = option(COUNT, None, opset_help, check=check_opset)
    image_size: str | None = option(
        choices("image size", IMAGE_SIZES),
        None,
        "images of a vision model: trained (only the size of the config) or free (any size); "
        "default: by the model's config",
    )
    shortlist: Iterable[int] | str | os.PathLike | None = option(
        PATH_OR_TOKENS,
        None,
        "text in the output language; only its tokens and special tokens are generated",
    )
    calibrate: File = option(
        PATH,
        None,
        "text file to calibrate int8 on the cpu target: one activation scale for all rows "
        "instead of one per row; faster",
        check=check_calibrate,
    )
    alignments: str | os.PathLike | bool = option(
        PATH_OR_FLAG,
        False,
        alignments_help,
    )
    generate: str | None = option(
        choices("mode", MODES),
        None,
        "write one graph with the whole generation loop, from token ids to sequences: greedy, "
        "sample or beam",
        check=check_generate,
    )
    keep: File = option(
        DIRECTORY,
        None,
        "directory for the converted CHECKPOINT of another family; default: temporary",
    )
    config: Mapping[str, Any] | None = option(
        FIELDS_BY_NAME,
        None,
        "field of config.json for a CHECKPOINT of another family: architectures=BertModel ...; "
        f"{SET_HELP}",
        flag="--set",
    )
    leave_out: Iterable[str] = option(NAMES, (), LEAVE_OUT_HELP)
    variant: str | None = option(TEXT._replace(expected="a name"), None, VARIANT_HELP)
    triton: File = option(
        DIRECTORY,
        None,
        "directory for a Triton model, a folder of a model repository; for models that do not "
        "generate, or with --generate",
    )
    force: bool = option(FLAG, False, "replace OUTPUT if vanilla-transformer wrote it")
    cases: int = option(
        COUNT,
        12,
        "number of random inputs on which the graphs are compared with torch",
        flag=None,
    )

    def __post_init__(self) -> None:
        for name, field in FIELDS.items():
            value = getattr(self, name)
            if value is None:
                object.__setattr__(self, name, field.default)
            else:
                check_option(name, value, field.metadata["kind"])
        for field in FIELDS.values():
            field.metadata.get("check", lambda options: None)(self)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "ExportOptions":
        """Return the options for {name: value}; others have their defaults. Raises UsageError for
        an unknown name or an invalid value."""
        for name in options.keys() - FIELDS.keys():
            raise UsageError(
                f"export has no option {name!r}, expected one of "
                f"{', '.join(FIELDS)}{did_you_mean(name, FIELDS)}"
            )
        return cls(**options)

    @property
    def dtypes(self) -> list[str | None]:
        """Dtypes of the weights, in order; `None` is the default of the target."""
        return [None] if self.dtype is None else [*as_list(self.dtype)]

    @property
    def texts(self) -> list[str | os.PathLike]:
        """Paths of the text files that export reads besides the checkpoint: `shortlist`,
        `calibrate` and `alignments`. A shortlist of token ids is not among them."""
        texts = (self.shortlist, self.calibrate, self.alignments)
        return [text for text in texts if isinstance(text, str | os.PathLike)]


FIELDS = fields_by_name(ExportOptions)
