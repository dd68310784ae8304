"""Small models of each kind for the targets that have operators of their own, and prompts for
them."""

import collections

import numpy as np
import onnx
import pytest
from checkpoints import EOS, PAD, perturbed

SIZES = dict(vocab_size=48, hidden_size=32, intermediate_size=40, num_attention_heads=4)
LEARNED = dict(
    position_embedding_type="learned",
    max_position_embeddings=60,
    norm_first=True,
    linear_bias=False,
)
# Few buckets, so that short sequences reach the logarithmic ones and what is beyond.
RELATIVE = dict(
    position_embedding_type="relative",
    relative_attention_num_buckets=8,
    relative_attention_max_distance=5,
)
# As T5 v1.1: heads that together are wider than the residual stream.
T5 = dict(
    **RELATIVE, norm_type="rms_norm", norm_first=True, gated=True, hidden_act="gelu_new",
    linear_bias=False, head_dim=12, scale_embedding=False,
)  # fmt: skip
MODELS = {
    "seq2seq": ("VanillaSeq2SeqForConditionalGeneration", dict(encoder_layers=1, decoder_layers=2)),
    "causal": ("VanillaDecoderForCausalLM", dict(num_hidden_layers=2, **LEARNED)),
    "causal-window": (
        "VanillaDecoderForCausalLM",
        dict(
            num_hidden_layers=1,
            position_embedding_type="rotary",
            sliding_window=5,
            tie_word_embeddings=False,
        ),
    ),
    "causal-grouped": (
        "VanillaDecoderForCausalLM",
        dict(
            num_hidden_layers=2,
            num_key_value_heads=2,
            use_qk_norm=True,
            norm_first=True,
            sandwich_norm=True,
            position_embedding_type="rotary",
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={
                "sliding_attention": {"rope_theta": 50.0},
                "full_attention": {"rope_theta": 500.0},
            },
        ),
    ),
    "encoder": (
        "VanillaEncoderForPreTraining",
        dict(
            num_hidden_layers=2, type_vocab_size=2, pooler_act="tanh", head_dim=6, value_head_dim=10
        ),
    ),
    "seq2seq-t5": (
        "VanillaSeq2SeqForConditionalGeneration",
        dict(encoder_layers=1, decoder_layers=2, **T5),
    ),
    "causal-relative": (
        "VanillaDecoderForCausalLM",
        dict(num_hidden_layers=2, sliding_window=5, **RELATIVE),
    ),
    "encoder-relative": ("VanillaEncoderForMaskedLM", dict(num_hidden_layers=2, **RELATIVE)),
}
# Values that are not as wide as keys, and grouped keys beside a source, for which the cpu target's
# decoders have no operator.
NOT_ON_CPU = {
    "causal-values": (
        "VanillaDecoderForCausalLM",
        dict(num_hidden_layers=2, **LEARNED, head_dim=8, value_head_dim=12),
    ),
    "seq2seq-values": (
        MODELS["seq2seq"][0],
        dict(encoder_layers=1, decoder_layers=2, head_dim=8, value_head_dim=12),
    ),
    "seq2seq-grouped": (
        MODELS["seq2seq"][0],
        dict(encoder_layers=1, decoder_layers=2, num_key_value_heads=2, use_qk_norm=True),
    ),
}
# Attention adds something to their scores.
WITH_BIAS = ["seq2seq-t5", "causal-relative", "encoder-relative"]
GENERATORS = ["seq2seq", "causal", "causal-window", "causal-grouped"]
generators = pytest.mark.parametrize("name", GENERATORS)
SEQ2SEQ = ("seq2seq", "seq2seq-t5", "seq2seq-values", "seq2seq-grouped")
FILES = dict.fromkeys(SEQ2SEQ, ("onnx/encoder_model.onnx", "onnx/decoder_model_merged.onnx"))


def exports_for(target):
    """Return a fixture: a function from a name of `MODELS` and a dtype to an `Exported` for
    `target`."""

    @pytest.fixture(scope="module")
    def exported(exported_for):
        return lambda name, dtype="fp32": exported_for(name, target, dtype)

    return exported


def build(name):
    architecture, fields = (MODELS | NOT_ON_CPU)[name]
    model = perturbed(architecture, {**SIZES, **fields})
    if model.can_generate():
        model.lm_head.bias.data[EOS] += 1.5  # makes rows end at different times
    return model


def graph(directory, name, role=-1):
    return onnx.load(directory / FILES.get(name, ("onnx/model.onnx",))[role]).graph


def ops(model):
    return collections.Counter(node.op_type for node in model.node)


def prompts(name, seed=0):
    """Return random ids and mask (4, 7) of rows of several lengths for the model `name`.

    Sources are padded on the right, prompts of a decoder on the left.
    """
    rng, lengths = np.random.default_rng(seed), [7, 1, 4, 6]
    ids, mask = np.full((4, 7), PAD), np.zeros((4, 7), np.int64)
    for row, length in enumerate(lengths):
        real = slice(0, length) if name in FILES else slice(7 - length, 7)
        ids[row, real], mask[row, real] = rng.integers(4, 48, length), 1
    return ids, mask
