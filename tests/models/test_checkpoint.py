"""Tests of a checkpoint's files: every verb rejects damaged ones in one line, and runs none of
their code."""

import io
import json
import struct
import sys

import huggingface_hub
import pytest
import torch
from checkpoints import CHECKPOINTS, SIZES, build, copy_folder, edit_json, perturbed, toy_corpus
from huggingface_hub.errors import LocalEntryNotFoundError
from messages import check_message, raises
from safetensors.torch import load_file, save_file

from vanilla_transformer import VanillaDecoderForCausalLM
from vanilla_transformer.checkpoint import load_checkpoint, load_tokenizer
from vanilla_transformer.checkpoint_files import checkpoint_directory
from vanilla_transformer.conversion import plan_conversion
from vanilla_transformer.training.averaging import average
from vanilla_transformer.training.tokenizer import train_tokenizer
from vanilla_transformer_export.cli.main import main

INDEX, SHARD = "model.safetensors.index.json", "model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A seq2seq checkpoint with its tokenizer; of equal shares, so that it can become Marian's."""
    directory = tmp_path_factory.mktemp("saved") / "seq2seq"
    fields = SIZES | dict(encoder_layers=1, decoder_layers=2, head_dim=8, value_head_dim=8)
    perturbed("VanillaSeq2SeqForConditionalGeneration", fields).save_pretrained(directory)
    train_tokenizer([text for pair in toy_corpus(50, seed=0) for text in pair], 48).save_pretrained(
        directory
    )
    return directory


@pytest.fixture
def checkpoint(saved, tmp_path):
    """A copy to be damaged."""
    return copy_folder(saved, tmp_path)


def verbs(checkpoint, out):
    """The arguments of every verb that reads weights, on one checkpoint."""
    return {
        "average": ["average", checkpoint, checkpoint, "--output", out],
        "attention": ["attention", checkpoint, "the dog", "--output", f"{out}.png"],
        "export": ["export", checkpoint, out],
        "evaluate": ["evaluate", checkpoint, "--source", "a.en", "--references", "a.de"],
        "convert": ["convert", checkpoint, out, "--to", "marian"],
    }


VERBS = list(verbs("", ""))


def error_of(arguments, capsys, code=1):
    """The one line that the command ends with."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    if code == 1:
        line = caught.value.code
    else:
        assert caught.value.code == code
        line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("vanilla-transformer") and "\n" not in line
    return line


def assert_refused(checkpoint, words, capsys, chosen=VERBS):
    """Check that each verb of `chosen` prints one line with all `words`, and writes nothing."""
    before = sorted(checkpoint.parent.rglob("*"))
    for verb in chosen:
        line = error_of(verbs(checkpoint, checkpoint.parent / "out")[verb], capsys)
        assert [word for word in words if word not in line] == [], line
    assert sorted(checkpoint.parent.rglob("*")) == before


# ------------------------------------------------------------------------------------------ weights


def edit_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def edit_header(directory, change):
    """Replace the header of the weights by the result of `change`, which need not be valid."""
    data = (directory / "model.safetensors").read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.dumps(change(json.loads(data[8:end]))).encode()
    (directory / "model.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + data[end:]
    )


def first(tensors):
    return next(name for name in tensors if name != "__metadata__")


Q_PROJ = "model.decoder.layers.1.self_attn.q_proj.weight"
OF_WEIGHTS = ["average", "attention", "export", "evaluate"]


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop(Q_PROJ), ["1 are missing", Q_PROJ.removeprefix("model.")]),
        (
            lambda t: t[Q_PROJ].fill_(torch.nan),
            [Q_PROJ, "1024 of 1024 values that are NaN or infinite"],
        ),
        (
            lambda t: t.update({Q_PROJ: torch.ones(3, 32)}),
            ["of another shape", "(3, 32) for (32, 32)"],
        ),
        (lambda t: t.update({Q_PROJ: t[Q_PROJ].to(torch.int64)}), ["not floating point", Q_PROJ]),
        (lambda t: t.update(extra=torch.ones(2)), ["1 are unexpected: extra"]),
        (
            lambda t: t.update({name: torch.ones(()) for name in t}),
            ["hidden_size is 32", "expected at most 0"],
        ),
    ],
    ids=["missing", "NaN", "shape", "integers", "unexpected", "no axes"],
)
def test_weights_that_are_not_those_of_the_model_are_refused(checkpoint, change, words, capsys):
    edit_tensors(checkpoint, change)
    assert_refused(checkpoint, words, capsys, OF_WEIGHTS)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:4],
        lambda data: data[:-1],
        lambda data: struct.pack("<Q", 2**63) + data[8:],
        lambda data: struct.pack("<Q", 10**8 - 1) + data[8:],
        lambda data: b"junk" * 99,
    ],
    ids=[
        "8 bytes are missing",
        "the end is missing",
        "a header of 2**63 bytes",
        "a header longer than the file",
        "junk",
    ],
)
def test_a_file_that_is_no_safetensors_file_is_refused(checkpoint, change, capsys):
    path = checkpoint / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    assert_refused(
        checkpoint,
        [str(path), "is not a complete safetensors file", f"({path.stat().st_size} bytes)"],
        capsys,
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda header: [],
        lambda header: 5,
        lambda header: header | {first(header): {**header[first(header)], "shape": "x"}},
        lambda header: header | {first(header): {**header[first(header)], "shape": [-1]}},
        lambda header: (
            header | {first(header): {**header[first(header)], "data_offsets": [0, 10**15]}}
        ),
        lambda header: header | {first(header): {**header[first(header)], "dtype": "Q8"}},
    ],
    ids=["a list", "a number", "shape x", "shape -1", "offsets behind the end", "unknown type"],
)
def test_a_header_of_wrong_types_is_refused(checkpoint, change, capsys):
    edit_header(checkpoint, change)
    assert_refused(checkpoint, ["model.safetensors is not a complete safetensors file"], capsys)


def test_a_type_of_tensors_that_has_no_place_here_is_refused(checkpoint, capsys):
    edit_tensors(checkpoint, lambda t: t.update({Q_PROJ: t[Q_PROJ].to(torch.float8_e4m3fn)}))
    assert_refused(
        checkpoint, [Q_PROJ, "is of type F8_E4M3, expected one of ['F64', 'F32',"], capsys
    )


@pytest.mark.parametrize(
    "content, words",
    [
        ("[]", [INDEX, "holds [], expected a JSON object"]),
        ("{", [INDEX, "is not JSON"]),
        ("[" * 100_000, [INDEX, "is not JSON: RecursionError"]),
        ({}, ["the weight_map None, expected the file of each tensor"]),
        ({"weight_map": []}, ["the weight_map [], expected"]),
        ({"weight_map": {"a": 5}}, ["the weight_map {'a': 5}, expected"]),
        ({"weight_map": {"a": f"../copy/{SHARD}"}}, ["expected .safetensors files beside it"]),
        (
            {"weight_map": {"a": "/etc/passwd"}},
            ["['/etc/passwd'], expected .safetensors files beside it"],
        ),
        ({"weight_map": {"a": ".."}}, ["['..'], expected .safetensors files beside it"]),
        (
            {"weight_map": {"a": "config.json"}},
            ["['config.json'], expected .safetensors files beside it"],
        ),
        (
            {"weight_map": {"a": "gone.safetensors"}},
            [f"lacks gone.safetensors, which {INDEX} names"],
        ),
        ({"weight_map": {"a": SHARD}, "metadata": 5}, ["the metadata 5, expected a JSON object"]),
    ],
    ids=lambda value: str(value)[:40] if not isinstance(value, list) else "",
)
def test_an_index_of_wrong_types_is_refused(checkpoint, content, words, capsys):
    (checkpoint / "model.safetensors").rename(checkpoint / SHARD)
    (checkpoint / INDEX).write_text(content if isinstance(content, str) else json.dumps(content))
    assert_refused(checkpoint, words, capsys)


def test_a_checkpoint_in_shards_loads(checkpoint):
    expected = load_checkpoint(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    expected.save_pretrained(checkpoint, max_shard_size=4000)
    assert len(list(checkpoint.glob("model-*.safetensors"))) > 2
    actual = load_checkpoint(checkpoint).state_dict()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.state_dict().items())


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_what_a_model_of_ours_saves_loads_whole(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert type(loaded) is type(model) and not loaded.training
    for (expected_name, expected), (found_name, actual) in zip(
        model.named_parameters(), loaded.named_parameters(), strict=True
    ):
        assert (expected_name, expected.dtype) == (found_name, actual.dtype) and torch.equal(
            expected, actual
        )


def test_a_matrix_that_is_tied_may_be_in_the_file_twice(tmp_path):
    build("causal").save_pretrained(tmp_path)
    edit_tensors(
        tmp_path,
        lambda t: t.update({"lm_head.weight": t["model.embeddings.embed_tokens.weight"].clone()}),
    )
    model = load_checkpoint(tmp_path)
    assert model.lm_head.weight is model.model.embeddings.embed_tokens.weight


def test_a_matrix_that_is_tied_has_to_be_there_under_the_name_it_is_saved_by(tmp_path):
    """Transformers would draw a new one."""
    build("causal").save_pretrained(tmp_path)
    edit_tensors(
        tmp_path,
        lambda t: t.update({"lm_head.weight": t.pop("model.embeddings.embed_tokens.weight")}),
    )
    with raises(ValueError, seen=(1, "embeddings.embed_tokens.weight")):
        load_checkpoint(tmp_path)


# ------------------------------------------------------------------------------------------ configs


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", ["is not JSON"]),
        (b"{", ["is not JSON"]),
        (b'{"model_type": "\xe9"}', ["is not JSON", "utf-8"]),
        (b"[" * 100_000, ["is not JSON: RecursionError"]),
        (b"[]", ["holds [], expected a JSON object"]),
        (b"5", ["holds 5, expected a JSON object"]),
        (b'"x"', ["holds 'x', expected a JSON object"]),
        (b"{}", ["the model_type None, expected a name"]),
        (b'{"model_type": [5]}', ["the model_type [5], expected a name"]),
        (b'{"model_type": "nope"}', ["has model_type nope"]),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, bytes) else "",
)
def test_a_config_that_is_none_is_refused(checkpoint, content, words, capsys):
    (checkpoint / "config.json").write_bytes(content)
    assert_refused(checkpoint, words, capsys)
    line = error_of(["info", checkpoint], capsys)
    assert [word for word in words if word not in line] == [], line


FIELDS = [
    (dict(hidden_size="x"), "hidden_size"),
    (dict(hidden_size=-1), "hidden_size must be at least 1, got -1"),
    (dict(hidden_size=10**12), "hidden_size must be at most 268435456"),
    (dict(vocab_size=10**12), "vocab_size must be at most 268435456"),
    (dict(architectures="x"), "the architectures 'x', expected a list of names"),
    (dict(architectures=[5]), "the architectures [5], expected a list of names"),
    (dict(architectures=[]), "and architecture none, expected one of VanillaSeq2SeqModel"),
    (
        dict(architectures=["VanillaPreTrainedModel"]),
        "and architecture VanillaPreTrainedModel, expected one of",
    ),
    (
        dict(architectures=["VanillaEncoderModel"]),
        "and architecture VanillaEncoderModel, expected one of VanillaSeq2SeqModel",
    ),
    (dict(id2label=5), "id2label 5, expected a JSON object"),
    (dict(id2label={"x": "a"}), "'x'"),
    (dict(num_labels=10**12), "num_labels 1000000000000, expected at most"),
    (dict(num_labels="x"), "num_labels 'x', expected"),
    (dict(dtype="nope"), "nope"),
    (dict(quantization_config={}), "quantization_config, expected weights in floating point"),
    (dict(is_encoder_decoder=False), "is_encoder_decoder False, expected True"),
    (dict(return_dict=False), "return_dict False, expected True"),
    (dict(output_hidden_states="x"), "output_hidden_states 'x', expected False"),
    *[
        (dict(_attn_implementation=value), f"_attn_implementation {value}, expected a name")
        for value in (True, 5, [1])
    ],
    (dict(decoder="x"), "the nested configs decoder"),
    (dict(to_dict=5), "the key to_dict, an attribute of the config class: expected only fields"),
    (dict(attribute_map={}), "the key attribute_map, an attribute of the config class"),
]


@pytest.mark.parametrize("fields, word", FIELDS, ids=[str(fields) for fields, _ in FIELDS])
def test_a_field_of_a_wrong_type_or_an_absurd_value_is_refused(checkpoint, fields, word, capsys):
    edit_json(checkpoint / "config.json", **fields)
    for arguments in (
        ["info", checkpoint],
        verbs(checkpoint, checkpoint.parent / "out")["average"],
    ):
        line = error_of(arguments, capsys)
        assert word in line and str(checkpoint) in line


@pytest.mark.parametrize("field", ["encoder_layers", "decoder_layers"])
def test_layers_that_the_file_does_not_hold_are_refused_before_any_is_built(
    checkpoint, field, capsys
):
    edit_json(checkpoint / "config.json", **{field: 10**9})
    assert_refused(
        checkpoint,
        [f"{field} is 1000000000 in the config of {checkpoint}, expected at most 2"],
        capsys,
    )


def test_a_foreign_config_with_layers_that_the_file_does_not_hold_is_refused(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=16, n_head=2, n_layer=1, vocab_size=20, bos_token_id=1, eos_token_id=2
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", n_layer=10**9)
    with raises(ValueError, seen=("num_hidden_layers", 1000000000), expected=1):
        plan_conversion(tmp_path)


# --------------------------------------------------------------------------- tokenizers, generation


TOKENIZER_VERBS = ["attention", "evaluate", "convert"]


@pytest.mark.parametrize(
    "file, content, word",
    [
        ("tokenizer.json", "{", "is not JSON"),
        ("tokenizer.json", "[]", "holds [], expected a JSON object"),
        ("tokenizer.json", '{"model": 5}', "KeyError"),
        ("tokenizer_config.json", "[]", "holds [], expected a JSON object"),
        ("tokenizer_config.json", '{"tokenizer_class": 5}', "AttributeError"),
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "TokenizersBackend", "model_max_length": "x"}',
            "model_max_length is 'x'",
        ),
        ("generation_config.json", "[]", "holds [], expected a JSON object"),
        ("generation_config.json", '"x"', "holds 'x', expected a JSON object"),
    ],
)
def test_a_damaged_companion_is_refused(checkpoint, file, content, word, capsys):
    (checkpoint / file).write_text(content)
    assert_refused(checkpoint, [str(checkpoint), word], capsys, TOKENIZER_VERBS)


@pytest.mark.parametrize(
    "content, seen, expected",
    [
        (dict(num_beams="x"), ("num_beams", "x"), (0, 2)),
        (dict(max_length=10**30), ("max_length", 1000000000000000000000000000000), ()),
        (dict(top_k=[5]), ("top_k", 5), ()),
        (dict(temperature="hot"), ("temperature", "hot"), ()),
        (dict(output_hidden_states="x"), ("output_hidden_states", "x"), ()),
        (dict(eos_token_id=10**30), ("eos_token_id",), (0, 2147483647)),
        (dict(pad_token_id=48), ("pad_token_id", 48), (0, 47)),
        (dict(eos_token_id=[2, "x"]), ("eos_token_id", 2, "x"), ()),
        (dict(decoder_start_token_id=[1]), ("decoder_start_token_id", 1), ()),
        (dict(penalty_alpha=0.5), ("penalty_alpha", 0.5), ()),
    ],
    ids=str,
)
def test_a_generation_config_of_wrong_types_is_refused(checkpoint, content, seen, expected):
    edit_json(checkpoint / "generation_config.json", **content)
    with raises(ValueError, seen=("generation_config.json", *seen), expected=expected):
        load_checkpoint(checkpoint)


def test_a_tokenizer_whose_expression_is_past_the_engine_s_limit_is_refused(checkpoint, capsys):
    """It panics in Rust, which is no Exception, and only when it reads a text."""
    edit_json(
        checkpoint / "tokenizer.json",
        normalizer=None,
        pre_tokenizer={
            "type": "Split",
            "pattern": {"Regex": "(a+)+$"},
            "behavior": "Isolated",
            "invert": False,
        },
    )
    arguments = verbs(checkpoint, checkpoint.parent / "out")["attention"]
    line = error_of([*arguments[:2], "a" * 40 + "b", *arguments[3:]], capsys)
    assert "PanicException" in line and str(checkpoint) in line


def test_a_checkpoint_without_a_tokenizer_says_so(tmp_path, capsys):
    build("seq2seq").save_pretrained(tmp_path / "copy")
    for verb in ("attention", "evaluate"):
        assert_refused(
            tmp_path / "copy", ["has no tokenizer, expected one of tokenizer.json"], capsys, [verb]
        )


# --------------------------------------------------------------------------------------------- code


MARK = "open({mark!r}, 'w').write('ran')\n"


@pytest.fixture
def foreign_code(checkpoint, tmp_path, monkeypatch):
    """`checkpoint` with code that leaves a file when it runs, and a user who would say yes."""
    mark = tmp_path / "ran"
    (checkpoint / "theirs.py").write_text(MARK.format(mark=str(mark)) + "class Theirs: pass\n")
    autos = ("AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM")
    edit_json(checkpoint / "config.json", auto_map={name: "theirs.Theirs" for name in autos})
    edit_json(
        checkpoint / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["theirs.Theirs", "theirs.Theirs"]},
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 99))
    return mark


def test_no_verb_runs_the_code_of_a_checkpoint_of_ours_or_asks_whether_to(
    checkpoint, foreign_code, tmp_path, capsys
):
    for side, text in zip(("en", "de"), ("the dog", "der Hund"), strict=True):
        (tmp_path / f"a.{side}").write_text(f"{text}\n")
    chosen = verbs(checkpoint, tmp_path / "out") | {"info": ["info", checkpoint]}
    chosen["evaluate"] = [
        "evaluate",
        checkpoint,
        "--source",
        tmp_path / "a.en",
        "--references",
        tmp_path / "a.de",
    ]
    for verb in ("info", "average", "attention", "evaluate"):
        main([str(argument) for argument in chosen[verb]])
    assert sys.stdin.read(2) == "y\n"
    assert not foreign_code.exists()


@pytest.mark.parametrize("verb", ["info", "average", "attention", "evaluate", "export", "convert"])
def test_a_checkpoint_that_is_nothing_but_code_is_refused(checkpoint, foreign_code, verb, capsys):
    edit_json(checkpoint / "config.json", model_type="theirs")
    edit_json(checkpoint / "tokenizer_config.json", tokenizer_class="Theirs")
    arguments = (verbs(checkpoint, checkpoint.parent / "out") | {"info": ["info", checkpoint]})[
        verb
    ]
    line = error_of(arguments, capsys)
    assert "trust_remote_code" not in line
    assert sys.stdin.read(2) == "y\n" and not foreign_code.exists()


def test_a_tokenizer_that_is_nothing_but_code_is_refused(checkpoint, foreign_code):
    edit_json(checkpoint / "config.json", model_type="theirs")
    edit_json(checkpoint / "tokenizer_config.json", tokenizer_class="Theirs")
    with raises(ValueError, seen="copy"):
        load_tokenizer(checkpoint)
    assert not foreign_code.exists()


def test_an_average_has_our_code_and_not_that_of_a_file(checkpoint, foreign_code, tmp_path):
    average([checkpoint, checkpoint], tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["auto_map"] == VANILLA_SEQ2SEQ_MAP
    code = {path.name for path in (tmp_path / "out").glob("*.py")}
    assert code == {
        f"{part}_vanilla_transformer.py" for part in ("configuration", "layers", "modeling")
    }
    assert not foreign_code.exists()


MODELING = "modeling_vanilla_transformer"
VANILLA_SEQ2SEQ_MAP = {
    "AutoConfig": "configuration_vanilla_transformer.VanillaSeq2SeqConfig",
    "AutoModel": f"{MODELING}.VanillaSeq2SeqModel",
    "AutoModelForSeq2SeqLM": f"{MODELING}.VanillaSeq2SeqForConditionalGeneration",
    "AutoModelForSequenceClassification": f"{MODELING}.VanillaSeq2SeqForSequenceClassification",
    "AutoModelForQuestionAnswering": f"{MODELING}.VanillaSeq2SeqForQuestionAnswering",
}


@pytest.mark.parametrize(
    "fields, seen, expected",
    [
        (dict(hidden_act="gelu"), ("hidden_act", "gelu"), "relu"),
        (dict(layer_norm_eps=0.1), ("layer_norm_eps", 0.1), 1e-05),
        (dict(id2label={"0": "A", "1": "B"}), ("id2label.0", "A"), "LABEL_0"),
    ],
)
def test_models_of_equal_shapes_that_are_not_the_same_have_no_average(
    checkpoint, tmp_path, fields, seen, expected
):
    (tmp_path / "more").mkdir()
    other = copy_folder(checkpoint, tmp_path / "more")
    edit_json(other / "config.json", use_cache=False, dtype="float16", transformers_version="5")
    average([checkpoint, other], tmp_path / "out")
    edit_json(other / "config.json", **fields)
    with raises(ValueError, seen=(other, *seen), expected=(expected, checkpoint)):
        average([checkpoint, other], tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_models_of_other_tokenizers_have_no_average(checkpoint, tmp_path):
    (tmp_path / "more").mkdir()
    other = copy_folder(checkpoint, tmp_path / "more")
    content = json.loads((other / "tokenizer.json").read_text())
    content["truncation"] = dict(max_length=8, strategy="LongestFirst", stride=0, direction="Right")
    (other / "tokenizer.json").write_text(json.dumps(content))  # other bytes, the same tokenizer
    average([checkpoint, other], tmp_path / "out")
    token, *_ = content["model"]["vocab"]
    number = content["model"]["vocab"][token]
    content["model"]["vocab"][token] = 47
    (other / "tokenizer.json").write_text(json.dumps(content))
    with raises(
        ValueError, seen=("tokenizer.json", "model.vocab", 47), expected=(number, "tokenizer.json")
    ):
        average([checkpoint, other], tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_an_average_has_all_files_of_a_tokenizer(checkpoint, tmp_path):
    for name in ("source.spm", "vocab.txt", "target_vocab.json", "special_tokens_map.json"):
        (checkpoint / name).write_text("{}")
    average([checkpoint], tmp_path / "out")
    for name in (
        "tokenizer.json",
        "source.spm",
        "vocab.txt",
        "target_vocab.json",
        "special_tokens_map.json",
    ):
        assert (tmp_path / "out" / name).read_bytes() == (checkpoint / name).read_bytes()
    result, before = (
        json.loads((path / "tokenizer_config.json").read_text())
        for path in (tmp_path / "out", checkpoint)
    )
    assert result == before | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }


# -------------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize("verb", ["info", *VERBS])
@pytest.mark.parametrize("source", ["/no/where", "a/b/c", "./x", "..x", "x..y", "a b", "~/x"])
def test_a_path_that_does_not_exist_is_told_as_that(source, verb, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = error_of((verbs(source, "out") | {"info": ["info", source]})[verb], capsys)
    check_message(line, seen=source)


@pytest.mark.parametrize("verb", ["info", *VERBS])
def test_a_hub_id_that_cannot_be_reached_is_one_short_line(verb, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = error_of(
        (verbs("someone/nothing", "out") | {"info": ["info", "someone/nothing"]})[verb], capsys
    )
    reason = "it is not in the cache and the Hub cannot be reached"
    assert line == (
        "vanilla-transformer: someone/nothing is neither a checkpoint directory nor on the Hub: "
        f"{reason}"
    )


@pytest.mark.parametrize("verb", ["info", *VERBS])
def test_a_file_or_a_link_to_nothing_in_place_of_a_directory(verb, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        if (verb, name) != ("convert", "file"):  # which it reads as a state dict
            arguments = (
                verbs(tmp_path / name, tmp_path / "out") | {"info": ["info", tmp_path / name]}
            )[verb]
            assert "is not a directory, expected a checkpoint directory or a Hub id" in error_of(
                arguments, capsys
            )


def test_of_a_hub_repository_what_lies_in_folders_is_left_there(saved, monkeypatch):
    calls = []

    def download(hub_id, allow_patterns, ignore_patterns):
        calls.append((hub_id, "*.safetensors" in allow_patterns, ignore_patterns))
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert isinstance(load_checkpoint("someone/model"), torch.nn.Module)
    assert calls == [("someone/model", True, ["*/*"])]


def test_what_the_hub_says_is_not_repeated(monkeypatch):
    def download(*_, **__):
        raise LocalEntryNotFoundError("many\nlines about a Repo id")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with raises(FileNotFoundError, seen="someone/model"):
        checkpoint_directory("someone/model")


def test_an_empty_name_is_not_the_working_directory(saved, monkeypatch, capsys):
    monkeypatch.chdir(saved)
    with raises(FileNotFoundError, seen="''"):
        load_checkpoint("")
    assert "''" in error_of(["info", ""], capsys, code=2)
    assert isinstance(load_checkpoint("."), torch.nn.Module)


def test_a_decoder_with_the_config_of_an_encoder_is_refused(tmp_path):
    model = build("causal")
    assert isinstance(model, VanillaDecoderForCausalLM)
    model.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", model_type="vanilla-encoder")
    with raises(ValueError, seen=("model_type", "vanilla-encoder", "VanillaDecoderForCausalLM")):
        load_checkpoint(tmp_path)
