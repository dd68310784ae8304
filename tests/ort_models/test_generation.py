"""Tests of `generate` of exports against the torch model, in `Runtime.generate` and in the loop of
transformers."""

import copy

import numpy as np
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

from vanilla_transformer_export import Options, Runtime
from vanilla_transformer_export.errors import SessionError
from vanilla_transformer_export.ort_models import (
    ORTModelForCausalLM,
    ORTModelForImageClassification,
    ORTModelForSeq2SeqLM,
)
from vanilla_transformer_export.ort_models.decoder_cache import DecoderCache
from vanilla_transformer_export.ort_models.generation import CACHE, with_source

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


@pytest.fixture(scope="module", params=["portable", "cpu"])
def target(request):
    return request.param


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
def test_decoder_logits_match_torch(saved):
    exported = saved("causal")
    ours = ORTModelForCausalLM.from_pretrained(exported.directory)
    theirs = AutoModelForCausalLM.from_pretrained(exported.checkpoint).eval()
    ids = torch.randint(3, 48, (2, 6))
    for mask in ([0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]):
        mask = torch.tensor([mask, [1] * 6])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        expected = theirs(ids, attention_mask=mask, position_ids=positions).logits
        actual = ours(ids, attention_mask=mask).logits
        torch.testing.assert_close(actual[mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-5)
    # in a loop of the caller the cache replaces the tokens already read
    output = ours(ids[:, :4], return_dict=False)
    following = ours(ids[:, 4:], **{CACHE: output[1]}).logits
    torch.testing.assert_close(following, theirs(ids).logits[:, 4:], rtol=1e-4, atol=1e-5)
    assert isinstance(output[1], DecoderCache)
    assert isinstance(ours(ids.numpy()).logits, np.ndarray)


@torch.no_grad()
def test_seq2seq_logits_and_states_match_torch(saved):
    exported = saved("seq2seq")
    ours = ORTModelForSeq2SeqLM.from_pretrained(exported.directory)
    theirs = AutoModelForSeq2SeqLM.from_pretrained(exported.checkpoint).eval()
    ids, targets = torch.randint(3, 48, (2, 6)), torch.randint(3, 48, (2, 4))
    mask, targets_mask = torch.ones_like(ids), torch.ones_like(targets)
    mask[1, 4:] = targets_mask[0, 3:] = 0
    inputs = {"attention_mask": mask, "decoder_input_ids": targets}
    actual = ours(ids, mask, targets, targets_mask)
    expected = theirs(ids, decoder_attention_mask=targets_mask, **inputs)
    for name, real in (("logits", targets_mask), ("encoder_last_hidden_state", mask)):
        torch.testing.assert_close(
            actual[name][real == 1], expected[name][real == 1], rtol=1e-4, atol=1e-5
        )
    states = ours.get_encoder()(ids, attention_mask=mask)
    assert torch.equal(ours(encoder_outputs=states, **inputs).logits, actual.logits)
    tokens = ours.generate(encoder_outputs=states, attention_mask=mask, max_new_tokens=6)
    assert torch.equal(tokens, theirs.generate(ids, attention_mask=mask, max_new_tokens=6))
    prefix = {"decoder_input_ids": targets, "decoder_attention_mask": torch.ones_like(targets)}
    options = {"attention_mask": mask, "max_new_tokens": 4}
    expected = theirs.generate(ids, **prefix, **options)
    assert torch.equal(ours.generate(ids, **prefix, **options), expected)
    with raises(ValueError, seen="decoder_attention_mask", expected="zeros only on the right"):
        ours(ids, mask, targets, targets_mask.flip(1))
    with raises(ValueError, seen=torch.ones_like(mask).tolist(), expected=mask.tolist()):
        ours(None, torch.ones_like(mask), targets, None, states)
    with pytest.raises(ValueError, match="encoder_outputs has no source"):
        ours(encoder_outputs=theirs.get_encoder()(ids), **inputs)
    with pytest.raises(ValueError, match="decoder_input_ids has 1 rows, expected 2"):
        ours(ids, decoder_input_ids=targets[:1])
    with pytest.raises(ValueError, match="needs the input decoder_input_ids, got None"):
        ours(ids)


@torch.no_grad()
@pytest.mark.parametrize("target", ["portable", "cpu"])
def test_caches_are_cropped_and_reordered_and_other_changes_raise(saved, target):
    exported = saved("causal", target)
    ours = ORTModelForCausalLM.from_pretrained(exported.directory)
    theirs = AutoModelForCausalLM.from_pretrained(exported.checkpoint).eval()
    ids = torch.randint(3, 48, (2, 7))
    logits = []
    for model in (ours, theirs):
        cache = get_cache(model(ids, logits_to_keep=1))
        cache.crop(-2)
        for _ in range(3):
            cache.reorder_cache(torch.tensor([1, 0]))
        # the third argument is that of optimum
        arguments = (ids[:, 5:6], None, cache) if model is ours else (ids[:, 5:6],)
        options = {} if model is ours else {CACHE: cache}
        logits.append(model(*arguments, logits_to_keep=1, **options).logits)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    cache = get_cache(ours(ids, logits_to_keep=1))
    for tokens in (3, -8):
        with raises(ValueError, seen=tokens, expected=(-7, 0)):
            cache.crop(tokens)
    for call in (cache.reset, lambda: cache.batch_select_indices([0]), lambda: copy.copy(cache)):
        with pytest.raises(NotImplementedError, match="reset|batch_select_indices|copy"):
            call()
    with raises(ValueError, seen=1, expected=2):
        ours(ids[:1, :1], **{CACHE: cache})
    again = ORTModelForCausalLM.from_pretrained(saved("causal").directory)
    for call in (
        lambda: again(ids, **{CACHE: cache}),
        lambda: again.generate(ids, **{CACHE: cache}),
    ):
        with raises(
            ValueError, seen=str(exported.directory), expected=str(saved("causal").directory)
        ):
            call()


def get_cache(output):
    return getattr(output, CACHE)


@torch.no_grad()
def test_seq2seq_cache_is_cropped_where_the_decoder_can(saved):
    exported = saved("seq2seq")
    theirs = AutoModelForSeq2SeqLM.from_pretrained(exported.checkpoint).eval()
    ids, targets = torch.randint(3, 48, (2, 6)), torch.randint(3, 48, (2, 5))
    expected = theirs(ids, decoder_input_ids=targets[:, :4]).logits[:, 3:]
    for target in ("portable", "cpu"):
        ours = ORTModelForSeq2SeqLM.from_pretrained(saved("seq2seq", target).directory)
        states = with_source(torch.zeros(2, 6, 1), ids, None)  # cpu exports return none
        inputs = {"encoder_outputs": states, "logits_to_keep": 1}
        cache = get_cache(ours(decoder_input_ids=targets, **inputs))
        if target == "cpu":
            with raises(ValueError, seen=-2, expected=0):
                cache.crop(-2)
            continue
        cache.crop(-2)
        actual = ours(decoder_input_ids=targets[:, 3:4], **inputs, **{CACHE: cache}).logits
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    unused = DecoderCache(ours.runtime, Options(9))
    unused.crop(0)
    with raises(ValueError, seen=-1, expected=0):
        unused.crop(-1)


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
    cache = get_cache(ours(row["input_ids"], logits_to_keep=1))
    with raises(ValueError, seen=-1, expected=0):
        cache.crop(-1)
    ids = torch.randint(3, 48, (2, 4))
    cache = get_cache(ours(ids.repeat(1, 2)))
    cache = get_cache(ours(ids, **{CACHE: cache}))
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


def test_padding_after_first_call_and_other_positions_raise(saved):
    model = ORTModelForCausalLM.from_pretrained(saved("causal").directory)
    ids, mask = torch.randint(3, 48, (2, 6)), torch.tensor([[0, 0, 1, 1, 0, 1], [1] * 6])
    cache = get_cache(model(ids[:, :4], mask[:, :4]))
    for column in (0, 1, 3, 4):
        changed = torch.ones_like(mask)
        changed[0, :2] = changed[1, column] = 0
        with raises(ValueError, seen=("attention_mask", [2, 1]), expected=[2, 0]):
            model(ids[:, 4:], changed, **{CACHE: cache})
    with raises(ValueError, seen=("attention_mask", [1, 0]), expected=[0, 0]):
        model(ids[:, 4:], mask[:, 4:], **{CACHE: cache})
    for ones in (torch.ones(2, 3), torch.ones(6), torch.ones(1, 2)):
        with raises(ValueError, seen=str(tuple(ones.shape)), expected=("(2, 6)", "(2, 2)")):
            model(ids[:, 4:], ones, **{CACHE: cache})
    whole = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    model(ids[:, 4:], whole, position_ids=torch.tensor([[2, 3], [4, 5]]), **{CACHE: cache})
    positions = torch.tensor([[1, 1, 0, 1], [0, 1, 2, 3]])
    model(ids[:, :4], mask[:, :4], position_ids=positions)
    with raises(ValueError, seen=positions.tolist(), expected=[[0, 1, 2, 3], [0, 1, 2, 3]]):
        model(ids[:, :4], position_ids=positions)


@torch.no_grad()
@pytest.mark.parametrize("target", ["portable", "cpu"])
def test_last_logits_of_padded_rows_match_torch(saved, target):
    exported = saved("causal", target)
    ours = ORTModelForCausalLM.from_pretrained(exported.directory)
    theirs = AutoModelForCausalLM.from_pretrained(exported.checkpoint).eval()
    ids = torch.randint(3, 48, (2, 7))
    for mask, kept in (([0] * 2 + [1] * 5, 5), ([1] * 4 + [0] * 3, 5), ([1] * 7, 9)):
        mask = torch.tensor([mask, [1] * 7])
        if target == "cpu" and not mask[:, -kept:].all():
            with raises(ValueError, seen="cpu", expected=("logits_to_keep", 1, "portable")):
                ours(ids, mask, logits_to_keep=kept)
            continue
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        expected = theirs(ids, attention_mask=mask, position_ids=positions).logits[:, -kept:]
        actual, real = ours(ids, mask, logits_to_keep=kept).logits, mask[:, -kept:] == 1
        torch.testing.assert_close(actual[real], expected[real], rtol=1e-4, atol=1e-5)
    for kept in (-1, torch.tensor([0, 2])):
        with raises(ValueError, seen=("logits_to_keep", str(kept)), expected=0):
            ours(ids, logits_to_keep=kept)


def test_images_may_be_the_first_argument(saved):
    model = ORTModelForImageClassification.from_pretrained(saved("images").directory)
    size = model.config.image_size
    images = torch.rand(
        2, model.config.num_channels, *([size] * 2 if isinstance(size, int) else size)
    )
    assert torch.equal(model(images).logits, model(pixel_values=images).logits)


def test_cpu_target_raises_for_logits_it_does_not_return(saved):
    decoder = ORTModelForCausalLM.from_pretrained(saved("causal", "cpu").directory)
    ids = torch.randint(3, 48, (1, 6))
    with pytest.raises(ValueError, match="target 'cpu' returns only the logits after the last"):
        decoder(ids)
    assert decoder(ids, logits_to_keep=1).logits.shape == (1, 1, 48)
    seq2seq = ORTModelForSeq2SeqLM.from_pretrained(saved("seq2seq", "cpu").directory)
    with pytest.raises(ValueError, match="returns keys and values for its decoder only"):
        seq2seq(ids, decoder_input_ids=ids)


def test_invalid_tokens_and_masks_raise_and_error_names_values(saved):
    model = ORTModelForCausalLM.from_pretrained(saved("causal").directory)
    ids = torch.randint(3, 48, (2, 6))
    with raises(ValueError, seen=(3, 48), expected=("input_ids", 0, 47)):
        model(torch.tensor([[3, 48]]))
    with raises(ValueError, seen=("attention_mask", "row 1", "is 0"), expected="a token"):
        model(ids, attention_mask=torch.tensor([[1] * 6, [0] * 6]))
    with raises(ValueError, seen=("row 1", "attention_mask", "position 2"), expected="one block"):
        model(ids, attention_mask=torch.tensor([[1] * 6, [1, 0, 1, 1, 1, 1]]))
    with raises(ValueError, seen=61, expected=(60, "learned positions")):
        model(torch.full((1, 61), 5))


def test_search_raises_only_when_it_exceeds_learned_positions(saved):
    """An end token may come first, as in torch."""
    exported = saved("causal")
    ours = ORTModelForCausalLM.from_pretrained(exported.directory)
    ids = torch.randint(3, 48, (1, 50))
    with pytest.raises(ValueError, match="61 tokens.* 60.* learned positions"):
        ours.generate(ids, max_new_tokens=30, suppress_tokens=[2])
    assert ours.generate(ids, max_new_tokens=30, eos_token_id=list(range(48))).shape == (1, 51)
    assert ours.generate(ids, max_new_tokens=11, suppress_tokens=[2]).shape == (1, 61)
