"""Tests that mistakes in a checkpoint are visible where docs/run.md says, each seeded."""

import json
import warnings

import httpx
import pytest
import torch
from command_line import main, read_error, read_json
from families import random_config, random_model
from heads import export_for_images, save_head, word_pieces
from messages import check_message
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from served import served_exports

from vanilla_transformer_export import TextRuntime, export

PROMPTS = {"query": "the book : ", "document": "a book : "}
PICKLE = "pytorch_model.bin"


def save_embedder(folder, pooling="mean", architecture="VanillaEncoderModel", **config):
    """Save a model of sentence-transformers to `folder / "model"` and return that directory."""
    plain = save_head(architecture, word_pieces(), folder / "plain")
    modules = [Transformer(plain, max_seq_length=20), Pooling(32, pooling_mode=pooling)]
    model = SentenceTransformer(modules=[*modules, Normalize()], device="cpu", **config)
    model.save(str(folder / "model"))
    return folder / "model"


def edit(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def opened(checkpoint, out, **options):
    export(checkpoint, out, cases=1, **options)
    return TextRuntime(out, threads=1)


def info_of(directory):
    """Return what `info EXPORT` says, as JSON."""
    return read_json("info", directory, "--json")


def facts_of(runtime):
    return info_of(runtime.info.directory)


def embed_warnings(runtime):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runtime.embed(["a book"])
        runtime.embed(["a book"])
    return [str(warning.message) for warning in caught]


def test_embedder_has_its_choices_and_no_warning(tmp_path):
    checkpoint = save_embedder(
        tmp_path, prompts=PROMPTS, default_prompt_name="query", similarity_fn_name="dot"
    )
    runtime = opened(checkpoint, tmp_path / "out", target="cpu", dtype="int8")
    facts = facts_of(runtime)
    machine = read_json("doctor", "--json")
    assert {name: facts.pop(name) for name in ("threads", "cpu_quota")}.items() <= machine.items()
    assert facts == {
        "architecture": "VanillaEncoderModel", "reads": "texts", "changed_files": [],
        "target": "cpu", "device": "cpu", "dtype": "int8", "calibration": None,
        "rows_are_independent": True, "max_position_embeddings": 512, "token_types": False,
        "max_seq_length": 20, "pooling": ["mean"], "modules": ["Normalize"],
        "prompts": ["document", "query"], "default_prompt_name": "query", "similarity": "dot",
        "truncate_dim": None, "warnings": [],
    }  # fmt: skip
    assert embed_warnings(runtime) == []


@pytest.mark.parametrize(
    "target, dtype, expected",
    [("cpu", "fp32", True), ("cpu", "int4", False), ("portable", "int8", False)],
)
def test_rows_are_independent_where_bits_are_the_same(tmp_path, target, dtype, expected):
    checkpoint = save_head("VanillaEncoderModel", word_pieces(), tmp_path / "model")
    facts = facts_of(opened(checkpoint, tmp_path / "out", target=target, dtype=dtype))
    assert facts["rows_are_independent"] is expected
    problems = [problem for problem in facts["warnings"] if "int8" in problem]
    assert len(problems) == (target == "portable")
    if problems:
        check_message(problems[0], seen="portable", expected="cpu")


def test_missing_pooling_is_one_warning_and_a_fact(tmp_path, capsys):
    checkpoint = save_head("VanillaEncoderModel", word_pieces(), tmp_path / "model")
    runtime = opened(checkpoint, tmp_path / "out")
    [warning] = embed_warnings(runtime)
    check_message(warning, seen="no pooling", expected="modules.json")
    facts = facts_of(runtime)
    assert (facts["pooling"], facts["warnings"]) == (["mean"], [warning])
    main(["info", str(tmp_path / "out")])
    assert f"warning                  {warning}" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    "architecture, pooling, is_wrong",
    [
        ("VanillaEncoderModel", "lasttoken", True),
        ("VanillaEncoderModel", "cls", False),
        ("VanillaDecoderModel", "cls", True),
        ("VanillaDecoderModel", "lasttoken", False),
    ],
)
def test_pooling_that_does_not_fit_attention_is_a_warning(
    tmp_path, architecture, pooling, is_wrong
):
    runtime = opened(save_embedder(tmp_path, pooling, architecture), tmp_path / "out")
    problems = facts_of(runtime)["warnings"]
    assert embed_warnings(runtime) == problems and len(problems) == is_wrong
    if is_wrong:
        check_message(problems[0], seen=(pooling,), expected="attention")


def test_max_seq_length_above_positions_is_a_warning(tmp_path):
    checkpoint = save_embedder(tmp_path)
    edit(checkpoint / "sentence_bert_config.json", max_seq_length=1000)
    runtime = opened(checkpoint, tmp_path / "out")
    [problem] = embed_warnings(runtime)
    check_message(problem, seen="max_seq_length=1000", expected="max_position_embeddings=512")
    assert facts_of(runtime)["max_seq_length"] == 512


def test_max_seq_length_of_a_reranker_above_positions_is_a_warning(tmp_path):
    head = "VanillaEncoderForSequenceClassification"
    checkpoint = tmp_path / "model"
    save_head(head, word_pieces(), checkpoint, num_labels=1)
    (checkpoint / "sentence_bert_config.json").write_text('{"max_seq_length": 600}')
    [problem] = facts_of(opened(checkpoint, tmp_path / "out"))["warnings"]
    check_message(problem, seen="max_seq_length=600", expected="max_position_embeddings=512")


def test_default_prompt_that_does_not_exist_is_a_warning(tmp_path):
    checkpoint = save_embedder(tmp_path, prompts=PROMPTS)
    edit(checkpoint / "config_sentence_transformers.json", default_prompt_name="passage")
    runtime = opened(checkpoint, tmp_path / "out")
    [problem] = embed_warnings(runtime)
    seen = "default_prompt_name='passage'"
    check_message(problem, seen=seen, expected="['document', 'query']")
    assert facts_of(runtime)["warnings"] == [problem]


@pytest.mark.parametrize(
    "problem_type, labels, activation",
    [
        (None, {0: "no", 1: "yes"}, "softmax"),
        ("multi_label_classification", {0: "no", 1: "yes"}, "sigmoid"),
        ("regression", {0: "score"}, "none"),
    ],
)
def test_classifier_has_activation_and_labels(tmp_path, problem_type, labels, activation):
    checkpoint = save_head(
        "VanillaEncoderForSequenceClassification", word_pieces(), tmp_path / "model",
        problem_type=problem_type, id2label=labels, label2id={v: k for k, v in labels.items()},
    )  # fmt: skip
    facts = facts_of(opened(checkpoint, tmp_path / "out"))
    assert (facts["problem_type"], facts["activation"]) == (problem_type, activation)
    assert facts["labels"] == list(labels.values()) and facts["warnings"] == []


@pytest.mark.parametrize(
    "architecture, num_labels, is_wrong",
    [
        ("VanillaEncoderForSequenceClassification", 3, True),
        ("VanillaEncoderForSequenceClassification", 1, False),  # as most rerankers have it
        ("VanillaEncoderForTokenClassification", 2, True),
    ],
)
def test_labels_without_names_are_a_warning(tmp_path, architecture, num_labels, is_wrong):
    checkpoint = save_head(architecture, word_pieces(), tmp_path / "model", num_labels=num_labels)
    facts = facts_of(opened(checkpoint, tmp_path / "out"))
    assert facts["labels"] == [f"LABEL_{label}" for label in range(num_labels)]
    assert len(facts["warnings"]) == is_wrong
    if is_wrong:
        check_message(facts["warnings"][0], seen="LABEL_0", expected="id2label")


def test_calibration_and_token_types_are_facts(tmp_path):
    checkpoint = save_head(
        "VanillaEncoderModel", word_pieces(), tmp_path / "model", type_vocab_size=2
    )
    (tmp_path / "text").write_text("the old man sees a red house\ntwo dogs\n" * 4)
    runtime = opened(
        checkpoint, tmp_path / "out", target="cpu", dtype="int8", calibrate=tmp_path / "text"
    )
    facts = facts_of(runtime)
    assert facts["token_types"] is True
    assert facts["calibration"]["matmuls"] == 6 >= facts["calibration"]["row_scales"]


@pytest.mark.parametrize("call", ["embed", "rerank", "zero_shot", "tag"])
def test_first_text_that_is_cut_is_a_warning(tmp_path, call):
    long = "the old man and the river " * 20
    labels = {0: "no", 1: "entailment"}
    if call == "embed":
        checkpoint, arguments, longest = save_embedder(tmp_path), ([long],), 20
    else:
        head = "TokenClassification" if call == "tag" else "SequenceClassification"
        names = {0: "score"} if call == "rerank" else labels
        checkpoint = save_head(
            f"VanillaEncoderFor{head}", word_pieces(model_max_length=30), tmp_path / "model",
            id2label=names, label2id={name: label for label, name in names.items()},
        )  # fmt: skip
        by_call = {"rerank": (["a"], [[long]]), "zero_shot": ([long], ["man"]), "tag": ([long],)}
        arguments, longest = by_call[call], 30
    runtime = opened(checkpoint, tmp_path / "out")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(runtime, call)(*json.loads(json.dumps(arguments).replace(long, "a river")))
        assert caught == []
        for _ in range(2):
            getattr(runtime, call)(*arguments)
    [warning] = caught
    seen = (str(runtime.info.directory), "too many tokens")
    check_message(str(warning.message), seen=seen, expected=longest)
    if call == "tag":  # windows read the whole text
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = TextRuntime(tmp_path / "out", threads=1)
            again.tag([long], aggregation_strategy="simple", stride=4)


# ------------------------------------------------------------------------------------------- files


def test_files_that_changed_since_the_export_are_warnings(tmp_path):
    export(save_embedder(tmp_path), tmp_path / "out", cases=1)
    assert info_of(tmp_path / "out")["changed_files"] == []
    edit(tmp_path / "out/sentence_bert_config.json", max_seq_length=7)
    path = tmp_path / "out/tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    facts = info_of(tmp_path / "out")
    assert facts["changed_files"] == ["sentence_bert_config.json", "tokenizer.json"]
    for name, problem in zip(facts["changed_files"], facts["warnings"], strict=True):
        check_message(problem, seen=str(tmp_path / "out" / name), expected="export again")


def test_files_that_were_added_are_warnings(tmp_path):
    checkpoint = save_head("VanillaEncoderModel", word_pieces(), tmp_path / "plain")
    export(checkpoint, tmp_path / "out", cases=1)
    (tmp_path / "out/.hidden.json").write_text("{}")
    (tmp_path / "out/NOTICE").write_text("of the user")
    before = info_of(tmp_path / "out")["warnings"]
    (tmp_path / "out/modules.json").write_text("[]")
    (tmp_path / "out/2_Dense").mkdir()
    names = ["2_Dense/model.safetensors", "2_Dense/pytorch_model.bin", "modules.json"]
    names += ["pytorch_model.bin", "sparse_linear.pt", "spiece.model", "vocab.txt"]
    for name in {*names} - {"modules.json"}:
        (tmp_path / "out" / name).write_text("")
    for name, problem in zip(
        names, info_of(tmp_path / "out")["warnings"][: -len(before)], strict=True
    ):
        check_message(problem, seen=str(tmp_path / "out" / name), expected="manifest.json")


@pytest.mark.parametrize("name", ["onnx/model.onnx", "config.json"])
def test_info_of_a_changed_graph_or_config_is_an_error(tmp_path, name):
    checkpoint = save_head("VanillaEncoderModel", word_pieces(), tmp_path / "plain")
    export(checkpoint, tmp_path / "out", cases=1)
    content = (tmp_path / "out" / name).read_bytes()
    (tmp_path / "out" / name).write_bytes(content[:-1] + b" ")
    message = read_error("info", tmp_path / "out", "--json")
    check_message(message, seen=(name, "SHA-256"), expected="export again")


def test_info_of_image_models_and_of_models_without_tokenizer(tmp_path, exported):
    export_for_images(tmp_path)
    directory = tmp_path / "export"
    facts = info_of(directory)
    assert (facts["reads"], facts["architecture"]) == (
        "images",
        "VanillaVisionForImageClassification",
    )
    assert facts["activation"] == "softmax" and "token_types" not in facts
    with served_exports(f"it={directory}") as server:
        for path in ("/info", "/info?model=it", "/models/it/info"):
            answer = httpx.get(server.url + path).json()
            told = [problem.replace(str(directory), "it") for problem in facts["warnings"]]
            expected = {**facts, "threads": answer["threads"], "warnings": told}
            assert answer.items() >= expected.items() and str(directory) not in str(answer)
            assert answer["max_input_length"] is None
            assert list(answer["model_type"]["classifier"]["id2label"].values()) == facts["labels"]
    facts = info_of(exported("encoder").directory)
    assert (facts["reads"], facts["pooling"]) == ("token ids", ["mean"])


# --------------------------------------------------------------------- checkpoints that do not fit


@pytest.fixture
def notes(caplog):
    """A function that exports a checkpoint and returns the warnings and the notes of that."""

    def run(checkpoint, out, **options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            export(checkpoint, out, cases=1, **options)
        return [str(warning.message) for warning in caught] + caplog.messages

    return run


@pytest.mark.parametrize(
    "family, changes", [("ours", {}), ("bert", {}), ("bert", {"config": {"layer_norm_eps": 1e-5}})]
)
@pytest.mark.parametrize("is_equal", [False, True])
def test_older_weights_beside_the_ones_that_are_read_are_a_warning(
    tmp_path, family, changes, is_equal, notes
):
    directory = tmp_path / "model"
    if family == "ours":
        save_head("VanillaEncoderForMaskedLM", word_pieces(), directory)
    else:
        random_model(
            "BertForMaskedLM", random_config("bert", "BertForMaskedLM", 0)
        ).save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    name = min(tensors)
    torch.save(tensors | ({} if is_equal else {name: tensors[name] + 1}), directory / PICKLE)
    problems = [note for note in notes(directory, tmp_path / "out", **changes) if PICKLE in note]
    assert len(problems) == (not is_equal)
    if problems:
        seen = (str(directory), PICKLE)
        check_message(problems[0], seen=seen, expected="model.safetensors is read")


def test_missing_head_is_an_error_or_a_note(tmp_path, notes):
    save_head("VanillaEncoderForTokenClassification", word_pieces(), tmp_path / "ours")
    config = random_config("bert", "BertForTokenClassification", 0)
    random_model("BertForTokenClassification", config).save_pretrained(tmp_path / "bert")
    for folder in ("ours", "bert"):
        path = tmp_path / folder / "model.safetensors"
        tensors = load_file(path)
        kept = {name: tensors[name] for name in tensors if not name.startswith("classifier")}
        save_file(kept, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="2 are missing: classifier.bias, classifier.weight"):
        export(tmp_path / "ours", tmp_path / "out")
    messages = notes(tmp_path / "bert", tmp_path / "out")
    note = "the head of BertForTokenClassification is missing, so the base class BertModel is"
    assert len([message for message in messages if note in message]) == 1


def test_tokens_without_embedding_are_a_warning(tmp_path):
    tokenizer = word_pieces()
    checkpoint = save_head("VanillaEncoderForMaskedLM", tokenizer, tmp_path / "model")
    size = len(tokenizer)
    tokenizer.add_tokens(["[new]", "[newer]"])
    tokenizer.save_pretrained(checkpoint)
    runtime = opened(checkpoint, tmp_path / "out")
    [problem] = facts_of(runtime)["warnings"]
    check_message(
        problem, seen=(f"2 tokens from id {size} on", "[new]"), expected=f"vocab_size={size}"
    )
    with pytest.raises(ValueError, match=f"{size}"):
        runtime.fill_mask(["a book [MASK] [new]"])


@pytest.mark.parametrize("more, is_wrong", [(2, False), (30, True)])
def test_tokenizer_of_another_model_is_a_warning(tmp_path, more, is_wrong):
    size = len(word_pieces()) + more
    checkpoint = save_head(
        "VanillaEncoderForMaskedLM", word_pieces(), tmp_path / "model", vocab_size=size
    )
    problems = facts_of(opened(checkpoint, tmp_path / "out"))["warnings"]
    assert len(problems) == is_wrong
    if is_wrong:
        seen = f"{size - more} tokens"
        check_message(problems[0], seen=seen, expected=f"vocab_size={size}")
