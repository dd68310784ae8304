"""Other projects' checkpoints -> ours, and back: only tensors and names.

    convert           a checkpoint of one of `FAMILIES` -> ours; with `to`, ours -> a family that
                      converts back
    converted         the same, in a temporary directory
    plan_conversion   the same, checked but not written; its text is the mapping of the tensors

Differences of layout are removed by permuting, slicing or joining weights. What a config cannot
represent is an error that names the field, before anything is written. A family is a line in
`registry` and a module, see `converter.Converter`.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from transformers.utils import logging

from ..outputs import new_directory
from ..source import converted
from .conversion_plan import ConversionPlan
from .planning import plan_conversion
from .registry import FAMILIES, Family

logger = logging.get_logger(__name__)

__all__ = [
    "FAMILIES",
    "ConversionPlan",
    "Family",
    "convert",
    "converted",
    "plan_conversion",
]


def convert(
    source: str | os.PathLike,
    out: str | os.PathLike,
    to: str | None = None,
    force: bool = False,
    config: Mapping[str, Any] | None = None,
    leave_out: Iterable[str] = (),
    variant: str | None = None,
) -> dict[str, Any]:
    """Convert the checkpoint `source`, a directory or Hub id, into the directory `out`.

    The result has config, weights (written one tensor at a time, in their dtypes), generation
    config and tokenizer. Returns the summary `ConversionPlan.facts`, with the keys out,
    architecture, tensors, parameters, left_out, tokenizer, notes and modules.

    Args:
        to: by default another project's checkpoint becomes ours; the name of a family in `FAMILIES`
            that converts back, as `"bert"`, makes one of ours a checkpoint of that family.
        force: replace `out` if we wrote it.
        config: fields that replace those in the config.json of `source`, such as `model_type` or
            `architectures`.
        leave_out: patterns of names of tensors that are not converted, such as `"cls.chain.*"`.
        variant: as in transformers' `from_pretrained`: "fp16" reads the weights in
            model.fp16.safetensors.

    Raises:
        UsageError: for `config` or `leave_out` with `to`.
        FileExistsError: if `out` exists and may not be replaced: without `force`, or with files of
            anyone else.
        FileNotFoundError: if there is no config.json, no weights or none of `variant`.
        OSError: if there is no room for it on the disk.
        ValueError: for a family or architecture that is not known, a field that cannot be
            represented, unknown, missing or misshapen tensors, and pickles that hold more than
            tensors.
    """
    with new_directory(out, force, [source]) as directory:
        plan = plan_conversion(source, to, config, leave_out, variant)
        plan.save(directory)
    return plan.facts(out)


def log_notes(facts: dict[str, Any]) -> None:
    """Log the notes in `facts`, the summary that `convert` returns, as warnings.

    It is for callers that do not show the summary.
    """
    for note in facts["notes"]:
        logger.warning(note)
