"""The mean of the weights of several checkpoints (section 6.1 of the paper)."""

import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from ..checkpoint import TOKENIZER_FILES, stored_shapes
from ..checkpoint import load_checkpoint as load
from ..checkpoint_files import checkpoint_directory, for_every_version, read_json, shorten
from ..companions import companions
from ..files import MODULES
from ..outputs import new_directory
from ..source import Source

# config fields without effect on the model; fields of tokenizer.json that the last call left
NEUTRAL = {
    "_name_or_path",
    "transformers_version",
    "dtype",
    "auto_map",
    "custom_pipelines",
    "use_cache",
    "output_attentions",
}
NEUTRAL |= {"output_hidden_states", "return_dict"}
OF_A_CALL = {"padding", "truncation"}


def average(
    checkpoints: list[str | os.PathLike],
    out: str | os.PathLike,
    force: bool = False,
    variant: str | None = None,
) -> None:
    """Write a model with the mean of the weights of `checkpoints`, directories or Hub ids, to
    `out`.

    The tokenizer is that of the first checkpoint. Modules of sentence-transformers are averaged and
    written too. `force` replaces `out` if this package wrote it. `variant` "fp16" reads
    model.fp16.safetensors instead of model.safetensors.

    Raises:
        FileExistsError: if `out` exists and may not be replaced.
        FileNotFoundError: if a checkpoint or a file of it is missing.
        ValueError: for damaged files, and if architectures, shapes, configs, tokenizer.json or
            modules differ.
    """
    with new_directory(out, force, checkpoints) as directory:
        model = average_weights(checkpoints, variant)
        check_tokenizers(checkpoints)
        model.save_pretrained(directory)
        first = checkpoint_directory(checkpoints[0])
        for name in TOKENIZER_FILES:
            if (first / name).is_file():
                shutil.copyfile(first / name, directory / name)
        for_every_version(directory)
        average_modules(checkpoints, directory)


def average_weights(
    checkpoints: list[str | os.PathLike], variant: str | None = None
) -> PreTrainedModel:
    """Return the model of the first checkpoint with the mean of all weights, computed in float64.

    `checkpoints` are directories or Hub ids. `variant` "fp16" reads the weights in
    model.fp16.safetensors.

    Raises:
        FileNotFoundError: if a checkpoint or a file of it is missing.
        ValueError: for damaged files, and if their architectures, the shapes of their weights or
            their configs differ.
    """
    model = load(checkpoints[0], variant)
    sums = {name: weight.double() for name, weight in model.named_parameters()}
    for checkpoint in checkpoints[1:]:
        other = load(checkpoint, variant)
        weights = dict(other.named_parameters())
        shapes, expected = (
            {name: tuple(weight.shape) for name, weight in state.items()}
            for state in (weights, sums)
        )
        if type(other) is not type(model) or shapes != expected:
            raise ValueError(
                f"{checkpoint} has another architecture or other shapes than {checkpoints[0]}"
            )
        check_equal(
            other.config.to_dict(), model.config.to_dict(), (checkpoint, checkpoints[0]), NEUTRAL
        )
        for name, weight in weights.items():
            sums[name] = sums[name] + weight.double()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(sums[name] / len(checkpoints))
    return model


def check_tokenizers(checkpoints: list[str | os.PathLike]) -> None:
    """Raise ValueError if two checkpoints have different tokenizer.json files.

    Checkpoints without this file are not compared. Settings of padding and truncation may differ.
    """
    files = [checkpoint_directory(checkpoint) / "tokenizer.json" for checkpoint in checkpoints]
    first, *others = [file for file in files if file.is_file()] or [None]
    for file in others:
        check_equal(read_json(file), read_json(first), (file, first), OF_A_CALL)


def average_modules(checkpoints: list[str | os.PathLike], directory: Path) -> None:
    """Write the sentence-transformers modules to `directory`, with the mean of their weights,
    computed in float64.

    Raises ValueError if modules or their configs differ, or weights are missing or not safetensors.
    """
    checkpoint_modules = [companions(Source.open(path).download()) for path in checkpoints]
    first, *others = checkpoint_modules
    for checkpoint, other in zip(checkpoints[1:], others):
        if other.modules != first.modules:
            one, same = ([module.kind for module in entry.modules] for entry in (other, first))
            raise ValueError(
                f"{checkpoint} has the modules {one}, expected {same} as {checkpoints[0]} has"
            )
        for name in sorted({*first.files, *other.files} - {MODULES}):
            sources = [Path(source, name) for source in (checkpoint, checkpoints[0])]
            one, same = (entry.files.get(name) for entry in (other, first))
            if name.endswith(".json"):
                check_equal(
                    *(read_json(file) if file else {} for file in (one, same)),
                    sources,
                    {"__version__"},
                )
            elif not name.endswith(".safetensors"):
                raise ValueError(f"{one or same} cannot be averaged, expected a safetensors file")
            elif not (one and same):
                missing, present = sources if same else sources[::-1]
                raise ValueError(f"{missing} is missing, expected weights as in {present}")
    first.copy(directory)
    for name in first.files:
        if name.endswith(".safetensors"):
            save_file(mean([entry.files[name] for entry in checkpoint_modules]), directory / name)


def mean(files: list[Path]) -> dict[str, torch.Tensor]:
    """Return {name: mean} of the tensors of several safetensors files.

    The mean is computed in float64 and has the dtype of the first file. Raises ValueError naming
    the first file that is damaged or differs in names or shapes.
    """
    shapes = [{name: shape for name, (shape, _) in stored_shapes(file).items()} for file in files]
    for file, file_shapes in zip(files, shapes):
        check_equal(file_shapes, shapes[0], (file, files[0]), set())
    parts = [load_file(file) for file in files]
    return {
        name: (sum(part[name].double() for part in parts) / len(parts)).to(tensor.dtype)
        for name, tensor in parts[0].items()
    }


def check_equal(actual: dict, expected: dict, sources: tuple, neutral: set[str]) -> None:
    """Raise ValueError naming the first difference of two dicts in keys that are not `neutral`.

    `sources` are the files or checkpoints of `actual` and `expected`, for the message.
    """
    for key in sorted((actual.keys() | expected.keys()) - neutral):
        if actual.get(key) != expected.get(key):
            name, one, other = difference(key, actual.get(key), expected.get(key))
            raise ValueError(
                f"{sources[0]} has {name} {shorten(one)}, expected {shorten(other)} as in "
                f"{sources[1]}"
            )


def difference(name: str, one: object, other: object) -> tuple[str, object, object]:
    """Return (path, value, other value) of the first difference of two unequal JSON values, `one`
    and `other`.

    The path begins with `name`, such as "config.id2label.0".
    """
    if isinstance(one, list) and isinstance(other, list):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return name, one, other
    key = next((key for key in [*one, *other] if one.get(key) != other.get(key)), None)
    return (
        (name, one, other)
        if key is None
        else difference(f"{name}.{key}", one.get(key), other.get(key))
    )
