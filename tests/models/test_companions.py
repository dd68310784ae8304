"""Tests of the tokenizer_config.json and generation_config.json that are written beside weights.

The commands `train`, `average`, `convert` and `export` write these files.
"""

import json
import shutil

import numpy as np
import pytest
from messages import raises
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    pipeline,
)

from vanilla_transformer.conversion import convert
from vanilla_transformer.training.averaging import average
from vanilla_transformer.training.recipe import Recipe
from vanilla_transformer.training.run import train
from vanilla_transformer_export import TextRuntime, export

POSITIONS, TEXT = 16, "the old dog sees a red bird. " * 20
SHAPE = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1)
STEPS = dict(per_device_train_batch_size=4, max_steps=2, save_steps=2, learning_rate=1e-2, seed=0)


@pytest.fixture(scope="module")
def train_checkpoint(tmp_path_factory):
    """A function that trains a small character model and returns its checkpoint directory.

    Its arguments are a name, generation settings and config fields.
    """
    root = tmp_path_factory.mktemp("companions")
    (root / "text").write_text(TEXT)

    def make(name, generation=None, **fields):
        if not (root / name).exists():
            data = {"train": str(root / "text"), "block_size": 8}
            recipe = Recipe(
                "causal-lm",
                data,
                {"kind": "character"},
                {**SHAPE, **fields},
                STEPS,
                generation or {},
            )
            train(recipe, root / name)
        return root / name

    return make


@pytest.fixture(scope="module")
def short(train_checkpoint):
    """A checkpoint with learned positions for 16 tokens."""
    return train_checkpoint(
        "short", position_embedding_type="learned", max_position_embeddings=POSITIONS
    )


def read(directory, name):
    return json.loads((directory / name).read_text())


# ----------------------------------------------------------------------------------- short contexts


def test_learned_positions_set_max_length_and_model_max_length(short, train_checkpoint):
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    result = read(short, "generation_config.json")
    assert result.pop("transformers_version")
    assert result == {**tokens, "max_length": POSITIONS, "use_cache": True}
    assert read(short, "tokenizer_config.json")["model_max_length"] == POSITIONS
    unbounded = train_checkpoint("unbounded")  # sinusoidal positions
    assert "max_length" not in read(unbounded, "generation_config.json")
    assert read(unbounded, "generation_config.json")["use_cache"] is True
    assert read(unbounded, "tokenizer_config.json")["model_max_length"] > 10**9


def test_generation_length_of_recipe_is_kept(train_checkpoint):
    fields = dict(position_embedding_type="learned", max_position_embeddings=POSITIONS)
    result = read(
        train_checkpoint("named", {"max_new_tokens": 3}, **fields), "generation_config.json"
    )
    assert result["max_new_tokens"] == 3 and "max_length" not in result


def test_default_pipeline_stops_at_last_position(short):
    generator = pipeline("text-generation", str(short))
    [result] = generator("the old", do_sample=False, eos_token_id=None)
    assert len(result["generated_text"]) == POSITIONS
    with raises(ValueError, seen=("input_ids", POSITIONS, "max_length")):
        generator(TEXT[:POSITIONS])


def test_pipeline_shortens_long_prompt_with_hole_strategy(short):
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(short),
        AutoTokenizer.from_pretrained(short),
    )
    kept = tokenizer(TEXT[30 - (POSITIONS - 4) : 30], return_tensors="pt")["input_ids"]
    expected = tokenizer.decode(
        model.generate(kept, max_new_tokens=4, do_sample=False)[0, -4:], skip_special_tokens=True
    )
    generator = pipeline("text-generation", str(short))
    options = dict(max_new_tokens=4, do_sample=False, return_full_text=False)
    assert generator(TEXT[:30], handle_long_generation="hole", **options) == [
        {"generated_text": expected}
    ]


def test_runtime_stops_at_last_position_and_error_names_both_lengths(short, tmp_path):
    export(short, tmp_path / "onnx", cases=2)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(short),
        AutoTokenizer.from_pretrained(short),
    )
    ids = tokenizer("the old", return_tensors="pt")["input_ids"]
    runtime = TextRuntime(tmp_path / "onnx", threads=1).runtime
    result = runtime.generate(ids.numpy())
    np.testing.assert_array_equal(result, model.generate(ids).numpy())
    full = tokenizer(TEXT[: POSITIONS + 1], return_tensors="np", verbose=False)["input_ids"]
    for length in (POSITIONS, POSITIONS + 1):
        with raises(ValueError, seen=(length, POSITIONS)):
            runtime.generate(full[:, :length])


@pytest.fixture
def gpt2(tmp_path):
    """A function: model_max_length of the tokenizer -> GPT-2 checkpoint with 24 positions."""

    def make(longest):
        config = GPT2Config(
            vocab_size=20,
            n_embd=8,
            n_layer=1,
            n_head=2,
            n_positions=24,
            bos_token_id=1,
            eos_token_id=1,
        )
        GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
        words = Tokenizer(
            models.WordLevel({f"w{token}": token for token in range(20)}, unk_token="w0")
        )
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer_kwargs = {} if longest is None else {"model_max_length": longest}
        fast = PreTrainedTokenizerFast(
            tokenizer_object=words, extra_special_tokens=["w3"], eos_token="w1", **tokenizer_kwargs
        )
        fast.save_pretrained(tmp_path / "gpt2")
        return tmp_path / "gpt2"

    return make


@pytest.mark.parametrize("longest, expected", [(None, 24), (1024, 24), (10, 10)])
def test_converted_positions_set_max_length_and_model_max_length(gpt2, tmp_path, longest, expected):
    convert(gpt2(longest), tmp_path / "ours")
    actual = read(tmp_path / "ours", "generation_config.json")
    assert (actual["max_length"], actual["use_cache"]) == (24, True)
    assert read(tmp_path / "ours", "tokenizer_config.json")["model_max_length"] == expected


def test_convert_keeps_generation_length_of_source(gpt2, tmp_path):
    model = GPT2LMHeadModel.from_pretrained(gpt2(None))
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path / "gpt2")
    convert(tmp_path / "gpt2", tmp_path / "ours")
    result = read(tmp_path / "ours", "generation_config.json")
    assert result["max_new_tokens"] == 7 and "max_length" not in result


# -------------------------------------------------------------------------- names of transformers 4


def check_tokenizer(directory, source):
    """Check that the config uses names of transformers 4 and ids equal those of `source`."""
    config = read(directory, "tokenizer_config.json")
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not config.keys() & {"extra_special_tokens", "is_local", "local_files_only"}
    actual, expected = (
        AutoTokenizer.from_pretrained(directory),
        AutoTokenizer.from_pretrained(source),
    )
    assert actual.get_vocab() == expected.get_vocab()
    assert actual("the old dog w3 w4")["input_ids"] == expected("the old dog w3 w4")["input_ids"]
    assert actual.all_special_tokens == expected.all_special_tokens
    assert actual.extra_special_tokens == expected.extra_special_tokens


def test_train_average_and_export_write_tokenizer_class_of_transformers_4(short, tmp_path):
    steps = sorted(short.parent.glob("short-run/checkpoint-*"))
    before = tmp_path / "before"  # as a user of transformers 5 saves it
    shutil.copytree(short, before)
    AutoTokenizer.from_pretrained(short).save_pretrained(before)
    assert read(before, "tokenizer_config.json")["tokenizer_class"] == "TokenizersBackend"
    average([before, before], tmp_path / "averaged")
    export(before, tmp_path / "onnx", cases=1)
    assert steps
    for directory in (short, *steps, tmp_path / "averaged", tmp_path / "onnx"):
        check_tokenizer(directory, before)


def test_convert_both_ways_writes_tokenizer_class_of_transformers_4(gpt2, tmp_path):
    source = gpt2(None)
    assert read(source, "tokenizer_config.json")["extra_special_tokens"] == ["w3"]
    convert(source, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", to="gpt2")
    for name in ("ours", "back"):
        check_tokenizer(tmp_path / name, source)
        assert read(tmp_path / name, "tokenizer_config.json")["additional_special_tokens"] == ["w3"]
