"""Text embeddings: one vector per text from the hidden states of its tokens, as configured by the
export's sentence-transformers files."""

import io
import re
import reprlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from tokenizers import Encoding, normalizers

from ...errors import UsageError, did_you_mean
from ...heads import EMBED
from ...inference.export_info import ExportInfo, json_object
from ...inference.options import as_list
from ...shared.files import safetensors_header
from .classification import activation, sentence_config
from .rows import (
    Cut,
    TokenRow,
    check_choice,
    check_count,
    check_strings,
    encode_texts,
    require,
    run,
)

if TYPE_CHECKING:
    from ...text_runtime import TextRuntime

# file with `max_seq_length` and `do_lower_case`
LENGTH_CONFIG = re.compile(r"sentence_[\w-]+_config\.json")
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
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
Step = Callable[[np.ndarray], np.ndarray]  # (D,) -> (E,)


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


def embed(
    runtime: "TextRuntime",
    texts: Sequence[str],
    /,
    prompt_name: str | None = None,
    prompt: str | None = None,
    truncate_dim: int | None = None,
) -> np.ndarray:
    """Return one vector for each text (B, E), float32, as `SentenceTransformer.encode` does. The
    export's modules.json selects pooling, linear maps and normalization. Without modules.json it is
    the mean over all tokens.

    Args:
        texts: strings; they may be blank. Texts longer than the export's `max_seq_length` are
            truncated, as in sentence-transformers.
        prompt_name: name of a prompt in config_sentence_transformers.json; by default its
            `default_prompt_name`.
        prompt: text that precedes each text, in place of `prompt_name`.
        truncate_dim: number of values of each vector, from its start; by default the `truncate_dim`
            of the export, or all. The vectors are not normalized again, and no file has the layer
            norm that the card of nomic-embed-text applies first, without weights.

    Raises:
        UsageError: if `prompt_name` is unknown, if both a prompt and a name are set, or if
            `truncate_dim` is not a positive integer.
        ValueError: if the export does not return hidden states, a text is a pair or has no tokens,
            or a module is not supported.
    """
    require(runtime, EMBED)
    prompt = select_prompt(sentence_config(runtime), prompt_name, prompt)
    return vectors(runtime, *rows_to_embed(runtime, check_strings(texts), prompt), truncate_dim)


def rows_to_embed(
    runtime: "TextRuntime", texts: Sequence[str], prompt: str = ""
) -> tuple[list[Encoding], int]:
    """Return the tokens of `prompt` and each text together, and the number of tokens of the prompt,
    0 without one. Rows are truncated to the export's maximum."""
    longest, lowers = length_and_case(runtime)
    lowered = normalizers.Lowercase().normalize_str if lowers else str
    rows = encode_texts(runtime, [lowered(prompt + text) for text in texts], Cut(longest))
    return rows, count_prompt_tokens(
        encode_texts(runtime, [lowered(prompt)], Cut(longest))[0]
    ) if prompt else 0


def vectors(
    runtime: "TextRuntime",
    rows: Sequence[Encoding | TokenRow],
    prompt_length: int = 0,
    truncate_dim: int | None = None,
) -> np.ndarray:
    """Return one vector for each of `rows` (B, E), float32, as `embed` does for texts.

    The first `prompt_length` tokens of a row are a prompt. `truncate_dim` is the number of values
    of each vector, by default all or what the export sets. The tokens of a `TokenRow` are used
    unchanged. Raises UsageError unless `truncate_dim` is a positive integer.
    """
    modules = runtime.sentence_modules
    width = sentence_config(runtime).get("truncate_dim") if truncate_dim is None else truncate_dim
    if width is not None:
        check_count("truncate_dim", width)
    results: list[np.ndarray] = [np.empty(0)] * len(rows)
    for index, outputs in run(runtime, rows):
        results[index] = modules.embedding(outputs["last_hidden_state"], prompt_length)[:width]
    return np.stack(results).astype(np.float32)


def similarity(runtime: "TextRuntime", first: np.ndarray, second: np.ndarray, /) -> np.ndarray:
    """Return the similarity (A, B), float32, of the vectors `first` (A, E) to the vectors `second`
    (B, E).

    The export's `similarity_fn_name` selects `"cosine"` (the default), `"dot"`, `"euclidean"` or
    `"manhattan"`. Euclidean and Manhattan distances are negated. An array (E,) is one vector.

    Raises:
        ValueError: if the arrays have more than two axes or differ in E, or the export has another
            `similarity_fn_name`.
    """
    name = sentence_config(runtime).get("similarity_fn_name") or "cosine"
    if name not in SIMILARITIES:
        raise ValueError(
            f"similarity_fn_name of the export is {name!r:.60}, expected one of "
            f"{', '.join(SIMILARITIES)}"
        )
    one, other = (np.atleast_2d(np.asarray(vectors, np.float32)) for vectors in (first, second))
    if one.ndim != 2 or other.ndim != 2 or one.shape[1] != other.shape[1]:
        raise ValueError(
            f"the vectors have shapes {one.shape} and {other.shape}, expected (A, E) and (B, E)"
        )
    if name == "cosine":
        one, other = normalize(one), normalize(other)
    if name in ("cosine", "dot"):
        return one @ other.T
    order = 2 if name == "euclidean" else 1
    return -np.stack([np.linalg.norm(row - other, ord=order, axis=1) for row in one])


# -------------------------------------------------------------------------------------- the prompts


def select_prompt(config: dict, prompt_name: str | None, prompt: str | None) -> str:
    prompts = config.get("prompts") or {}
    if prompt is not None:
        if prompt_name is not None:
            raise UsageError(
                f"prompt is {prompt!r:.60} and prompt_name is {prompt_name!r:.60}, expected only "
                "one of them"
            )
        if not isinstance(prompt, str):
            raise UsageError(f"prompt is {prompt!r:.60}, expected a string")
        return prompt
    if prompt_name is None:
        return prompts.get(config.get("default_prompt_name")) or ""
    if prompt_name not in prompts:
        expected = (
            f"expected one of {', '.join(prompts)}"
            if prompts
            else "expected None: this export has no prompts"
        )
        raise UsageError(
            f"prompt_name is {prompt_name!r:.60}, {expected}"
            f"{did_you_mean(str(prompt_name), prompts)}"
        )
    return prompts[prompt_name] or ""


def count_prompt_tokens(prompt: Encoding) -> int:
    """Return the number of tokens of a prompt, including the special tokens before it."""
    return len(prompt.ids) - (prompt.special_tokens_mask[-1:] == [1])


def length_and_case(runtime: "TextRuntime") -> tuple[int, bool]:
    """Return the maximum number of tokens of a text, including special tokens, and True if texts
    are lowercased."""
    config = length_config(runtime.info)
    longest = config.get("max_seq_length") or runtime.tokenizer_settings.longest
    limit = runtime.info.config["max_position_embeddings"]
    return min(longest or limit, limit), bool(config.get("do_lower_case"))


def length_config(info: ExportInfo) -> dict:
    """Return the content of the file with `max_seq_length`, empty without one."""
    names = sorted(name for name in info.manifest["files"] if LENGTH_CONFIG.fullmatch(name))
    return json_object(info.directory / names[0], info.read(names[0]) or b"{}") if names else {}


def length_problems(runtime: "TextRuntime") -> list[str]:
    """Return a warning if `max_seq_length` of the export is more than the model has positions."""
    info = runtime.info
    longest, limit = (
        length_config(info).get("max_seq_length"),
        info.config["max_position_embeddings"],
    )
    if not longest or longest <= limit:
        return []
    cut = f"expected at most max_position_embeddings={limit}: texts are cut there"
    return [f"{info.directory} has max_seq_length={longest}, {cut}"]


# -------------------------------------------------------------------------------------- the modules


def sentence_modules(runtime: "TextRuntime") -> SentenceModules:
    """Return the sentence modules of the export; without any, the mean of the token states.

    There is a warning for each of `pooling_problems` and `length_problems`. Raises ValueError as
    `read_modules` does.
    """
    modules = read_modules(runtime.info.manifest.get("sentence_modules") or [], runtime.info)
    for problem in pooling_problems(runtime) + length_problems(runtime):
        warnings.warn(problem, stacklevel=1)
    return modules


def pooling_problems(runtime: "TextRuntime") -> list[str]:
    """Return a warning if the export configures no pooling, or one that does not fit the attention:
    the first token of a decoder reads no other."""
    modules = runtime.info.manifest.get("sentence_modules")
    directory = runtime.info.directory
    if not modules:
        return [f"{directory} configures no pooling, expected modules.json: it is the mean"]
    unfit, kind = (
        ("cls", "decoder")
        if runtime.info.config["model_type"] == "vanilla-decoder"
        else ("lasttoken", "encoder")
    )
    if unfit not in read_poolings(modules[0]):
        return []
    return [f"{directory} has the pooling {unfit!r}, which does not fit the attention of a {kind}"]


def read_modules(modules: list[dict], files: Files) -> SentenceModules:
    """Return the sentence modules of the entries `modules` of a manifest, with the weights in
    `files`.

    Raises:
        ValueError: if the order or a setting of the modules is not supported, or weights are
            missing, invalid or of another shape.
    """
    first, *rest = modules or [{"type": "Pooling", "pooling_mode": "mean"}]
    kinds = [module.get("type") for module in (first, *rest)]
    if kinds[0] != "Pooling" or not set(kinds[1:]) <= STEPS.keys():
        raise ValueError(
            f"{files.directory} has the modules {kinds}, expected Pooling, then "
            f"{' or '.join(STEPS)}"
        )
    for module in rest:
        check_names(module)
    steps = [STEPS[module["type"]](files, module) for module in rest]
    return SentenceModules(read_poolings(first), first.get("include_prompt", True), tuple(steps))


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


def dense(files: Files, module: dict) -> Step:
    """Return the function from vector to vector of a module Dense: its linear map and its
    activation.

    `module` is its entry in the manifest.

    Raises:
        ValueError: if the module has a residual connection or an unknown activation, or its weights
            are missing, of another shape or not a safetensors file.
    """
    if module.get("use_residual"):
        raise ValueError(
            "the module Dense has use_residual=True, which is not supported: expected False"
        )
    function = activation(
        module.get("activation_function", "torch.nn.Tanh"), "the activation of the module Dense"
    )
    names = ("linear.weight", "linear.bias")[: 1 + bool(module.get("bias"))]
    tensors = module_tensors(files, module, *names)
    weight, bias = tensors["linear.weight"], tensors.get("linear.bias", np.float32(0))
    shape = module.get("out_features"), module.get("in_features")
    if None not in shape and weight.shape != shape:
        raise ValueError(
            f"the weight of the module Dense in {module['folder']} has the shape {weight.shape}, "
            f"expected {shape}"
        )
    return lambda vector: function(weight @ vector + bias)


def layer_norm(files: Files, module: dict) -> Step:
    """Return the function from vector to vector of a module LayerNorm.

    `module` is its entry in the manifest. Raises ValueError if its weights are missing or not a
    safetensors file.
    """
    tensors = module_tensors(files, module, "norm.weight", "norm.bias")
    weight, bias = tensors["norm.weight"], tensors["norm.bias"]

    def step(vector: np.ndarray) -> np.ndarray:
        centered = vector - vector.mean()
        return centered / np.sqrt(np.square(centered).mean() + 1e-5) * weight + bias

    return step


def module_tensors(files: Files, module: dict, *names: str) -> dict[str, np.ndarray]:
    """Return {name: array} of the weights of `module`, its entry in the manifest.

    Raises ValueError if the file is missing or no safetensors file, or lacks a tensor of `names`.
    """
    kind = module["type"]
    if "folder" not in module:
        raise ValueError(
            f"{files.directory} has a module {kind} without a folder, expected its name: export "
            "again"
        )
    name = f"{module['folder']}/model.safetensors"
    content = files.read(name)
    if content is None:
        raise ValueError(
            f"{files.directory} has no {name}, expected the weights of its module {kind}: export "
            f"again"
        )
    tensors = read_safetensors(content, name)
    if not set(names) <= tensors.keys():
        raise ValueError(
            f"{files.directory / name} has {reprlib.repr(list(tensors))}, expected "
            f"{' and '.join(names)}"
        )
    return tensors


# functions from the export and a module's entry in the manifest to its step
STEPS: dict[str, Callable[[Files, dict], Step]] = {
    "Dense": dense,
    "LayerNorm": layer_norm,
    "Normalize": lambda files, module: normalize,
}


def read_safetensors(content: bytes, name: str) -> dict[str, np.ndarray]:
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
