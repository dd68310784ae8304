"""Tests of the files beside the graphs that other programs read, by the sources and documentation
of these programs."""

import json
import shutil

import pytest
from huggingface_hub import ModelCard
from standins import SHAPE, classifier, translator
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from vanilla_transformer import (
    VanillaDecoderConfig,
    VanillaDecoderForCausalLM,
    VanillaEncoderConfig,
    VanillaEncoderModel,
    VanillaSeq2SeqConfig,
)
from vanilla_transformer.checkpoint import save_tokenizer
from vanilla_transformer.training.tokenizer import train_tokenizer
from vanilla_transformer_export import export
from vanilla_transformer_export.exporting.repository_files import (
    adapt_tokenizer,
    base_name,
    client_config,
    unread_by_genai,
)
from vanilla_transformer_export.graphs import saving
from vanilla_transformer_export.inference.export_info import read_export_info
from vanilla_transformer_export.proof import verify
from vanilla_transformer_export.proof.compare import Report

TEXT = [
    "the film wins and the cast shines",
    "Who bores whom? It's 1234 or 3.5, naïve café.",
    "two  spaces, and\ta tab",
    "Äpfel öffnen Übermut",
] * 3
KINDS = {"bpe": 80, "byte-bpe": 300, "word": 20, "character": None}


@pytest.fixture
def unchecked(monkeypatch):
    """Replace the comparison with torch, which these tests do not need."""
    monkeypatch.setattr(verify, "prove", lambda *_: Report(cases=1))


def read_json(path):
    return json.loads(path.read_text())


def save_decoder(path, kind="byte-bpe", **fields):
    """Save a decoder checkpoint with a tokenizer, and return its path."""
    tokenizer = train_tokenizer(TEXT, KINDS[kind], kind)
    config = VanillaDecoderConfig(vocab_size=len(tokenizer), num_hidden_layers=1, **SHAPE | fields)
    VanillaDecoderForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


# ---------------------------------------------------------------------------------- Transformers.js

SUFFIXES = {"fp32": "", "int8": "_int8"}  # of graph files, from its src/utils/dtypes.js
# graphs that its model types load
SESSIONS = {
    "bert": ["model"],
    "opt": ["model"],
    "marian": ["encoder_model", "decoder_model_merged"],
}
SIZES = {"vocab_size": 30, "hidden_size": 24, "num_attention_heads": 3}


@pytest.mark.parametrize("width", [{}, {"head_dim": 6}, {"value_head_dim": 6}], ids=str)
@pytest.mark.parametrize(
    "config_class, roles, model_type, names",
    [
        (VanillaEncoderConfig, ["encoder"], "bert", {}),
        (VanillaDecoderConfig, ["decoder"], "opt", {}),
        (VanillaDecoderConfig, ["encoder"], "bert", {}),
        (VanillaSeq2SeqConfig, ["encoder"], "bert", {}),
        (
            VanillaSeq2SeqConfig,
            ["encoder", "decoder"],
            "marian",
            {"d_model": 24, "encoder_attention_heads": 3, "decoder_attention_heads": 3},
        ),
    ],
)
def test_config_json_has_model_type_that_runs_the_graphs(
    config_class, roles, model_type, names, width
):
    config = config_class(**SIZES, **width).to_dict()
    loaded = {"transformers.js_config": {"dtype": "fp32"}}
    assert client_config(config, roles, ["fp32"]) == {
        **config,
        **names,
        **loaded,
        "model_type": model_type,
    }
    assert client_config(config, roles, []) == {**config, **names, "model_type": model_type}


def test_config_json_has_label2id():
    config = VanillaEncoderConfig(**SIZES, id2label={0: "bad", 1: "good"}).to_dict()
    assert config["label2id"] is None
    assert client_config(config, ["encoder"], [])["label2id"] == {"bad": 0, "good": 1}


@pytest.mark.parametrize(
    "dtypes, expected",
    [
        (["fp32"], {"dtype": "fp32"}),
        (["int8"], {"dtype": "int8"}),
        (["fp32", "int8"], {"dtype": "fp32", "device_config": {"wasm": {"dtype": "int8"}}}),
        (["int8", "fp32"], {"dtype": "int8"}),
    ],
    ids=str,
)
def test_config_json_has_default_dtype(dtypes, expected):
    config = VanillaEncoderConfig(**SIZES).to_dict()
    assert client_config(config, ["encoder"], dtypes)["transformers.js_config"] == expected
    external = client_config(config, ["encoder"], dtypes, ["model.onnx"])["transformers.js_config"]
    assert external == {**expected, "use_external_data_format": {"model.onnx": True}}


@pytest.mark.parametrize(
    "name", ["encoder", "causal", "seq2seq", "causal-learned", "seq2seq-rotary", "classification"]
)
def test_export_has_files_that_are_loaded_by_default(exported, name):
    directory = exported(name).directory
    config = read_json(directory / "config.json")
    suffix = SUFFIXES[config["transformers.js_config"]["dtype"]]
    files = {f"{session}{suffix}.onnx" for session in SESSIONS[config["model_type"]]}
    assert {path.name for path in (directory / "onnx").iterdir()} == files


@pytest.mark.parametrize(
    "dtype, target, expected", [("int8", "portable", {"dtype": "int8"}), ("int8", "cpu", None)]
)
def test_only_portable_exports_have_transformers_js_config(
    unchecked, tmp_path, dtype, target, expected
):
    classifier(tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "out", target=target, dtype=dtype)
    assert read_json(tmp_path / "out/config.json").get("transformers.js_config") == expected


def test_config_json_declares_external_data(unchecked, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "PROTOBUF_LIMIT", 10_000)  # in place of 2 GB
    translator(tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "out")
    announced = read_json(tmp_path / "out/config.json")["transformers.js_config"][
        "use_external_data_format"
    ]
    assert announced == {"encoder_model.onnx": True, "decoder_model_merged.onnx": True}


# Classes that return token types in its src/models/*/tokenization_*.js.
TYPED = {"BertTokenizer", "ConvBertTokenizer"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend"])
def test_tokenizer_class_with_token_types_keeps_transformers_ids(kind, name, tmp_path):
    train_tokenizer(TEXT, KINDS[kind], kind, "encoder", token_types=True).save_pretrained(
        tmp_path / "trained"
    )
    config = read_json(tmp_path / "trained/tokenizer_config.json")
    shutil.copytree(tmp_path / "trained", tmp_path / "out")
    (tmp_path / "out/tokenizer_config.json").write_text(
        json.dumps({**config, "tokenizer_class": name})
    )
    (tmp_path / "out/config.json").write_text('{"model_type": "bert"}')
    adapt_tokenizer(tmp_path / "out", has_types=True, is_decoder=False)
    actual = read_json(tmp_path / "out/tokenizer_config.json")
    assert actual["tokenizer_class"] in TYPED
    assert {**actual, "tokenizer_class": None} == {**config, "tokenizer_class": None}
    trained, out = (
        Tokenizer.from_file(str(tmp_path / place / "tokenizer.json"))
        for place in ("trained", "out")
    )
    ours = AutoTokenizer.from_pretrained(tmp_path / "out")
    for first, second in ((TEXT[0], TEXT[1]), (TEXT[2], " "), ("", TEXT[3])):
        expected = trained.encode(first, second)
        pair = ours(first, second)
        assert (pair["input_ids"], pair["token_type_ids"]) == (expected.ids, expected.type_ids)
        assert out.encode(first, second).ids == expected.ids


@pytest.mark.parametrize("name", ["BertTokenizer", "RobertaTokenizer", "XLMRobertaTokenizer"])
def test_family_tokenizer_class_is_kept(tmp_path, name):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    adapt_tokenizer(tmp_path, has_types=True, is_decoder=False)
    assert read_json(tmp_path / "tokenizer_config.json") == {"tokenizer_class": name}


@pytest.mark.parametrize("types, expected", [(0, "unchanged"), (2, "typed")])
def test_tokenizer_class_changes_only_for_models_with_token_types(
    unchecked, tmp_path, types, expected
):
    tokenizer = train_tokenizer(TEXT, 20, "word", "encoder", token_types=types > 0)
    config = VanillaEncoderConfig(
        vocab_size=20, num_hidden_layers=1, type_vocab_size=types, **SHAPE
    )
    VanillaEncoderModel(config).save_pretrained(tmp_path / "checkpoint")
    save_tokenizer(tokenizer, tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "out")
    before, after = (
        read_json(tmp_path / place / "tokenizer_config.json") for place in ("checkpoint", "out")
    )
    assert after["tokenizer_class"] in TYPED if expected == "typed" else after == before


@pytest.mark.parametrize(
    "template, expected",
    [("<s> $A", True), ("$A", None), ("$A </s>", None), ("<s> $A </s>", None), (None, None)],
)
@pytest.mark.parametrize("in_sequence", [False, True])
def test_add_bos_token_is_set_if_template_only_adds_bos(
    unchecked, tmp_path, template, expected, in_sequence
):
    """Only `add_bos_token` adds special tokens in its src/pipelines/text-generation.js."""
    save_decoder(tmp_path / "checkpoint")
    tokenizer = Tokenizer.from_file(str(tmp_path / "checkpoint/tokenizer.json"))
    if template is None:
        tokenizer.post_processor = processors.ByteLevel()
    else:
        added = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
        tokenizer.post_processor = (
            processors.Sequence([processors.ByteLevel(), added]) if in_sequence else added
        )
    tokenizer.save(str(tmp_path / "checkpoint/tokenizer.json"))
    export(tmp_path / "checkpoint", tmp_path / "out")
    assert read_json(tmp_path / "out/tokenizer_config.json").get("add_bos_token") == expected
    before, after = (
        AutoTokenizer.from_pretrained(tmp_path / place) for place in ("checkpoint", "out")
    )
    assert after(TEXT).input_ids == before(TEXT).input_ids


# -------------------------------------------------------------------------------- onnxruntime-genai


def test_genai_config_has_graph_lengths_and_special_tokens(unchecked, tmp_path):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    save_decoder(tmp_path / "checkpoint", **heads, max_position_embeddings=40)
    manifest = export(tmp_path / "checkpoint", tmp_path / "out", dtype="int8")
    assert manifest["genai"] == {"config": True, "tokenizer": True}
    assert read_json(tmp_path / "out/genai_config.json") == {
        "model": {
            "type": "decoder",
            "vocab_size": 300,
            "context_length": 40,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "decoder": {
                "filename": "onnx/model_int8.onnx",
                "hidden_size": 16,
                "head_size": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "num_hidden_layers": 1,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "position_ids": "position_ids",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {"max_length": 40, "past_present_share_buffer": False},
    }


def test_genai_config_has_sampling_and_eos_tokens_of_generation_config(unchecked, tmp_path):
    model = VanillaDecoderForCausalLM(
        VanillaDecoderConfig(vocab_size=20, num_hidden_layers=1, **SHAPE)
    )
    model.generation_config.update(
        do_sample=True, top_k=7, temperature=0.5, eos_token_id=[2, 5], pad_token_id=None
    )
    model.save_pretrained(tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "out")
    result = read_json(tmp_path / "out/genai_config.json")
    assert (result["model"]["eos_token_id"], result["model"]["pad_token_id"]) == ([2, 5], 2)
    sampled = {"do_sample": True, "top_k": 7, "temperature": 0.5}
    assert result["search"] == {"max_length": 512, "past_present_share_buffer": False, **sampled}


def test_manifest_says_why_value_head_dim_has_no_genai_config(exported):
    assert not (exported("causal").directory / "genai_config.json").exists()
    genai = read_json(exported("causal").directory / "manifest.json")["genai"]
    assert genai["config"] is False and "value_head_dim" in genai["because"]


@pytest.mark.parametrize(
    "name, target", [("seq2seq", "portable"), ("encoder", "portable"), ("decoder", "cpu")]
)
def test_genai_config_is_not_written_for_unsupported_exports(unchecked, tmp_path, name, target):
    make = {"seq2seq": translator, "encoder": classifier, "decoder": save_decoder}[name]
    make(tmp_path / "checkpoint")
    manifest = export(tmp_path / "checkpoint", tmp_path / "out", target=target)
    assert "genai" not in manifest and not (tmp_path / "out/genai_config.json").exists()


@pytest.mark.parametrize(
    "kind, word", [("bpe", "Sequence"), ("word", "WordLevel"), ("character", "WordLevel")]
)
def test_unsupported_tokenizer_is_hidden_from_genai(unchecked, tmp_path, kind, word):
    manifest = export(save_decoder(tmp_path / "checkpoint", kind), tmp_path / "out")
    assert manifest["genai"]["tokenizer"] is False and word in manifest["genai"]["because"]
    folder = read_json(tmp_path / "out/genai_config.json")["model"]["tokenizer_dir"]
    assert not (tmp_path / "out" / folder).exists()


def test_unread_by_genai_returns_reason_for_unsupported_tokenizers():
    def content(**parts):
        tokenizer = Tokenizer(parts.pop("model", models.BPE()))
        for name, part in parts.items():
            setattr(tokenizer, name, part)
        return json.loads(tokenizer.to_str())

    level = {
        "pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "decoder": decoders.ByteLevel(),
    }
    assert unread_by_genai(content(**level)) is None
    assert "no tokenizer.json" in unread_by_genai({})
    front = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    behind = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    sequence = processors.Sequence([processors.ByteLevel(), front])
    assert unread_by_genai(content(**level, post_processor=behind)) is None
    assert all(
        "in front" in unread_by_genai(content(**level, post_processor=processor))
        for processor in (front, sequence)
    )
    for change in (
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"normalizer": normalizers.NFC()},
        {"decoder": decoders.Fuse()},
        {"model": models.WordLevel()},
    ):
        assert "byte-level" in unread_by_genai(content(**level | change))


# --------------------------------------------------------------------------------------------- card


def test_card_names_base_model_and_keeps_license(unchecked, tmp_path):
    translator(tmp_path / "my-model")
    terms = (
        "license: other\nlicense_name: of-multi30k\nlanguage: [en, no]\npipeline_tag: "
        "translation\nmodel-index: []\n"
    )
    (tmp_path / "my-model/README.md").write_text(f"---\n{terms}---\n# Mine\n")
    export(tmp_path / "my-model", tmp_path / "out")
    card = ModelCard.load(tmp_path / "out/README.md")
    assert card.data.to_dict() == {
        "base_model": "my-model",
        "language": ["en", "no"],  # Norwegian, which is no boolean
        "library_name": "transformers.js",
        "license": "other",
        "license_name": "of-multi30k",
        "pipeline_tag": "translation",
        "tags": ["onnx", "vanilla-transformer"],
    }
    assert "await pipeline('translation', " in card.content and str(tmp_path) not in card.content


@pytest.mark.parametrize(
    "readme", [None, "no metadata", "---\na: [\n---\n", "---\n- a\n---\n", b"\xff"]
)
def test_card_is_written_if_base_has_no_valid_card(unchecked, tmp_path, readme):
    classifier(tmp_path / "a model")  # not a valid name of a repository
    if readme is not None:
        (tmp_path / "a model/README.md").write_bytes(
            readme if isinstance(readme, bytes) else readme.encode()
        )
    export(tmp_path / "a model", tmp_path / "out", dtype="int8")
    data = ModelCard.load(tmp_path / "out/README.md").data.to_dict()
    assert data == {
        "base_model_relation": "quantized",
        "library_name": "transformers.js",
        "pipeline_tag": "text-classification",
        "tags": ["onnx", "vanilla-transformer"],
    }


def test_card_of_cpu_target_has_no_javascript(unchecked, tmp_path):
    classifier(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", target="cpu")
    card = ModelCard.load(tmp_path / "out/README.md")
    assert card.data.library_name == "onnxruntime" and "```" not in card.content


def test_card_without_tokenizer_has_no_javascript(exported):
    assert "```" not in (exported("classification").directory / "README.md").read_text()


def test_base_name_is_hub_id_or_directory_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert (base_name("org/model"), base_name(tmp_path / "model"), base_name("model/")) == (
        "org/model",
        "model",
        "model",
    )
    (tmp_path / "two words").mkdir()
    assert base_name(tmp_path / "two words") is None


def test_card_is_editable_and_replaced_with_export(unchecked, tmp_path):
    classifier(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out")
    (tmp_path / "out/README.md").write_text("mine")
    assert "README.md" not in read_export_info(tmp_path / "out").manifest["files"]
    (tmp_path / "out/README.md").unlink()
    read_export_info(tmp_path / "out")
    (tmp_path / "out/README.md").write_text("mine")
    export(tmp_path / "model", tmp_path / "out", force=True)
    assert "mine" not in (tmp_path / "out/README.md").read_text()
