"""Tests of conversion from other families: outputs and tokens match, for random configs."""

import functools

import pytest
import torch
from checkpoints import edit_json
from families import (
    ARCHITECTURES,
    DTYPES_AND_SEEDS,
    LLAMAS,
    RIGHT,
    SEEDS,
    assert_exact,
    compute_outputs,
    converted,
    every_class_once,
    make_arguments,
    random_config,
    random_model,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import DataCollatorForSeq2Seq, GenerationConfig, PreTrainedTokenizerFast

from vanilla_transformer.conversion import convert
from vanilla_transformer_export import Runtime, export

DECODERS = [
    ("gpt2", "GPT2LMHeadModel"),
    ("opt", "OPTForCausalLM"),
    ("xglm", "XGLMForCausalLM"),
    ("biogpt", "BioGptForCausalLM"),
    ("llama", "LlamaForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("mistral", "MistralForCausalLM"),
]
PAIRS = [
    ("bart", "BartForConditionalGeneration"),
    ("mbart", "MBartForConditionalGeneration"),
    ("marian", "MarianMTModel"),
    ("m2m_100", "M2M100ForConditionalGeneration"),
    ("pegasus", "PegasusForConditionalGeneration"),
    ("blenderbot", "BlenderbotForConditionalGeneration"),
    ("plbart", "PLBartForConditionalGeneration"),
    ("t5", "T5ForConditionalGeneration"),
]


def supported_dtype(family, dtype):
    """Return `dtype`, or float32 for XGLM.

    Its class fails in float64, because it stores the smallest float64 in a float32 tensor.
    """
    return torch.float32 if family == "xglm" else dtype


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A family, a class, a dtype and a seed -> a random model of theirs and ours, converted once.

    Tests do not change them.
    """

    @functools.cache
    def make(family, architecture, dtype, seed):
        theirs = random_model(architecture, random_config(family, architecture, seed), dtype)
        return theirs, converted(theirs, tmp_path_factory.mktemp("pair"), dtype)

    return make


@every_class_once(ARCHITECTURES)
def test_converted_checkpoint_gives_same_outputs(family, architecture, dtype, seed, pair):
    dtype = supported_dtype(family, dtype)
    theirs, ours = pair(family, architecture, dtype, seed)
    inputs = make_arguments(theirs)
    expected, got = compute_outputs(theirs, inputs), compute_outputs(ours, inputs)
    if architecture == "ElectraForPreTraining":
        got["logits"] = got["logits"].squeeze(-1)
    if architecture == "Dinov2Model":
        got["pooler_output"] = got["last_hidden_state"][:, 0]
    # these return the residual stream, which conversion reorders
    if architecture in ("MarianModel", "PegasusModel"):
        half = ours.config.hidden_size // 2
        got["last_hidden_state"] = got["last_hidden_state"].unflatten(-1, (half, 2)).mT.flatten(-2)
    assert expected.keys() <= got.keys() and expected
    for name in expected:
        assert_exact(got[name], expected[name], dtype, family)


@pytest.mark.parametrize("depth", [12, pytest.param(24, marks=pytest.mark.slow)])
def test_models_as_deep_as_nllb_give_same_logits(depth, tmp_path):
    config = random_config("m2m_100", "M2M100ForConditionalGeneration", 0)
    config.update(dict(encoder_layers=depth, decoder_layers=depth))
    theirs = random_model("M2M100ForConditionalGeneration", config, torch.float64)
    ours = converted(theirs, tmp_path, torch.float64)
    assert (ours.config.encoder_layers, ours.config.decoder_layers) == (depth, depth)
    inputs = make_arguments(theirs)
    assert_exact(
        compute_outputs(ours, inputs)["logits"],
        compute_outputs(theirs, inputs)["logits"],
        torch.float64,
    )


@pytest.mark.parametrize(
    "family, architecture",
    [
        pytest.param("gpt2", "GPT2ForTokenClassification", marks=pytest.mark.slow),
        pytest.param("opt", "OPTForQuestionAnswering", marks=pytest.mark.slow),
        ("bart", "BartForSequenceClassification"),
        pytest.param("mbart", "MBartForQuestionAnswering", marks=pytest.mark.slow),
        pytest.param("mpnet", "MPNetForTokenClassification", marks=pytest.mark.slow),
        pytest.param("xlm-roberta", "XLMRobertaForSequenceClassification", marks=pytest.mark.slow),
    ],
)
def test_export_of_converted_head_gives_same_outputs(family, architecture, tmp_path):
    theirs = random_model(architecture, random_config(family, architecture, 0))
    converted(theirs, tmp_path)
    export(tmp_path / "ours", tmp_path / "export", cases=4)
    inputs = make_arguments(theirs)
    actual = Runtime(tmp_path / "export").outputs(
        **{name: tensor.numpy() for name, tensor in inputs.items()}
    )
    for name, expected in compute_outputs(theirs, inputs).items():
        got = torch.from_numpy(actual[name])
        assert_exact(
            got[RIGHT.bool()] if got.shape[:2] == RIGHT.shape else got,
            expected,
            torch.float32,
            family,
        )


EXPORTS = [  # test_languages.py and test_positions.py have fast ones
    pytest.param(*case, target, marks=pytest.mark.slow)
    for case in [*PAIRS[3:], *DECODERS[2:]]
    for target in ("portable", "cpu", "cuda")
]


@pytest.mark.parametrize("family, architecture, target", EXPORTS)
def test_export_of_converted_model_generates_same_tokens(family, architecture, target, tmp_path):
    config = random_config(family, architecture, 0)
    # the cuda target pads sources to multiples of 32, also beyond a shorter table
    config.max_position_embeddings = 64
    if target == "cpu" and family in LLAMAS:
        config.head_dim = 8  # the random ones are no multiples of 8, which this target rejects
    theirs = random_model(architecture, config)
    # set by Blenderbot; the runtime does not apply it
    theirs.generation_config.encoder_no_repeat_ngram_size = None
    ours = converted(theirs, tmp_path)
    export(tmp_path / "ours", tmp_path / "export", target=target, dtype="fp32", cases=3)
    runtime = Runtime(tmp_path / "export", device="cpu")
    inputs = make_arguments(theirs)
    sides = {"m2m_100": ("right", "left")}.get(
        family, ("right",) if theirs.config.is_encoder_decoder else ("left",)
    )
    pad = theirs.config.pad_token_id  # these decoders do not count generated padding
    for side in sides:
        ids, mask = (
            tensor if side == "right" else tensor.flip(1) for tensor in (inputs["input_ids"], RIGHT)
        )
        for settings in (dict(num_beams=1), dict(num_beams=4, length_penalty=0.7)):
            settings |= dict(
                max_new_tokens=10, min_new_tokens=8, no_repeat_ngram_size=2, bad_words_ids=[[pad]]
            )
            expected = theirs.generate(ids, attention_mask=mask, do_sample=False, **settings)
            assert len(expected.unique()) > 4, "a model that repeats itself proves little"
            assert (
                ours.generate(ids, attention_mask=mask, do_sample=False, **settings).tolist()
                == expected.tolist()
            )
            assert (
                runtime.generate(ids.numpy(), mask.numpy(), **settings).tolist()
                == expected.tolist()
            )


@DTYPES_AND_SEEDS
@pytest.mark.parametrize("family, architecture", DECODERS)
def test_left_padding_and_cache_give_same_logits(family, architecture, dtype, seed, pair):
    dtype = supported_dtype(family, dtype)
    theirs, ours = pair(family, architecture, dtype, seed)
    mask = RIGHT.flip(1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    ids = torch.randint(3, theirs.config.vocab_size, mask.shape)
    later = torch.randint(3, theirs.config.vocab_size, (3, 4))
    with torch.no_grad():
        expected = theirs(ids, attention_mask=mask, position_ids=positions, use_cache=True)
        got = ours(ids, attention_mask=mask, position_ids=positions, use_cache=True)
        assert_exact(got.logits[mask.bool()], expected.logits[mask.bool()], dtype, family)
        mask = torch.cat([mask, torch.ones_like(later)], dim=1)
        positions = positions[:, -1:] + torch.arange(1, 5)
        inputs = dict(attention_mask=mask, position_ids=positions)
        got = ours(later, past_key_values=got.past_key_values, **inputs)
        expected = theirs(later, past_key_values=expected.past_key_values, **inputs)
    assert_exact(got.logits, expected.logits, dtype, family)


@DTYPES_AND_SEEDS
@pytest.mark.parametrize("family, architecture", PAIRS)
def test_encoder_decoder_cache_gives_same_logits(family, architecture, dtype, seed, pair):
    theirs, ours = pair(family, architecture, dtype, seed)
    inputs = make_arguments(theirs) | dict(use_cache=True)
    later = torch.randint(3, theirs.config.vocab_size - 2, (3, 2))
    results = []
    with torch.no_grad():
        for model in (ours, theirs):
            cache = model(**inputs).past_key_values
            results.append(
                model(**inputs | dict(decoder_input_ids=later, past_key_values=cache)).logits
            )
    assert_exact(*results, dtype, family)


@pytest.mark.parametrize(
    "family, architecture, start", [*((*pair, 2) for pair in PAIRS), (*PAIRS[1], None)]
)
def test_labels_give_same_loss_and_decoder_inputs(family, architecture, start, tmp_path):
    config = random_config(family, architecture, 0)
    if family == "mbart":  # mBART needs no start token and ignores one
        config.decoder_start_token_id = start
    theirs = random_model(architecture, config, torch.float64)
    ours = converted(theirs, tmp_path, torch.float64)
    inputs = make_arguments(theirs)
    del inputs["decoder_input_ids"]
    labels = inputs["input_ids"].roll(1, 0).masked_fill(RIGHT.roll(1, 0) == 0, -100)
    for masked in (labels, labels.masked_fill(torch.rand(labels.shape) < 0.3, -100)):
        with torch.no_grad():
            got, expected = (model(**inputs, labels=masked) for model in (ours, theirs))
        assert_exact(got.logits, expected.logits, torch.float64, family)
        assert got.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)  # in float32
    if not hasattr(theirs, "prepare_decoder_input_ids_from_labels"):
        return
    features = [dict(input_ids=[5, 6, 7], labels=row[row != -100].tolist()) for row in labels]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": config.pad_token_id})),
        pad_token="<pad>",
        padding_side="right",
    )
    batches = [
        DataCollatorForSeq2Seq(tokenizer, model=model)(features)["decoder_input_ids"]
        for model in (ours, theirs)
    ]
    assert batches[0].tolist() == batches[1].tolist()


SETTINGS = [
    dict(num_beams=1, no_repeat_ngram_size=2),
    dict(num_beams=4, length_penalty=0.7, early_stopping=True, no_repeat_ngram_size=2),
    dict(num_beams=3, num_return_sequences=2, no_repeat_ngram_size=2, repetition_penalty=1.3),
]


def settings_in_turn():
    """Return parameters (family, architecture, settings) of decoders and pairs: one settings each,
    and the others with the slow tests."""
    names = ["greedy", "4 beams", "3 beams, 2 returned"]
    return [
        pytest.param(
            *model,
            settings,
            id=f"{model[0]}-{name}",
            marks=() if (place - turn) % 3 == 0 else pytest.mark.slow,
        )
        for place, model in enumerate(DECODERS + PAIRS)
        for turn, (name, settings) in enumerate(zip(names, SETTINGS))
    ]


@SEEDS
@pytest.mark.parametrize("family, architecture, settings", settings_in_turn())
def test_generation_config_is_converted_and_generates_same_tokens(
    family, architecture, settings, seed, tmp_path
):
    theirs = random_model(architecture, random_config(family, architecture, seed))
    fields = dict(
        max_new_tokens=12,
        do_sample=False,
        forced_eos_token_id=theirs.config.eos_token_id,
        min_new_tokens=8,
    )
    theirs.generation_config = GenerationConfig.from_model_config(theirs.config)
    theirs.generation_config.update(**fields, **settings)
    ours = converted(theirs, tmp_path)
    assert ours.generation_config.num_beams == settings["num_beams"]
    inputs = make_arguments(theirs)
    inputs = dict(input_ids=inputs["input_ids"], attention_mask=RIGHT)
    if not theirs.config.is_encoder_decoder:  # prompts are padded on the left
        inputs = {name: tensor.flip(1) for name, tensor in inputs.items()}
    expected = theirs.generate(**inputs)
    assert len(expected.unique()) > 4, "a model that repeats itself proves little"
    assert ours.generate(**inputs).tolist() == expected.tolist()


@pytest.mark.parametrize("family, architecture", PAIRS)
def test_generation_settings_in_config_json_are_converted(family, architecture, tmp_path):
    """Checkpoints older than generation_config.json look like this."""
    theirs = random_model(architecture, random_config(family, architecture, 0))
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "generation_config.json").unlink()
    edit_json(tmp_path / "theirs" / "config.json", num_beams=3, max_length=9, bad_words_ids=[[5]])
    convert(tmp_path / "theirs", tmp_path / "ours")
    generation = GenerationConfig.from_pretrained(tmp_path / "ours").to_dict()
    expected = type(theirs).from_pretrained(tmp_path / "theirs").generation_config.to_dict()
    assert (generation["num_beams"], generation["max_length"], generation["bad_words_ids"]) == (
        3,
        9,
        [[5]],
    )
    assert {name: value for name, value in generation.items() if name[0] != "_"} == {
        name: value for name, value in expected.items() if name[0] != "_"
    }
