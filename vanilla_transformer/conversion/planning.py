"""The choice of a conversion, from a checkpoint's config and the names and shapes of its
tensors."""

from collections.abc import Iterable, Mapping
from functools import partial
from os import PathLike
from typing import Any

from ..errors import UsageError
from .conversion_plan import ConversionPlan
from .overrides import Overrides
from .plan_parts import plan_variant
from .registry import FAMILIES
from .to_source import plan_family
from .to_vanilla import plan_overridden


def plan_conversion(
    source: str | PathLike,
    to: str | None = None,
    config: Mapping[str, Any] | None = None,
    leave_out: Iterable[str] = (),
    variant: str | None = None,
) -> ConversionPlan:
    """Return the checked plan of what `convert` would do, without writing to `out`.

    Args:
        source: a directory, a Hub id or an open checkpoint.
        to: the name of a family that one of our checkpoints is converted to; by default another
            project's checkpoint becomes ours.
        config: fields that replace those in the config.json of `source`.
        leave_out: patterns of names of tensors that are not converted.
        variant: "fp16" reads the weights in model.fp16.safetensors.

    Raises:
        UsageError: for `config` or `leave_out` with `to`.
        FileNotFoundError: if there is no config.json, no weights or none of `variant`.
        ValueError: for a family or architecture that is not known, a field that cannot be
            represented, and unknown, missing or misshapen tensors.
    """
    overrides = Overrides(config or {}, tuple(leave_out), variant)
    if to is None:
        return plan_variant(source, variant, partial(plan_overridden, overrides=overrides))
    if overrides:
        raise UsageError(
            "config and leave_out are for checkpoints of another family, expected none with "
            f"to={to!r}"
        )
    families = [name for name, family in FAMILIES.items() if family.converts_back]
    if to not in families:
        raise ValueError(f"checkpoints can be converted to {', '.join(families)}, got {to!r}")
    return plan_variant(source, variant, partial(plan_family, to=to))
