"""A conversion, checked before anything is written."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from ..checkpoint import Shapes, learned_positions
from ..checkpoint_files import read_json
from ..companions import Companions
from ..files import IMAGE_PROCESSOR, write_json
from ..pipelines import carry_translation
from .tensors import TensorFiles, write_safetensors
from .tokenizers import FoundTokenizer


@dataclass(frozen=True)
class TensorStep:
    """A function from tensors of the source to tensors of the result, by name.

    `same` are names of the result that hold equal tensors. `stored` are the names in the files of
    the result, if they differ from those in its class.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    function: Callable[..., tuple[torch.Tensor, ...]]
    note: str
    same: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()


@dataclass
class ConversionPlan:
    """The plan of a conversion: the checkpoint that `save` will write.

    `model` has its parameters on the meta device, without values.

    `left_out` are tensors of the source that belong to its family but not to its architecture,
    fields that act in training only, and files that change what a model does and are not converted.
    `foreign` are tensors of the source that no class of the family has. `image_processor` is the
    class of transformers that reads a preprocessor_config.json without a class name. A checkpoint
    that `translates`, and does nothing else, carries the translation pipeline. `remarks` are
    notes for users. `temporaries` hold files that had to be made for this plan. A printed plan is
    the mapping of tensors.

    Raises:
        ValueError: for tensors of the source whose shapes do not fit the config.
    """

    model: PreTrainedModel
    files: TensorFiles
    steps: list[TensorStep]
    left_out: list[str]
    generation_config: GenerationConfig | None = None
    tokenizer: FoundTokenizer | None = None
    companions: Companions = field(default_factory=Companions)
    image_processor: str | None = None
    translates: bool = False
    temporaries: list[TemporaryDirectory] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shapes: Shapes = {}
        self.stored = {
            name: stored for step in self.steps for name, stored in zip(step.writes, step.stored)
        }
        for step in self.steps:
            inputs = [
                torch.empty(shape, dtype=dtype, device="meta")
                for shape, dtype in (self.files.shapes[name] for name in step.reads)
            ]
            outputs = self._outputs(step, inputs)
            dtypes = (
                [tensor.dtype for tensor in outputs]
                if step.reads
                else [self.model.config.dtype] * len(outputs)
            )
            for name, tensor, dtype in zip(step.writes, outputs, dtypes, strict=True):
                self.shapes[name] = (tuple(tensor.shape), dtype)
        self._check_shapes()

    def _outputs(self, step: TensorStep, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        try:
            with torch.device("meta"):
                outputs = step.function(*inputs)
        except (IndexError, RuntimeError):  # too few axes, or axes of wrong lengths
            outputs = ()
        if len(outputs) == len(step.writes):
            return outputs
        shapes = ", ".join(
            f"{name} {list(tensor.shape)}" for name, tensor in zip(step.reads, inputs)
        )
        raise ValueError(
            f"{self.files.path} has {shapes}, which cannot be converted to "
            f"{' and '.join(step.writes)} ({step.note})"
        )

    def _check_shapes(self) -> None:
        tied = self.model.get_expanded_tied_weights_keys(all_submodels=True)
        expected = {
            name: tuple(tensor.shape)
            for name, tensor in self.model.state_dict().items()
            if name not in tied
        }
        # as sinusoids, which a model computes
        optional = set(self.model._keys_to_ignore_on_load_missing or ())
        difference = sorted(expected.keys() ^ self.shapes.keys())
        difference = [name for name in difference if not {name, f"model.{name}"} & optional]
        if difference:
            raise RuntimeError(
                f"the mapping of {type(self.model).__name__} is not complete: {difference}"
            )
        for step in self.steps:
            for name in step.writes:
                shape = self.shapes[name][0]
                if shape != expected[name]:
                    raise ValueError(
                        f"{', '.join(step.reads)} gives {name} the shape {shape}, expected "
                        f"{expected[name]} by the config"
                    )

    def __str__(self) -> str:
        lines = [f"{type(self.model).__name__}, {len(self.shapes)} tensors"]
        for step in self.steps:
            sources = " = ".join((" and ".join(step.reads), *step.same)) or "(new)"
            shapes = ", ".join(
                f"{self.stored.get(name, name)} {list(self.shapes[name][0])}"
                for name in step.writes
            )
            lines.append(f"{sources} -> {shapes}" + f"  ({step.note})" * bool(step.note))
        return "\n".join([*lines, *(f"{name} is left out" for name in self.left_out), *self.notes])

    @property
    def notes(self) -> list[str]:
        """Notes for users about the conversion and the tokenizer."""
        return [*self.remarks, *(self.tokenizer.notes if self.tokenizer is not None else [])]

    def save(self, directory: Path) -> None:
        """Write the checkpoint's files into the existing `directory`, the weights tensor by tensor.

        Raises OSError if the disk has no room for the weights.
        """
        self._check_disk_space(directory)
        shapes = {self.stored.get(name, name): shape for name, shape in self.shapes.items()}
        tensors = ((self.stored.get(name, name), tensor) for name, tensor in self.tensors())
        write_safetensors(directory / "model.safetensors", shapes, tensors)
        is_ours = self.model._auto_class is not None
        if is_ours:
            custom_object_save(self.model, directory, config=self.model.config)
        self.model.config.save_pretrained(directory)
        if self.generation_config is not None:
            self.generation_config.save_pretrained(directory)
        if self.tokenizer is not None:
            self.tokenizer.save(directory, learned_positions(self.model.config))
        if self.translates:
            carry_translation(directory)
        copy = Companions.copy_without_pickles if is_ours else Companions.copy_for_flag_embedding
        copy(self.companions, directory)
        name_image_processor(directory / IMAGE_PROCESSOR, self.image_processor)

    def _check_disk_space(self, directory: Path) -> None:
        needed = sum(
            torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.shapes.values()
        )
        free = shutil.disk_usage(directory).free
        if free < needed:
            raise OSError(
                f"{directory} has {free / 1e6:,.1f} MB free, expected {needed / 1e6:,.1f} MB for "
                "the weights"
            )

    def facts(self, out: str | os.PathLike) -> dict[str, Any]:
        """Return a JSON-ready summary of the checkpoint that was written to `out`.

        The keys are out, architecture (our class), tensors and parameters (numbers), left_out,
        tokenizer (its class, or None), notes, and modules (kinds of sentence-transformers modules).
        """
        return {
            "out": str(out),
            "architecture": type(self.model).__name__,
            "tensors": len(self.shapes),
            "parameters": sum(torch.Size(shape).numel() for shape, _ in self.shapes.values()),
            "left_out": self.left_out,
            "tokenizer": type(self.tokenizer.tokenizer).__name__
            if self.tokenizer is not None
            else None,
            "notes": self.notes,
            "modules": [module.kind for module in self.companions.modules],
        }

    def unequal(self) -> list[tuple[str, str]]:
        """Return the pairs of names that should hold one tensor, as tied weights do, but have
        different values in the source."""
        pairs = [(step.reads[0], name) for step in self.steps for name in step.same]
        return [pair for pair in pairs if not torch.equal(*map(self.files.read, pair))]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and value of each tensor of the result, in the order of `shapes`."""
        for step in self.steps:
            sources = [self.files.read(name) for name in step.reads]
            for name, tensor in zip(step.writes, step.function(*sources), strict=True):
                yield name, tensor.to(self.shapes[name][1])


def name_image_processor(path: Path, name: str | None) -> None:
    """Add `image_processor_type` with the class `name` to the preprocessor_config.json at `path`.

    Do nothing if the file is missing, if it has a class, or if `name` is `None`. Older files have
    no class, because the model type determined it.
    """
    if name is None or not path.is_file():
        return
    content = read_json(path)
    if not content.keys() & {"image_processor_type", "feature_extractor_type"}:
        write_json(path, {**content, "image_processor_type": name})
