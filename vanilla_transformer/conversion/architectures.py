"""The model class of a source: by config.json, or by its tensors if only one class fits them."""

import contextlib
from collections.abc import Iterable

import torch
import transformers
from transformers import PreTrainedConfig

from ..class_names import current_class
from .conversion_plan import ConversionPlan
from .converter import ForeignCheckpoint, base_prefix
from .plan_parts import MissingTensors
from .to_vanilla import plan_as

SET = "--set architectures=NAME"


def settle_architecture(source: ForeignCheckpoint) -> tuple[str, list[str]]:
    """Return the name of the class of `source` to convert, and notes for users.

    The class is the one in config.json. If that names no class of transformers, it is the only
    class whose tensors are in the files.

    Raises:
        ValueError: for a class that cannot be converted, and if config.json names none and the
            tensors fit none or several.
    """
    theirs, known = source.theirs, source.converter.ARCHITECTURES
    for name in theirs.architectures or ():
        if isinstance(name, str) and (current := current_class(name, known, type(theirs).__name__)):
            return current, [] if current == name else [
                f"architectures={[name]!r} is read as {current}"
            ]
    names = theirs.architectures or ()
    if any(hasattr(transformers, str(name)) for name in names):
        expected = f"expected one of {', '.join(known)}: {SET}"
        raise ValueError(f"architectures={names!r} cannot be converted, {expected}")
    return class_by_tensors(source)


def class_by_tensors(source: ForeignCheckpoint) -> tuple[str, list[str]]:
    """Return the name of the only class that the tensors of `source` fit, and a list with a note
    about it.

    Raises ValueError if the tensors fit no class or several.
    """
    problem = f"architectures={source.theirs.architectures!r}"
    known = [*source.converter.ARCHITECTURES]
    classes = matching_classes(source)
    if not classes:
        plan_as(source, known[0])  # raises the error of the base class
    if len(classes) != 1:
        raise ValueError(
            f"{source.files.path} has {problem}, expected one of {', '.join(known)}: its tensors "
            f"fit {' and '.join(classes)}, {SET}"
        )
    return classes[0], [
        f"{problem} in config.json: the tensors are read as {classes[0]}, {SET} selects "
        "another class"
    ]


def matching_classes(source: ForeignCheckpoint) -> list[str]:
    """Return the names of the classes that leave the fewest tensors of other heads unused.

    If there are several, keep those that name their tensors with the base model's prefix as the
    files of `source` do. If that leaves none, return all.
    """
    classes = closest_classes(source)
    if len(classes) == 1:
        return classes
    has_prefix, prefix = bool(source.files.prefixed), base_prefix(source.converter)
    return [
        name for name in classes if stores_prefix(name, source.theirs, prefix) == has_prefix
    ] or classes


def closest_classes(source: ForeignCheckpoint) -> list[str]:
    """Return the names of the classes that leave the fewest tensors of other heads unused.

    Only classes whose tensors are all in `source` are compared; the list may be empty.
    """
    remaining = fitting_classes(source, source.converter.ARCHITECTURES)
    fewest = min(remaining.values(), default=0)
    return [name for name, number in remaining.items() if number == fewest]


def fitting_classes(source: ForeignCheckpoint, architectures: Iterable[str]) -> dict[str, int]:
    """Return {class name: number of unused tensors that belong to other heads}.

    It has only those of `architectures` whose tensors are all in `source`: `plan_as` raises no
    ValueError or RuntimeError for them.
    """
    remaining = {}
    for name in architectures:
        with contextlib.suppress(ValueError, RuntimeError):
            remaining[name] = len(other_heads(plan_as(source, name)))
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


def plan_or_base(source: ForeignCheckpoint, architecture: str) -> tuple[ConversionPlan, list[str]]:
    """Return the plan for `source` as the class `architecture`, and notes for users.

    If it has no tensor of any head, the plan is for the base class, with a note.

    Raises:
        MissingTensors: if it lacks tensors of the base model, or a part of the head. The
            message names the classes that its tensors fit.
    """
    try:
        return plan_as(source, architecture), []
    except MissingTensors as error:
        known = source.converter.ARCHITECTURES
        bases = [name for name, ours in known.items() if ours.endswith("Model")]
        for base in bases:
            with contextlib.suppress(ValueError, RuntimeError):
                plan = plan_as(source, base)
                if not other_heads(plan):
                    return plan, [
                        f"the head of {architecture} is missing, so the base class {base} is "
                        f"converted"
                    ]
        classes = closest_classes(source)
        hint = f": its tensors fit {' and '.join(classes)}, {SET}" if classes else ""
        raise MissingTensors(f"{error}{hint}") from None
