"""Tests of what `export --generate` writes and rejects, for each target, dtype and mode."""

import json

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from checkpoints import EOS, PAD, VOCABULARY, build, default_graphs, default_parity, edit_json
from command_line import main
from messages import raises
from one_graphs import BEAMS, Generator, prompts, source

from vanilla_transformer_export import Runtime, export, verify
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.proof.one_graph import num_equal, random_feeds, search
from vanilla_transformer_export.targets.cpu.generation import grow_caches


@pytest.fixture
def cpu_model_and_export(exported_for, tmp_path):
    """A torch model that the cpu target supports, and the directory of its export."""
    return exported_for("seq2seq", "cpu")


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
