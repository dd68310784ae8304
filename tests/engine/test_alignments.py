"""Tests of the alignment graph: cross-attention as torch's, the same bits in every batch."""

import asyncio
import dataclasses
import json
import shutil
from itertools import compress, cycle

import numpy as np
import onnx
import pytest
import torch
from checkpoints import START, perturbed
from messages import raises
from opened_engines import open_client
from random_prompts import pad_rows
from targets import SIZES, build

from vanilla_transformer_export import Runtime, export
from vanilla_transformer_export.engine.model import OnnxModel

SEQ2SEQ = "VanillaSeq2SeqForConditionalGeneration"
# As NLLB: pre-norm, a learned table that counts tokens by their ids, scaled embeddings.
NLLB = dict(
    encoder_layers=2,
    decoder_layers=3,
    position_embedding_type="learned",
    position_ids_from="ids",
    max_position_embeddings=40,
    norm_first=True,
    final_norm=True,
    hidden_act="relu",
)
HEADS = [[0, 1, "read"], [1, 0, "made"], [1, 3, "read"]]
SOURCES = [[7, 8, 9, 10, 11, 2], [5, 2], [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 2]]
TARGETS = [
    [START, 12, 13, 2],
    [START, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 2],
    [START, 25],
]


def model_of(name):
    return perturbed(SEQ2SEQ, {**SIZES, **NLLB}) if name == "seq2seq-nllb" else build(name)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A function that exports a model, by default for cpu. It returns the model in torch and the
    directory."""
    made = {}

    def make(name, dtype="fp32", heads=HEADS, **options):
        key = name, dtype, heads is None, *options.items()
        if key not in made:
            model, folder = model_of(name), tmp_path_factory.mktemp(name)
            model.config.alignment_heads = heads
            model.save_pretrained(folder / "checkpoint")
            options = {"target": "cpu", "dtype": dtype, "cases": 2} | options
            export(folder / "checkpoint", folder / "export", **options)
            made[key] = model, folder / "export"
        return made[key]

    return make


def torch_weights(model, source, target, heads):
    """Return the mean of torch's cross-attention of `heads`, each with its shift, (T, S)."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        layers = model(
            input_ids=torch.tensor([source]),
            decoder_input_ids=torch.tensor([target]),
            output_attentions=True,
        ).cross_attentions
    steps = {"made": slice(0, -1), "read": slice(1, None)}
    rows = [layers[layer][0, head, steps[shift]].double() for layer, head, shift in heads]
    return torch.stack(rows).mean(0).numpy()


@pytest.mark.parametrize("target", ["cpu", "portable", "cuda"])
@pytest.mark.parametrize("name", ["seq2seq", "seq2seq-t5", "seq2seq-nllb"])
def test_weights_are_those_of_torch(exported, name, target):
    model, directory = exported(name, target=target, alignments=True)
    found = Runtime(directory, device="cpu").alignments(SOURCES, TARGETS)
    for weights, source, target in zip(found, SOURCES, TARGETS, strict=True):
        assert (weights.shape, weights.dtype) == ((len(target) - 1, len(source)), np.float32)
        expected = torch_weights(model, source, target, HEADS)
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-5)
        assert np.ptp(expected) > 0.05  # no head looks everywhere alike


def test_default_is_mean_of_layer_before_last(exported):
    model, directory = exported("seq2seq-nllb", heads=None)
    expected = torch_weights(
        model, SOURCES[0], TARGETS[0], [(1, head, "made") for head in range(4)]
    )
    [weights] = Runtime(directory).alignments(SOURCES[:1], TARGETS[:1])
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("name", ["seq2seq", "seq2seq-t5"])
def test_rows_have_the_same_bits_alone_and_in_a_batch(exported, name, dtype):
    _, directory = exported(name, dtype)
    rng = np.random.default_rng(0)
    sources = [rng.integers(4, 48, size).tolist() for size in rng.integers(1, 40, 24)]
    targets = [[START, *rng.integers(4, 48, size)] for size in rng.integers(1, 40, 24)]
    for threads in (1, 2):
        runtime = Runtime(directory, threads=threads)
        together = runtime.alignments(sources, targets)
        for source, target, weights in zip(sources, targets, together, strict=True):
            [alone] = runtime.alignments([source], [target])
            np.testing.assert_array_equal(alone, weights)


# ---------------------------------------------------------------------------------- in the engine

SEARCHES = {
    "greedy": dict(),
    "beams": dict(num_beams=4, num_return_sequences=3),
    "samples": dict(do_sample=True, num_return_sequences=3, seed=5, temperature=2.0),
    "one token": dict(do_sample=True, num_return_sequences=2, seed=5, max_new_tokens=1),
}


def random_rows(count, seed=1):
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 48, size).tolist() for size in rng.integers(1, 30, count)]


def check_alignments(runtime, sources, inputs, results):
    """The weights of each sequence have the bits that `Runtime.alignments` returns for it alone."""
    for source, row, sequences in zip(sources, inputs, results, strict=True):
        for sequence in sequences:
            target = [*row.prompt, *sequence.tokens]
            [alone] = runtime.alignments([source], [target])
            assert alone.shape == (len(target) - 1, len(source))
            np.testing.assert_array_equal(sequence.alignment, alone)


@pytest.fixture
def without_encoding(monkeypatch):
    """Let the encoder not run but for the rows of a search."""
    monkeypatch.setattr(OnnxModel, "outputs", lambda *args: pytest.fail("the encoder ran again"))
    return monkeypatch.undo


@pytest.mark.parametrize("count", [1, 12, 40])  # alone, rows that start together, and that join
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize(("name", "dtype"), [("seq2seq", "int8"), ("seq2seq-t5", "fp32")])
def test_generated_sequences_come_with_their_alignments(
    exported, without_encoding, name, dtype, search, count
):
    runtime = Runtime(exported(name, dtype)[1], threads=1)
    sources = random_rows(count)
    starts = np.array([[START, 9, 9]] * count)
    options = dict(max_new_tokens=12) | SEARCHES[search]
    rows = runtime.inputs(*pad_rows(sources), starts, options)
    plain = runtime.sequences(rows)
    aligned = [dataclasses.replace(row, is_aligned=True) for row in rows]
    found = runtime.sequences(aligned)
    assert found[0][0].alignment is not None and plain[0][0].alignment is None
    without_encoding()
    check_alignments(runtime, sources, rows, found)
    for one, other in zip(plain, found, strict=True):
        assert [row.tokens for row in one] == [row.tokens for row in other]


def test_requests_of_a_server_are_aligned_beside_others(exported, without_encoding):
    """Searches of all kinds share the slots of two workers; some of them ask for alignments."""
    _, directory = exported("seq2seq")
    sources = random_rows(24, seed=2)
    client = open_client(directory, slots=16, workers=2).start()
    requests = []
    for source, (number, options) in zip(sources, enumerate(cycle(SEARCHES.values()))):
        row = client.admission.admit(source, dict(max_new_tokens=12) | options)
        requests.append([dataclasses.replace(row, is_aligned=number % 3 > 0)])

    async def answers():
        return await asyncio.gather(*map(client.generate, requests))

    results = [of_input for [of_input] in asyncio.run(answers())]
    client.close()
    without_encoding()
    runtime = Runtime(directory, threads=1)
    asked = [row.is_aligned for [row] in requests]
    assert asked == [sequences[0].alignment is not None for sequences in results]
    columns = [list(compress(column, asked)) for column in (sources, sum(requests, []), results)]
    check_alignments(runtime, *columns)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("target", ["portable", "cuda"])
def test_other_targets_align_what_they_generate(exported, without_encoding, target, search):
    """Their rows leave batches, change places as beams, or are searched by graphs."""
    _, directory = exported("seq2seq-nllb", target=target, alignments=True)
    runtime, sources = Runtime(directory, device="cpu"), random_rows(12, seed=3)
    options = dict(max_new_tokens=12) | SEARCHES[search]
    rows = runtime.inputs(*pad_rows(sources), None, options)
    found = runtime.sequences([dataclasses.replace(row, is_aligned=True) for row in rows])
    without_encoding()
    for source, row, sequences in zip(sources, rows, found, strict=True):
        for sequence in sequences:
            [alone] = runtime.alignments([source], [[*row.prompt, *sequence.tokens]])
            np.testing.assert_allclose(sequence.alignment, alone, rtol=0, atol=1e-6)


def test_shortlist_does_not_change_weights(exported):
    """A shortlist has other logits, but the graph has none."""
    model, directory = exported("seq2seq", shortlist=tuple(range(4, 20)))
    for weights, *pair in zip(Runtime(directory).alignments(SOURCES, TARGETS), SOURCES, TARGETS):
        np.testing.assert_allclose(weights, torch_weights(model, *pair, HEADS), rtol=0, atol=1e-5)


def test_masked_source_tokens_have_no_weight(exported):
    runtime = Runtime(exported("seq2seq")[1])
    mask = np.array([[1, 0, 1, 1]])
    [row] = runtime.inputs(np.array([[7, 8, 9, 2]]), mask, None, {})
    [[sequence]] = runtime.sequences([dataclasses.replace(row, is_aligned=True)])
    assert (sequence.alignment[:, 1] == 0).all() and (sequence.alignment[:, 2] > 0).all()


def test_last_token_beyond_the_learned_positions_has_the_weights_of_its_step(exported):
    """NLLB's table has 40 rows. A sequence of 41 tokens fits, because its last one is not read."""
    model, directory = exported("seq2seq-nllb")
    runtime = Runtime(directory)
    options = dict(max_new_tokens=40, min_new_tokens=40)
    [row] = runtime.inputs(np.array([SOURCES[0]]), None, None, options)
    [[sequence]] = runtime.sequences([dataclasses.replace(row, is_aligned=True)])
    target = [*row.prompt, *sequence.tokens]
    assert (len(target), len(sequence.alignment)) == (41, 40)
    expected = torch_weights(model, SOURCES[0], target[:40], HEADS)
    np.testing.assert_allclose(sequence.alignment[:39], expected, rtol=0, atol=1e-5)
    steps = [[layer, head, "read"] for layer, head, _ in HEADS]  # whose last row is the last step
    last = torch_weights(model, SOURCES[0], target[:40], steps)[-1]
    np.testing.assert_allclose(sequence.alignment[39], last, rtol=0, atol=1e-5)


def test_integer_weights_are_near_those_of_float(exported):
    exact, rounded = (
        Runtime(exported("seq2seq", dtype)[1]).alignments(SOURCES, TARGETS)
        for dtype in ("fp32", "int8")
    )
    errors = np.concatenate([abs(a - b).ravel() for a, b in zip(exact, rounded, strict=True)])
    assert 0 < errors.mean() < 0.02


def test_weights_are_shared_with_other_graphs(exported):
    """All external weights of the graph are also in the others, at the same place in the file."""
    _, directory = exported("seq2seq")
    places = {
        path.stem: {
            tuple(entry.value for entry in tensor.external_data)
            for tensor in onnx.load(path, load_external_data=False).graph.initializer
            if tensor.external_data
        }
        for path in directory.glob("onnx/*.onnx")
    }
    own = places.pop("alignment_model")
    assert own and own <= set().union(*places.values())


def test_target_without_tokens_has_no_rows(exported):
    [weights] = Runtime(exported("seq2seq")[1]).alignments(SOURCES[:1], [[START]])
    assert weights.shape == (0, len(SOURCES[0]))
    assert Runtime(exported("seq2seq")[1]).alignments([], []) == []


def test_export_without_graph_generates_and_says_what_it_lacks(exported, tmp_path):
    model, directory = exported("seq2seq")
    old = tmp_path / "old"
    shutil.copytree(directory, old)
    (old / "onnx/alignment_model.onnx").unlink()
    manifest = json.loads((old / "manifest.json").read_text())
    del manifest["alignment"], manifest["files"]["onnx/alignment_model.onnx"]
    (old / "manifest.json").write_text(json.dumps(manifest))
    runtime = Runtime(old)
    assert runtime.generate(np.array(SOURCES[:1])).shape[0] == 1
    with raises(ValueError, seen="no alignment graph", expected=("--target cpu", "--alignments")):
        runtime.alignments(SOURCES, TARGETS)


@pytest.mark.parametrize("target", ["portable", "cuda"])
def test_only_cpu_has_the_graph_by_itself(exported, target):
    model, directory = exported("seq2seq", target=target)
    manifest = json.loads((directory / "manifest.json").read_text())
    assert "alignment" not in manifest and not list(directory.glob("onnx/*alignment*"))
    with raises(ValueError, seen="no alignment graph", expected="--alignments"):
        Runtime(directory, device="cpu").alignments(SOURCES, TARGETS)
    _, other = exported("seq2seq", target=target, alignments=True)
    assert json.loads((other / "manifest.json").read_text())["alignment"] == {"heads": HEADS}


def test_bfloat16_has_no_graph(exported):
    with raises(ValueError, seen="bf16", expected="fp16"):
        exported("seq2seq", "bf16", target="cuda", alignments=True)


@pytest.mark.parametrize(
    ("sources", "targets", "seen", "expected"),
    [
        (SOURCES, TARGETS[:2], 2, 3),
        (SOURCES[:1], [[]], ("0", "targets"), "the start token first"),
        ([[]], TARGETS[:1], ("0", "sources"), "at least one"),
        ([[48]], TARGETS[:1], 48, 47),
        (SOURCES[:1], [[START, -1]], -1, 0),
        ([list(range(4, 45))], TARGETS[:1], 41, 40),
    ],
)
def test_bad_rows_are_named(exported, sources, targets, seen, expected):
    with raises(ValueError, seen=seen, expected=expected):
        Runtime(exported("seq2seq-nllb")[1]).alignments(sources, targets)


def test_decoder_export_has_no_alignments(exported_for):
    with raises(ValueError, seen="VanillaDecoderForCausalLM", expected="encoder-decoder"):
        Runtime(exported_for("causal", "cpu")[1]).alignments(SOURCES, TARGETS)


@pytest.mark.parametrize("heads", [[], [[3, 0, "made"]], [[0, 4, "made"]], [[0, 0]], [[0, 0, "x"]]])
def test_heads_that_model_lacks_are_rejected(tmp_path, heads):
    model = model_of("seq2seq-nllb")
    model.config.alignment_heads = heads
    model.save_pretrained(tmp_path / "checkpoint")
    with raises(ValueError, seen="alignment_heads", expected=("below 3", "below 4")):
        export(tmp_path / "checkpoint", tmp_path / "export", target="cpu")
    assert not (tmp_path / "export").exists()
