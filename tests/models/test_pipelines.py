"""Tests of the text-to-text pipelines of transformers 4, with any encoder-decoder model.

Question answering has its own file, but its registration is tested here.
"""

import pytest
import torch
import transformers
from checkpoints import SIZES
from families import bart
from messages import raises
from transformers import AutoTokenizer, BertConfig, BertModel, GenerationConfig, pipeline

from vanilla_transformer import (
    SummarizationPipeline,
    Text2TextGenerationPipeline,
    TranslationPipeline,
    VanillaSeq2SeqConfig,
    VanillaSeq2SeqForConditionalGeneration,
)
from vanilla_transformer import pipelines_vanilla_transformer as pipelines_module
from vanilla_transformer.training.tokenizer import train_tokenizer

TEXTS = ["a man rides a horse", "two dogs run", "the woman reads a book ."]
LINES = [*TEXTS, "der Mann reitet ein Pferd", "zwei Hunde laufen", "die Frau liest ein Buch ."] * 3


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(LINES, 60)


def ours(vocab_size):
    config = VanillaSeq2SeqConfig(
        **{**SIZES, "vocab_size": vocab_size},
        encoder_layers=1,
        decoder_layers=1,
        tie_word_embeddings=False,
    )
    return VanillaSeq2SeqForConditionalGeneration(config)


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
    """Return the decoded output of `model.generate` for a single text."""
    ids = translate.tokenizer(text, return_tensors="pt")["input_ids"]
    outputs = translate.model.generate(ids, **{"max_new_tokens": 6, "num_beams": 1, **options})
    return [translate.tokenizer.decode(row, skip_special_tokens=True) for row in outputs]


def test_task_loads_our_pipeline_and_model_of_checkpoint(translate, checkpoint):
    assert type(translate) is TranslationPipeline
    assert type(translate.model).__name__ in (
        "VanillaSeq2SeqForConditionalGeneration",
        "BartForConditionalGeneration",
    )
    assert translate.task == "translation"


def test_string_returns_list_of_one_dict(translate):
    assert translate(TEXTS[0]) == [{"translation_text": expected(translate, TEXTS[0])[0]}]


def test_random_test_models_generate_some_text(translate):
    assert any(expected(translate, text)[0] for text in TEXTS)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_list_returns_one_dict_per_text_for_any_batch_size(translate, batch_size):
    results = translate(TEXTS, batch_size=batch_size)
    assert results == [{"translation_text": expected(translate, text)[0]} for text in TEXTS]


def test_list_of_one_text_returns_list_of_one_dict(translate):
    assert translate(TEXTS[:1]) == [{"translation_text": expected(translate, TEXTS[0])[0]}]


def test_generator_returns_one_list_of_dicts_per_text(translate):
    results = list(translate(text for text in TEXTS))
    assert results == [[{"translation_text": expected(translate, text)[0]}] for text in TEXTS]


def test_num_return_sequences_returns_one_list_per_text(translate):
    options = dict(num_beams=3, num_return_sequences=2)
    expected_results = [
        [{"translation_text": actual} for actual in expected(translate, text, **options)]
        for text in TEXTS
    ]
    assert [len(actual) for actual in expected_results] == [2, 2, 2]
    assert translate(TEXTS[0], **options) == expected_results[0]
    assert translate(TEXTS, **options) == expected_results


def test_return_tensors_returns_token_ids_instead_of_text(translate):
    ids = translate.tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    expected = translate.model.generate(ids, max_new_tokens=6, num_beams=1)[0]
    for arguments in (dict(return_tensors=True), dict(return_text=False)):
        [result] = translate(TEXTS[0], **arguments)
        assert list(result) == ["translation_token_ids"]
        assert torch.equal(result["translation_token_ids"], expected)
    assert list(translate(TEXTS[0], return_text=True)[0]) == ["translation_text"]


@pytest.mark.parametrize(
    "options",
    [dict(max_new_tokens=2), dict(num_beams=4, length_penalty=2.0), dict(min_new_tokens=5)],
)
def test_generation_arguments_reach_generate(translate, options):
    assert translate(TEXTS[2], **options) == [
        {"translation_text": expected(translate, TEXTS[2], **options)[0]}
    ]


def test_pipeline_arguments_apply_to_each_call(checkpoint):
    translate = pipeline("translation", model=str(checkpoint), num_beams=2, max_new_tokens=3)
    assert translate(TEXTS[0]) == [
        {"translation_text": expected(translate, TEXTS[0], num_beams=2, max_new_tokens=3)[0]}
    ]


def test_pipeline_accepts_model_and_tokenizer_objects(translate):
    second_pipeline = pipeline(
        "translation",
        model=translate.model,
        tokenizer=translate.tokenizer,
        max_new_tokens=6,
        num_beams=1,
    )
    assert second_pipeline(TEXTS) == translate(TEXTS)


@pytest.mark.parametrize("text", ["", "  \n", None, 7, ["nested"]])
def test_invalid_text_raises_and_error_names_value(translate, text):
    error = ValueError if isinstance(text, str) else TypeError
    with raises(error, seen=repr(text), expected="string"):
        translate([TEXTS[0], text])


def test_single_empty_text_raises(translate):
    with raises(ValueError, seen="''", expected="string"):
        translate("")


def test_languages_are_ignored_with_warning_if_tokenizer_has_none(translate, monkeypatch):
    logged = []
    monkeypatch.setattr(pipelines_module.logger, "warning_once", logged.append)
    assert translate(TEXTS[0], src_lang="en", tgt_lang="de") == translate(TEXTS[0])
    assert len(logged) == 1
    assert "src_lang='en' and tgt_lang='de' have no effect" in logged[0]


def test_token_id_beyond_model_vocabulary_raises_and_error_names_both(tokenizer):
    translate = pipeline("translation", model=ours(len(tokenizer) - 20), tokenizer=tokenizer)
    largest = max(tokenizer(TEXTS[0])["input_ids"])
    assert largest >= len(tokenizer) - 20
    with raises(ValueError, seen=(largest, len(tokenizer) - 20)):
        translate(TEXTS[0])


def test_long_text_is_truncated_only_on_request(translate, tokenizer):
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


# ---------------------------------------------------------------------- tasks and their differences


RETURN_NAMES = {
    "text2text-generation": "generated",
    "summarization": "summary",
    "translation": "translation",
}
CLASSES = {
    "text2text-generation": Text2TextGenerationPipeline,
    "summarization": SummarizationPipeline,
    "translation": TranslationPipeline,
}


@pytest.mark.parametrize("task", RETURN_NAMES)
def test_each_task_has_its_own_result_keys(task, checkpoint, translate):
    generate = pipeline(task, model=str(checkpoint), max_new_tokens=6, num_beams=1)
    assert type(generate) is CLASSES[task]
    name = RETURN_NAMES[task]
    assert generate(TEXTS) == [{f"{name}_text": expected(translate, text)[0]} for text in TEXTS]
    assert [list(result) for result in generate(TEXTS, return_tensors=True)] == [
        [f"{name}_token_ids"]
    ] * 3


@pytest.mark.parametrize("task", RETURN_NAMES)
def test_task_defaults_are_four_beams_and_256_tokens(task, translate, monkeypatch):
    generate = pipeline(task, model=translate.model, tokenizer=translate.tokenizer)
    calls = []
    monkeypatch.setattr(
        translate.model,
        "generate",
        lambda input_ids, **kwargs: calls.append(kwargs) or torch.zeros(1, 2, dtype=torch.long),
    )
    generate(TEXTS[0])
    assert (calls[0]["num_beams"], calls[0]["max_new_tokens"]) == (4, 256)


def test_empty_list_returns_empty_list(translate):
    assert translate([]) == []


def test_generation_stops_at_token_of_stop_sequence(translate, monkeypatch):
    plain = translate(TEXTS[0], return_tensors=True)[0]["translation_token_ids"].tolist()
    # after the start token
    monkeypatch.setattr(translate.tokenizer, "encode", lambda text, add_special_tokens: [plain[1]])
    [stopped] = translate(TEXTS[0], stop_sequence="any", return_tensors=True)
    assert stopped["translation_token_ids"].tolist() == plain[:2]


def test_stop_sequence_of_several_tokens_warns(translate):
    with pytest.warns(UserWarning, match="stop_sequence"):
        translate(TEXTS[0], stop_sequence="zwei Hunde laufen")


def test_empty_stop_sequence_raises(translate):
    with raises(ValueError, seen=("stop_sequence", "''")):
        translate(TEXTS[0], stop_sequence="")


@pytest.mark.parametrize(
    "given, wanted", [({}, False), ({"clean_up_tokenization_spaces": True}, True)]
)
def test_clean_up_tokenization_spaces_is_passed_to_tokenizer(translate, monkeypatch, given, wanted):
    calls = []
    monkeypatch.setattr(
        translate.tokenizer, "batch_decode", lambda ids, **kwargs: calls.append(kwargs) or ["text"]
    )
    assert translate(TEXTS[0], **given) == [{"translation_text": "text"}]
    assert calls == [{"skip_special_tokens": True, "clean_up_tokenization_spaces": wanted}]


def test_generation_config_of_call_replaces_settings_of_pipeline(checkpoint, translate):
    generate = pipeline("translation", model=str(checkpoint), num_beams=3, max_new_tokens=6)
    actual = generate(TEXTS[2], generation_config=GenerationConfig(max_new_tokens=4))
    assert actual == [
        {"translation_text": expected(translate, TEXTS[2], max_new_tokens=4, num_beams=1)[0]}
    ]


def test_max_length_replaces_default_max_new_tokens(checkpoint, translate):
    generate = pipeline("translation", model=str(checkpoint), num_beams=1)
    [result] = generate(TEXTS[0], max_length=5, return_tensors=True)
    ids = translate.tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    assert torch.equal(
        result["translation_token_ids"], translate.model.generate(ids, num_beams=1, max_length=5)[0]
    )
    assert len(result["translation_token_ids"]) <= 5


def test_max_new_tokens_of_call_replaces_max_length_of_pipeline_and_vice_versa(
    checkpoint,
):
    shorter = pipeline("translation", model=str(checkpoint), num_beams=1, max_length=3)
    longer = pipeline("translation", model=str(checkpoint), num_beams=1, max_new_tokens=9)
    [by_tokens] = shorter(TEXTS[0], max_new_tokens=7, min_new_tokens=7, return_tensors=True)
    [by_length] = longer(TEXTS[0], max_length=3, return_tensors=True)
    assert (len(by_tokens["translation_token_ids"]), len(by_length["translation_token_ids"])) == (
        8,
        3,
    )


def test_encoder_model_raises_and_error_names_class(tokenizer):
    model = BertModel(
        BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    )
    with raises(ValueError, seen="BertModel"):
        pipeline("summarization", model=model, tokenizer=tokenizer)


def test_missing_tokenizer_raises(translate):
    with raises(ValueError, seen=None):
        Text2TextGenerationPipeline(translate.model)


# ----------------------------------------------------------------------------- task_specific_params


@pytest.fixture(scope="module")
def params_checkpoint(checkpoint, tokenizer, tmp_path_factory):
    """The checkpoint with `task_specific_params`, which configs of transformers 4 have."""
    directory = tmp_path_factory.mktemp("told")
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    config.task_specific_params = {
        "summarization": {"prefix": "the woman ", "num_beams": 3, "max_length": 5},
        "translation_en_to_de": {"prefix": "two dogs ", "min_new_tokens": 4},
    }
    transformers.AutoModelForSeq2SeqLM.from_pretrained(checkpoint, config=config).save_pretrained(
        directory
    )
    tokenizer.save_pretrained(directory)
    return str(directory)


def test_task_specific_params_are_used(params_checkpoint, translate):
    [result] = pipeline("summarization", model=params_checkpoint)(TEXTS[0], return_tensors=True)
    ids = translate.tokenizer("the woman " + TEXTS[0], return_tensors="pt")["input_ids"]
    assert torch.equal(
        result["summary_token_ids"], translate.model.generate(ids, num_beams=3, max_length=5)[0]
    )


def test_task_specific_params_of_other_task_are_not_used(params_checkpoint, translate):
    generate = pipeline("translation", model=params_checkpoint, num_beams=1, max_new_tokens=6)
    assert generate(TEXTS[0]) == [{"translation_text": expected(translate, TEXTS[0])[0]}]


def test_arguments_take_precedence_over_task_specific_params(params_checkpoint, translate):
    expected_results = expected(translate, "the woman " + TEXTS[0], num_beams=2, max_new_tokens=7)
    assert pipeline("summarization", model=params_checkpoint)(
        TEXTS[0], num_beams=2, max_new_tokens=7
    ) == [{"summary_text": expected_results[0]}]
    assert pipeline("summarization", model=params_checkpoint, num_beams=2, max_new_tokens=7)(
        TEXTS[0]
    ) == [{"summary_text": expected_results[0]}]


def test_task_specific_params_apply_again_to_same_model_and_stay_in_config(params_checkpoint):
    summarize = pipeline("summarization", model=params_checkpoint)
    second_pipeline = pipeline(
        "summarization", model=summarize.model, tokenizer=summarize.tokenizer
    )
    assert second_pipeline.prefix == summarize.prefix == "the woman "
    assert second_pipeline(TEXTS[0]) == summarize(TEXTS[0])
    saved_config = transformers.AutoConfig.from_pretrained(params_checkpoint)
    assert summarize.model.config.task_specific_params == saved_config.task_specific_params


def test_language_pair_uses_its_own_task_specific_params(params_checkpoint, translate):
    generate = pipeline(
        "translation_en_to_de", model=params_checkpoint, num_beams=1, max_new_tokens=6
    )
    expected_results = expected(translate, "two dogs " + TEXTS[0], min_new_tokens=4)
    assert generate(TEXTS[0]) == [{"translation_text": expected_results[0]}]


def test_prefix_of_config_is_prepended_to_text(translate, monkeypatch):
    monkeypatch.setattr(translate.model.config, "prefix", "zwei ", raising=False)
    generate = pipeline(
        "translation",
        model=translate.model,
        tokenizer=translate.tokenizer,
        num_beams=1,
        max_new_tokens=6,
    )
    assert generate(TEXTS[0]) == [{"translation_text": expected(translate, "zwei " + TEXTS[0])[0]}]


# ---------------------------------------------------------------------------------- length warnings


def collect_warnings(generate, monkeypatch, *args, **kwargs):
    logged = []
    monkeypatch.setattr(pipelines_module.logger, "warning", logged.append)
    generate(*args, **kwargs)
    return logged


def test_summary_limit_longer_than_text_warns(translate, monkeypatch):
    length = len(translate.tokenizer(TEXTS[0])["input_ids"])
    summarize = pipeline(
        "summarization", model=translate.model, tokenizer=translate.tokenizer, num_beams=1
    )
    [logged] = collect_warnings(summarize, monkeypatch, TEXTS[0], max_new_tokens=length + 1)
    assert (
        f"{length} tokens" in logged
        and f"may have {length + 1}" in logged
        and f"max_length={length // 2}" in logged
    )
    assert collect_warnings(summarize, monkeypatch, TEXTS[0], max_length=length) == []


def test_text_as_long_as_translation_limit_warns(translate, monkeypatch):
    length = len(translate.tokenizer(TEXTS[0])["input_ids"])
    [logged] = collect_warnings(translate, monkeypatch, TEXTS[0], max_new_tokens=length)
    assert f"{length} tokens" in logged and f"may have {length} only" in logged
    assert collect_warnings(translate, monkeypatch, TEXTS[0], max_length=2 * length) == []


@pytest.mark.parametrize("task", RETURN_NAMES)
def test_default_length_does_not_warn(task, translate, monkeypatch):
    generate = pipeline(task, model=translate.model, tokenizer=translate.tokenizer)
    monkeypatch.setattr(translate.model, "generate", lambda input_ids, **_: input_ids)
    assert collect_warnings(generate, monkeypatch, [TEXTS[0], "two dogs " * 150]) == []


# ----------------------------------------------------------------------------------- language pairs


@pytest.mark.parametrize(
    "task", ["translation_en_to_de", "translation_gsw_to_ja", "translation_eng_Latn_to_deu_Latn"]
)
def test_language_pairs_are_tasks(task, checkpoint, translate):
    generate = pipeline(task, model=str(checkpoint), max_new_tokens=6, num_beams=1)
    assert (type(generate), generate.task) == (TranslationPipeline, task)
    assert generate(TEXTS) == translate(TEXTS)


# ------------------------------------------------------------------------------------- registration


def test_saved_pipeline_loads_without_remote_code(translate, tmp_path):
    translate.save_pretrained(tmp_path)
    second_pipeline = pipeline("translation", model=str(tmp_path), max_new_tokens=6, num_beams=1)
    assert second_pipeline(TEXTS) == translate(TEXTS)


def test_tokenizer_of_checkpoint_loads_alone(checkpoint, tokenizer):
    assert (
        AutoTokenizer.from_pretrained(checkpoint)(TEXTS)["input_ids"]
        == tokenizer(TEXTS)["input_ids"]
    )
