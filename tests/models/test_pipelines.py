"""The text-to-text pipelines give what they gave under transformers 4, for any encoder-decoder
model.

Question answering has a file of its own; its registration is tested here.
"""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from checkpoints import SIZES
from messages import raises
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    GenerationConfig,
    MBart50Tokenizer,
    MBartTokenizer,
    pipeline,
)

from vanilla_transformer import VanillaSeq2SeqConfig, VanillaSeq2SeqForConditionalGeneration
from vanilla_transformer import pipelines_vanilla_transformer as pipelines_module
from vanilla_transformer.pipelines import (
    PIPELINES,
    SummarizationPipeline,
    Text2TextGenerationPipeline,
    TranslationPipeline,
    register_pipelines,
)
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


def bart(vocab_size):
    config = BartConfig(
        vocab_size=vocab_size, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, max_position_embeddings=300, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2, init_std=0.5,
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
    assert type(translate.model).__name__ in (
        "VanillaSeq2SeqForConditionalGeneration",
        "BartForConditionalGeneration",
    )
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
    reference = [
        [{"translation_text": actual} for actual in expected(translate, text, **options)]
        for text in TEXTS
    ]
    assert [len(actual) for actual in reference] == [2, 2, 2]
    assert translate(TEXTS[0], **options) == reference[0]
    assert translate(TEXTS, **options) == reference


def test_token_ids_come_in_place_of_the_text(translate):
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


def test_arguments_of_the_pipeline_hold_for_each_call(checkpoint):
    translate = pipeline("translation", model=str(checkpoint), num_beams=2, max_new_tokens=3)
    assert translate(TEXTS[0]) == [
        {"translation_text": expected(translate, TEXTS[0], num_beams=2, max_new_tokens=3)[0]}
    ]


def test_models_and_tokenizers_in_memory_are_taken(translate):
    again = pipeline(
        "translation",
        model=translate.model,
        tokenizer=translate.tokenizer,
        max_new_tokens=6,
        num_beams=1,
    )
    assert again(TEXTS) == translate(TEXTS)


@pytest.mark.parametrize("text", ["", "  \n", None, 7, ["nested"]])
def test_what_is_not_a_text_is_refused_with_the_value(translate, text):
    error = ValueError if isinstance(text, str) else TypeError
    with raises(error, seen=repr(text), expected="string"):
        translate([TEXTS[0], text])


def test_one_empty_text_alone_is_refused(translate):
    with raises(ValueError, seen="''", expected="string"):
        translate("")


def test_languages_have_no_effect_where_the_tokenizer_has_none_and_that_is_said(
    translate, monkeypatch
):
    said = []
    monkeypatch.setattr(pipelines_module.logger, "warning_once", said.append)
    assert translate(TEXTS[0], src_lang="en", tgt_lang="de") == translate(TEXTS[0])
    assert len(said) == 1
    assert "src_lang='en' and tgt_lang='de' have no effect" in said[0]


def test_a_tokenizer_larger_than_the_model_is_refused_with_both_sizes(tokenizer):
    translate = pipeline("translation", model=ours(len(tokenizer) - 20), tokenizer=tokenizer)
    largest = max(tokenizer(TEXTS[0])["input_ids"])
    assert largest >= len(tokenizer) - 20
    with raises(ValueError, seen=(largest, len(tokenizer) - 20)):
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


# ----------------------------------------------------------------------- the tasks and what differs

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
def test_each_task_names_its_results(task, checkpoint, translate):
    generate = pipeline(task, model=str(checkpoint), max_new_tokens=6, num_beams=1)
    assert type(generate) is CLASSES[task]
    name = RETURN_NAMES[task]
    assert generate(TEXTS) == [{f"{name}_text": expected(translate, text)[0]} for text in TEXTS]
    assert [list(result) for result in generate(TEXTS, return_tensors=True)] == [
        [f"{name}_token_ids"]
    ] * 3


@pytest.mark.parametrize("task", RETURN_NAMES)
def test_the_defaults_of_a_task_are_four_beams_and_256_tokens(task, translate, monkeypatch):
    generate = pipeline(task, model=translate.model, tokenizer=translate.tokenizer)
    asked = []
    monkeypatch.setattr(
        translate.model,
        "generate",
        lambda input_ids, **kwargs: asked.append(kwargs) or torch.zeros(1, 2, dtype=torch.long),
    )
    generate(TEXTS[0])
    assert (asked[0]["num_beams"], asked[0]["max_new_tokens"]) == (4, 256)


def test_an_empty_list_gives_an_empty_list(translate):
    assert translate([]) == []


def test_generation_ends_with_the_token_of_the_stop_sequence(translate, monkeypatch):
    plain = translate(TEXTS[0], return_tensors=True)[0]["translation_token_ids"].tolist()
    # after the start token
    monkeypatch.setattr(translate.tokenizer, "encode", lambda text, add_special_tokens: [plain[1]])
    [stopped] = translate(TEXTS[0], stop_sequence="any", return_tensors=True)
    assert stopped["translation_token_ids"].tolist() == plain[:2]


def test_a_stop_sequence_of_several_tokens_is_warned_about(translate):
    with pytest.warns(UserWarning, match="stop_sequence"):
        translate(TEXTS[0], stop_sequence="zwei Hunde laufen")


def test_a_stop_sequence_without_tokens_is_refused(translate):
    with raises(ValueError, seen=("stop_sequence", "''")):
        translate(TEXTS[0], stop_sequence="")


@pytest.mark.parametrize(
    "given, wanted", [({}, False), ({"clean_up_tokenization_spaces": True}, True)]
)
def test_spaces_are_cleaned_up_when_asked(translate, monkeypatch, given, wanted):
    asked = []
    monkeypatch.setattr(
        translate.tokenizer, "batch_decode", lambda ids, **kwargs: asked.append(kwargs) or ["text"]
    )
    assert translate(TEXTS[0], **given) == [{"translation_text": "text"}]
    assert asked == [{"skip_special_tokens": True, "clean_up_tokenization_spaces": wanted}]


def test_a_generation_config_in_a_call_replaces_what_the_pipeline_has(checkpoint, translate):
    generate = pipeline("translation", model=str(checkpoint), num_beams=3, max_new_tokens=6)
    actual = generate(TEXTS[2], generation_config=GenerationConfig(max_new_tokens=4))
    assert actual == [
        {"translation_text": expected(translate, TEXTS[2], max_new_tokens=4, num_beams=1)[0]}
    ]


def test_a_max_length_takes_the_place_of_the_default_number_of_tokens(checkpoint, translate):
    generate = pipeline("translation", model=str(checkpoint), num_beams=1)
    [result] = generate(TEXTS[0], max_length=5, return_tensors=True)
    ids = translate.tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    assert torch.equal(
        result["translation_token_ids"], translate.model.generate(ids, num_beams=1, max_length=5)[0]
    )
    assert len(result["translation_token_ids"]) <= 5


def test_a_number_of_tokens_takes_the_place_of_the_max_length_of_the_pipeline_and_the_reverse(
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


def test_an_encoder_is_refused_by_its_class(tokenizer):
    model = BertModel(
        BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    )
    with raises(ValueError, seen="BertModel"):
        pipeline("summarization", model=model, tokenizer=tokenizer)


def test_a_missing_tokenizer_is_refused(translate):
    with raises(ValueError, seen=None):
        Text2TextGenerationPipeline(translate.model)


# ----------------------------------------------------------- what the model's config has for a task


@pytest.fixture(scope="module")
def told(checkpoint, tokenizer, tmp_path_factory):
    """The checkpoint with a config as published for transformers 4."""
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


def test_the_parameters_of_the_task_are_used(told, translate):
    [result] = pipeline("summarization", model=told)(TEXTS[0], return_tensors=True)
    ids = translate.tokenizer("the woman " + TEXTS[0], return_tensors="pt")["input_ids"]
    assert torch.equal(
        result["summary_token_ids"], translate.model.generate(ids, num_beams=3, max_length=5)[0]
    )


def test_the_parameters_of_another_task_are_not_used(told, translate):
    generate = pipeline("translation", model=told, num_beams=1, max_new_tokens=6)
    assert generate(TEXTS[0]) == [{"translation_text": expected(translate, TEXTS[0])[0]}]


def test_arguments_win_over_the_parameters_of_the_task(told, translate):
    reference = expected(translate, "the woman " + TEXTS[0], num_beams=2, max_new_tokens=7)
    assert pipeline("summarization", model=told)(TEXTS[0], num_beams=2, max_new_tokens=7) == [
        {"summary_text": reference[0]}
    ]
    assert pipeline("summarization", model=told, num_beams=2, max_new_tokens=7)(TEXTS[0]) == [
        {"summary_text": reference[0]}
    ]


def test_the_config_is_left_as_it_was(told):
    summarize = pipeline("summarization", model=told)
    again = pipeline("summarization", model=summarize.model, tokenizer=summarize.tokenizer)
    assert again.prefix == summarize.prefix == "the woman "
    assert again(TEXTS[0]) == summarize(TEXTS[0])


def test_a_language_pair_has_parameters_of_its_own(told, translate):
    generate = pipeline("translation_en_to_de", model=told, num_beams=1, max_new_tokens=6)
    reference = expected(translate, "two dogs " + TEXTS[0], min_new_tokens=4)
    assert generate(TEXTS[0]) == [{"translation_text": reference[0]}]


def test_a_prefix_of_the_whole_config_is_put_in_front_of_the_text(translate, monkeypatch):
    monkeypatch.setattr(translate.model.config, "prefix", "zwei ", raising=False)
    generate = pipeline(
        "translation",
        model=translate.model,
        tokenizer=translate.tokenizer,
        num_beams=1,
        max_new_tokens=6,
    )
    assert generate(TEXTS[0]) == [{"translation_text": expected(translate, "zwei " + TEXTS[0])[0]}]


# -------------------------------------------------------------------------- lengths worth a warning


def warnings_of(generate, monkeypatch, *args, **kwargs):
    said = []
    monkeypatch.setattr(pipelines_module.logger, "warning", said.append)
    generate(*args, **kwargs)
    return said


def test_a_summary_that_may_be_longer_than_its_text_is_warned_about(translate, monkeypatch):
    length = len(translate.tokenizer(TEXTS[0])["input_ids"])
    summarize = pipeline(
        "summarization", model=translate.model, tokenizer=translate.tokenizer, num_beams=1
    )
    [said] = warnings_of(summarize, monkeypatch, TEXTS[0], max_new_tokens=length + 1)
    assert (
        f"{length} tokens" in said
        and f"may have {length + 1}" in said
        and f"max_length={length // 2}" in said
    )
    assert warnings_of(summarize, monkeypatch, TEXTS[0], max_length=length) == []


def test_a_text_longer_than_its_translation_may_be_is_warned_about(translate, monkeypatch):
    length = len(translate.tokenizer(TEXTS[0])["input_ids"])
    [said] = warnings_of(translate, monkeypatch, TEXTS[0], max_new_tokens=length)
    assert f"{length} tokens" in said and f"may have {length} only" in said
    assert warnings_of(translate, monkeypatch, TEXTS[0], max_length=2 * length) == []


@pytest.mark.parametrize("task", RETURN_NAMES)
def test_the_default_length_is_nothing_to_warn_about(task, translate, monkeypatch):
    generate = pipeline(task, model=translate.model, tokenizer=translate.tokenizer)
    monkeypatch.setattr(translate.model, "generate", lambda input_ids, **_: input_ids)
    assert warnings_of(generate, monkeypatch, [TEXTS[0], "two dogs " * 150]) == []


# ----------------------------------------------------------------------------------- language pairs


@pytest.mark.parametrize(
    "task", ["translation_en_to_de", "translation_gsw_to_ja", "translation_eng_Latn_to_deu_Latn"]
)
def test_every_language_pair_is_a_task(task, checkpoint, translate):
    generate = pipeline(task, model=str(checkpoint), max_new_tokens=6, num_beams=1)
    assert (type(generate), generate.task) == (TranslationPipeline, task)
    assert generate(TEXTS) == translate(TEXTS)


@pytest.mark.parametrize(
    "task",
    [
        "translation_en_de",
        "translation_",
        "translation_en_to_",
        "translations",
        "summarization_a_to_b",
    ],
)
def test_other_names_stay_unknown(task):
    with raises(KeyError, seen=task):
        pipeline(task, model="unused", config=BartConfig())


@pytest.fixture(scope="module")
def multilingual():
    tokenizer = MBart50Tokenizer(
        vocab=[
            ("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁a", -1.0),
            ("▁man", -1.0), ("▁dog", -1.0)
        ],
        src_lang="en_XX", tgt_lang="fr_XX",
    )  # fmt: skip
    transformers.set_seed(0)
    return bart(len(tokenizer)), tokenizer


def test_a_multilingual_tokenizer_is_told_the_languages(multilingual):
    model, tokenizer = multilingual
    english, german, french = tokenizer.convert_tokens_to_ids(["en_XX", "de_DE", "fr_XX"])
    by_argument = pipeline(
        "translation", model=model, tokenizer=tokenizer, src_lang="en_XX", tgt_lang="de_DE"
    )
    by_name = pipeline("translation_en_XX_to_de_DE", model=model, tokenizer=tokenizer)
    for translate in (by_argument, by_name):
        inputs = translate.preprocess("a man", **translate._preprocess_params)
        assert inputs["input_ids"][0, 0] == english
        [result] = translate("a man", return_tensors=True, max_new_tokens=4)
        assert result["translation_token_ids"][1] == german
        [result] = translate(
            "a man", src_lang="en_XX", tgt_lang="fr_XX", return_tensors=True, max_new_tokens=4
        )
        assert result["translation_token_ids"][1] == french
        batched = translate(["a man", "a dog"], batch_size=2, return_tensors=True, max_new_tokens=4)
        assert [result["translation_token_ids"][1] for result in batched] == [german, german]


def test_a_language_that_the_tokenizer_does_not_have_is_an_error(multilingual):
    model, tokenizer = multilingual
    translate = pipeline(
        "translation", model=model, tokenizer=tokenizer, src_lang="en_XX", tgt_lang="de_DE"
    )
    for name in ("src_lang", "tgt_lang"):
        with raises(ValueError, seen=(name, "fr_FR"), expected="fr_XX"):
            translate("a man", **{name: "fr_FR"})
    with raises(ValueError, seen=("src_lang", "en_XX", "tgt_lang", None)):
        pipeline("translation", model=model, tokenizer=tokenizer, src_lang="en_XX")("a man")


def test_mbart_starts_with_the_target_language_where_its_settings_name_no_other_start():
    """https://huggingface.co/docs/transformers/model_doc/mbart generates so:
    `decoder_start_token_id` is the language."""
    tokenizer = MBartTokenizer(
        vocab=[
            ("<s>", 0.0),
            ("<pad>", 0.0),
            ("</s>", 0.0),
            ("<unk>", 0.0),
            ("▁a", -1.0),
            ("▁man", -1.0),
            ("▁dog", -1.0),
        ]
    )
    transformers.set_seed(0)
    model = bart(len(tokenizer)).eval()
    model.generation_config.decoder_start_token_id = None
    translate = pipeline(
        "translation", model=model, tokenizer=tokenizer, src_lang="de_DE", tgt_lang="ro_RO"
    )
    [result] = translate("a man", return_tensors=True, max_new_tokens=4, num_beams=1)
    tokenizer.src_lang = "de_DE"
    start = tokenizer.convert_tokens_to_ids("ro_RO")
    settings = dict(decoder_start_token_id=start, max_new_tokens=4, num_beams=1)
    expected = model.generate(**tokenizer("a man", return_tensors="pt"), **settings)[0]
    assert result["translation_token_ids"].tolist() == expected.tolist() and expected[0] == start


# ------------------------------------------------------------------------------------- registration


def in_a_fresh_process(code):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


TASKS = ["question-answering", "summarization", "text2text-generation", "translation"]


def test_importing_the_package_frees_the_names_of_its_tasks_and_no_other():
    before, after, registered = in_a_fresh_process("""
import json
import transformers.pipelines as pipelines
before = sorted(pipelines.REMOVED_TASKS)
tasks = set(pipelines.PIPELINE_REGISTRY.supported_tasks)
import vanilla_transformer
added = set(pipelines.PIPELINE_REGISTRY.supported_tasks) - tasks
print(json.dumps([before, sorted(pipelines.REMOVED_TASKS), sorted(added)]))
""")
    assert set(TASKS) < set(before)
    assert after == [task for task in before if task not in TASKS]
    assert registered == sorted(PIPELINES) == TASKS


@pytest.mark.slow
def test_registering_again_changes_nothing_and_does_not_warn():
    assert in_a_fresh_process("""
import importlib, json
import transformers.pipelines as pipelines
import vanilla_transformer
from vanilla_transformer.pipelines import register_pipelines
registry = pipelines.PIPELINE_REGISTRY
entry, check = registry.supported_tasks["translation"], registry.check_task
register_pipelines()
importlib.reload(vanilla_transformer)
same = entry is registry.supported_tasks["translation"]
print(json.dumps(same and check is registry.check_task))
""")


def test_registering_works_where_transformers_removed_no_tasks(monkeypatch):
    monkeypatch.delattr(transformers.pipelines, "REMOVED_TASKS")
    register_pipelines()
    assert (
        transformers.pipelines.PIPELINE_REGISTRY.supported_tasks["translation"]["impl"]
        is TranslationPipeline
    )


def test_a_task_that_stays_removed_says_so():
    with raises(KeyError, seen="visual-question-answering"):
        pipeline("visual-question-answering")


@pytest.mark.parametrize(
    "task, seen",
    [
        ("summarization", "sshleifer/distilbart-cnn-12-6"),
        ("text2text-generation", "google-t5/t5-base"),
        ("translation_en_to_fr", "google-t5/t5-base"),
        ("question-answering", "distilbert/distilbert-base-cased-distilled-squad"),
    ],
)
def test_a_task_without_a_model_takes_the_one_it_had(task, seen, monkeypatch):
    def load(name, *_, **__):
        raise InterruptedError(name)

    monkeypatch.setattr(transformers.pipelines.AutoConfig, "from_pretrained", load)
    with raises(InterruptedError, seen=seen):
        pipeline(task)


def test_a_language_pair_without_a_model_of_its_own_says_so():
    with raises(ValueError, seen=("en", "ja")):
        pipeline("translation_en_to_ja")


def test_a_saved_pipeline_loads_again_without_remote_code(translate, tmp_path):
    translate.save_pretrained(tmp_path)
    again = pipeline("translation", model=str(tmp_path), max_new_tokens=6, num_beams=1)
    assert again(TEXTS) == translate(TEXTS)


def test_the_tokenizer_of_a_checkpoint_loads_alone(checkpoint, tokenizer):
    assert (
        AutoTokenizer.from_pretrained(checkpoint)(TEXTS)["input_ids"]
        == tokenizer(TEXTS)["input_ids"]
    )
