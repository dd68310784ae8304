"""The model class of a source: by config.json, or by its tensors if only one class fits them."""

import contextlib
from collections.abc import Callable, Iterable

import torch
import transformers
from transformers import PreTrainedConfig

from ..class_names import current_class
from .conversion_plan import ConversionPlan
from .converter import Converter, base_prefix
from .tensors import TensorFiles

PlanAs = Callable[[str], ConversionPlan]
SET = "--set architectures=NAME"


class MissingTensors(ValueError):
    """Tensors that a class needs and a source lacks."""


def settle_architecture(
    theirs: PreTrainedConfig, converter: Converter, files: TensorFiles, plan_as: PlanAs
) -> tuple[str, list[str]]:
    """Return the name of the source's class to convert, and notes for users.

    The class is the one in config.json. If that names no class of transformers, it is the only
    class whose tensors are in the files.

    Args:
        theirs: config of the source.
        plan_as: plans the conversion as the class of a name, or raises ValueError.

    Raises:
        ValueError: for a class that cannot be converted, and if config.json names none and the
            tensors fit none or several.
    """
    known = converter.ARCHITECTURES
    for name in theirs.architectures or ():
        if isinstance(name, str) and (current := current_class(name, known, type(theirs).__name__)):
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
    """Return the name of the only class that the tensors fit, and a list with a note about it.

    Raises ValueError if the tensors fit no class or several. `theirs` is the config of the source,
    `files` are its tensors, and `plan_as(name)` plans the conversion as the class `name`.
    """
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
    """Return the names of the classes that leave the fewest tensors of other heads unused.

    If there are several, keep those that name their tensors with the base model's prefix as `files`
    do. If that leaves none, return all. `plan_as(name)` plans the conversion as the class `name`.
    """
    classes = closest_classes(converter, plan_as)
    if len(classes) == 1:
        return classes
    has_prefix, prefix = bool(files.prefixed), base_prefix(converter)
    return [
        name for name in classes if stores_prefix(name, theirs, prefix) == has_prefix
    ] or classes


def closest_classes(converter: Converter, plan_as: PlanAs) -> list[str]:
    """Return the names of the classes that leave the fewest tensors of other heads unused.

    Only classes whose tensors are all in the source are compared; the list may be empty.
    `plan_as(name)` plans the conversion as the class `name`.
    """
    remaining = fitting_classes(converter.ARCHITECTURES, plan_as)
    fewest = min(remaining.values(), default=0)
    return [name for name, number in remaining.items() if number == fewest]


def fitting_classes(architectures: Iterable[str], plan_as: PlanAs) -> dict[str, int]:
    """Return {class name: number of unused tensors that belong to other heads}.

    It has only those of `architectures` whose tensors are all in the source: `plan_as(name)`, which
    plans the conversion as a class, raises no ValueError or RuntimeError for them.
    """
    remaining = {}
    for name in architectures:
        with contextlib.suppress(ValueError, RuntimeError):
            remaining[name] = len(other_heads(plan_as(name)))
    return remaining


def other_heads(plan: ConversionPlan) -> list[str]:
    """Return the names of the tensors of the source that `plan` does not use and that belong to
    other heads of the family.

    A pooler is not counted, because old files have one with any head.
    """
    return [
        name
        for name in plan.left_out
        if name not in plan.foreign and not name.startswith("pooler.")
    ]


def stores_prefix(architecture: str, theirs: PreTrainedConfig, prefix: str) -> bool:
    """Return True if transformers saves the base model of the class `architecture` under `prefix`,
    such as "bert.". `theirs` is a config of that class."""
    with torch.device("meta"):
        names = getattr(transformers, architecture)(theirs).state_dict()
    return any(name.startswith(prefix) for name in names)


def plan_or_base(
    architecture: str, converter: Converter, plan_as: PlanAs
) -> tuple[ConversionPlan, list[str]]:
    """Return the plan of the conversion as the class `architecture`, and notes for users.

    If the source has no tensor of any head, the plan is for the base class, with a note.
    `plan_as(name)` plans the conversion as the class `name`.

    Raises:
        MissingTensors: if the source lacks tensors of the base model, or a part of the head. The
            message names the classes that its tensors fit.
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
