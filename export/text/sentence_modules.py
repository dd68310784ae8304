"""The modules of sentence-transformers in an export: poolings, linear maps and normalization, which
make one vector of the hidden states of a text. And the heads of BGE-M3, which make a weight and a
vector of each state."""

import io
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from ..shared.files import TOKEN_HEADS, safetensors_header
from ..shared.options import as_list
from .checks import check_choice
from .scores import activation

SMALLEST_NORM = 1e-12
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
# Names of poolings by their field in older versions of sentence-transformers, in the order in which
# their vectors are concatenated.
POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
Step = Callable[[np.ndarray], np.ndarray]  # (D,) -> (E,)
Tensors = dict[str, np.ndarray]  # {name: array} of a file
Shapes = Mapping[str, tuple[int | None, ...]]


class Files(Protocol):
    """The files of an export: an `ExportInfo`, or those of one that is not complete."""

    @property
    def directory(self) -> Path: ...

    def read(self, name: str) -> bytes | None:
        """Return the content of the file `name`, or None without such a file."""


@dataclass(frozen=True)
class SentenceModules:
    """The modules that compute one vector from the hidden states of a text. The vectors of
    `poolings` are concatenated, with or without the prompt's tokens. Then `steps` are applied in
    order."""

    poolings: tuple[str, ...]
    includes_prompt: bool
    steps: tuple[Step, ...]

    def embedding(self, states: np.ndarray, prompt_length: int) -> np.ndarray:
        """Return one vector (E,) for the states (S, D) of a text: pooled, then through all steps.

        The first `prompt_length` tokens are a prompt.
        """
        skipped = 0 if self.includes_prompt else prompt_length
        vector = np.concatenate([pool(name, states, skipped) for name in self.poolings])
        for step in self.steps:
            vector = step(vector)
        return vector

    def without_normalization(self) -> "SentenceModules":
        """Return these modules without normalization at their end."""
        steps = self.steps
        while steps and steps[-1] is normalize:
            steps = steps[:-1]
        return replace(self, steps=steps)


def read_modules(modules: list[dict], files: Files, hidden_size: int) -> SentenceModules:
    """Return the sentence modules of the entries `modules` of a manifest, with the weights in
    `files`, for states of `hidden_size` values.

    Raises:
        ValueError: if the order or a setting of the modules is not supported, or weights are
            missing, invalid, of another shape or not finite.
    """
    first, *rest = modules or [{"type": "Pooling", "pooling_mode": "mean"}]
    kinds = [module.get("type") for module in (first, *rest)]
    if kinds[0] != "Pooling" or not set(kinds[1:]) <= STEPS.keys():
        raise ValueError(
            f"{files.directory} has the modules {kinds}, expected Pooling, then "
            f"{' or '.join(STEPS)}"
        )
    poolings, steps = read_poolings(first), []
    width = len(poolings) * hidden_size
    for module in rest:
        check_names(module)
        step, width = STEPS[module["type"]](files, module, width)
        steps.append(step)
    return SentenceModules(poolings, first.get("include_prompt", True), tuple(steps))


def check_names(module: dict) -> None:
    """Raise ValueError unless the module reads and writes the sentence embedding, so that the
    modules form a chain."""
    for name in ("module_input_name", "module_output_name"):
        if module.get(name) not in (None, "sentence_embedding"):
            raise ValueError(
                f"the module {module['type']} has {name} {module[name]!r:.60}, expected "
                f"'sentence_embedding'"
            )


def read_poolings(config: dict) -> tuple[str, ...]:
    names = (
        as_list(config.get("pooling_mode"))
        or [name for old, name in POOLINGS.items() if config.get(old)]
        or ["mean"]
    )
    for name in names:
        if name not in POOLINGS.values():
            raise ValueError(
                f"pooling_mode is {name!r:.60}, expected one of {', '.join(POOLINGS.values())}"
            )
    return tuple(names)


def pool(name: str, states: np.ndarray, skipped: int) -> np.ndarray:
    """Return one vector (D,) for the states (S, D), without the first `skipped` tokens. `name` is a
    value of `POOLINGS`, such as "mean"."""
    rest = states[skipped:]
    match name:
        case "cls":
            return rest[0] if len(rest) else states[0]
        case "lasttoken":
            return states[-1]
        case "max":
            return rest.max(axis=0, initial=-np.inf)
        case "weightedmean":
            weights = np.arange(skipped + 1, len(states) + 1, dtype=np.float32)
            return weights @ rest / max(weights.sum(), 1e-9)
        case _:
            count = max(len(rest), 1e-9)
            return rest.sum(axis=0) / (np.sqrt(count) if name == "mean_sqrt_len_tokens" else count)


def normalize(vectors: np.ndarray) -> np.ndarray:
    """Return the vectors scaled to length 1 over the last axis. Zero vectors stay zero."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), SMALLEST_NORM)


def check_width(module: dict, name: str, width: int) -> None:
    """Raise ValueError unless the setting `name` of `module`, the number of values that it reads,
    is `width` or missing."""
    if module.get(name, width) != width:
        raise ValueError(
            f"{module['folder']}/config.json has {name}={module[name]!r:.60}, expected {width}, "
            "the number of values of the vectors before it"
        )


def dense(files: Files, module: dict, width: int) -> tuple[Step, int]:
    """Return the function from vector to vector of a module Dense, its linear map and its
    activation, and the number of values of its result.

    `module` is its entry in the manifest. It reads vectors of `width` values.

    Raises:
        ValueError: if the module has a residual connection or an unknown activation, or its weights
            are missing, of another shape, not finite or not a safetensors file.
    """
    if module.get("use_residual"):
        raise ValueError(
            "the module Dense has use_residual=True, which is not supported: expected False"
        )
    function = activation(
        module.get("activation_function", "torch.nn.Tanh"), "the activation of the module Dense"
    )
    size = module.get("out_features")
    shapes = {"linear.weight": (size, width), "linear.bias": (size,)}
    if not module.get("bias", True):
        del shapes["linear.bias"]
    tensors = module_tensors(files, module, shapes)
    check_width(module, "in_features", width)
    weight, bias = tensors["linear.weight"], tensors.get("linear.bias", np.float32(0))
    return lambda vector: function(weight @ vector + bias), len(weight)


def layer_norm(files: Files, module: dict, width: int) -> tuple[Step, int]:
    """Return the function from vector to vector of a module LayerNorm, and `width`, the number of
    values of a vector.

    `module` is its entry in the manifest. Raises ValueError if its weights are missing, of another
    shape, not finite or not a safetensors file.
    """
    shapes = dict.fromkeys(("norm.weight", "norm.bias"), (width,))
    tensors = module_tensors(files, module, shapes)
    check_width(module, "dimension", width)
    weight, bias = tensors["norm.weight"], tensors["norm.bias"]

    def step(vector: np.ndarray) -> np.ndarray:
        centered = vector - vector.mean()
        return centered / np.sqrt(np.square(centered).mean() + 1e-5) * weight + bias

    return step, width


def module_tensors(files: Files, module: dict, shapes: Shapes) -> Tensors:
    """Return the weights of `module`, its entry in the manifest.

    Raises ValueError if the file is missing or no safetensors file, or has other tensors than
    `shapes` or values that are not finite.
    """
    kind = module["type"]
    if "folder" not in module:
        raise ValueError(
            f"{files.directory} has a module {kind} without a folder, expected its name: export "
            "again"
        )
    name = f"{module['folder']}/model.safetensors"
    tensors = file_tensors(files, name, f"module {kind}")
    check_shapes(files.directory / name, tensors, shapes)
    return tensors


def file_tensors(files: Files, name: str, owner: str) -> Tensors:
    """Return the weights in the file `name`, those of `owner`.

    Raises ValueError if the file is missing or no safetensors file, or has values that are not
    finite.
    """
    content = files.read(name)
    if content is None:
        raise ValueError(
            f"{files.directory} has no {name}, expected the weights of its {owner}: export again"
        )
    tensors = read_safetensors(content, name)
    for tensor, values in tensors.items():
        if not np.isfinite(values).all():
            raise ValueError(
                f"{tensor} of {files.directory / name} has values that are NaN or infinite, "
                "expected finite numbers"
            )
    return tensors


def check_shapes(path: Path, tensors: Tensors, shapes: Shapes) -> None:
    """Raise ValueError unless `tensors`, those in the file `path`, have exactly the names and the
    `shapes` that are expected."""
    seen = {name: values.shape for name, values in tensors.items()}
    if seen != shapes:
        raise ValueError(f"{path} has {reprlib.repr(seen)}, expected {reprlib.repr(shapes)}")


# functions from the export, a module's entry in the manifest and the number of values that it reads
# to its step and the number of values of the result
STEPS: dict[str, Callable[[Files, dict, int], tuple[Step, int]]] = {
    "Dense": dense,
    "LayerNorm": layer_norm,
    "Normalize": lambda files, module, width: (normalize, width),
}


def read_safetensors(content: bytes, name: str) -> Tensors:
    """Return {name: array} of the tensors in the `content` of a safetensors file, in float32.

    The file has 8 bytes with the length of a JSON header, the header, and the data. `name` is the
    file, for errors.

    Raises:
        ValueError: if the file is not valid, or a tensor is not of a floating point type.
    """
    try:
        start, header = safetensors_header(io.BytesIO(content))
        return {key: read_tensor(content[start:], facts) for key, facts in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name} is not a valid safetensors file: {error}") from None


def read_tensor(data: bytes, facts: dict) -> np.ndarray:
    begin, end = facts["data_offsets"]
    if facts["dtype"] == "BF16":  # the upper half of a float32
        values = (np.frombuffer(data[begin:end], "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        check_choice("dtype", facts["dtype"], DTYPES)
        values = np.frombuffer(data[begin:end], DTYPES[facts["dtype"]]).astype(np.float32)
    return values.reshape(facts["shape"])


# ----------------------------------------------------------------------------- the heads of BGE-M3


class TokenHeads(NamedTuple):
    """The heads of BGE-M3 (Chen et al. 2024): linear maps from states (S, D) of tokens to weights
    (S, 1) of a sparse embedding, which may be below 0, and to the vectors (S, E) of a multi-vector
    embedding."""

    weights: Step
    vectors: Step


def read_token_heads(files: Files, hidden_size: int) -> TokenHeads:
    """Return the heads of an export, for states of `hidden_size` values.

    Raises ValueError if a file is missing or no safetensors file, or has tensors of other shapes or
    values that are not finite.
    """
    sparse, multi_vector = (f"{head}.safetensors" for head in TOKEN_HEADS)
    return TokenHeads(
        linear(files, sparse, hidden_size, 1), linear(files, multi_vector, hidden_size)
    )


def linear(files: Files, name: str, in_features: int, out_features: int | None = None) -> Step:
    """Return the linear map with the weights in the file `name`. `out_features` may be any number
    if it is None."""
    tensors = file_tensors(files, name, "heads of BGE-M3")
    size = out_features or max(tensors.get("weight", np.ones(1)).size // in_features, 1)
    shapes = {"weight": (size, in_features), "bias": (size,)}
    check_shapes(files.directory / name, tensors, shapes)
    weight, bias = tensors["weight"], tensors["bias"]
    return lambda states: states @ weight.T + bias
