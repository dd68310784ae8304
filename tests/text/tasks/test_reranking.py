"""Tests of reranking: by classifiers of pairs, and by language models with a prompt, against the
recipe of Qwen3-Reranker's card and CrossEncoder."""

import json
import pickle
import shlex

import httpx
import numpy as np
import pytest
import torch
from checkpoints import edit_json
from command_line import main
from heads import MANY, PAIRS, close, save_head, word_pieces
from hub_checkpoints import QWEN3, make_tokenizer, save_checkpoint, write_json
from messages import raises
from sentence_transformers import CrossEncoder
from served_models import serving

from vanilla_transformer.conversion import convert
from vanilla_transformer_export import TextRuntime, export
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.ort_models import stand_in_for_optimum

QUERY = "What is the capital of China?"
DOCUMENTS = ["The capital of China is Beijing.", "Gravity {is} a force", "no", "the yes " * 9]
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
FIRST = '| map(attribute="content") | first'
TEMPLATE = (
    f'{{%- set instruct = messages | selectattr("role", "eq", "system") {FIRST} | '
    f'default("{INSTRUCTION}") -%}}\n'
    f"{PREFIX}<Instruct>: {{{{ instruct }}}}\n"
    f'<Query>: {{{{ messages | selectattr("role", "eq", "query") {FIRST} }}}}\n'
    f'<Document>: {{{{ messages | selectattr("role", "eq", "document") {FIRST} }}}}'
    '<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n{{ "" }}'
)
PARTS = "sentence_transformers.base.modules.transformer.Transformer"
SCORE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"


def card_scores(model, tokenizer, texts, instruction=INSTRUCTION, max_length=8192):
    """Return the scores of `texts` as the code on Qwen3-Reranker's card computes them."""
    before, after = (tokenizer.encode(part, add_special_tokens=False) for part in (PREFIX, SUFFIX))
    pairs = [
        f"<Instruct>: {instruction}\n<Query>: {QUERY}\n<Document>: {document}" for document in texts
    ]
    inputs = tokenizer(
        pairs,
        truncation="longest_first",
        return_attention_mask=False,
        max_length=max_length - len(before) - len(after),
    )
    rows = {"input_ids": [before + ids + after for ids in inputs["input_ids"]]}
    inputs = tokenizer.pad(rows, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits[:, -1, :]
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    both = torch.stack([logits[:, no], logits[:, yes]], dim=1)
    return torch.nn.functional.log_softmax(both, dim=1)[:, 1].exp().tolist()


def save_reranker(directory, has_modules, tokenizer, content=QWEN3, yes="yes", no="no"):
    """Save a reranker of Qwen3's shape, with the files of the Hub or with those of its first
    version."""
    tokenizer.chat_template = TEMPLATE if has_modules else "{{ messages[0].content }}"
    model = save_checkpoint(directory, content, "Qwen3ForCausalLM", tokenizer=tokenizer)
    if has_modules:
        names = [("", PARTS), ("1_LogitScore", SCORE)]
        entries = [
            {"idx": index, "name": str(index), "path": path, "type": kind}
            for index, (path, kind) in enumerate(names)
        ]
        write_json(directory / "modules.json", entries)
        (directory / "1_LogitScore").mkdir()
        ids = [
            None if each is None else tokenizer.convert_tokens_to_ids(each) for each in (yes, no)
        ]
        config = dict(zip(("true_token_id", "false_token_id"), ids))
        write_json(directory / "1_LogitScore" / "config.json", config)
        method = {"method": "forward", "method_output_name": "logits"}
        modalities = {"text": method, "message": method | {"format": "flat"}}
        settings = {
            "transformer_task": "text-generation",
            "modality_config": modalities,
            "module_output_name": "causal_logits",
        }
        write_json(directory / "sentence_bert_config.json", settings)
        settings = {
            "model_type": "CrossEncoder",
            "prompts": {"code": "Given code, find its tests"},
            "default_prompt_name": None,
            "activation_fn": "torch.nn.modules.activation.Sigmoid",
        }
        write_json(directory / "config_sentence_transformers.json", settings)
    return model


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    """A reranker, its tokenizer, its folder and the folder of what becomes of it."""
    root = tmp_path_factory.mktemp("reranker")
    tokenizer = make_tokenizer()
    content = QWEN3 | {"max_position_embeddings": 512}
    model = save_reranker(root / "theirs", True, tokenizer, content)
    facts = convert(root / "theirs", root / "ours")
    assert facts["architecture"] == "VanillaDecoderForSequenceClassification"
    export(root / "ours", root / "export", cases=2)
    return model, tokenizer, root


def scores_in_order(ranks):
    return [rank["score"] for rank in sorted(ranks, key=lambda rank: rank["index"])]


def test_scores_equal_recipe_of_the_card(reranker):
    model, tokenizer, root = reranker
    expected = card_scores(model, tokenizer, DOCUMENTS)
    assert max(expected) - min(expected) > 0.01
    runtime = TextRuntime(root / "export", threads=1)
    [ranks, one] = runtime.rerank([QUERY, QUERY], [DOCUMENTS, DOCUMENTS[:1]])
    np.testing.assert_allclose(scores_in_order(ranks), expected, atol=1e-5)
    assert [rank["index"] for rank in ranks] == np.argsort(-np.array(expected)).tolist()
    assert one[0]["score"] == pytest.approx(expected[0], abs=1e-5)
    [raw] = runtime.rerank([QUERY], [DOCUMENTS], raw_scores=True, top_k=2)
    assert raw[0]["index"] == ranks[0]["index"] and len(raw) == 2
    assert 1 / (1 + np.exp(-raw[0]["score"])) == pytest.approx(ranks[0]["score"], abs=1e-6)


def test_instruction_is_prompt_of_cross_encoder(reranker):
    model, tokenizer, root = reranker
    runtime = TextRuntime(root / "export", threads=1)
    instruction = "Given code, find its tests"
    expected = card_scores(model, tokenizer, DOCUMENTS, instruction)
    for options in ({"prompt_name": "code"}, {"prompt": instruction}):
        [ranks] = runtime.rerank([QUERY], [DOCUMENTS], **options)
        np.testing.assert_allclose(scores_in_order(ranks), expected, atol=1e-5)


def test_long_texts_are_cut_before_the_end_of_the_prompt(reranker):
    model, tokenizer, root = reranker
    long = [QUERY * 100, DOCUMENTS[0]]
    expected = card_scores(model, tokenizer, long, max_length=tokenizer.model_max_length)
    runtime = TextRuntime(root / "export", threads=1)
    [ranks] = runtime.rerank([QUERY], [long])
    np.testing.assert_allclose(scores_in_order(ranks), expected, atol=1e-5)


def test_cross_encoders_over_source_checkpoint_and_export_agree(reranker):
    model, tokenizer, root = reranker
    expected = card_scores(model, tokenizer, DOCUMENTS)
    stand_in_for_optimum()
    pairs = [(QUERY, document) for document in DOCUMENTS]
    for folder, options in (("theirs", {}), ("ours", {}), ("export", {"backend": "onnx"})):
        encoder = CrossEncoder(str(root / folder), device="cpu", **options)
        np.testing.assert_allclose(encoder.predict(pairs), expected, atol=1e-5)


@pytest.mark.parametrize("truncates", [True, False])
def test_endpoint_ranks_with_the_prompt(reranker, truncates):
    model, tokenizer, root = reranker
    expected = card_scores(model, tokenizer, DOCUMENTS)
    runtimes = {"it": TextRuntime(root / "export", threads=1)}
    with serving(runtimes, auto_truncate=truncates) as server:
        body = {"query": QUERY, "texts": DOCUMENTS}
        ranks = httpx.post(f"{server.url}/rerank", json=body, timeout=60).json()
        np.testing.assert_allclose(scores_in_order(ranks), expected, atol=1e-5)
        inputs = {"inputs": body}
        again = httpx.post(f"{server.url}/predict/text-ranking", json=inputs, timeout=60).json()
        np.testing.assert_allclose(scores_in_order(again), expected, atol=1e-5)
        long = httpx.post(f"{server.url}/rerank", json={"query": "a", "texts": ["the " * 600]})
        assert long.status_code == (200 if truncates else 413)


def test_first_version_without_modules_reads_prompt_of_the_card(tmp_path):
    tokenizer = make_tokenizer()
    content = QWEN3 | {"tie_word_embeddings": False}
    model = save_reranker(tmp_path / "theirs", False, tokenizer, content)
    config = {"classifier_from_token": ["no", "yes"]}
    facts = convert(tmp_path / "theirs", tmp_path / "ours", config=config)
    assert facts["architecture"] == "VanillaDecoderForSequenceClassification"
    assert convert(tmp_path / "theirs", tmp_path / "lm")["architecture"].endswith("CausalLM")
    export(tmp_path / "ours", tmp_path / "export", cases=2)
    [ranks] = TextRuntime(tmp_path / "export").rerank([QUERY], [DOCUMENTS])
    expected = card_scores(model, tokenizer, DOCUMENTS)
    np.testing.assert_allclose(scores_in_order(ranks), expected, atol=1e-5)


def test_score_of_one_token_is_its_logit(tmp_path):
    tokenizer = make_tokenizer()
    save_reranker(tmp_path / "theirs", True, tokenizer, no=None)
    convert(tmp_path / "theirs", tmp_path / "ours")
    pairs = [(QUERY, document) for document in DOCUMENTS]
    expected = CrossEncoder(str(tmp_path / "theirs"), device="cpu").predict(pairs)
    got = CrossEncoder(str(tmp_path / "ours"), device="cpu").predict(pairs)
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize(
    "config, seen",
    [
        ({"classifier_from_token": ["no", "yes"], "reranker": {"template": "{query}"}}, "query"),
        ({"classifier_from_token": ["no", "yes"], "reranker": "{query}"}, "{query}"),
        ({"classifier_from_token": ["no", "maybe not"]}, ("classifier_from_token", "maybe not")),
        ({"classifier_from_token": "yes"}, ("classifier_from_token", "yes")),
        ({"reranker": {"template": "{document}"}}, "document"),
        ({"classifier_from_token": ["no", "yes"], "model_type": "gpt2"}, ("model_type", "gpt2")),
    ],
)
def test_wrong_answers_and_prompts_raise_before_files_are_written(config, seen, tmp_path):
    save_reranker(tmp_path / "theirs", False, make_tokenizer())
    with raises(ValueError, seen=seen):
        convert(tmp_path / "theirs", tmp_path / "ours", config=config)
    assert not (tmp_path / "ours").exists()


def test_family_without_prompt_names_the_field(tmp_path):
    tokenizer = make_tokenizer()
    save_reranker(tmp_path / "theirs", False, tokenizer)
    edit_json(tmp_path / "theirs" / "config.json", model_type="llama", attention_bias=False)
    config = {"classifier_from_token": ["no", "yes"], "architectures": "LlamaForCausalLM"}
    with raises(ValueError, seen=("chat template", "query"), expected="reranker"):
        convert(tmp_path / "theirs", tmp_path / "ours", config=config)


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory):
    """A classifier with one label that reads pairs, and its export."""
    root = tmp_path_factory.mktemp("cross encoder")
    fields = {"num_labels": 1, "type_vocab_size": 2}
    save_head(
        "VanillaEncoderForSequenceClassification", word_pieces(), root / "checkpoint", **fields
    )
    export(root / "checkpoint", root / "export", cases=1)
    return root


def test_ranks_of_a_cross_encoder(cross_encoder):
    encoder = CrossEncoder(str(cross_encoder / "checkpoint"), device="cpu")
    runtime = TextRuntime(cross_encoder / "export", threads=1)
    expected = encoder.rank(MANY[0], MANY, top_k=3)
    [ranks] = runtime.rerank([MANY[0]], [MANY], top_k=3)
    assert [rank["index"] for rank in ranks] == [rank["corpus_id"] for rank in expected]
    scores = [rank["score"] for rank in expected]
    np.testing.assert_allclose([rank["score"] for rank in ranks], scores, atol=1e-5)


def test_cross_encoder_over_an_export_can_be_pickled(cross_encoder):
    """A pool of processes of sentence-transformers pickles its model."""
    stand_in_for_optimum()
    encoder = CrossEncoder(str(cross_encoder / "export"), device="cpu", backend="onnx")
    again = pickle.loads(pickle.dumps(encoder))
    np.testing.assert_array_equal(again.predict(PAIRS), encoder.predict(PAIRS))


def test_command_ranks_lines_of_json(cross_encoder, capsys):
    line = json.dumps({"query": MANY[0], "texts": MANY})
    capsys.readouterr()
    arguments = ["predict", str(cross_encoder / "export"), line, "--task", "rerank"]
    main([*arguments, "--set", "top_k=2"])
    expected = TextRuntime(cross_encoder / "export").rerank([MANY[0]], [MANY], top_k=2)
    got = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [rank["index"] for rank in got[0]] == [rank["index"] for rank in expected[0]]
    close(got, expected)


def test_export_suggests_a_command_that_ranks(cross_encoder, capsys):
    """The path of the export has a space."""
    main(["export", str(cross_encoder / "checkpoint"), str(cross_encoder / "again")])
    suggested = capsys.readouterr().err.splitlines()[-1]
    marker, program, *arguments = shlex.split(suggested)
    assert (marker, program) == ("next:", "vanilla-transformer")
    main(arguments)
    [ranks] = map(json.loads, capsys.readouterr().out.splitlines())
    assert {rank["index"] for rank in ranks} == {0, 1}


@pytest.mark.parametrize(
    "arguments, options, error, seen",
    [
        ((["a"], [["b"], ["c"]]), {}, ValueError, (1, 2)),
        ((["a"], [[]]), {}, ValueError, ()),
        ((["a"], [["b", 3]]), {}, ValueError, 3),
        ((["a"], [["b"]]), {"top_k": 0}, UsageError, ("top_k", 0)),
        ((["a"], [["b"]]), {"prompt": "Find it"}, UsageError, "Find it"),
        ((["a"], [["b"]]), {"prompt_name": "x"}, UsageError, ("prompt_name", "x")),
    ],
)
def test_wrong_arguments_raise(cross_encoder, arguments, options, error, seen):
    with raises(error, seen=seen):
        TextRuntime(cross_encoder / "export", threads=1).rerank(*arguments, **options)


def test_several_labels_do_not_rank(tmp_path):
    save_head("VanillaEncoderForSequenceClassification", word_pieces(), tmp_path / "c")
    export(tmp_path / "c", tmp_path / "export", cases=1)
    assert len(json.loads((tmp_path / "export" / "config.json").read_text())["id2label"]) == 2
    with raises(ValueError, seen="LABEL_1", expected="one label"):
        TextRuntime(tmp_path / "export", threads=1).rerank(["a"], [["b"]])
