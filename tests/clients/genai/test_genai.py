"""Tests of onnxruntime-genai with exported decoders.

Tokens match torch. The tokenizer of genai matches ours if it supports it.
"""

import functools
from pathlib import Path

import numpy as np
import onnxruntime_genai as genai
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import vanilla_transformer as vanilla
from vanilla_transformer.conversion import convert
from vanilla_transformer.training.tokenizer import train_tokenizer
from vanilla_transformer_export import Runtime, export

CARD = Path(__file__).parents[3] / "model_cards/vanilla-decoder-tiny-shakespeare"
LINES = [
    "the film wins and the cast shines, but the plot bores.",
    "naïve cafés; Äpfel, 1234 oder 3.5",
    "don't we'll",
] * 4
TEXTS = [
    "the film",
    "  two  spaces ",
    "Äpfel, naïve café 東京 🙂",
    "don't we'll 1234 3.5",
    "tab\tand\nline\n\n end ",
    "A.B,C",
]
SIZES = dict(
    hidden_size=24,
    intermediate_size=32,
    num_attention_heads=2,
    num_hidden_layers=2,
    max_position_embeddings=40,
)
WIDTHS = dict(head_dim=10, value_head_dim=10)
# name: fields of the config, fields of the generation config
MODELS = {
    "learned": (dict(position_embedding_type="learned"), {}),
    "rotary": (dict(position_embedding_type="rotary", **WIDTHS), dict(repetition_penalty=1.5)),
    "grouped": (
        dict(position_embedding_type="rotary", num_key_value_heads=1, use_qk_norm=True, **WIDTHS),
        {},
    ),
    "relative": (
        dict(position_embedding_type="relative", pad_token_id=None),
        dict(eos_token_id=[2, 7]),
    ),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a function: a name of `MODELS`, "card" or "gpt2" -> the checkpoint and its export."""
    root = tmp_path_factory.mktemp("genai")

    @functools.cache
    def make(name):
        checkpoint = CARD if name == "card" else root / name
        if name == "gpt2":
            transformers.set_seed(0)
            sizes = dict(
                vocab_size=300,
                n_embd=24,
                n_head=2,
                n_layer=2,
                n_positions=40,
                initializer_range=0.3,
            )
            gpt2 = transformers.GPT2LMHeadModel(
                transformers.GPT2Config(**sizes, bos_token_id=2, eos_token_id=2)
            )
            gpt2.save_pretrained(root / "source")
            train_tokenizer(LINES, 300, "byte-bpe").save_pretrained(root / "source")
            convert(root / "source", checkpoint)
        elif name != "card":
            save(name, checkpoint)
        export(checkpoint, root / f"{name}-export", cases=2)
        return checkpoint, root / f"{name}-export"

    return make


def save(name, path):
    fields, generation = MODELS[name]
    transformers.set_seed(0)
    tokenizer = train_tokenizer(LINES, 300, "byte-bpe")
    model = vanilla.VanillaDecoderForCausalLM(
        vanilla.VanillaDecoderConfig(vocab_size=300, **SIZES, **fields)
    )
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.generation_config.update(**generation)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def generate_tokens(directory, prompt, max_length):
    """Return all tokens of each row of `prompt` (B, T), which is right-padded."""
    parameters = genai.GeneratorParams(genai.Model(str(directory)))
    parameters.set_search_options(max_length=max_length, batch_size=len(prompt))
    generator = genai.Generator(genai.Model(str(directory)), parameters)
    generator.append_tokens(np.array(prompt, np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [generator.get_sequence(row).tolist() for row in range(len(prompt))]


@pytest.mark.parametrize("name", ["card", "gpt2", *MODELS])
def test_greedy_tokens_match_torch(exported, name):
    checkpoint, directory = exported(name)
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    for prompt in ([5], [9, 12, 30, 8], [11, 6, 44, 13, 27, 5, 60]):
        expected = model.generate(
            torch.tensor([prompt]), do_sample=False, max_length=30, max_new_tokens=None
        )[0].tolist()
        assert generate_tokens(directory, [prompt], 30) == [expected]


@pytest.mark.parametrize("name", ["card", "learned"])
def test_ragged_batch_matches_single_rows(exported, name):
    _, directory = exported(name)
    rows = [[5, 9], [12, 30, 8, 6, 44]]
    # genai reads padding on the left as tokens
    padded = [row + [0] * (5 - len(row)) for row in rows]
    outputs = generate_tokens(directory, padded, 20)
    for row, prompt, output in zip(rows, padded, outputs, strict=True):
        new = output[len(prompt) :]
        alone = generate_tokens(directory, [row], 20 - len(prompt) + len(row))[0][len(row) :]
        assert new[: len(alone)] == alone and not any(new[len(alone) :])


def test_int8_tokens_match_runtime(exported, tmp_path):
    checkpoint, _ = exported("learned")
    export(checkpoint, tmp_path / "out", cases=2, dtype="int8")
    expected = Runtime(tmp_path / "out").generate(np.array([[9, 12, 30, 8]]), max_new_tokens=20)
    assert generate_tokens(tmp_path / "out", [[9, 12, 30, 8]], 24) == expected.tolist()


@pytest.mark.parametrize("name", ["learned", "gpt2"])
def test_genai_tokenizer_matches_ours_if_supported(exported, name):
    _, directory = exported(name)
    theirs, ours = (
        genai.Tokenizer(genai.Model(str(directory))),
        Tokenizer.from_file(str(directory / "tokenizer.json")),
    )
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert theirs.encode(text).tolist() == ids
        assert theirs.decode(np.array(ids, np.int32)) == ours.decode(ids) == text


def test_genai_tokenizer_raises_if_unsupported(exported):
    with pytest.raises(RuntimeError, match="no-tokenizer"):
        genai.Tokenizer(genai.Model(str(exported("card")[1])))
