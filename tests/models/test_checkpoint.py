"""Tests of checkpoint files: every command rejects damaged files in one line and never runs code
from a checkpoint."""

import io
import json
import struct
import sys
import time

import huggingface_hub
import pytest
import torch
from checkpoints import CHECKPOINTS, SIZES, build, copy_folder, edit_json, perturbed, toy_corpus
from command_line import main, read_error
from huggingface_hub.errors import LocalEntryNotFoundError
from messages import check_message, raises
from models import AUTO_CLASSES
from safetensors.torch import load_file, save_file

from vanilla_transformer import VanillaDecoderForCausalLM
from vanilla_transformer.checkpoint import load_tokenizer
from vanilla_transformer.checkpoint_files import checkpoint_directory
from vanilla_transformer.conversion import plan_conversion
from vanilla_transformer.training.averaging import average
from vanilla_transformer.training.tokenizer import train_tokenizer
from vanilla_transformer_export import load_checkpoint

INDEX, SHARD = "model.safetensors.index.json", "model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A seq2seq checkpoint with its tokenizer. Its head dims allow a conversion to Marian."""
    directory = tmp_path_factory.mktemp("saved") / "seq2seq"
    fields = SIZES | dict(encoder_layers=1, decoder_layers=2, head_dim=8, value_head_dim=8)
    perturbed("VanillaSeq2SeqForConditionalGeneration", fields).save_pretrained(directory)
    train_tokenizer([text for pair in toy_corpus(50, seed=0) for text in pair], 48).save_pretrained(
        directory
    )
    return directory


@pytest.fixture
def checkpoint(saved, tmp_path):
    """A copy of the saved checkpoint that the test may damage."""
    return copy_folder(saved, tmp_path)


def verbs(checkpoint, out):
    """Return the arguments of every command that reads weights, by command."""
    return {
        "average": ["average", checkpoint, checkpoint, "--output", out],
        "attention": ["attention", checkpoint, "the dog", "--output", f"{out}.png"],
        "export": ["export", checkpoint, out],
        "evaluate": ["evaluate", checkpoint, "--source", "a.en", "--references", "a.de"],
        "convert": ["convert", checkpoint, out, "--to", "marian"],
    }


VERBS = list(verbs("", ""))


def exit_message(arguments, capsys, code=1):
    """Run a command that fails and return its error, which must be a single line."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    if code == 1:
        line = caught.value.code
    else:
        assert caught.value.code == code
        line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("vanilla-transformer") and "\n" not in line
    return line


def assert_rejected(checkpoint, words, capsys, commands=VERBS):
    """Check that each command fails with one line that has all `words`, and writes nothing."""
    before = sorted(checkpoint.parent.rglob("*"))
    for verb in commands:
        line = exit_message(verbs(checkpoint, checkpoint.parent / "out")[verb], capsys)
        assert [word for word in words if word not in line] == [], line
    assert sorted(checkpoint.parent.rglob("*")) == before


# ------------------------------------------------------------------------------------------ weights


def edit_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def edit_header(directory, change):
    """Replace the header of the weights by the result of `change`, valid or not."""
    data = (directory / "model.safetensors").read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.dumps(change(json.loads(data[8:end]))).encode()
    (directory / "model.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + data[end:]
    )


def first_name(tensors):
    return next(name for name in tensors if name != "__metadata__")


Q_PROJ = "model.decoder.layers.1.self_attn.q_proj.weight"
WEIGHT_VERBS = ["average", "attention", "export", "evaluate"]


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
def test_invalid_weights_are_rejected(checkpoint, change, words, capsys):
    edit_tensors(checkpoint, change)
    assert_rejected(checkpoint, words, capsys, WEIGHT_VERBS)


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
def test_damaged_safetensors_file_is_rejected(checkpoint, change, capsys):
    path = checkpoint / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    assert_rejected(
        checkpoint,
        [str(path), "is not a complete safetensors file", f"({path.stat().st_size} bytes)"],
        capsys,
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda header: [],
        lambda header: 5,
        lambda header: header | {first_name(header): {**header[first_name(header)], "shape": "x"}},
        lambda header: header | {first_name(header): {**header[first_name(header)], "shape": [-1]}},
        lambda header: (
            header
            | {first_name(header): {**header[first_name(header)], "data_offsets": [0, 10**15]}}
        ),
        lambda header: header | {first_name(header): {**header[first_name(header)], "dtype": "Q8"}},
    ],
    ids=["a list", "a number", "shape x", "shape -1", "offsets behind the end", "unknown type"],
)
def test_invalid_safetensors_header_is_rejected(checkpoint, change, capsys):
    edit_header(checkpoint, change)
    assert_rejected(checkpoint, ["model.safetensors is not a complete safetensors file"], capsys)


def test_unsupported_tensor_dtype_is_rejected(checkpoint, capsys):
    edit_tensors(checkpoint, lambda t: t.update({Q_PROJ: t[Q_PROJ].to(torch.float8_e4m3fn)}))
    assert_rejected(
        checkpoint, [Q_PROJ, "is of type F8_E4M3, expected one of ['F64', 'F32',"], capsys
    )


@pytest.mark.parametrize(
    "content, words",
    [
        ("[]", [INDEX, "holds [], expected a JSON object"]),
        ("{", [INDEX, "is not JSON"]),
        ("[" * 100_000, [INDEX, "is not JSON: RecursionError"]),
        ({}, ["the weight_map None, expected an object"]),
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
def test_invalid_shard_index_is_rejected(checkpoint, content, words, capsys):
    (checkpoint / "model.safetensors").rename(checkpoint / SHARD)
    (checkpoint / INDEX).write_text(content if isinstance(content, str) else json.dumps(content))
    assert_rejected(checkpoint, words, capsys)


def test_sharded_checkpoint_loads(checkpoint):
    expected = load_checkpoint(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    expected.save_pretrained(checkpoint, max_shard_size=4000)
    assert len(list(checkpoint.glob("model-*.safetensors"))) > 2
    actual = load_checkpoint(checkpoint).state_dict()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.state_dict().items())


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_saved_model_loads_with_equal_parameters(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert type(loaded) is type(model) and not loaded.training
    for (expected_name, expected), (actual_name, actual) in zip(
        model.named_parameters(), loaded.named_parameters(), strict=True
    ):
        assert (expected_name, expected.dtype) == (actual_name, actual.dtype) and torch.equal(
            expected, actual
        )


def test_tied_matrix_may_be_stored_twice(tmp_path):
    build("causal").save_pretrained(tmp_path)
    edit_tensors(
        tmp_path,
        lambda t: t.update({"lm_head.weight": t["model.embeddings.embed_tokens.weight"].clone()}),
    )
    model = load_checkpoint(tmp_path)
    assert model.lm_head.weight is model.model.embeddings.embed_tokens.weight


def test_tied_matrix_stored_under_other_name_only_raises(tmp_path):
    """Transformers would initialize the matrix at random."""
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
def test_invalid_config_json_is_rejected(checkpoint, content, words, capsys):
    (checkpoint / "config.json").write_bytes(content)
    assert_rejected(checkpoint, words, capsys)
    line = exit_message(["info", checkpoint], capsys)
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
def test_invalid_config_field_is_rejected(checkpoint, fields, word, capsys):
    edit_json(checkpoint / "config.json", **fields)
    for arguments in (
        ["info", checkpoint],
        verbs(checkpoint, checkpoint.parent / "out")["average"],
    ):
        line = exit_message(arguments, capsys)
        assert word in line and str(checkpoint) in line


@pytest.mark.parametrize("field", ["encoder_layers", "decoder_layers"])
def test_config_with_more_layers_than_weights_is_rejected(checkpoint, field, capsys):
    """Layers are counted before the model is built, which 10**9 layers would make impossible."""
    edit_json(checkpoint / "config.json", **{field: 10**9})
    assert_rejected(
        checkpoint,
        [f"{field} is 1000000000 in the config of {checkpoint}, expected at most 2"],
        capsys,
    )


def test_foreign_config_with_more_layers_than_weights_is_rejected(tmp_path):
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
def test_damaged_tokenizer_or_generation_config_is_rejected(
    checkpoint, file, content, word, capsys
):
    (checkpoint / file).write_text(content)
    assert_rejected(checkpoint, [str(checkpoint), word], capsys, TOKENIZER_VERBS)


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
def test_invalid_generation_config_field_raises(checkpoint, content, seen, expected):
    edit_json(checkpoint / "generation_config.json", **content)
    with raises(ValueError, seen=("generation_config.json", *seen), expected=expected):
        load_checkpoint(checkpoint)


def test_tokenizer_regex_beyond_backtracking_limit_is_rejected(checkpoint, capsys):
    """The regex panics in Rust when a text is tokenized. A PanicException is no Exception."""
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
    line = exit_message([*arguments[:2], "a" * 40 + "b", *arguments[3:]], capsys)
    assert "PanicException" in line and str(checkpoint) in line


def test_checkpoint_without_tokenizer_is_rejected(tmp_path, capsys):
    build("seq2seq").save_pretrained(tmp_path / "copy")
    for verb in ("attention", "evaluate"):
        assert_rejected(
            tmp_path / "copy", ["has no tokenizer, expected one of tokenizer.json"], capsys, [verb]
        )


# --------------------------------------------------------------------------------------------- code


MARK = "open({mark!r}, 'w').write('ran')\n"


@pytest.fixture
def foreign_code(checkpoint, tmp_path, monkeypatch):
    """Add code to `checkpoint` that creates a file when it runs, and let stdin answer yes.

    Return the path of that file.
    """
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


def test_commands_neither_run_remote_code_nor_ask_to(checkpoint, foreign_code, tmp_path, capsys):
    for side, text in zip(("en", "de"), ("the dog", "der Hund"), strict=True):
        (tmp_path / f"a.{side}").write_text(f"{text}\n")
    commands = verbs(checkpoint, tmp_path / "out") | {"info": ["info", checkpoint]}
    commands["evaluate"] = [
        "evaluate",
        checkpoint,
        "--source",
        tmp_path / "a.en",
        "--references",
        tmp_path / "a.de",
    ]
    for verb in ("info", "average", "attention", "evaluate"):
        main([str(argument) for argument in commands[verb]])
    assert sys.stdin.read(2) == "y\n"
    assert not foreign_code.exists()


@pytest.mark.parametrize("verb", ["info", "average", "attention", "evaluate", "export", "convert"])
def test_checkpoint_with_only_remote_code_is_rejected(checkpoint, foreign_code, verb, capsys):
    edit_json(checkpoint / "config.json", model_type="theirs")
    edit_json(checkpoint / "tokenizer_config.json", tokenizer_class="Theirs")
    arguments = (verbs(checkpoint, checkpoint.parent / "out") | {"info": ["info", checkpoint]})[
        verb
    ]
    line = exit_message(arguments, capsys)
    assert "trust_remote_code" not in line
    assert sys.stdin.read(2) == "y\n" and not foreign_code.exists()


def test_tokenizer_with_only_remote_code_raises(checkpoint, foreign_code):
    edit_json(checkpoint / "config.json", model_type="theirs")
    edit_json(checkpoint / "tokenizer_config.json", tokenizer_class="Theirs")
    with raises(ValueError, seen="copy"):
        load_tokenizer(checkpoint)
    assert not foreign_code.exists()


def test_average_writes_package_code_and_not_code_of_inputs(checkpoint, foreign_code, tmp_path):
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
    **{
        name: f"{MODELING}.{model_class.__name__}"
        for name, model_class in AUTO_CLASSES["seq2seq"].items()
    },
}


@pytest.mark.parametrize(
    "fields, seen, expected",
    [
        (dict(hidden_act="gelu"), ("hidden_act", "gelu"), "relu"),
        (dict(layer_norm_eps=0.1), ("layer_norm_eps", 0.1), 1e-05),
        (dict(id2label={"0": "A", "1": "B"}), ("id2label.0", "A"), "LABEL_0"),
    ],
)
def test_average_of_different_configs_raises(checkpoint, tmp_path, fields, seen, expected):
    (tmp_path / "more").mkdir()
    other = copy_folder(checkpoint, tmp_path / "more")
    edit_json(other / "config.json", use_cache=False, dtype="float16", transformers_version="5")
    average([checkpoint, other], tmp_path / "out")
    edit_json(other / "config.json", **fields)
    with raises(ValueError, seen=(other, *seen), expected=(expected, checkpoint)):
        average([checkpoint, other], tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_average_of_different_tokenizers_raises(checkpoint, tmp_path):
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


def test_average_copies_all_tokenizer_files(checkpoint, tmp_path):
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
def test_error_names_path_that_does_not_exist(source, verb, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = exit_message((verbs(source, "out") | {"info": ["info", source]})[verb], capsys)
    check_message(line, seen=source)


@pytest.mark.parametrize("verb", ["info", *VERBS])
def test_unreachable_hub_id_is_reported_in_one_line(verb, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = exit_message(
        (verbs("someone/nothing", "out") | {"info": ["info", "someone/nothing"]})[verb], capsys
    )
    reason = "it is not in the cache and the Hub cannot be reached"
    assert line == (
        "vanilla-transformer: someone/nothing is neither a checkpoint directory nor on the Hub: "
        f"{reason}"
    )


@pytest.mark.parametrize("verb", ["info", *VERBS])
def test_file_or_broken_link_instead_of_directory_is_rejected(verb, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        if (verb, name) != ("convert", "file"):  # convert reads a file as a state dict
            arguments = (
                verbs(tmp_path / name, tmp_path / "out") | {"info": ["info", tmp_path / name]}
            )[verb]
            assert (
                "is not a directory, expected a checkpoint directory or a Hub id"
                in exit_message(arguments, capsys)
            )


def test_subfolders_of_hub_repository_are_not_downloaded(saved, monkeypatch):
    downloads = []

    def download(hub_id, allow_patterns, ignore_patterns, revision=None):
        downloads.append((hub_id, "*.safetensors" in allow_patterns, ignore_patterns))
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert isinstance(load_checkpoint("someone/model"), torch.nn.Module)
    assert downloads == [("someone/model", False, ["*/*"]), ("someone/model", True, ["*/*"])]


def test_failed_hub_download_error_names_hub_id_without_text_of_hub_client(monkeypatch):
    def download(*_, **__):
        raise LocalEntryNotFoundError("many\nlines about a Repo id")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with raises(FileNotFoundError, seen="someone/model") as raised:
        checkpoint_directory("someone/model")
    assert type(raised.value) is FileNotFoundError
    assert "Repo id" not in str(raised.value)


def test_empty_name_is_not_working_directory(saved, monkeypatch, capsys):
    monkeypatch.chdir(saved)
    with raises(FileNotFoundError, seen="''"):
        load_checkpoint("")
    assert "''" in exit_message(["info", ""], capsys, code=2)
    assert isinstance(load_checkpoint("."), torch.nn.Module)


def test_model_type_that_contradicts_architecture_raises(tmp_path):
    model = build("causal")
    assert isinstance(model, VanillaDecoderForCausalLM)
    model.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", model_type="vanilla-encoder")
    with raises(ValueError, seen=("model_type", "vanilla-encoder", "VanillaDecoderForCausalLM")):
        load_checkpoint(tmp_path)


def test_folder_of_an_adapter_says_how_to_merge_it(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with raises(FileNotFoundError, seen=(tmp_path, "adapter"), expected="merge_and_unload"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("verb", ["convert", "info", "export"])
def test_directory_that_marian_wrote_names_its_converter(tmp_path, verb):
    for name in ("model.npz", "decoder.yml", "opus.vocab.yml", "source.spm", "target.spm"):
        (tmp_path / name).write_text("")
    message = read_error(verb, tmp_path, *([] if verb == "info" else [tmp_path.parent / "out"]))
    check_message(message, seen=(tmp_path, "Marian"), expected="convert_marian_to_pytorch")


def test_too_many_labels_are_rejected_at_once(checkpoint):
    labels = {str(number): f"label {number}" for number in range(200_000)}
    edit_json(checkpoint / "config.json", id2label=labels)
    start = time.monotonic()
    with raises(ValueError, seen=("config.json", 200_000, "id2label"), expected=2**17):
        load_checkpoint(checkpoint)
    assert time.monotonic() - start < 10
