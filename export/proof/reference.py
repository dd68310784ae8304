"""The inputs of a proof, and the results expected from them: random ones, and the reference of an
export, which has what torch computed when the export was written."""

import dataclasses
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.inputs import GenerationInput, generation_inputs
from ..heads import HEADS, READS_IMAGES
from ..inference.export_info import ExportInfo
from ..inference.inputs import move_padding, position_limit
from ..inference.options import Options, special_token
from ..inference.rows import GenerationRequest
from ..shared.options import as_list, without_none
from ..specs.graph_spec import TensorSpec, concrete_shape
from ..specs.sequences import pair

FILE = "reference.npz"
TORCH = "torch"  # the key of torch's results
# logits of a graph for prompt lookup, which exports had before
UNUSED = "lookup"
MAX_SIZE = 48  # of each axis of a stored result after the first; larger ones are sampled
# fields of the manifest that the reference repeats
FACTS = ("architecture", "model_type", "target", "activations", "opset", "step")
VARIANT_FACTS = ("graphs", "tolerance")
PADDED = ("input_ids", "attention_mask", "token_type_ids")  # as long as the mask
LENGTHS = (40, 17, 6)  # tokens of the rows of a reference; learned positions are a limit
NEW_TOKENS = 20
NUM_PIXELS = 1009  # which images repeat; a prime, so that no two rows of an image are the same
MAX_LENGTH = 33  # of random rows
CASE_TOKENS = 8  # after the prompt of a random row
PADDINGS = ("none", "right", "empty row")
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Reference:
    """Inputs of an export and the results expected from them.

    Args:
        inputs: inputs of the graph of a model that reads full sequences. For a model that generates
            `input_ids` and `attention_mask`; also `tokens` (B, T), which are fed after the prompt;
            and `start` (B, P) for seq2seq.
        options: options of `generate`; empty for a model that does not generate.
        results: results by name, of torch in float32, and by dtype of the export itself when it was
            written, for weights that are rounded to integers. See `outcome`.
        manifest: fields of the manifest, see `manifest_facts`; empty if nothing was exported yet.
    """

    inputs: Arrays
    options: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Arrays] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)

    def write(self, directory: Path, manifest: Mapping[str, Any]) -> None:
        """Write the reference of an export with this `manifest` to reference.npz in `directory`.

        Results are reduced by `sample`. The same arrays give the same bytes.
        """
        arrays = {f"inputs/{name}": array for name, array in self.inputs.items()}
        for source, results in self.results.items():
            arrays |= {f"{source}/{name}": array for name, array in sampled(results).items()}
        facts = {"manifest": manifest_facts(manifest), "options": self.options}
        content = np.array(json.dumps(facts, sort_keys=True))
        with open(directory / FILE, "wb") as file:
            np.savez(file, facts=content, **arrays)  # type: ignore[arg-type]

    @classmethod
    def read(cls, directory: Path) -> "Reference":
        """Return the reference in the export `directory`. Raise ValueError if it has none, or if
        reference.npz is not a reference."""
        path = directory / FILE
        if not path.is_file():
            raise ValueError(
                f"{directory} has no {FILE}, which `export` writes where torch is installed: "
                "export again"
            )
        try:
            with np.load(path) as file:
                arrays = dict(file)
            facts = json.loads(str(arrays.pop("facts")))
            groups: dict[str, Arrays] = {}
            for name, array in arrays.items():
                group, _, name = name.partition("/")
                if name != UNUSED:
                    groups.setdefault(group, {})[name] = array
            manifest, options = {**facts["manifest"]}, {**facts["options"]}
            return cls(groups.pop("inputs"), options, groups, manifest)
        except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is not a reference ({error!r}): export again") from None

    @property
    def feeds(self) -> Arrays:
        """The inputs by name. Images repeat the numbers of `pixels` in the given shape."""
        if "pixels" not in self.inputs:
            return self.inputs
        pixels, shape = self.inputs["pixels"], self.inputs["shape"]
        return {"pixel_values": np.resize(pixels, shape)}

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.feeds.values())))

    def row(self, index: int) -> "Reference":
        """Return a reference with the inputs of one row without its padding, and no results."""
        feeds = {name: array[index : index + 1] for name, array in self.feeds.items()}
        for prefix in ("", "decoder_"):
            if (mask := feeds.get(f"{prefix}attention_mask")) is not None:
                columns = mask.reshape(-1, mask.shape[-1]).any(axis=0)
                padded = [f"{prefix}{name}" for name in PADDED if f"{prefix}{name}" in feeds]
                feeds |= {name: feeds[name][..., columns] for name in padded}
        return dataclasses.replace(self, inputs=feeds, results={})

    @property
    def start(self) -> np.ndarray | None:
        """Tokens (B, P) that a decoder of seq2seq begins with."""
        return self.inputs.get("start")

    @property
    def generation_options(self) -> Options:
        return Options(**self.options)

    def request(self) -> GenerationRequest:
        """Return the request that opens rows for the inputs."""
        ids, mask = self.inputs["input_ids"], self.inputs["attention_mask"]
        if self.start is None:
            return GenerationRequest(self.generation_options, ids, mask)
        ones = np.ones_like(self.start)
        return GenerationRequest(self.generation_options, self.start, ones, (ids, mask))

    def rows(self, info: ExportInfo, **options: Any) -> list[GenerationInput]:
        """Return the rows that the export `info` generates from, with `options` besides those of
        the reference."""
        ids, mask, start = self.inputs["input_ids"], self.inputs["attention_mask"], self.start
        first = None if start is None else int(start[0, 0])
        resolved = Options(**self.options, decoder_start_token_id=first, **options)
        return generation_inputs(info, ids, mask, start, resolved)

    def real_values(self, info: ExportInfo) -> Arrays:
        """Return which values of the outputs and logits of an export are not of padding: a boolean
        array of the first axes of each, by name."""
        real = {tensor.name: real_values(tensor, self.feeds) for tensor in compared_outputs(info)}
        if info.generates:
            has_tokens = self.inputs["attention_mask"].any(axis=1, keepdims=True)
            real["logits"] = np.repeat(has_tokens, self.inputs["tokens"].shape[1], axis=1)
            if "start" not in self.inputs:  # without a prompt, the first token is the prompt
                real["logits"][:, 1:] = True
        return real


def decoder_ids(start: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return what a decoder reads (B, P + T - 1) before each of `tokens` (B, T), which follow
    `start` (B, P)."""
    return np.concatenate([start, tokens[:, :-1]], axis=1)


def manifest_facts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a manifest that decide how an export runs."""
    variants = {
        dtype: {name: variant.get(name) for name in VARIANT_FACTS}
        for dtype, variant in manifest["variants"].items()
    }
    return {name: manifest.get(name) for name in FACTS} | {"variants": variants}


def compared_outputs(info: ExportInfo) -> list[TensorSpec]:
    """Return the specs of the outputs of the encoder graph, without keys and values that it
    computes for a decoder."""
    outputs = info.specs["encoder"].outputs if "encoder" in info.specs else ()
    return [tensor for tensor in outputs if not tensor.name.startswith("present")]


def real_values(output: TensorSpec, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return which values of `output` belong to tokens, or to sequences with tokens: a boolean
    array of its first axes."""
    if "attention_mask" not in feeds:
        return np.ones(len(feeds["pixel_values"]), bool)
    real = feeds["attention_mask"] == 1
    if "source_length" not in output.shape:
        real = real.any(axis=-1)
    if "target_length" in output.shape:
        real = real[:, None] & (feeds["decoder_attention_mask"] == 1)
    return real


def sample(values: np.ndarray) -> np.ndarray:
    """Return `values` at evenly spaced indices of each axis after the first, at most `MAX_SIZE`
    of an axis."""
    for axis, size in enumerate(values.shape[1:], 1):
        if size > MAX_SIZE:
            indices = np.linspace(0, size - 1, MAX_SIZE).round().astype(int)
            values = values.take(indices, axis)
    return values


def sampled(results: Arrays) -> Arrays:
    return {name: sample(values) for name, values in results.items()}


# ------------------------------------------------------------------------------------- random rows


def reference_inputs(
    info: ExportInfo, rng: np.random.Generator, min_length: int = 0, copies: int = 1
) -> Reference:
    """Return random rows of the `LENGTHS` of a reference, `copies` times, without results.

    The first row has at least `min_length` tokens. It is cut at the number of learned positions,
    the second at half and the third at a quarter of it. A vision model gets two images of 3.5
    patches on each side.
    """
    if reads_images(info):
        return image_inputs(info, rng, 2, 3.5)
    limit, new_tokens = room(info, NEW_TOKENS)
    lengths = np.minimum((max(min_length, LENGTHS[0]), *LENGTHS[1:]), limit // np.array([1, 2, 4]))
    return text_inputs(info, rng, np.tile(np.maximum(lengths, 1), copies), (1, new_tokens))


def case_inputs(
    info: ExportInfo, rng: np.random.Generator, padding: str, new_tokens: int = CASE_TOKENS
) -> Reference:
    """Return 1 to 5 random rows of 1 to 33 tokens, without results. Learned positions are a limit.

    `padding` is one of `PADDINGS`. Prompts have up to 4 tokens in front of a target, and are
    followed by up to `new_tokens`. Images have 1 to 8 patches on each side.
    """
    rows = int(rng.integers(1, 6))
    if reads_images(info):
        return image_inputs(info, rng, rows, rng.uniform(1, 8))
    limit, new_tokens = room(info, new_tokens)
    lengths = random_lengths(rng, (rows, min(MAX_LENGTH, limit)), padding)
    return text_inputs(info, rng, lengths, (min(int(rng.integers(1, 5)), limit), new_tokens))


def reads_images(info: ExportInfo) -> bool:
    return HEADS[info.architecture].reads == READS_IMAGES


def room(info: ExportInfo, new_tokens: int) -> tuple[int, int]:
    """Return the maximum number of tokens of a row, and of those that may follow it: `new_tokens`
    or fewer."""
    limit = position_limit(info.config) or 2**31
    new_tokens = min(new_tokens, max(1, limit // 2))
    return max(1, limit - new_tokens if info.generates else limit), new_tokens


def random_lengths(rng: np.random.Generator, shape: tuple[int, int], padding: str) -> np.ndarray:
    """Return the lengths of rows that fit in `shape` (B, S). `padding` is one of `PADDINGS`."""
    rows, length = shape[0], rng.integers(1, shape[1] + 1)
    if padding == "none":
        return np.full(rows, length)
    lengths = rng.integers(1, length + 1, rows)
    lengths[rng.integers(rows)] = length
    if padding == "empty row" and rows > 1:
        lengths[rng.integers(rows)] = 0
    return lengths


def random_rows(
    rng: np.random.Generator, vocab_size: int, lengths: Sequence[int] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return random ids and the mask (B, S) of rows of `lengths`, padded on the right. Together
    they have all tokens of a small vocabulary."""
    shape = len(lengths), max(lengths)
    ids = np.resize(rng.permutation(vocab_size), shape)
    return ids, (np.arange(shape[1]) < np.asarray(lengths)[:, None]).astype(np.int64)


def without_pad(info: ExportInfo, ids: np.ndarray) -> np.ndarray:
    """Return `ids` with another token for the pad token, which counts no position in some
    models."""
    pad = model_token("pad_token_id", info)
    return ids if pad is None else np.where(ids == pad, (pad + 1) % info.config["vocab_size"], ids)


def model_token(name: str, info: ExportInfo) -> Any:
    return special_token(name, info.generation_config, info.config)


def image_inputs(
    info: ExportInfo, rng: np.random.Generator, rows: int, patches: float
) -> Reference:
    """Return random pixels and the shape (B, C, H, W) of images, which repeat these pixels.

    They have the size of the config, or that of `patches` on each side if the graph takes any size.
    """
    height, width = (int(patches * side) for side in pair(info.config["patch_size"]))
    sizes = {"batch_size": rows, "height": height, "width": width}
    shape = concrete_shape(info.specs["encoder"].inputs[0], sizes)
    pixels = rng.standard_normal(NUM_PIXELS).astype(np.float32)
    return Reference({"pixels": pixels, "shape": np.array(shape)})


def text_inputs(
    info: ExportInfo, rng: np.random.Generator, lengths: np.ndarray, sizes: tuple[int, int]
) -> Reference:
    """Return random rows of `lengths` for the model. `sizes` are the numbers of tokens that a
    target begins with, and that follow the prompt."""
    size = info.config["vocab_size"]
    ids, mask = random_rows(rng, size, lengths)
    if not info.generates:
        return Reference(sequence_inputs(info, rng, ids, mask))
    start, new_tokens = sizes
    options = {"max_new_tokens": new_tokens}
    options |= {name: model_token(name, info) for name in ("eos_token_id", "pad_token_id")}
    inputs = {"tokens": without_pad(info, rng.integers(0, size, (len(ids), new_tokens)))}
    if "encoder" in info.specs:
        inputs["start"] = without_pad(info, rng.integers(0, size, (len(ids), start)))
        inputs["start"][:, 0] = model_token("decoder_start_token_id", info) or 0
    else:
        ids, mask = move_padding(ids, mask, "left", 0)
    inputs |= {"input_ids": ids, "attention_mask": mask}
    return Reference(inputs, without_none(options))


def sequence_inputs(
    info: ExportInfo, rng: np.random.Generator, ids: np.ndarray, mask: np.ndarray
) -> Arrays:
    """Return the inputs of a graph that reads full sequences, by name, for random ids and their
    mask (B, S).

    Ids and mask may be changed to fit the model, such as end tokens, choices or left padding.
    Further inputs are random.
    """
    config, spec = info.config, info.specs["encoder"]
    names = {tensor.name for tensor in spec.inputs}
    feeds = {}
    # ids that the decoder reads too, shifted
    if config["model_type"] == "vanilla-seq2seq" and "decoder_input_ids" not in names:
        ids = np.where(mask == 1, ids, config["pad_token_id"])
        last = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
        ids[np.arange(len(ids)), last] = as_list(config["eos_token_id"])[0]
    if "num_choices" in spec.outputs[0].shape:
        mask = mask[rng.integers(len(mask), size=(len(mask), 3))]
        ids = rng.integers(0, config["vocab_size"], mask.shape)
    counts_tokens = (config.get("position_ids_from") or "place") != "place"
    on_either_side = config["model_type"] == "vanilla-decoder" or counts_tokens
    if on_either_side and ids.ndim == 2 and rng.integers(2):
        ids, mask = move_padding(ids, mask, "left", 0)
    if "token_type_ids" in names:
        feeds["token_type_ids"] = rng.integers(0, config["type_vocab_size"], ids.shape)
    if "decoder_input_ids" in names:
        target = rng.permutation(mask)  # as long as the sources, in another order
        feeds["decoder_input_ids"] = rng.integers(0, config["vocab_size"], target.shape)
        feeds["decoder_attention_mask"] = target
    return {"input_ids": ids, "attention_mask": mask, **feeds}
