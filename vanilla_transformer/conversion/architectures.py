"""The model class of a source: by config.json, or by its tensors if only one class fits them."""

import contextlib
from collections.abc import Callable, Iterable

import torch
import transformers
from transformers import PreTrainedConfig

from ..class_names import current_class
from .conversion_plan import ConversionPlan
from .converter import Converter
from .tensors import TensorFiles

PlanAs = Callable[[str], ConversionPlan]
SET = "--set architectures=NAME"


class MissingTensors(ValueError):
    """Tensors that a class needs and a source lacks."""


def settle_architecture(
    theirs: PreTrainedConfig, converter: Converter, files: TensorFiles, plan_as: PlanAs
) -> tuple[str, list[str]]:
    """Return the class that is converted and notes for users.

    Args:
        plan_as: plans the conversion as a class, or raises ValueError.

    Raises:
        ValueError: for classes that cannot be converted, and if none is named and the tensors do
            not decide.
    """
    known = converter.ARCHITECTURES
    for name in theirs.architectures or ():
        if isinstance(name, str) and (current := current_class(name, known, converter.CONFIG)):
            return current, [] if current == name else [
                f"architectures={[name]!r} is read as {current}"
            ]
    names = theirs.architectures or ()
    if any(hasattr(transformers, str(name)) for name in names):
        expected = f"expected one of {', '.join(known)}: {SET}"
        raise ValueError(f"architectures={names!r} cannot be converted, {expected}")
    return class_by_tensors(theirs, converter, files, plan_as)


def class_by_tensors(
    theirs: PreTrainedConfig, converter: Converter, files: TensorFiles, plan_as: PlanAs
) -> tuple[str, list[str]]:
    """Return the class that the tensors fit and a note, where config.json names no class or one
    that is not transformers'."""
    problem = f"architectures={theirs.architectures!r}"
    classes = matching_classes(theirs, converter, files, plan_as)
    if not classes:
        plan_as(next(iter(converter.ARCHITECTURES)))  # raises the error of the base class
    if len(classes) != 1:
        known = f"expected one of {', '.join(converter.ARCHITECTURES)}"
        raise ValueError(
            f"{files.path} has {problem}, {known}: its tensors fit {' and '.join(classes)}, {SET}"
        )
    return classes[0], [
        f"{problem} in config.json: the tensors are read as {classes[0]}, {SET} selects "
        "another class"
    ]


def matching_classes(
    theirs: PreTrainedConfig, converter: Converter, files: TensorFiles, plan_as: PlanAs
) -> list[str]:
    """Return the classes that use the most tensors of `files`, and of several those that are saved
    with the same prefix."""
    classes = closest_classes(converter, plan_as)
    if len(classes) == 1:
        return classes
    has_prefix = bool(files.prefixed)
    return [
        name for name in classes if stores_prefix(name, theirs, converter.PREFIX) == has_prefix
    ] or classes


def closest_classes(converter: Converter, plan_as: PlanAs) -> list[str]:
    """Return the classes that a source has all tensors of, and the fewest tensors of other
    heads."""
    remaining = fitting_classes(converter.ARCHITECTURES, plan_as)
    fewest = min(remaining.values(), default=0)
    return [name for name, number in remaining.items() if number == fewest]


def fitting_classes(architectures: Iterable[str], plan_as: PlanAs) -> dict[str, int]:
    """Return the classes that a source has all tensors of, each with the number of tensors of other
    heads."""
    remaining = {}
    for name in architectures:
        with contextlib.suppress(ValueError, RuntimeError):
            remaining[name] = len(other_heads(plan_as(name)))
    return remaining


def other_heads(plan: ConversionPlan) -> list[str]:
    """Return the tensors of other heads in a source. A pooler may come with any head, as in old
    files."""
    return [
        name
        for name in plan.left_out
        if name not in plan.foreign and not name.startswith("pooler.")
    ]


def stores_prefix(architecture: str, theirs: PreTrainedConfig, prefix: str) -> bool:
    """Return whether transformers saves the base model inside `architecture` under `prefix`."""
    with torch.device("meta"):
        names = getattr(transformers, architecture)(theirs).state_dict()
    return any(name.startswith(prefix) for name in names)


def plan_or_base(
    architecture: str, converter: Converter, plan_as: PlanAs
) -> tuple[ConversionPlan, list[str]]:
    """Plan the conversion as `architecture`, or as its base class where the file has no tensor of
    any head.

    Raises:
        MissingTensors: if the base model or a part of the head is missing.
    """
    try:
        return plan_as(architecture), []
    except MissingTensors as error:
        bases = [name for name, ours in converter.ARCHITECTURES.items() if ours.endswith("Model")]
        for base in bases:
            with contextlib.suppress(ValueError, RuntimeError):
                plan = plan_as(base)
                if not other_heads(plan):
                    return plan, [
                        f"the head of {architecture} is missing, so the base class {base} is "
                        f"converted"
                    ]
        classes = closest_classes(converter, plan_as)
        hint = f": its tensors fit {' and '.join(classes)}, {SET}" if classes else ""
        raise MissingTensors(f"{error}{hint}") from None
