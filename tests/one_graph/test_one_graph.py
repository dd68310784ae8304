"""Tests of `export --generate`: sequences of one graph match the runtime, which searches on the
host."""

import json

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from checkpoints import (
    EOS,
    PAD,
    START,
    VOCABULARY,
    build,
    default_graphs,
    default_parity,
    edit_json,
)
from command_line import main
from messages import raises

from vanilla_transformer_export import Runtime, export, verify
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.proof.one_graph import num_equal, random_feeds, search
from vanilla_transformer_export.targets.cpu.generation import grow_caches

BEAMS = dict(num_beams=3, length_penalty=0.7, early_stopping=False)
BEFORE_1 = np.nextafter(np.float32(1), np.float32(0))


def source(rows, seed=0, length=9):
    """Return ids and mask of rows of different lengths, padded on the right."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, VOCABULARY, (rows, length))
    mask = (np.arange(length) < rng.integers(2, length + 1, (rows, 1))).astype(np.int64)
    return np.where(mask, ids, PAD), mask


def prompts(rows, seed=0, length=7):
    """Return ids and mask of decoder prompts of different lengths, padded on the left."""
    ids, mask = source(rows, seed, length)
    return np.take_along_axis(ids, np.argsort(mask, axis=1, kind="stable"), axis=1), np.sort(
        mask, axis=1
    )


class Generator:
    """A graph that generates, and the usual export of the same checkpoint for the runtime."""

    def __init__(self, directory, parts, mode):
        self.directory = directory
        manifest = json.loads((directory / "manifest.json").read_text())
        [file] = default_graphs(manifest).values()
        self.session = onnxruntime.InferenceSession(
            directory / file, providers=["CPUExecutionProvider"]
        )
        self.parts = parts
        self.mode = mode

    def run(self, ids, mask, **inputs):
        """Run the graph. A single number in `inputs` applies to all rows."""
        feeds = {"input_ids": ids, "attention_mask": mask}
        for each in self.session.get_inputs()[2:]:
            value = np.asarray(inputs[each.name], np.float32 if "float" in each.type else np.int64)
            feeds[each.name] = np.broadcast_to(value, (len(ids), 1)) if value.ndim < 2 else value
        return self.session.run(None, feeds)


@pytest.fixture(scope="module")
def generator(exported, tmp_path_factory):
    made = {}

    def make(mode, target="portable", name="seq2seq"):
        if (mode, target, name) not in made:
            out = tmp_path_factory.mktemp("one") / "export"
            export(exported(name).checkpoint, out, cases=1, target=target, generate=mode)
            made[mode, target, name] = Generator(out, exported(name).directory, mode)
        return made[mode, target, name]

    return make


@pytest.fixture
def cpu_model_and_export(exported_for, tmp_path):
    """A torch model that the cpu target supports, and the directory of its export."""
    return exported_for("seq2seq", "cpu")


# ---------------------------------------------------------------------------------------- sequences


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_greedy_sequences_match_runtime_and_torch(generator, exported, rows):
    greedy, (ids, mask) = generator("greedy"), source(rows)
    [actual] = greedy.run(ids, mask, max_new_tokens=12)
    np.testing.assert_array_equal(
        actual, Runtime(greedy.parts).generate(ids, mask, max_new_tokens=12, num_beams=1)
    )
    expected = exported("seq2seq").model.generate(
        torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), max_new_tokens=12
    )
    np.testing.assert_array_equal(actual, expected)
    assert (actual[:, 0] == START).all() and (
        rows == 1 or len(set((actual == EOS).argmax(axis=1))) > 1
    )


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_decoder_continuations_match_runtime_and_torch(generator, exported, rows):
    """Prompts may be padded on either side."""
    greedy, (ids, mask) = generator("greedy", name="causal"), prompts(rows)
    [actual] = greedy.run(ids, mask, max_new_tokens=12)
    np.testing.assert_array_equal(
        actual, Runtime(greedy.parts).generate(ids, mask, max_new_tokens=12, num_beams=1)
    )
    torch_inputs = torch.from_numpy(ids), torch.from_numpy(mask)
    expected = exported("causal").model.generate(
        torch_inputs[0], attention_mask=torch_inputs[1], max_new_tokens=12
    )
    np.testing.assert_array_equal(actual, expected)
    ends = (actual[:, ids.shape[1] :] == EOS).argmax(axis=1)
    assert (actual[:, : ids.shape[1]] == ids).all() and (rows < 32 or len(set(ends)) > 1)
    right_padded = source(rows, length=7)
    assert (right_padded[1] == mask[:, ::-1]).all() and greedy.run(
        *right_padded, max_new_tokens=12
    )[0].tolist() == actual.tolist()


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_decoder_beams_and_scores_match_runtime(generator, rows):
    beam, (ids, mask) = generator("beam", name="causal"), prompts(rows)
    actual, scores = beam.run(ids, mask, **BEAMS, max_new_tokens=9)
    expected, expected_scores = Runtime(beam.parts).generate_with_scores(
        ids, mask, **BEAMS, max_new_tokens=9
    )
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_allclose(scores[:, 0], expected_scores, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-0.5, 0.0, 1.3])
def test_beams_and_scores_match_runtime(generator, early_stopping, length_penalty):
    beam, (ids, mask) = generator("beam"), source(8)
    options = dict(num_beams=4, length_penalty=length_penalty, max_new_tokens=9)
    number = {False: 0, True: 1, "never": 2}[early_stopping]
    actual, scores = beam.run(ids, mask, **options, early_stopping=number)
    expected, expected_scores = Runtime(beam.parts).generate_with_scores(
        ids, mask, **options, early_stopping=early_stopping
    )
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_allclose(scores[:, 0], expected_scores, rtol=1e-4, atol=1e-5)


def test_each_row_may_have_its_own_options(generator):
    """The runtime runs each row alone with its options, in greedy and in beam search."""
    ids, mask = source(5)
    steps = np.array([[12], [1], [0], [-3], [5]])
    [actual] = generator("greedy").run(ids, mask, max_new_tokens=steps)
    runtime = Runtime(generator("greedy").parts)
    for row, count in enumerate(steps[:, 0]):
        expected = [START]
        if count > 0:
            one = slice(row, row + 1)
            expected = runtime.generate(
                ids[one], mask[one], max_new_tokens=int(count), num_beams=1
            )[0].tolist()
        assert actual[row].tolist() == expected + [PAD] * (actual.shape[1] - len(expected))
    beams, penalties, early = (
        np.array([[1], [5], [2], [3], [4]]),
        np.array([[1.0], [0.0], [2.0], [-1.0], [0.5]]),
        [0, 1, 2, 0, 1],
    )
    steps = np.array([[8], [6], [9], [1], [7]])
    inputs = dict(
        num_beams=beams,
        length_penalty=penalties,
        early_stopping=np.array(early)[:, None],
        max_new_tokens=steps,
    )
    actual, scores = generator("beam").run(ids, mask, **inputs)
    for row in range(5):
        # with one beam the runtime searches greedily and fills rows with the pad token
        if beams[row, 0] == 1:
            continue
        one = slice(row, row + 1)
        options = {name: value[row, 0].item() for name, value in inputs.items()}
        options["early_stopping"] = (False, True, "never")[early[row]]
        expected, score = runtime.generate_with_scores(ids[one], mask[one], **options)
        width = expected.shape[1]
        assert actual[row, :width].tolist() == expected[0].tolist() and set(
            actual[row, width:]
        ) <= {EOS}
        np.testing.assert_allclose(scores[row], score, rtol=1e-4)


# ----------------------------------------------------------------------------------------- sampling


def sample_token(logits, temperature, top_k, top_p, uniform):
    """Return a token of `logits` (V,), sampled in float64 with transformers' filters in order."""
    scores = logits.astype(np.float64) / temperature
    order = np.argsort(-scores, kind="stable")
    kept = order[: top_k or None]
    p = np.exp(scores[kept] - scores[kept[0]])
    p /= p.sum()
    before = np.concatenate([[0], np.cumsum(p)[:-1]])
    kept, p = kept[before < top_p], p[before < top_p]
    kept = kept if len(kept) else order[:1]
    cumulative = np.cumsum(p / p.sum())
    return kept[min((cumulative <= np.float64(uniform)).sum(), len(kept) - 1)]


@pytest.mark.parametrize("top_k, top_p", [(50, 1.0), (0, 0.9), (5, 0.7), (1, 1.0), (0, 0.0)])
def test_samples_match_float64_reference(generator, exported, top_k, top_p):
    sample, (ids, mask) = generator("sample"), source(6)
    uniforms = np.random.default_rng(1).random((6, 8), np.float32)
    uniforms[0], uniforms[1] = 0, BEFORE_1
    inputs = dict(temperature=0.8, top_k=top_k, top_p=top_p, uniforms=uniforms, max_new_tokens=8)
    [actual] = sample.run(ids, mask, **inputs)
    torch_inputs = dict(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))
    with torch.no_grad():
        logits = (
            exported("seq2seq")
            .model(**torch_inputs, decoder_input_ids=torch.from_numpy(actual[:, :-1]))
            .logits.numpy()
        )
    for row, tokens in enumerate(actual):
        for place, token in enumerate(tokens[1:]):
            ended = EOS in tokens[1 : 1 + place]
            expected = (
                PAD
                if ended
                else sample_token(logits[row, place], 0.8, top_k, top_p, uniforms[row, place])
            )
            assert token == expected, (row, place)
    [again] = sample.run(ids, mask, **inputs)
    np.testing.assert_array_equal(actual, again)


@pytest.mark.parametrize("top_k, top_p", [(50, 1.0), (5, 0.7)])
def test_decoder_samples_match_float64_reference(generator, exported, top_k, top_p):
    sample, (ids, mask) = generator("sample", name="causal"), prompts(6)
    uniforms = np.random.default_rng(1).random((6, 8), np.float32)
    uniforms[0], uniforms[1] = 0, BEFORE_1
    inputs = dict(temperature=0.8, top_k=top_k, top_p=top_p, uniforms=uniforms, max_new_tokens=8)
    [actual] = sample.run(ids, mask, **inputs)
    for row, tokens in enumerate(actual):
        # without padding, as the model reads the row alone
        tokens = tokens[ids.shape[1] - mask[row].sum() :]
        with torch.no_grad():
            logits = exported("causal").model(torch.from_numpy(tokens[None, :-1])).logits[0].numpy()
        for place, token in enumerate(tokens[mask[row].sum() :]):
            before = tokens[mask[row].sum() :][:place]
            expected = sample_token(
                logits[mask[row].sum() - 1 + place], 0.8, top_k, top_p, uniforms[row, place]
            )
            assert token == (PAD if EOS in before else expected), (row, place)
    [again] = sample.run(ids, mask, **inputs)
    np.testing.assert_array_equal(actual, again)


def test_unusual_inputs_of_decoder_have_defined_results(generator):
    """Run without steps or uniform numbers, with steps per row, with holes in the mask, with rows
    of padding, and with too many beams."""
    greedy, (ids, mask) = generator("greedy", name="causal"), prompts(4)
    runtime = Runtime(greedy.parts)
    for count in (0, -2):
        assert greedy.run(ids, mask, max_new_tokens=count)[0].tolist() == ids.tolist()
    [actual] = greedy.run(ids, mask, max_new_tokens=np.array([[2], [7], [0], [4]]))
    for row, count in ((0, 2), (1, 7), (3, 4)):
        one = slice(row, row + 1)
        expected = runtime.generate(ids[one], mask[one], max_new_tokens=count, num_beams=1)[
            0
        ].tolist()
        assert actual[row].tolist() == expected + [PAD] * (actual.shape[1] - len(expected))
    assert set(actual[2, ids.shape[1] :]) == {PAD}
    # A hole is skipped, and a row of padding only is read as its last token.
    holes = mask.copy()
    holes[1, -2], holes[2] = 0, 0
    [actual] = greedy.run(ids, holes, max_new_tokens=5)
    without = np.where(holes[1] == 1)[0]
    for row, prompt in ((1, ids[1:2, without]), (2, ids[2:3, -1:])):
        expected = runtime.generate(prompt, np.ones_like(prompt), max_new_tokens=5, num_beams=1)[
            0
        ].tolist()
        padded = [PAD] * (ids.shape[1] - prompt.shape[1]) + expected
        assert actual[row].tolist() == padded + [PAD] * (actual.shape[1] - len(padded))
    settings = dict(length_penalty=1.0, early_stopping=0, max_new_tokens=3)
    beam = generator("beam", name="causal")
    at_limit, above_limit = (
        beam.run(ids, mask, num_beams=count, **settings) for count in (VOCABULARY, VOCABULARY + 9)
    )
    one, none = (beam.run(ids, mask, num_beams=count, **settings) for count in (1, -1))
    for other, expected in ((above_limit, at_limit), (none, one)):
        assert [each.tolist() for each in other] == [each.tolist() for each in expected]
    uniforms = np.zeros((4, 0), np.float32)
    settings = dict(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=8)
    sample = generator("sample", name="causal")
    assert sample.run(ids, mask, **settings, uniforms=uniforms)[0].tolist() == ids.tolist()
    [actual] = sample.run(
        ids, mask, **settings | dict(temperature=0), uniforms=np.full((4, 3), 0.5)
    )
    assert actual.tolist() == greedy.run(ids, mask, max_new_tokens=3)[0].tolist()
    with pytest.raises(Exception, match="(?i)invalid|bounds|index|dimension"):
        greedy.run(ids[:, :0], mask[:, :0], max_new_tokens=3)


def test_unusual_sampling_inputs_have_defined_results(generator):
    sample, (ids, mask) = generator("sample"), source(3)
    settings = dict(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=8)
    uniforms = np.random.default_rng(2).random((3, 4), np.float32)
    [result] = sample.run(ids, mask, **settings, uniforms=uniforms)
    assert result.shape[1] <= 5  # no more tokens than uniform numbers
    [none] = sample.run(ids, mask, **settings, uniforms=uniforms[:, :0])
    assert none.tolist() == [[START]] * 3
    greedy = generator("greedy").run(ids, mask, max_new_tokens=4)[0]
    # Temperature 0, top_k 1, top_p 0 and negative uniform numbers select the most likely token.
    for changed in (dict(temperature=0), dict(top_k=1), dict(top_p=0.0)):
        assert (
            sample.run(ids, mask, **settings | changed, uniforms=uniforms)[0].tolist()
            == greedy.tolist()
        )
    assert sample.run(ids, mask, **settings, uniforms=uniforms - 2)[0].tolist() == greedy.tolist()
    above = sample.run(ids, mask, **settings | dict(top_k=3), uniforms=uniforms + 2)[0]
    last = sample.run(ids, mask, **settings | dict(top_k=3), uniforms=np.full((3, 4), BEFORE_1))[0]
    assert above.tolist() == last.tolist()


def test_row_without_tokens_does_not_affect_other_rows(generator):
    ids, mask = source(4)
    whole = generator("greedy").run(ids, mask, max_new_tokens=6)[0]
    mask[2] = 0
    result = generator("greedy").run(ids, mask, max_new_tokens=6)[0]
    rows = [0, 1, 3]
    width = min(whole.shape[1], result.shape[1])
    assert result[rows, :width].tolist() == whole[rows, :width].tolist()
    assert ((result >= 0) & (result < VOCABULARY)).all()
    assert np.isfinite(generator("beam").run(ids, mask, **BEAMS, max_new_tokens=6)[1]).all()


def test_num_beams_is_clamped_to_1_and_vocabulary_size(generator):
    ids, mask = source(2)
    settings = dict(length_penalty=1.0, early_stopping=0, max_new_tokens=3)
    at_limit, above_limit = (
        generator("beam").run(ids, mask, num_beams=count, **settings)
        for count in (VOCABULARY, VOCABULARY + 9)
    )
    one, none = (generator("beam").run(ids, mask, num_beams=count, **settings) for count in (1, -1))
    for actual, expected in ((above_limit, at_limit), (none, one)):
        assert [each.tolist() for each in actual] == [each.tolist() for each in expected]
    assert (
        generator("beam")
        .run(ids, mask, **settings | dict(num_beams=2, max_new_tokens=0))[0]
        .tolist()
        == [[START]] * 2
    )


# --------------------------------------------------------------------------- generation_config.json


SUPPRESSED = [
    dict(suppress_tokens=[5, 9, 11, 30]),
    dict(
        begin_suppress_tokens=[7, 20],
        min_new_tokens=4,
        forced_eos_token_id=EOS,
        bad_words_ids=[[6], [8]],
    ),
    dict(forced_bos_token_id=12, forced_eos_token_id=[EOS, 40], eos_token_id=[EOS, 17]),
    dict(renormalize_logits=True, suppress_tokens=list(range(3, 12)), pad_token_id=None),
]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["greedy", "beam"])
@pytest.mark.parametrize("settings", SUPPRESSED)
def test_generation_config_is_built_into_graph(exported, tmp_path, mode, settings):
    exported("seq2seq").model.save_pretrained(tmp_path / "checkpoint")
    edit_json(tmp_path / "checkpoint/generation_config.json", **settings)
    export(tmp_path / "checkpoint", tmp_path / "parts", cases=1)
    export(tmp_path / "checkpoint", tmp_path / "one", cases=1, generate=mode)
    one = Generator(tmp_path / "one", tmp_path / "parts", mode)
    ids, mask = source(8)
    options = BEAMS if mode == "beam" else {"num_beams": 1}
    result = one.run(ids, mask, max_new_tokens=10, **options)[0]
    assert (
        result.tolist()
        == Runtime(one.parts).generate(ids, mask, max_new_tokens=10, **options).tolist()
    )


@pytest.mark.parametrize(
    "mode, settings, seen, expected",
    [
        ("greedy", dict(repetition_penalty=1.2), ("repetition_penalty", 1.2), "1.0"),
        ("beam", dict(no_repeat_ngram_size=3), ("no_repeat_ngram_size", 3), 0),
        ("beam", dict(num_return_sequences=2, num_beams=2), ("num_return_sequences", 2), 1),
        ("greedy", dict(bad_words_ids=[[4, 5]]), ("bad_words_ids", 4, 5), ()),
        ("sample", dict(do_sample=True, min_p=0.1), ("min_p", 0.1), "0.0"),
        ("sample", dict(do_sample=True, typical_p=0.5), ("typical_p", 0.5), ()),
    ],
)
def test_unsupported_option_raises_before_files_are_written(
    exported, tmp_path, mode, settings, seen, expected
):
    exported("seq2seq").model.save_pretrained(tmp_path / "checkpoint")
    edit_json(tmp_path / "checkpoint/generation_config.json", **settings)
    with raises(ValueError, seen=seen, expected=expected):
        export(tmp_path / "checkpoint", tmp_path / "one", generate=mode)
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("settings", [dict(min_length=4), dict(forced_bos_token_id=5)])
def test_options_that_depend_on_prompt_length_raise_for_decoder(exported, tmp_path, settings):
    exported("causal").model.save_pretrained(tmp_path / "checkpoint")
    edit_json(tmp_path / "checkpoint/generation_config.json", **settings)
    [(name, value)] = settings.items()
    with raises(ValueError, seen=(name, value)):
        export(tmp_path / "checkpoint", tmp_path / "one", generate="greedy")


def test_unsupported_mode_target_or_model_raises(exported, tmp_path):
    checkpoint, out = exported("seq2seq").checkpoint, tmp_path / "one"
    with raises(UsageError, seen=("beams", "generate"), expected="greedy"):
        export(checkpoint, out, generate="beams")
    with raises(UsageError, seen=("generate", "greedy", "cuda")):
        export(checkpoint, out, target="cuda", generate="greedy")
    with raises(UsageError, seen=("generate", "greedy", "free")):
        export(checkpoint, out, image_size="free", generate="greedy")
    generators = ("VanillaDecoderForCausalLM", "VanillaSeq2SeqForConditionalGeneration")
    for name in ("encoder", "classification"):
        with raises(ValueError, expected=generators):
            export(exported(name).checkpoint, out, generate="greedy")
    with pytest.raises(SystemExit):
        main(["export", str(checkpoint), str(out), "--generate", "beams"])
    assert not out.exists()


# --------------------------------------------------------------------------------------- the export


def test_export_describes_its_mode_and_runtime_rejects_it(generator, exported):
    """The export is one file of standard operators.

    `Runtime` and `verify` reject it, since it is for other programs.
    """
    made = generator("greedy")
    manifest = json.loads((made.directory / "manifest.json").read_text())
    assert (manifest["generate"], default_graphs(manifest)) == (
        "greedy",
        {"generate": "onnx/generate.onnx"},
    )
    assert (
        default_parity(manifest)["failures"] == 0
        and default_parity(manifest)["sequences"]["equal"] > 0
    )
    assert sorted(path.name for path in (made.directory / "onnx").iterdir()) == ["generate.onnx"]
    model = onnx.load(made.directory / "onnx/generate.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert {each.domain for each in model.opset_import} == {""}
    shapes = {
        each.name: [size.dim_param or size.dim_value for size in each.type.tensor_type.shape.dim]
        for each in model.graph.input
    }
    assert set(next(iter(zip(*shapes.values())))) == {"batch_size"} and shapes[
        "max_new_tokens"
    ] == ["batch_size", 1]
    assert "greedy search" in (made.directory / "README.md").read_text()
    for open_export in (
        lambda: Runtime(made.directory),
        lambda: verify(made.directory, exported("seq2seq").model),
    ):
        with raises(ValueError, seen="greedy"):
            open_export()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["greedy", "beam"])
def test_cpu_target_matches_runtime(cpu_model_and_export, tmp_path, mode, capfd):
    _, directory = cpu_model_and_export
    export(f"{directory}-checkpoint", tmp_path / "one", cases=2, target="cpu", generate=mode)
    capfd.readouterr()
    one = Generator(tmp_path / "one", directory, mode)
    assert capfd.readouterr().err == ""  # onnxruntime prints no warnings
    for rows in (1, 8):
        ids, mask = source(rows, seed=rows)
        options = BEAMS if mode == "beam" else {"num_beams": 1}
        result = one.run(ids, mask, max_new_tokens=10, **options)[0]
        assert (
            result.tolist()
            == Runtime(directory).generate(ids, mask, max_new_tokens=10, **options).tolist()
        )


def check_decoder(model, graph, parts, mode, **options):
    """Check that the graph continues prompts as the runtime of `parts` does, padded on either
    side."""
    one = Generator(graph, parts, mode)
    for rows in (1, 8, 32):
        ids, mask = prompts(rows, seed=rows)
        result = one.run(ids, mask, max_new_tokens=10, **options)[0]
        assert (
            result.tolist()
            == Runtime(parts).generate(ids, mask, max_new_tokens=10, **options).tolist()
        )
        right_padded = source(rows, seed=rows, length=7)
        assert one.run(*right_padded, max_new_tokens=10, **options)[0].tolist() == result.tolist()


def test_decoder_of_cpu_target_matches_runtime(exported_for, tmp_path):
    model, directory = exported_for("causal", "cpu")
    export(f"{directory}-checkpoint", tmp_path / "one", cases=1, target="cpu", generate="greedy")
    check_decoder(model, tmp_path / "one", directory, "greedy", num_beams=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal-window", "causal-relative", "causal", "causal-grouped"])
def test_decoder_beams_of_cpu_target_match_runtime(exported_for, tmp_path, name):
    model, directory = exported_for(name, "cpu")
    export(f"{directory}-checkpoint", tmp_path / "one", cases=1, target="cpu", generate="beam")
    check_decoder(model, tmp_path / "one", directory, "beam", **BEAMS)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["portable", "cpu"])
def test_decoder_rows_stop_at_end_of_learned_positions(exported_for, tmp_path, target):
    """Each row stops when its positions run out, while other rows continue.

    A prompt longer than the table gets no new tokens.
    """
    model, directory = exported_for("causal", "cpu")
    model.lm_head.bias.data[EOS] -= 60
    model.save_pretrained(tmp_path / "checkpoint")
    model.lm_head.bias.data[EOS] += 60
    export(tmp_path / "checkpoint", tmp_path / "one", cases=1, target=target, generate="greedy")
    one = Generator(tmp_path / "one", None, "greedy")
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (3, 61))
    mask = np.sort((np.arange(61) < np.array([[61], [58], [5]])).astype(np.int64), axis=1)
    [result] = one.run(ids, mask, max_new_tokens=9)  # 60 positions: 0, 3 and 9 new tokens
    assert result.shape == (3, 70) and [(row[61:] != PAD).sum() for row in result] == [0, 3, 9]
    alone = one.run(ids[1:2, 3:], mask[1:2, 3:], max_new_tokens=50)[0]
    assert alone.shape == (1, 61) and alone[0, 58:].tolist() == result[1, 61:64].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["seq2seq", "seq2seq-untied", "seq2seq-rotary", "causal-learned", "causal-relative"]
)
@pytest.mark.parametrize("mode", ["greedy", "sample", "beam"])
def test_every_mode_and_model_keeps_sequences_in_int8_and_fp32(exported, tmp_path, name, mode):
    """The exporter compares the sequences itself.

    Rows of a batch share scales in int8, and the batches of the graph are not those of the runtime.
    So as many sequences are equal as the runtime itself has alone and in a batch.
    """
    settings = {"dtype": ["int8", "fp32"], "opset": 21}
    checkpoint, cases = exported(name).checkpoint, 40
    export(checkpoint, tmp_path / "parts", **settings)
    manifest = export(checkpoint, tmp_path / "one", generate=mode, cases=cases, **settings)
    int8, fp32 = (manifest["variants"][dtype]["parity"]["sequences"] for dtype in ("int8", "fp32"))
    assert fp32["equal"] >= 0.97 * fp32["rows"]
    rows, equal = agreement_with_itself(Runtime(tmp_path / "parts", dtype="int8"), mode, cases)
    deviation = (2 * equal * (1 - equal / rows)) ** 0.5  # of the difference of two such numbers
    assert int8["rows"] == rows and int8["equal"] >= equal - 3 * deviation


def agreement_with_itself(runtime, mode, cases):
    """Return the number of rows in the batches of `cases`, and how many of them have the same
    sequence alone."""
    rng, rows, equal = np.random.default_rng(0), 0, 0
    for _ in range(cases):
        feeds = random_feeds(rng, runtime.info, mode)
        together, fill = search(runtime, feeds, mode)
        for row in range(len(together)):
            one = slice(row, row + 1)
            alone, _ = search(runtime, {name: array[one] for name, array in feeds.items()}, mode)
            equal += num_equal(alone, together[one], fill)
        rows += len(together)
    return rows, equal


@pytest.mark.slow
@pytest.mark.parametrize("name", ["seq2seq", "causal"])
@pytest.mark.parametrize("dtype", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("mode", ["greedy", "sample", "beam"])
def test_every_mode_of_cpu_target_keeps_sequences(exported_for, tmp_path, name, dtype, mode):
    _, directory = exported_for(name, "cpu")
    manifest = export(
        f"{directory}-checkpoint", tmp_path / "one", target="cpu", dtype=dtype, generate=mode
    )
    assert default_graphs(manifest) == {
        "generate": "onnx/generate.onnx" if dtype == "fp32" else f"onnx/generate_{dtype}.onnx"
    }
    assert (
        default_parity(manifest)["sequences"]["equal"]
        >= (0.97 if dtype == "fp32" else 0.3) * default_parity(manifest)["sequences"]["rows"]
    )


@pytest.mark.slow
def test_sequences_stop_at_end_of_learned_positions(tmp_path):
    model = build("seq2seq")
    config = model.config.__class__(
        **{
            **model.config.to_dict(),
            "position_embedding_type": "learned",
            "max_position_embeddings": 10,
        }
    )
    learned = type(model)(config).eval()
    learned.lm_head.bias.data[EOS] = -30
    learned.save_pretrained(tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "one", generate="greedy")
    one = Generator(tmp_path / "one", None, "greedy")
    ids, mask = source(2)
    assert one.run(ids, mask, max_new_tokens=50)[0].shape == (2, 11)


def test_grow_caches_reads_batch_size_from_mask():
    """The graph may have read the batch size from the removed input `cache_indirection`.

    The graph of the shipped translator did.
    """
    mask, table = ["batch_size", "source"], ["batch_size", "beams", "room"]
    axes = {"encoder_attention_mask": mask, "cache_indirection": table, "num_beams": [1]}
    inputs = {name: ir.val(name, ir.DataType.INT32, shape) for name, shape in axes.items()}
    size = ir.node("Shape", [inputs["cache_indirection"]], {"start": 0, "end": 1})
    graph = ir.Graph(list(inputs.values()), list(size.outputs), nodes=[size])
    grow_caches(graph)
    assert [value.name for value in graph.inputs] == ["encoder_attention_mask"] and size.inputs == (
        graph.inputs[0],
    )
