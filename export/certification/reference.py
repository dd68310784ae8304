"""The reference of an export: inputs, and what torch computed from them when it was written."""

import dataclasses
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.inputs import GenerationInput, generation_inputs
from ..inference.export_info import ExportInfo
from ..inference.options import Options
from ..inference.rows import GenerationRequest
from ..specs.graph_spec import TensorSpec

FILE = "reference.npz"
TORCH = "torch"  # the key of torch's results
# logits of a graph for prompt lookup, which exports had before
UNUSED = "lookup"
MAX_SIZE = 48  # of each axis of an output after the first; larger ones are sampled
# fields of the manifest that the reference repeats
FACTS = ("architecture", "model_type", "target", "activations", "opset", "step")
VARIANT_FACTS = ("graphs", "tolerance")
PADDED = ("input_ids", "attention_mask", "token_type_ids")  # as long as the mask
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Reference:
    """Inputs of an export and the results expected from them.

    Args:
        manifest: fields of the manifest, see `manifest_facts`.
        options: options of `generate`; empty for a model that does not generate.
        inputs: inputs of the graph of a model that reads full sequences. For a model that generates
            `input_ids` and `attention_mask`; also `tokens` (B, T), which are fed one by one; and
            `start` (B, 1) for seq2seq.
        results: results by name, of torch in float32, and by dtype of the export itself when it was
            written, for weights that are rounded to integers. See `outcomes.outcome`.
    """

    manifest: dict[str, Any]
    options: dict[str, Any]
    inputs: Arrays
    results: dict[str, Arrays]

    def write(self, directory: Path) -> None:
        """Write the reference to reference.npz in the export `directory`. The same arrays give the
        same bytes."""
        arrays = {f"inputs/{name}": array for name, array in self.inputs.items()}
        for source, results in self.results.items():
            arrays |= {f"{source}/{name}": array for name, array in results.items()}
        facts = json.dumps({"manifest": self.manifest, "options": self.options}, sort_keys=True)
        with open(directory / FILE, "wb") as file:
            np.savez(file, facts=np.array(facts), **arrays)  # type: ignore[arg-type]

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
            return cls(manifest, options, groups.pop("inputs"), groups)
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

    def request(self) -> GenerationRequest:
        """Return the request that opens rows for the inputs."""
        ids, mask = self.inputs["input_ids"], self.inputs["attention_mask"]
        resolved = Options(**self.options)
        if (start := self.inputs.get("start")) is None:
            return GenerationRequest(resolved, ids, mask)
        return GenerationRequest(resolved, start, np.ones_like(start), (ids, mask))

    def rows(self, info: ExportInfo, **options: Any) -> list[GenerationInput]:
        """Return the rows that the export `info` generates from, with `options` besides those of
        the reference."""
        ids, mask = self.inputs["input_ids"], self.inputs["attention_mask"]
        start = self.inputs.get("start")
        first = None if start is None else int(start[0, 0])
        resolved = Options(**self.options, decoder_start_token_id=first, **options)
        return generation_inputs(info, ids, mask, start, resolved)


def manifest_facts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a manifest that decide how an export runs."""
    variants = {
        dtype: {name: variant.get(name) for name in VARIANT_FACTS}
        for dtype, variant in manifest["variants"].items()
    }
    return {name: manifest.get(name) for name in FACTS} | {"variants": variants}


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
