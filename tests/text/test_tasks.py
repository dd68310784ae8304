"""What an export gives for texts, without torch, is what transformers' pipelines, ours for
questions, and sentence-transformers give on its checkpoint."""

import dataclasses
import io
import json
import shutil
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import transformers
from checkpoints import EOS, SIZES, copy_folder, edit_json, list_file, perturbed, seal
from families import random_config, random_model
from heads import (
    HEADS,
    LABELLED,
    LABELS,
    MANY,
    PAIRS,
    TAGS,
    TEXTS,
    close,
    save_head,
    tokenizer_for,
    word_pieces,
)
from PIL import Image
from sentence_splitting import ours, right_texts
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Normalize,
    Pooling,
    Transformer,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import pipeline
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from vanilla_transformer.conversion import convert
from vanilla_transformer_export import ImageRuntime, TextRuntime, export
from vanilla_transformer_export.cli.main import main
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.text.tasks.sentences import sentences_and_spaces


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A name of `HEADS`, and settings of an export -> the checkpoint, and a runtime of the
    export."""
    found = {}

    def make(name, **settings):
        key = name, *settings.items()
        if key not in found:
            architecture, kind, fields = HEADS[name]
            folder = tmp_path_factory.mktemp("head")
            checkpoint = save_head(
                architecture, tokenizer_for(kind, architecture), folder / "checkpoint", **fields
            )
            export(checkpoint, folder / "export", cases=1, **settings)
            found[key] = checkpoint, TextRuntime(folder / "export", threads=1)
        return found[key]

    return make


def both(made, name, task, **settings):
    """The pipeline of transformers on the checkpoint, and the runtime."""
    checkpoint, runtime = made(name, **settings)
    return pipeline(task, model=checkpoint), runtime


@pytest.fixture
def cut_at(monkeypatch):
    """Sets the longest text, in tokens, of a pipeline's tokenizer and of a runtime."""

    def cut(pipe, runtime, longest):
        monkeypatch.setattr(pipe.tokenizer, "model_max_length", longest)
        settings = dataclasses.replace(runtime.tokenizer_settings, longest=longest)
        monkeypatch.setitem(runtime.__dict__, "tokenizer_settings", settings)

    return cut


def plain(value):
    """With Python's numbers for numpy's."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


def same(found, wanted):
    close(found, plain(wanted), absolute=1e-5)


# ----------------------------------------------------------------------------------- classification


@pytest.mark.parametrize(
    "options", [{}, {"top_k": None}, {"top_k": 2, "function_to_apply": "sigmoid"}], ids=str
)
def test_labels_are_those_of_the_pipeline(made, options):
    pipe, runtime = both(made, "classify", "text-classification")
    same(runtime.classify(MANY, **options), pipe(MANY, **{"top_k": 1, **options}))
    dicts = [{"text": text, "text_pair": pair} for text, pair in PAIRS]
    wanted = pipe(dicts, **{"top_k": 1, **options})
    same(runtime.classify(PAIRS, **options), wanted)
    same(runtime.classify(dicts, **options), wanted)
    same(runtime.classify([MANY[0], *dicts], **options)[1:], wanted)


@pytest.mark.parametrize(
    "problem", ["regression", "multi_label_classification", "single_label_classification", None]
)
def test_scores_are_made_as_the_kind_of_problem_wants_it(made, monkeypatch, problem):
    pipe, runtime = both(made, "classify", "text-classification")
    monkeypatch.setattr(pipe.model.config, "problem_type", problem)
    monkeypatch.setitem(runtime.info.config, "problem_type", problem)
    same(runtime.classify(TEXTS, top_k=None), pipe(TEXTS, top_k=None))
    for function in ("none", "softmax"):
        options = {"top_k": 3, "function_to_apply": function}
        same(runtime.classify(TEXTS, **options), pipe(TEXTS, **options))


@pytest.mark.parametrize("longest", [1000, 40, 12])  # of 12 tokens, hypotheses have more
@pytest.mark.parametrize("multi_label", [False, True])
def test_zero_shot_scores_are_those_of_the_pipeline(made, cut_at, longest, multi_label):
    pipe, runtime = both(made, "classify", "zero-shot-classification")
    cut_at(pipe, runtime, longest)
    for labels in (["a man", "the river", "and"], ["a man"], "the red , two"):
        options = {"multi_label": multi_label, "hypothesis_template": "the {} runs"}
        same(runtime.zero_shot(MANY, labels, **options), pipe(MANY, labels, **options))


def test_zero_shot_has_the_template_of_the_pipeline(made):
    pipe, runtime = both(made, "classify", "zero-shot-classification")
    same(runtime.zero_shot(TEXTS, ["a man", "a house"]), pipe(TEXTS, ["a man", "a house"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["classify by a decoder", "classify by both stacks", "one label"])
def test_other_classifiers_give_what_the_pipeline_gives(made, name):
    pipe, runtime = both(made, name, "text-classification")
    for options in ({}, {"top_k": None}):
        same(runtime.classify(MANY, **options), pipe(MANY, **{"top_k": 1, **options}))
    if name != "one label":
        pipe = pipeline("zero-shot-classification", model=made(name)[0])
        same(runtime.zero_shot(TEXTS, ["man", "people"]), pipe(TEXTS, ["man", "people"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"dtype": "int8"}, {"target": "cpu", "dtype": "int8"}, {"target": "cpu"}], ids=str
)
def test_labels_of_other_exports(made, settings):
    pipe, runtime = both(made, "classify", "text-classification", **settings)
    found, wanted = runtime.classify(MANY), pipe(MANY, top_k=1)
    assert [each[0]["label"] for each in found] == [each[0]["label"] for each in wanted]
    if "dtype" not in settings:
        same(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", ["config_sentence_transformers.json", "config.json", "config.json of old"]
)
@pytest.mark.parametrize("name", ["Identity", "Sigmoid", "Tanh"])
def test_a_cross_encoder_has_its_own_activation(made, tmp_path, place, name):
    checkpoint, runtime = made("one label")
    scores = CrossEncoder(
        checkpoint, device="cpu", activation_fn=getattr(torch.nn, name)()
    ).predict(PAIRS)
    directory = copy_folder(runtime.path.parent, tmp_path)
    recorded = f"torch.nn.modules.activation.{name}"
    if place == "config_sentence_transformers.json":
        (directory / place).write_text(json.dumps({"activation_fn": recorded}))
        list_file(directory, place)
    elif place == "config.json":
        edit_json(directory / "config.json", sentence_transformers={"activation_fn": recorded})
    else:
        edit_json(directory / "config.json", sbert_ce_default_activation_function=recorded)
    seal(directory)
    found = TextRuntime(directory, threads=1).classify(PAIRS)
    np.testing.assert_allclose([each[0]["score"] for each in found], scores, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------- tokens


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
@pytest.mark.parametrize(
    "name",
    [
        "tag",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("tag by a decoder", "tag words with spaces")
        ),
    ],
)
def test_entities_are_those_of_the_pipeline(made, cut_at, name, strategy):
    pipe, runtime = both(made, name, "token-classification")
    for options in ({}, {"ignore_labels": []}, {"ignore_labels": ["PER", "I-PER"]}):
        wanted = pipe(MANY, aggregation_strategy=strategy, **options)
        assert any(wanted)
        same(runtime.tag(MANY, aggregation_strategy=strategy, **options), wanted)
    cut_at(pipe, runtime, 24)
    same(
        runtime.tag(MANY, aggregation_strategy=strategy), pipe(MANY, aggregation_strategy=strategy)
    )
    if strategy != "none":
        for stride in (0, 7):
            options = {"aggregation_strategy": strategy, "stride": stride}
            same(runtime.tag(MANY, **options), [pipe(text, **options) for text in MANY])


def test_texts_are_cut_for_one_call_only(made, cut_at):
    """While others read the same tokenizer."""
    pipe, runtime = both(made, "tag", "token-classification")
    cut_at(pipe, runtime, 24)
    whole = [encoding.ids for encoding in runtime.encode(MANY, special_tokens=True)]
    wanted = runtime.tag(MANY)
    with ThreadPoolExecutor(4) as pool:
        cut = [pool.submit(runtime.tag, MANY) for _ in range(20)]
        read = [pool.submit(runtime.encode, MANY, special_tokens=True) for _ in range(200)]
        assert all([encoding.ids for encoding in each.result()] == whole for each in read)
        assert all(each.result() == wanted for each in cut)


# ---------------------------------------------------------------------------------------- questions

QUESTIONS = ["who sees the red house ?", "two dogs", "the woman reads"]
CONTEXTS = [MANY[0], MANY[5], MANY[4]]
WINDOWS = {"max_seq_len": 40, "doc_stride": 6}


@pytest.mark.parametrize(
    "name",
    [
        "answer",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in HEADS
            if name.startswith("answer ")
        ),
    ],
)
def test_answers_are_those_of_our_pipeline(made, name):
    pipe, runtime = both(made, name, "question-answering")
    for options in (
        {},
        {"top_k": 4},
        {"top_k": 3, "handle_impossible_answer": True, "max_answer_len": 3},
        {"top_k": 3, "align_to_words": False, **WINDOWS},
        {"top_k": 5, "handle_impossible_answer": True, **WINDOWS},
        {"max_seq_len": 50, "doc_stride": 0, "max_question_len": 2},
    ):
        wanted = pipe(question=QUESTIONS, context=CONTEXTS, **options)
        same(
            runtime.answer(QUESTIONS, CONTEXTS, **options),
            [each if isinstance(each, list) else [each] for each in wanted],
        )


def test_windows_and_questions_are_cut_by_the_tokenizer_s_length(made, cut_at):
    pipe, runtime = both(made, "answer", "question-answering")
    cut_at(pipe, runtime, 44)
    same(
        runtime.answer(QUESTIONS, CONTEXTS, top_k=2),
        pipe(question=QUESTIONS, context=CONTEXTS, top_k=2),
    )


def test_a_question_stands_on_the_side_of_the_padding(made, monkeypatch):
    pipe, runtime = both(made, "answer", "question-answering")
    monkeypatch.setattr(pipe.tokenizer, "padding_side", "left")
    settings = dataclasses.replace(runtime.tokenizer_settings, padding_side="left")
    monkeypatch.setitem(runtime.__dict__, "tokenizer_settings", settings)
    wanted = pipe(question=QUESTIONS, context=CONTEXTS, top_k=2, **WINDOWS)
    same(runtime.answer(QUESTIONS, CONTEXTS, top_k=2, **WINDOWS), wanted)


# -------------------------------------------------------------------------------------------- masks

MASKED = ["the <mask> man sees a house", "two <mask>", "<mask> woman reads a <mask> ."]


def test_masks_are_filled_as_by_the_pipeline(made):
    pipe, runtime = both(made, "fill_mask", "fill-mask")
    for options in ({}, {"top_k": 2}, {"targets": ["▁the", "▁a"]}, {"targets": "▁the"}):
        same(runtime.fill_mask(MASKED, **options), pipe(MASKED, **options))
    with pytest.warns(UserWarning, match="the target 'the' is not a token .*: '▁the' is used"):
        same(runtime.fill_mask(MASKED, targets=["the"]), pipe(MASKED, targets=["the"]))


# --------------------------------------------------------------------------- two texts, and choices


def logits(checkpoint, model_class, *texts):
    model = getattr(transformers, model_class).from_pretrained(checkpoint)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    with torch.no_grad():
        outputs = model(
            **{
                name: values[None]
                for name, values in tokenizer(*texts, return_tensors="pt", padding=True).items()
            }
        )
    return outputs.logits[0].numpy()


@pytest.mark.slow
def test_choices_have_the_scores_of_the_model(made):
    checkpoint, runtime = made("choose")
    choices = [["the red house", "a book and the river"], ["a", "b c", "the man"], ["one"]]
    found = runtime.choose(TEXTS, choices)
    for text, own, scores in zip(TEXTS, choices, found, strict=True):
        wanted = logits(checkpoint, "AutoModelForMultipleChoice", [text] * len(own), own)
        np.testing.assert_allclose(scores, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["next_sentence", "pretraining"])
def test_next_sentences_have_the_scores_of_the_model(made, name):
    checkpoint, runtime = made(name)
    model_class = (
        "AutoModelForNextSentencePrediction"
        if name == "next_sentence"
        else "AutoModelForPreTraining"
    )
    model = getattr(transformers, model_class).from_pretrained(checkpoint)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    for pair, scores in zip(PAIRS, runtime.next_sentence(PAIRS), strict=True):
        with torch.no_grad():
            outputs = model(**tokenizer(*pair, return_tensors="pt"))
        wanted = outputs.logits if name == "next_sentence" else outputs.seq_relationship_logits
        np.testing.assert_allclose(scores, wanted[0], rtol=1e-4, atol=1e-5)
    if name == "pretraining":
        [[first, *_]] = runtime.fill_mask(["the [MASK] man"])
        ids = tokenizer("the [MASK] man", return_tensors="pt")
        with torch.no_grad():
            probabilities = model(**ids).prediction_logits[0, 2].softmax(-1)
        assert first["token"] == int(probabilities.argmax())
        assert first["score"] == pytest.approx(float(probabilities.max()), rel=1e-4)


# --------------------------------------------------------------------------------------- embeddings

PROMPTS = {"query": "the book : ", "document": ""}
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """What stands after the states -> the model of sentence-transformers, and a runtime of an
    export; one graph for all."""
    root = tmp_path_factory.mktemp("embedder")
    architecture, fields = "VanillaEncoderModel", {"type_vocab_size": 2}
    plain = save_head(architecture, word_pieces(), root / "plain", **fields)
    export(plain, root / "export", cases=1)

    def make(*modules, **settings):
        folder = tmp_path_factory.mktemp("embedder")
        transformers.set_seed(1)
        model = SentenceTransformer(
            modules=[Transformer(plain, max_seq_length=30), *modules], device="cpu", **settings
        )
        model.save(str(folder / "model"))
        # The graph does not depend on the modules.
        directory = copy_folder(root / "export", folder)
        facts = []
        for place in (folder / "model").rglob("*"):
            name = place.relative_to(folder / "model").as_posix()
            if (
                "_" in name
                and not name.startswith(("README", "config.json", "model"))
                and place.is_file()
            ):
                (directory / name).parent.mkdir(exist_ok=True)
                shutil.copy(place, directory / name)
                list_file(directory, name)
        for module in json.loads((folder / "model" / "modules.json").read_text())[1:]:
            config = folder / "model" / module["path"] / "config.json"
            content = json.loads(config.read_text()) if config.is_file() else {}
            facts.append(
                {"type": module["type"].rpartition(".")[2], "folder": module["path"], **content}
            )
        edit_json(directory / "manifest.json", sentence_modules=facts)
        return model, TextRuntime(directory, threads=1)

    return make


@pytest.mark.parametrize("pooling", [*POOLINGS, POOLINGS], ids=str)
@pytest.mark.parametrize("include_prompt", [True, False])
def test_embeddings_are_those_of_sentence_transformers(embedded, pooling, include_prompt):
    modules = (
        Pooling(SIZES["hidden_size"], pooling_mode=pooling, include_prompt=include_prompt),
        Normalize(),
    )
    model, runtime = embedded(
        *modules, prompts=PROMPTS, default_prompt_name="query" if pooling == "max" else None
    )
    for options in (
        {},
        {"prompt_name": "query"},
        {"prompt_name": "document"},
        {"prompt": "a man"},
        {"truncate_dim": 5},
    ):
        found = runtime.embed(MANY, **options)
        np.testing.assert_allclose(found, model.encode(MANY, **options), rtol=1e-5, atol=1e-5)
        assert found.dtype == np.float32


BLANK = ["a man", " ", "", "\n\t"]


def test_blank_texts_are_embedded_as_in_sentence_transformers(embedded):
    model, runtime = embedded(
        Pooling(SIZES["hidden_size"], pooling_mode="mean"), Normalize(), prompts=PROMPTS
    )
    for options in ({}, {"prompt_name": "query"}):
        np.testing.assert_allclose(
            runtime.embed(BLANK, **options), model.encode(BLANK, **options), rtol=1e-5, atol=1e-5
        )


def test_blank_texts_are_labelled_as_in_the_pipelines(made):
    pipe, runtime = both(made, "classify", "text-classification")
    pairs = [{"text": "a man", "text_pair": " "}, {"text": "", "text_pair": "a man"}]
    texts = [*BLANK, *pairs]
    close(runtime.classify(texts, top_k=None), [pipe(each, top_k=None) for each in texts])
    pipe, runtime = both(made, "tag", "token-classification")
    assert (
        [each == [] for each in runtime.tag(BLANK)]
        == [each == [] for each in pipe(BLANK)]
        == [False, True, True, True]
    )


@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan"])
def test_a_linear_map_and_the_similarity_of_the_folder(embedded, name):
    width = SIZES["hidden_size"]
    activation = {
        "cosine": torch.nn.Identity(),
        "dot": torch.nn.ReLU(),
        "euclidean": torch.nn.Sigmoid(),
    }.get(name)
    dense = Dense(width, 6, bias=name != "dot", activation_function=activation or torch.nn.Tanh())
    model, runtime = embedded(
        Pooling(width, pooling_mode="mean"), dense, similarity_fn_name=name, truncate_dim=5
    )
    found, wanted = runtime.embed(MANY), model.encode(MANY)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    expected = model.similarity(wanted, wanted[:2]).numpy()
    np.testing.assert_allclose(runtime.similarity(found, found[:2]), expected, rtol=1e-4, atol=1e-4)


def test_without_a_folder_embeddings_are_means_as_in_sentence_transformers(embedded):
    _, runtime = embedded(Pooling(SIZES["hidden_size"]))
    runtime.info.manifest["sentence_modules"] = []
    plain = runtime.path.parent.with_name("model")
    (plain / "modules.json").unlink()
    model = SentenceTransformer(str(plain), device="cpu")
    np.testing.assert_allclose(runtime.embed(TEXTS), model.encode(TEXTS), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_an_export_carries_the_weights_of_a_pickled_module(tmp_path):
    plain = save_head("VanillaEncoderModel", word_pieces(), tmp_path / "plain", type_vocab_size=2)
    width = SIZES["hidden_size"]
    model = SentenceTransformer(
        modules=[Transformer(plain), Pooling(width), Dense(width, 5), Normalize()], device="cpu"
    )
    model.save(str(tmp_path / "model"), safe_serialization=False)
    shutil.copy(tmp_path / "plain" / "model.safetensors", tmp_path / "model")
    (tmp_path / "model" / "pytorch_model.bin").unlink(missing_ok=True)
    if (safe := tmp_path / "model" / "2_Dense" / "model.safetensors").is_file():
        safe.unlink()
        torch.save(model[2].state_dict(), tmp_path / "model" / "2_Dense" / "pytorch_model.bin")
    manifest = export(tmp_path / "model", tmp_path / "export", cases=1)
    assert (
        "2_Dense/model.safetensors" in manifest["files"]
        and "2_Dense/pytorch_model.bin" not in manifest["files"]
    )
    found = TextRuntime(tmp_path / "export", threads=1).embed(TEXTS)
    np.testing.assert_allclose(found, model.encode(TEXTS), rtol=1e-5, atol=1e-5)
    export(tmp_path / "model", tmp_path / "export", cases=1, force=True)


# -------------------------------------------------------------------------------------- translation


@pytest.mark.parametrize(
    "text, sentences",
    [
        ("One. Two!  Three?", ["One.", "Two!", "Three?"]),
        ("Dr. Smith met J. R. Lee. He left.", ["Dr. Smith met J. R. Lee.", "He left."]),
        ("Am 3. Mai kam z. B. er. Dann ging er.", ["Am 3. Mai kam z. B. er.", "Dann ging er."]),
        ("It costs 3.50 today. and more... he said", ["It costs 3.50 today. and more... he said"]),
        ('"Is it?" He asked. (No.) Yes', ['"Is it?"', "He asked.", "(No.)", "Yes"]),
        ("a line\n\n  another line \r\nthe last", ["a line", "another line", "the last"]),
        ("你好。你好吗？“好！”他说", ["你好。", "你好吗？", "“好！”", "他说"]),
        ("नमस्ते। आप कैसे हैं?", ["नमस्ते।", "आप कैसे हैं?"]),
        ("1. The first. 2. The second.", ["1. The first.", "2. The second."]),
        (" . ", ["."]),
    ],
)
def test_sentences_end_by_the_rules(text, sentences):
    parts = list(sentences_and_spaces(text))
    assert [part for part, is_sentence in parts if is_sentence] == sentences
    assert "".join(part for part, _ in parts) == text


@pytest.mark.parametrize(
    "language, minimum",
    [("en", 21), ("de", 15), ("fr", 9), ("es", 10), ("ru", 7), ("cs", 7), ("zh", 3)],
)
def test_abbreviations_of_the_language_end_no_sentence(language, minimum):
    """The texts are marked by hand. docs/runtime.md says how many are cut right."""
    assert right_texts(ours)[language] >= minimum


@pytest.mark.parametrize("space", ["\u2003", "\u1680", "\u00a0", "\t"])
def test_white_space_of_any_kind_stands_between_sentences(space):
    text = f"An S.{space}A man.{space}It runs."
    parts = list(sentences_and_spaces(text))
    assert [part for part, is_sentence in parts if is_sentence] == [
        f"An S.{space}A man.",
        "It runs.",
    ]
    assert "".join(part for part, _ in parts) == text


@pytest.mark.parametrize("unit, count", [(".", 1), (". A", 1), (".)", 1), (" .", 1), ("。", 2)])
def test_time_to_find_sentences_does_not_grow_with_the_square_of_the_text(unit, count):
    start = time.process_time()
    found = list(sentences_and_spaces("a" + unit * 2**16 + "a"))
    assert sum(is_sentence for _, is_sentence in found) == count
    assert time.process_time() - start < 2  # what does takes minutes


@pytest.fixture(scope="module")
def translator(exported, tmp_path_factory):
    """An export with a tokenizer of the words w0 to w47, and "." for w47."""
    directory = copy_folder(exported("seq2seq").directory, tmp_path_factory.mktemp("translator"))
    words = {f"w{token}": token for token in range(47)} | {".": 47}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["w0", f"w{EOS}"])
    tokenizer.save(str(directory / "tokenizer.json"))
    list_file(directory, "tokenizer.json")
    return TextRuntime(directory, threads=1)


@pytest.mark.filterwarnings("ignore:.*was cut after")
def test_a_text_is_translated_sentence_by_sentence_and_keeps_its_lines(translator):
    sentences = ["w5 w6 .", "w7 W9 .", "w20 w21 w22", "w30 ."]
    one, two, three, four = translator.generate(sentences, max_new_tokens=12)
    texts = [f"  {sentences[0]} W7 W9 .\n\n{sentences[2]}\t\n", sentences[3]]
    two = translator.generate(["W7 W9 ."], max_new_tokens=12)[0]
    assert translator.translate(texts, max_new_tokens=12) == [f"  {one} {two}\n\n{three}\t\n", four]
    whole = translator.generate(texts, max_new_tokens=12)
    assert translator.translate(texts, split=False, max_new_tokens=12) == whole


@pytest.mark.filterwarnings("ignore:.*was cut after")
def test_sentences_without_letters_are_copied(translator):
    options = {"max_new_tokens": 12}
    one, two = translator.generate(["w5 w6 .", "W7 W9 ."], **options)
    letterless = ["12345", "***", "12:30", "\N{DOG FACE}", "\u0967\u0968", "19.99 %"]
    for copied in letterless:
        text = f"w5 w6 . {copied}\n  {copied}\n\nW7 W9 ."
        assert translator.translate([text, copied], **options) == [
            f"{one} {copied}\n  {copied}\n\n{two}",
            copied,
        ]
        assert translator.translate([copied], split=False, **options) == [copied]
    assert translator.translate(letterless, **options) == letterless
    assert translator.translate(["w5 w6 .\n。W7 W9 ."], **options) == [f"{one}\n。{two}"]
    assert translator.translate(
        letterless, copy_letterless=False, split=False, **options
    ) == translator.generate(letterless, **options)
    both = translator.generate(["w5", "12345"], **options)
    assert translator.translate(["w5\n12345"], copy_letterless=False, **options) == [
        "\n".join(both)
    ]
    for script in ("é", "Ω", "ж", "犬", "か", "ع", "ह", "ก", "한"):
        assert translator.translate([script], **options) == translator.generate([script], **options)


def test_copied_texts_need_valid_options_too(translator, monkeypatch):
    for options, message in (
        ({"tgt_lang": "de"}, "tgt_lang is 'de', expected None"),
        ({"src_lang": "de"}, "src_lang is 'de', expected None"),
        ({"num_beams": 2, "do_sample": True}, "do_sample=True does not go with num_beams=2"),
    ):
        with pytest.raises(UsageError, match=message):
            translator.translate(["12345"], **options)
    monkeypatch.setattr(
        translator, "languages", dataclasses.replace(translator.languages, words=[">>a<<"])
    )
    assert translator.translate([">>a<< 12345", ">>a<<"]) == ["12345", ""]
    assert translator.translate([">>a<<\n12345"], split=False) == ["12345"]
    with pytest.raises(ValueError, match="begins with >>b<<, which is not a language of the model"):
        translator.translate([">>b<< 12345"])


def test_a_translation_that_is_cut_is_said_to_be(translator):
    text, options = "w3 w20\nw8 w20", {"no_repeat_ngram_size": 1}
    tokens, _ = translator.generate_tokens(
        translator.rows(text.split("\n")), [[], []], max_new_tokens=40, **options
    )
    short, long = (row.index(EOS) for row in tokens)  # both end by themselves, the second later
    assert 0 < short < long
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        translator.translate([text], max_new_tokens=long + 1, **options)
    for limit, count in ((long, 1), (short, 2)):
        with pytest.warns(
            UserWarning, match=f"the translation of 'w. w20' was cut after {limit} tokens"
        ) as warned:
            translator.translate([text], max_new_tokens=limit, **options)
        assert len(warned) == count
    # the end token hides it
    with pytest.warns(UserWarning, match="'w8 w20' was cut after 5 tokens"):
        translator.translate(["w8 w20"], max_new_tokens=5, forced_eos_token_id=EOS, **options)


@pytest.mark.filterwarnings("ignore:.*was cut after")
def test_a_sentence_of_more_tokens_than_positions_is_an_error_with_both_numbers(
    translator, monkeypatch
):
    monkeypatch.setitem(translator.runtime.config, "position_embedding_type", "learned")
    monkeypatch.setitem(translator.runtime.config, "max_position_embeddings", 10)
    texts = ["w5", "w6 . " * 6]
    with pytest.raises(
        ValueError, match="text 1 of 2, 'w6 .*': 12 tokens.* are more than the 10 learned positions"
    ):
        translator.translate(texts, split=False)
    assert len(translator.translate(["w5", "W6. " * 12], max_new_tokens=2)) == 2


@pytest.mark.filterwarnings("ignore:.*was cut after")
def test_the_word_of_a_language_holds_for_all_sentences(translator, monkeypatch):
    words = dataclasses.replace(translator.languages, words=["w40", ">>a<<"])
    monkeypatch.setattr(translator, "languages", words)
    seen = []
    rows = translator.rows
    monkeypatch.setattr(
        translator, "rows", lambda texts, lang=None: seen.extend(texts) or rows(texts, lang)
    )
    translator.translate([">>a<< w5. W6.", "w7"], max_new_tokens=2)
    assert seen == [">>a<< w5.", ">>a<< W6.", "w7"]
    with pytest.raises(ValueError, match="begins with >>b<<, which is not a language of the model"):
        translator.translate([">>b<< w5"])


@pytest.mark.filterwarnings("ignore:.*was cut after")
def test_each_text_has_its_languages(translator, monkeypatch):
    tokens = {"a": 10, "b": 11}
    languages = dataclasses.replace(
        translator.languages,
        tokens=tokens,
        source="a",
        before=[None],
        after=[],
        target="forced_bos_token_id",
    )
    monkeypatch.setattr(translator, "languages", languages)
    texts = ["w5. W6.", "w7", "w8. W9."]
    chosen = {"src_lang": ["a", "b", "a"], "tgt_lang": ["b", "a", "a"], "max_new_tokens": 6}
    found = translator.translate(texts, **chosen)
    for text, result, src_lang, tgt_lang in zip(
        texts, found, chosen["src_lang"], chosen["tgt_lang"], strict=True
    ):
        single = [
            translator.generate([part], None, src_lang, tgt_lang, max_new_tokens=6)[0]
            for part in text.split(" ")
        ]
        assert result == " ".join(single)
    with pytest.raises(UsageError, match="src_lang has 2 languages, expected 3"):
        translator.translate(texts, src_lang=["a", "b"], tgt_lang="a")


# -------------------------------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    "texts, said",
    [
        ("a man", "texts is 'a man', expected a list of strings or pairs"),
        ([], "texts is empty, expected at least one"),
        ([5], "text 0 of 1 is 5, expected two texts"),
        ([("a", "b", "c")], r"text 0 of 1 is \('a', 'b', 'c'\), expected two texts"),
        ([("a", 5)], "the second part of text 0 of 1 is 5, expected a string"),
        (
            [{"text": "a", "pair": "b"}],
            r"text 0 of 1 has the keys \['text', 'pair'\], expected 'text' and 'text_pair'",
        ),
        (["\ud83d"], "text 0 of 1 is not valid Unicode"),
    ],
    ids=ascii,
)
def test_what_is_no_text_or_pair_is_refused(made, texts, said):
    with pytest.raises(ValueError, match=said) as caught:
        made("classify")[1].classify(texts)
    assert "\n" not in str(caught.value)


def test_a_pair_for_a_head_that_reads_one_text_is_refused(made):
    calls = [made("tag")[1].tag, made("fill_mask")[1].fill_mask]
    for call in [*calls, lambda texts: made("classify")[1].zero_shot(texts, ["a"])]:
        for pair in (("a", "b"), {"text": "a", "text_pair": "b"}):
            with pytest.raises(ValueError, match="text 1 of 2 is the pair .*, expected one text"):
                call(["a", pair])


def test_a_task_of_another_head_is_refused_and_names_this_one(made):
    runtime = made("classify")[1]
    for call in (
        runtime.tag,
        runtime.embed,
        runtime.fill_mask,
        runtime.translate,
        runtime.next_sentence,
    ):
        with pytest.raises(
            ValueError,
            match="does not support .* VanillaEncoderForSequenceClassification, expected one",
        ):
            call(["a"])


@pytest.mark.parametrize(
    "name, call, said",
    [
        (
            "classify",
            lambda r: r.classify(["a"], top_k=0),
            "top_k is 0, expected an integer of at least 1",
        ),
        (
            "classify",
            lambda r: r.classify(["a"], function_to_apply="soft"),
            "function_to_apply is 'soft', expected one of",
        ),
        (
            "classify",
            lambda r: r.zero_shot(["a"], []),
            r"candidate_labels is \[\], expected",
        ),
        (
            "classify",
            lambda r: r.zero_shot(["a"], "b", "no place"),
            "hypothesis_template is 'no place', expected a text with {}",
        ),
        (
            "tag",
            lambda r: r.tag(["a"], "simpel"),
            "aggregation_strategy is 'simpel', expected .*; did you mean 'simple'",
        ),
        (
            "tag",
            lambda r: r.tag(["a"], stride=3),
            "stride is 3 with aggregation_strategy 'none', expected another",
        ),
        (
            "tag",
            lambda r: r.tag(["a"], "first", stride=-1),
            "stride is -1, expected an integer of at least 0",
        ),
        (
            "fill_mask",
            lambda r: r.fill_mask(["<mask>"], top_k=9999),
            "top_k is 9999, expected .* at least 1 and at most 100",
        ),
        (
            "fill_mask",
            lambda r: r.fill_mask(["<mask>"], targets=[]),
            "targets is .*, expected at least one token",
        ),
        (
            "answer",
            lambda r: r.answer(["a"], ["b"], max_answer_len=0),
            "max_answer_len is 0, expected an integer",
        ),
        (
            "answer",
            lambda r: r.answer(["a"], ["b"], max_seq_len=5, doc_stride=6),
            "doc_stride is 6, expected at most max_seq_len, 5",
        ),
    ],
)
def test_wrong_options_are_named(made, name, call, said):
    with pytest.raises(UsageError, match=said):
        call(made(name)[1])


@pytest.mark.parametrize(
    "name, call, said",
    [
        (
            "fill_mask",
            lambda r: r.fill_mask(["a man"]),
            "text 0 of 1 has no mask, expected <mask>",
        ),
        (
            "fill_mask",
            lambda r: r.fill_mask([f"<mask> {'a ' * 200}"]),
            "text 0 of 1: 20[0-9] tokens.* the 160 learned",
        ),
        (
            "answer",
            lambda r: r.answer(["a"], ["b", "c"]),
            "1 questions and 2 contexts",
        ),
        ("answer", lambda r: r.answer(["a"], [""]), "context 0 of 1 is '', expected a text"),
        (
            "answer",
            lambda r: r.answer(["a b"], ["b " * 50], max_seq_len=12, doc_stride=9),
            "leaves [0-9]+ tokens for",
        ),
    ],
)
def test_texts_that_do_not_fit_are_named(made, name, call, said):
    with pytest.raises(ValueError, match=said):
        call(made(name)[1])


def test_labels_that_the_config_lacks_are_an_error(made, monkeypatch):
    runtime = made("classify")[1]
    for labels, said in (
        (
            {"0": "a", "2": "c"},
            r"\['0', '2'\], expected all numbers from 0 to 1: 1 is missing",
        ),
        ({"0": "a", "1": "b", "2": "c"}, None),
    ):
        monkeypatch.setitem(runtime.info.config, "id2label", labels)
        if said:
            with pytest.raises(ValueError, match=said):
                runtime.classify(["a"])
        with pytest.raises(
            ValueError,
            match=said
            or r"labels of this model are \['a'.*, expected one that begins with 'entail'",
        ):
            runtime.zero_shot(["a"], ["b"])


def test_prompts_and_modules_that_are_not_there_are_an_error(embedded, monkeypatch):
    _, runtime = embedded(Pooling(SIZES["hidden_size"]), prompts=PROMPTS)
    for options, said in (
        (
            {"prompt_name": "qurey"},
            "prompt_name is 'qurey', expected one of document, query; did you mean 'query'",
        ),
        (
            {"prompt_name": "query", "prompt": "a"},
            "prompt is 'a' and prompt_name is 'query', expected only one",
        ),
        ({"truncate_dim": 0}, "truncate_dim is 0, expected an integer of at least 1"),
    ):
        with pytest.raises(UsageError, match=said):
            runtime.embed(["a"], **options)
    pooling = {"type": "Pooling", "pooling_mode": "mean"}
    for modules, said in (
        (
            [{"type": "Normalize"}],
            r"has the modules \['Normalize'\], expected Pooling, then Dense or Normalize",
        ),
        (
            [{"type": "Pooling", "pooling_mode": "median"}],
            "pooling_mode is 'median', expected one of cls",
        ),
        (
            [pooling, {"type": "Dense", "use_residual": True}],
            "use_residual=True, .*expected False",
        ),
        (
            [pooling, {"type": "Dense", "activation_function": "torch.nn.Mish"}],
            "is 'torch.nn.Mish', .*expected one of torch",
        ),
        ([pooling, {"type": "Dense"}], "a module Dense without a folder, expected"),
        (
            [pooling, {"type": "Dense", "folder": "2_Dense"}],
            "has no 2_Dense/model.safetensors, expected",
        ),
        (
            [pooling, {"type": "Normalize", "module_input_name": "token_embeddings"}],
            "expected 'sentence_embedding'",
        ),
    ):
        monkeypatch.setitem(runtime.info.manifest, "sentence_modules", modules)
        runtime.__dict__.pop("sentence_modules", None)
        with pytest.raises(ValueError, match=said):
            runtime.embed(["a"])
    with pytest.raises(
        ValueError, match=r"shapes \(1, 2\) and \(1, 3\), expected \(A, E\) and \(B, E\)"
    ):
        runtime.similarity(np.zeros(2), np.zeros(3))


def test_translations_are_one_for_each_text(translator):
    with pytest.raises(
        UsageError,
        match="num_return_sequences is 2, expected 1",
    ):
        translator.translate(["w5"], num_return_sequences=2)
    with pytest.raises(UsageError, match=r"unknown generation options \['target_prefix'\]"):
        translator.translate(["w5"], target_prefix=["w6"])
    with pytest.raises(UsageError, match="split is 'no', expected True or False"):
        translator.translate(["w5"], split="no")
    with pytest.raises(UsageError, match="copy_letterless is 'no', expected True or False"):
        translator.translate(["w5"], copy_letterless="no")


# ------------------------------------------------------------------------------------------ predict


def predicted(capsys, *arguments):
    capsys.readouterr()
    main(["predict", *map(str, arguments)])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_predict_calls_what_fits_the_head(made, translator, capsys):
    runtime = made("classify")[1]
    pair = json.dumps(dict(zip(("text", "text_pair"), PAIRS[0])))
    found = predicted(capsys, runtime.path.parent, "a man", pair, "--set", "top_k=null")
    same(
        found, [*runtime.classify(["a man"], top_k=None), *runtime.classify(PAIRS[:1], top_k=None)]
    )
    assert {each["label"] for each in found[0]} == set(LABELS.values())
    labels = ["--task", "zero-shot", "--set", 'candidate_labels=["a", "b"]']
    same(
        predicted(capsys, runtime.path.parent, "a man", *labels),
        runtime.zero_shot(["a man"], ["a", "b"]),
    )
    runtime = made("answer")[1]
    question = json.dumps({"question": QUESTIONS[0], "context": CONTEXTS[0]})
    same(
        predicted(capsys, runtime.path.parent, question),
        runtime.answer(QUESTIONS[:1], CONTEXTS[:1]),
    )
    directory = translator.path.parent
    options = ["--set", "max_new_tokens=9"]
    expected = translator.generate(["w5 w6"], max_new_tokens=9)
    for more in ([], ["--task", "translate"], ["--max-new-tokens", "9"]):
        capsys.readouterr()
        main(["predict", str(directory), "w5 w6", *options, *more])
        assert capsys.readouterr().out.splitlines() == expected
    options = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 9}
    given = [f"--set={name}={value}" for name, value in options.items()]
    main(["predict", str(directory), "w5 w6", "w7", *given])
    assert capsys.readouterr().out.splitlines() == [
        text for given in ("w5 w6", "w7") for text in translator.generate([given], **options)
    ]


def test_predict_reads_and_writes_lines_of_json(made, tmp_path, capsys, monkeypatch):
    runtime = made("tag")[1]
    lines = [MANY[3], "", MANY[0], *MANY[4:]]
    (tmp_path / "in").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    options = ["--set", "aggregation_strategy=simple", "--batch-size", "2"]
    call = [runtime.path.parent, "--input", tmp_path / "in", *options]
    [report] = predicted(capsys, *call, "--output", tmp_path / "out")
    assert (report["lines"], report["bad"]) == (len(lines), 0)
    found = [
        json.loads(line) for line in (tmp_path / "out").read_text(encoding="utf-8").splitlines()
    ]
    first, *rest = runtime.tag([MANY[3], MANY[0], *MANY[4:]], aggregation_strategy="simple")
    same(found, [first, None, *rest])
    same(predicted(capsys, *call), found)
    with pytest.raises(SystemExit, match="out exists already; expected a new path, or --force"):
        predicted(capsys, *call, "--output", tmp_path / "out")
    objects = ["", json.dumps({"text": MANY[0]}), MANY[3]]
    given = io.TextIOWrapper(io.BytesIO("\n".join(objects).encode()))
    monkeypatch.setattr("sys.stdin", given)
    same(predicted(capsys, runtime.path.parent, *options), [None, found[2], first])


@pytest.mark.parametrize(
    "name, arguments, said, code",
    [
        (
            "classify",
            ["a", "--task", "tag"],
            "tag is not what a VanillaEncoderForSequenceClassification is for",
            2,
        ),
        ("classify", ["a", "--task", "nothing"], "expected one of classify, zero-shot", 2),
        (
            "classify",
            ["a", "--set", "top=1"],
            "classify has no option 'top', expected some of top_k",
            2,
        ),
        (
            "classify",
            ["a", "--task", "zero-shot"],
            "zero_shot needs candidate_labels, expected --set candidate",
            2,
        ),
        ("classify", ["a", "--input", "in"], "--input goes without texts", 2),
        ("classify", ["a", "--output", "out"], "--output and --output-dir need --input", 2),
        ("classify", ["a", "--force"], "--force needs --output", 2),
        ("classify", ["a", "--num-beams", "2"], "classify has no option 'num_beams', expected", 2),
        ("classify", ["a"] * 2 + ['{"text": "a"'], "argument 3: it is no JSON that can be read", 1),
        (
            "classify",
            ['{"question": "a"}'],
            "argument 1: it has the fields ['question'], expected text, or text and text_pair",
            1,
        ),
        (
            "answer",
            ["who ?"],
            "argument 1: it is 'who ?', expected a JSON object with question and context",
            1,
        ),
        (
            "answer",
            ['{"question": "a", "context": ""}'],
            "argument 1: context 0 of 1 is '', expected a text that is not blank",
            1,
        ),
    ],
)
def test_wrong_calls_of_predict_are_one_line(made, capsys, name, arguments, said, code):
    with pytest.raises(SystemExit) as stopped:
        main(["predict", str(made(name)[1].path.parent), *arguments])
    line = str(stopped.value) if code == 1 else capsys.readouterr().err
    assert said in line and line.strip().count("\n") == 0
    assert (stopped.value.code == 2) == (code == 2)


def test_predict_reads_pictures(tmp_path, capsys):
    picture = np.random.default_rng(0).integers(0, 256, (20, 30, 3)).astype(np.uint8)
    Image.fromarray(picture).save(tmp_path / "a.png")
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    fields = {
        **sizes,
        "image_size": 16,
        "patch_size": 8,
        "id2label": {0: "cat", 1: "dog", 2: "bird"},
    }
    perturbed("VanillaVisionForImageClassification", fields).save_pretrained(tmp_path / "model")
    ViTImageProcessorPil(size=16).save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "export", cases=1)
    wanted = ImageRuntime(tmp_path / "export", threads=1).classify([tmp_path / "a.png"], top_k=2)
    line = json.dumps({"image": str(tmp_path / "a.png")})
    for given in (tmp_path / "a.png", line):
        same(predicted(capsys, tmp_path / "export", given, "--set", "top_k=2"), wanted)


# ------------------------------------------------------------------------------- source checkpoints

FAMILIES = {
    "bert": (
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForMaskedLM",
    ),
    "distilbert": (
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForMaskedLM",
    ),
    "roberta": (
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForMaskedLM",
    ),
    "xlm-roberta": (
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForMaskedLM",
    ),
    "mpnet": (
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForMaskedLM",
    ),
    "bart": ("ForSequenceClassification", "ForQuestionAnswering"),
    "t5": ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"),
}
PREFIXES = {"xlm-roberta": "XLMRoberta", "mpnet": "MPNet", "distilbert": "DistilBert"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, head", [(family, head) for family, heads in FAMILIES.items() for head in heads]
)
def test_an_export_of_a_source_checkpoint_gives_what_its_own_pipeline_gives(tmp_path, family, head):
    architecture = PREFIXES.get(family, family.capitalize()) + head
    tokenizer = word_pieces()
    config = random_config(family, architecture, 0)
    config.update({"vocab_size": len(tokenizer), "max_position_embeddings": 200})
    if head == "ForSequenceClassification":
        config.update(LABELLED)
    if head == "ForTokenClassification":
        config.update(
            {"id2label": TAGS, "label2id": {label: index for index, label in TAGS.items()}}
        )
    specials = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.sep_token_id}
    config.update({**specials, "bos_token_id": tokenizer.cls_token_id})
    random_model(architecture, config).save_pretrained(tmp_path / "source")
    if getattr(config, "type_vocab_size", 0) < 2:
        tokenizer = word_pieces(model_input_names=["input_ids", "attention_mask"])
    tokenizer.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "export", cases=1)
    runtime, source = TextRuntime(tmp_path / "export", threads=1), str(tmp_path / "source")
    texts = [text.lower() for text in MANY]
    if head == "ForSequenceClassification":
        same(
            runtime.classify(texts, top_k=None),
            pipeline("text-classification", model=source)(texts, top_k=None),
        )
        labels = ["man", "house"]
        same(
            runtime.zero_shot(texts, labels),
            pipeline("zero-shot-classification", model=source)(texts, labels),
        )
    elif head == "ForTokenClassification":
        pipe = pipeline("token-classification", model=source)
        for strategy in ("none", "simple", "average"):
            same(runtime.tag(texts, strategy), pipe(texts, aggregation_strategy=strategy))
    elif head == "ForQuestionAnswering":
        wanted = pipeline("question-answering", model=source)(
            question=QUESTIONS, context=CONTEXTS, top_k=2, **WINDOWS
        )
        same(runtime.answer(QUESTIONS, CONTEXTS, top_k=2, **WINDOWS), wanted)
    else:
        masked = ["the [MASK] man sees", "[MASK] river [MASK]"]
        same(runtime.fill_mask(masked), pipeline("fill-mask", model=source)(masked))
