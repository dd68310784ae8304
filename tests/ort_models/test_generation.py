"""Tests of `generate` of exports against the torch model, in `Runtime.generate` and in the loop of
transformers."""

import pytest
import torch
from checkpoints import copy_folder, edit_json, seal
from messages import raises
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
)

from vanilla_transformer_export import Runtime
from vanilla_transformer_export.errors import SessionError
from vanilla_transformer_export.ort_models import ORTModelForCausalLM, ORTModelForSeq2SeqLM
from vanilla_transformer_export.ort_models.generation import CACHE

CLASSES = {
    "seq2seq": (ORTModelForSeq2SeqLM, AutoModelForSeq2SeqLM),
    "causal": (ORTModelForCausalLM, AutoModelForCausalLM),
}


class Unchanged:
    """A logits processor, or a streamer, that changes nothing."""

    def __call__(self, ids, scores):
        return scores

    def put(self, tokens):
        pass  # a streamer would show them

    def end(self):
        pass  # a streamer would show what it still holds


PROCESSORS = {"logits_processor": LogitsProcessorList([Unchanged()])}
SCORES = {"return_dict_in_generate": True, "output_scores": True}
IN_RUNTIME = [
    {},
    {"num_beams": 4, "num_return_sequences": 2},
    {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True, "no_repeat_ngram_size": 2},
    {"repetition_penalty": 1.3, "suppress_tokens": [35, 41], "min_new_tokens": 6},
    {"use_cache": False},
]
IN_LOOP = [
    {"do_sample": True},
    {"do_sample": True, "num_return_sequences": 3, "top_k": 5},
    {"do_sample": True, "num_beams": 3},
    {"num_beams": 4, "num_return_sequences": 3, **PROCESSORS},
    {"use_cache": False, **PROCESSORS},
    {"max_time": 600.0},
    SCORES,
    {"num_beams": 3, **SCORES},
    {"labels": torch.ones(3, 2, dtype=torch.long)},
]


@pytest.fixture(scope="module", params=[*CLASSES])
def pair(request, saved, target):
    """The model of an export, the torch model, and a padded batch."""
    ours, theirs = CLASSES[request.param]
    exported = saved(request.param, target)
    ids = torch.randint(3, 48, (3, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    padded = slice(5, 7) if request.param == "seq2seq" else slice(0, 2)
    ids[0, padded] = mask[0, padded] = 0
    return (
        ours.from_pretrained(exported.directory),
        theirs.from_pretrained(exported.checkpoint).eval(),
        {"input_ids": ids, "attention_mask": mask},
    )


@pytest.fixture
def calls(monkeypatch):
    """The calls of `Runtime.generate`."""
    seen, generate = [], Runtime.generate

    def counted(self, *args, **kwargs):
        seen.append(kwargs)
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(Runtime, "generate", counted)
    return seen


def generate_seeded(model, inputs, options):
    torch.manual_seed(0)
    return model.generate(**inputs, **{"max_new_tokens": 12, **options})


def first_row(batch):
    return {name: tensor[1:2] for name, tensor in batch.items()}


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 3, **PROCESSORS}])
def test_caches_of_grouped_keys_match_torch(saved, target, options):
    exported = saved("causal-grouped", target)
    ours = ORTModelForCausalLM.from_pretrained(exported.directory)
    theirs = AutoModelForCausalLM.from_pretrained(exported.checkpoint).eval()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    batch = {"input_ids": torch.randint(3, 48, (2, 7)) * mask, "attention_mask": mask}
    assert torch.equal(
        generate_seeded(ours, batch, options), generate_seeded(theirs, batch, options)
    )


@pytest.mark.parametrize("options", IN_RUNTIME)
def test_searches_run_in_runtime_and_match_torch(pair, calls, options):
    ours, theirs, batch = pair
    assert torch.equal(
        generate_seeded(ours, batch, options), generate_seeded(theirs, batch, options)
    )
    assert len(calls) == 1


@pytest.mark.parametrize("options", IN_LOOP)
def test_other_options_run_in_transformers_loop_and_match_torch(pair, calls, options):
    """Sampling uses the seed of torch, so that it draws the same tokens."""
    ours, theirs, batch = pair
    actual, expected = (
        generate_seeded(ours, batch, options),
        generate_seeded(theirs, batch, options),
    )
    if "output_scores" in options:
        for one, other in zip(actual.scores, expected.scores, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        actual, expected = actual.sequences, expected.sequences
    assert torch.equal(actual, expected)
    assert not calls


def test_length_options_and_configs_match_transformers(pair, calls):
    ours, theirs, batch = pair
    for options in (
        {"max_length": 15, "max_new_tokens": None},
        {"max_new_tokens": None},
        {"max_new_tokens": None, "generation_config": GenerationConfig(max_new_tokens=5)},
    ):
        assert torch.equal(
            generate_seeded(ours, batch, options), generate_seeded(theirs, batch, options)
        )
    ids = batch["input_ids"][1:]
    actual = ours.generate(ids, max_new_tokens=4)
    assert torch.equal(actual, theirs.generate(ids, max_new_tokens=4))
    assert len(calls) == 4


def test_generation_config_of_model_is_used(pair, calls, monkeypatch):
    ours, theirs, batch = pair
    for model in (ours, theirs):
        config = GenerationConfig(**{**model.generation_config.to_dict(), "num_beams": 3})
        monkeypatch.setattr(model, "generation_config", config)
    assert torch.equal(generate_seeded(ours, batch, {}), generate_seeded(theirs, batch, {}))
    assert calls[0]["num_beams"] == 3


@pytest.mark.parametrize("target", ["portable"], indirect=True)
def test_prompt_lookup_and_assistants_do_not_change_tokens(pair, calls):
    ours, theirs, batch = pair
    row = first_row(batch)
    expected = generate_seeded(theirs, row, {})
    again = type(ours).from_pretrained(ours.runtime.info.directory)
    for options in (
        {"prompt_lookup_num_tokens": 3},
        {"prompt_lookup_num_tokens": 3, **PROCESSORS},
        {"assistant_model": theirs},
        {"assistant_model": again},
    ):
        assert torch.equal(generate_seeded(ours, row, options), expected)
    assert torch.equal(generate_seeded(theirs, row, {"assistant_model": ours}), expected)
    assert calls == []  # all ran in the loop of transformers


def test_streamer_and_decoder_prefix_match_torch(pair):
    ours, theirs, batch = pair
    row = first_row(batch)
    assert torch.equal(
        generate_seeded(ours, row, {"streamer": Unchanged()}), generate_seeded(theirs, row, {})
    )
    if theirs.config.is_encoder_decoder:
        prefix = {"decoder_input_ids": torch.tensor([[1, 7, 9]] * 3)}
        for options in (prefix, prefix | PROCESSORS):
            assert torch.equal(
                generate_seeded(ours, batch, options), generate_seeded(theirs, batch, options)
            )


def test_generation_continues_from_returned_cache(pair):
    ours, theirs, batch = pair
    row = first_row(batch)
    first = generate_seeded(ours, row, {"return_dict_in_generate": True, "max_new_tokens": 3})
    tokens = "decoder_input_ids" if theirs.config.is_encoder_decoder else "input_ids"
    inputs = {"input_ids": row["input_ids"], tokens: first.sequences, CACHE: first[CACHE]}
    actual = generate_seeded(ours, inputs, {"max_new_tokens": 3})
    assert torch.equal(actual, generate_seeded(theirs, row, {"max_new_tokens": 6}))
    with pytest.raises(ValueError, match="the cache is a DynamicCache, expected one of this model"):
        generate_seeded(ours, row, {CACHE: DynamicCache()})


def test_misspelled_option_raises_value_error(pair):
    ours, _, batch = pair
    with pytest.raises(ValueError, match="max_new_toks"):
        ours.generate(**batch, max_new_toks=3)
    with pytest.raises(ValueError, match="not used by the model: .'inputs_embeds'"):
        ours.generate(inputs_embeds=torch.zeros(1, 4, 32))
    with raises(ValueError, seen=(7,), expected=("batch_size", "source_length")):
        ours.generate(batch["input_ids"][1])
    with raises(ValueError, seen="do_sample", expected="tensors"):
        ours.generate(batch["input_ids"].numpy(), do_sample=True)


def test_positional_processors_and_masks_in_bfloat16_match_torch(pair):
    ours, theirs, batch = pair

    def prefer(ids, scores):
        return scores + 9 * torch.eye(48)[7]

    arguments = (batch["input_ids"], None, LogitsProcessorList([prefer]))
    options = {"attention_mask": batch["attention_mask"].bfloat16(), "max_new_tokens": 5}
    assert torch.equal(ours.generate(*arguments, **options), theirs.generate(*arguments, **options))


def test_states_that_no_graph_returns_are_left_out_and_tokenizer_is_not_logged(
    pair, target, saved, caplog
):
    ours, theirs, batch = pair
    row, states = first_row(batch), {"output_hidden_states": True, "output_attentions": True}
    options = {"return_dict_in_generate": True, **states}
    if target == "portable":
        options["prompt_lookup_num_tokens"] = 2
    output = generate_seeded(ours, row, options)
    assert torch.equal(output.sequences, generate_seeded(theirs, row, {}))
    assert not {name for name in output if "states" in name or "attentions" in name}
    name = "seq2seq" if theirs.config.is_encoder_decoder else "causal"
    tokenizer = AutoTokenizer.from_pretrained(saved(name).checkpoint)
    stop = {"stop_strings": ["e"], "tokenizer": tokenizer}
    assert torch.equal(generate_seeded(ours, row, stop), generate_seeded(theirs, row, stop))
    assert "tokenizer" not in caplog.text


@pytest.mark.parametrize("target", ["portable", "cpu"])
def test_prompts_are_returned_as_they_came_with_tokens_of_unpadded_prompts(saved, target):
    exported = saved("causal", target)
    ours = ORTModelForCausalLM.from_pretrained(exported.directory)
    theirs = AutoModelForCausalLM.from_pretrained(exported.checkpoint).eval()
    options = {"max_new_tokens": 12, "no_repeat_ngram_size": 2}
    ids = torch.randint(3, 48, (20, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[:10, :3], mask[:10, :3] = 1, 0  # 0 is the pad token
    expected = theirs.generate(ids, attention_mask=mask, **options)
    assert torch.equal(ours.generate(ids, attention_mask=mask, **options), expected)
    right = torch.cat([ids[10:], torch.zeros_like(ids[:10, :2])], 1)
    tokens = ours.generate(right, max_new_tokens=12)
    assert torch.equal(tokens[:, :8], right)
    assert torch.equal(tokens[:, 8:], theirs.generate(ids[10:], max_new_tokens=12)[:, 6:])


@torch.no_grad()
def test_full_sliding_window_is_cropped_by_tokens_of_last_step(saved):
    """Prompt lookup finds wrong candidates in the first step."""
    exported = saved("causal-window")
    ours = ORTModelForCausalLM.from_pretrained(exported.directory)
    theirs = AutoModelForCausalLM.from_pretrained(exported.checkpoint).eval()
    row = {"input_ids": torch.tensor([[5, 6, 7, 8] * 3])}
    lookup = {"prompt_lookup_num_tokens": 3, **PROCESSORS}
    for options in (lookup, {"assistant_model": theirs}):
        tokens = generate_seeded(ours, row, options)
        assert torch.equal(tokens, generate_seeded(theirs, row, {})), options
    cache = ours(row["input_ids"], logits_to_keep=1)[CACHE]
    with raises(ValueError, seen=-1, expected=0):
        cache.crop(-1)
    ids = torch.randint(3, 48, (2, 4))
    cache = ours(ids.repeat(1, 2))[CACHE]
    cache = ours(ids, **{CACHE: cache})[CACHE]
    with raises(ValueError, seen=-4, expected=(-3, 0)):
        cache.crop(-4)
    cache.crop(-3)
    expected = theirs(ids.repeat(1, 3)).logits[:, 9:]
    actual = ours(ids[:, 1:], **{CACHE: cache}).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_assistants_raise_if_graphs_check_one_token_per_step(saved):
    for name, (model_class, _) in CLASSES.items():
        model = model_class.from_pretrained(saved(name, "cpu").directory)
        for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": model}):
            expected = ("assistant_model", "prompt_lookup_num_tokens", "portable")
            with raises(ValueError, seen="cpu", expected=expected):
                model.generate(torch.tensor([[5, 6, 7, 5, 6]]), max_new_tokens=4, **options)


@pytest.mark.parametrize("target", ["portable", "cpu"])
def test_prompt_lookup_in_generation_config_is_ignored(saved, tmp_path, target):
    directory = copy_folder(saved("causal", target).directory, tmp_path)
    lookup = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 2}
    edit_json(directory / "generation_config.json", **lookup)
    seal(directory)
    models = [
        ORTModelForCausalLM.from_pretrained(path)
        for path in (directory, saved("causal", target).directory)
    ]
    ids = torch.tensor([[5, 6, 7, 5, 6]] * 2)
    for options in ({}, {"num_beams": 3}, {"do_sample": True}, PROCESSORS):
        actual, expected = (generate_seeded(model, {"input_ids": ids}, options) for model in models)
        assert torch.equal(actual, expected), options


def test_failure_of_onnxruntime_does_not_start_the_loop(saved, monkeypatch):
    def fail(*args, **kwargs):
        raise SessionError("no memory")

    monkeypatch.setattr(Runtime, "generate", fail)
    model = ORTModelForCausalLM.from_pretrained(saved("causal").directory)
    with pytest.raises(SessionError, match="no memory"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=2)


def test_search_raises_only_when_it_exceeds_learned_positions(saved):
    """An end token may come first, as in torch."""
    exported = saved("causal")
    ours = ORTModelForCausalLM.from_pretrained(exported.directory)
    ids = torch.randint(3, 48, (1, 50))
    with pytest.raises(ValueError, match="61 tokens.* 60.* learned positions"):
        ours.generate(ids, max_new_tokens=30, suppress_tokens=[2])
    assert ours.generate(ids, max_new_tokens=30, eos_token_id=list(range(48))).shape == (1, 51)
    assert ours.generate(ids, max_new_tokens=11, suppress_tokens=[2]).shape == (1, 61)
