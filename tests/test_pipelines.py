"""`pipeline("translation")` under transformers 5 gives what it gave under transformers 4, for any encoder-decoder model."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from checkpoints import SIZES
from transformers import AutoTokenizer, BartConfig, BartForConditionalGeneration, pipeline

from vanilla_transformer import TranslationPipeline, VanillaSeq2SeqConfig, VanillaSeq2SeqForConditionalGeneration
from vanilla_transformer.pipelines import register_pipelines
from vanilla_transformer.training.tokenizer import train_tokenizer

TEXTS = ["a man rides a horse", "two dogs run", "the woman reads a book ."]
LINES = [*TEXTS, "der Mann reitet ein Pferd", "zwei Hunde laufen", "die Frau liest ein Buch ."] * 3


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(LINES, 60)


def ours(vocab_size):
    config = VanillaSeq2SeqConfig(
        **{**SIZES, "vocab_size": vocab_size}, encoder_layers=1, decoder_layers=1, tie_word_embeddings=False
    )
    return VanillaSeq2SeqForConditionalGeneration(config)


def bart(vocab_size):
    config = BartConfig(
        vocab_size=vocab_size, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=300,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2, init_std=0.5,
    )  # fmt: skip
    return BartForConditionalGeneration(config)


@pytest.fixture(scope="module", params=[ours, bart])
def checkpoint(request, tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param.__name__)
    transformers.set_seed(0)
    model = request.param(len(tokenizer))
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.5)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def translate(checkpoint):
    return pipeline("translation", model=str(checkpoint), max_new_tokens=6, num_beams=1)


def expected(translate, text, **options):
    """`model.generate` and `decode`, one text alone."""
    ids = translate.tokenizer(text, return_tensors="pt")["input_ids"]
    outputs = translate.model.generate(ids, **{"max_new_tokens": 6, "num_beams": 1, **options})
    return [translate.tokenizer.decode(row, skip_special_tokens=True) for row in outputs]


def test_the_task_loads_our_pipeline_and_the_model_of_the_checkpoint(translate, checkpoint):
    assert type(translate) is TranslationPipeline
    assert type(translate.model).__name__ in ("VanillaSeq2SeqForConditionalGeneration", "BartForConditionalGeneration")
    assert translate.task == "translation"


def test_a_string_gives_a_list_of_one_dict(translate):
    assert translate(TEXTS[0]) == [{"translation_text": expected(translate, TEXTS[0])[0]}]


def test_the_random_models_of_these_tests_say_something(translate):
    assert any(expected(translate, text)[0] for text in TEXTS)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_a_list_gives_one_dict_per_text_whatever_the_batch(translate, batch_size):
    results = translate(TEXTS, batch_size=batch_size)
    assert results == [{"translation_text": expected(translate, text)[0]} for text in TEXTS]


def test_a_list_of_one_text_gives_a_list_of_one_dict(translate):
    assert translate(TEXTS[:1]) == [{"translation_text": expected(translate, TEXTS[0])[0]}]


def test_a_generator_gives_one_list_of_dicts_per_text(translate):
    results = list(translate(text for text in TEXTS))
    assert results == [[{"translation_text": expected(translate, text)[0]}] for text in TEXTS]


def test_several_sequences_of_each_text_are_a_list_each(translate):
    options = dict(num_beams=3, num_return_sequences=2)
    wanted = [[{"translation_text": found} for found in expected(translate, text, **options)] for text in TEXTS]
    assert [len(found) for found in wanted] == [2, 2, 2]
    assert translate(TEXTS[0], **options) == wanted[0]
    assert translate(TEXTS, **options) == wanted


def test_token_ids_come_in_place_of_the_text(translate):
    ids = translate.tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    wanted = translate.model.generate(ids, max_new_tokens=6, num_beams=1)[0]
    for arguments in (dict(return_tensors=True), dict(return_text=False)):
        [result] = translate(TEXTS[0], **arguments)
        assert list(result) == ["translation_token_ids"]
        assert torch.equal(result["translation_token_ids"], wanted)
    assert list(translate(TEXTS[0], return_text=True)[0]) == ["translation_text"]


@pytest.mark.parametrize("options", [dict(max_new_tokens=2), dict(num_beams=4, length_penalty=2.0), dict(min_new_tokens=5)])
def test_generation_arguments_reach_generate(translate, options):
    assert translate(TEXTS[2], **options) == [{"translation_text": expected(translate, TEXTS[2], **options)[0]}]


def test_arguments_of_the_pipeline_hold_for_each_call(checkpoint):
    translate = pipeline("translation", model=str(checkpoint), num_beams=2, max_new_tokens=3)
    assert translate(TEXTS[0]) == [{"translation_text": expected(translate, TEXTS[0], num_beams=2, max_new_tokens=3)[0]}]


def test_models_and_tokenizers_in_memory_are_taken(translate):
    again = pipeline("translation", model=translate.model, tokenizer=translate.tokenizer, max_new_tokens=6, num_beams=1)
    assert again(TEXTS) == translate(TEXTS)


@pytest.mark.parametrize("text", ["", "  \n", None, 7, ["nested"]])
def test_what_is_not_a_text_is_refused_with_the_value(translate, text):
    with pytest.raises(ValueError, match="non-empty string") as caught:
        translate([TEXTS[0], text])
    assert repr(text) in str(caught.value)


def test_one_empty_text_alone_is_refused(translate):
    with pytest.raises(ValueError, match="non-empty string, got ''"):
        translate("")


def test_languages_are_refused_where_the_tokenizer_has_none(translate):
    with pytest.raises(ValueError, match="no languages.*'en'.*'de'"):
        translate(TEXTS[0], src_lang="en", tgt_lang="de")


def test_a_tokenizer_larger_than_the_model_is_refused_with_both_sizes(tokenizer):
    translate = pipeline("translation", model=ours(len(tokenizer) - 20), tokenizer=tokenizer)
    largest = max(tokenizer(TEXTS[0])["input_ids"])
    assert largest >= len(tokenizer) - 20
    with pytest.raises(ValueError, match=f"token id {largest}, .* {len(tokenizer) - 20} entries"):
        translate(TEXTS[0])


def test_a_text_too_long_is_cut_only_when_asked(translate, tokenizer):
    long = " ".join(["two dogs run"] * 5)
    translate.tokenizer.model_max_length, before = 8, translate.tokenizer.model_max_length
    try:
        cut = translate.preprocess(long, truncation=True)["input_ids"]
        whole = translate.preprocess(long)["input_ids"]
    finally:
        translate.tokenizer.model_max_length = before
    assert cut.shape == (1, 8)
    assert whole.shape[1] > 15
    assert translate(long, truncation=True) == translate(long)


# ------------------------------------------------------------------------------------------------------------ registration


def in_a_fresh_process(code):
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_importing_the_package_frees_the_name_of_the_task_and_no_other():
    before, after, registered = in_a_fresh_process("""
import json
import transformers.pipelines as pipelines
before = sorted(pipelines.REMOVED_TASKS)
tasks = set(pipelines.PIPELINE_REGISTRY.supported_tasks)
import vanilla_transformer
print(json.dumps([before, sorted(pipelines.REMOVED_TASKS), sorted(set(pipelines.PIPELINE_REGISTRY.supported_tasks) - tasks)]))
""")
    assert "translation" in before
    assert after == [task for task in before if task != "translation"]
    assert {"summarization", "text2text-generation", "question-answering"} <= set(after)
    assert registered == ["translation"]


def test_registering_again_changes_nothing_and_does_not_warn():
    assert in_a_fresh_process("""
import importlib, json
import transformers.pipelines as pipelines
import vanilla_transformer
entry = pipelines.PIPELINE_REGISTRY.supported_tasks["translation"]
vanilla_transformer.register_pipelines()
importlib.reload(vanilla_transformer)
print(json.dumps(entry is pipelines.PIPELINE_REGISTRY.supported_tasks["translation"]))
""")


def test_registering_works_where_transformers_removed_no_tasks(monkeypatch):
    monkeypatch.delattr(transformers.pipelines, "REMOVED_TASKS")
    register_pipelines()
    assert transformers.pipelines.PIPELINE_REGISTRY.supported_tasks["translation"]["impl"] is TranslationPipeline


def test_a_task_that_stays_removed_says_so():
    with pytest.raises((KeyError, ValueError, RuntimeError), match="summarization"):
        pipeline("summarization")


def test_the_tokenizer_of_a_checkpoint_loads_alone(checkpoint, tokenizer):
    assert AutoTokenizer.from_pretrained(checkpoint)(TEXTS)["input_ids"] == tokenizer(TEXTS)["input_ids"]
