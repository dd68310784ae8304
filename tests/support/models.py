"""Small models of every class, and what the tests of models share."""

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from vanilla_transformer import (
    VanillaDecoderConfig,
    VanillaDecoderForCausalLM,
    VanillaDecoderForQuestionAnswering,
    VanillaDecoderForSequenceClassification,
    VanillaDecoderForTokenClassification,
    VanillaDecoderModel,
    VanillaEncoderConfig,
    VanillaEncoderForMaskedLM,
    VanillaEncoderForMultipleChoice,
    VanillaEncoderForNextSentencePrediction,
    VanillaEncoderForPreTraining,
    VanillaEncoderForQuestionAnswering,
    VanillaEncoderForSequenceClassification,
    VanillaEncoderForTokenClassification,
    VanillaEncoderModel,
    VanillaSeq2SeqConfig,
    VanillaSeq2SeqForConditionalGeneration,
    VanillaSeq2SeqForQuestionAnswering,
    VanillaSeq2SeqForSequenceClassification,
    VanillaSeq2SeqModel,
    VanillaVisionForImageClassification,
    VanillaVisionModel,
)
from vanilla_transformer.configuration_vanilla_transformer import pair

V, D, HEADS, D_K, D_V, LAYERS, LENGTH = 30, 16, 2, 6, 10, 2, 6
START, END = 1, 2

AUTO_CLASSES = {
    "encoder": {
        "AutoModel": VanillaEncoderModel,
        "AutoModelForMaskedLM": VanillaEncoderForMaskedLM,
        "AutoModelForPreTraining": VanillaEncoderForPreTraining,
        "AutoModelForNextSentencePrediction": VanillaEncoderForNextSentencePrediction,
        "AutoModelForSequenceClassification": VanillaEncoderForSequenceClassification,
        "AutoModelForTokenClassification": VanillaEncoderForTokenClassification,
        "AutoModelForQuestionAnswering": VanillaEncoderForQuestionAnswering,
        "AutoModelForMultipleChoice": VanillaEncoderForMultipleChoice,
    },
    "decoder": {
        "AutoModel": VanillaDecoderModel,
        "AutoModelForCausalLM": VanillaDecoderForCausalLM,
        "AutoModelForSequenceClassification": VanillaDecoderForSequenceClassification,
        "AutoModelForTokenClassification": VanillaDecoderForTokenClassification,
        "AutoModelForQuestionAnswering": VanillaDecoderForQuestionAnswering,
    },
    "seq2seq": {
        "AutoModel": VanillaSeq2SeqModel,
        "AutoModelForSeq2SeqLM": VanillaSeq2SeqForConditionalGeneration,
        "AutoModelForSequenceClassification": VanillaSeq2SeqForSequenceClassification,
        "AutoModelForQuestionAnswering": VanillaSeq2SeqForQuestionAnswering,
    },
}
VISION = {
    "AutoModel": VanillaVisionModel,
    "AutoModelForImageClassification": VanillaVisionForImageClassification,
}
ALL = [model_class for classes in AUTO_CLASSES.values() for model_class in classes.values()]
ENCODERS = list(AUTO_CLASSES["encoder"].values())
BASE = [VanillaEncoderModel, VanillaDecoderModel, VanillaSeq2SeqModel]
LANGUAGE_MODELS = [
    VanillaEncoderForMaskedLM,
    VanillaDecoderForCausalLM,
    VanillaSeq2SeqForConditionalGeneration,
]
GENERATIVE = LANGUAGE_MODELS[1:]
# their decoder has the same input
READS_TWICE = (VanillaSeq2SeqForSequenceClassification, VanillaSeq2SeqForQuestionAnswering)
QA_MODELS = [
    VanillaEncoderForQuestionAnswering,
    VanillaDecoderForQuestionAnswering,
    VanillaSeq2SeqForQuestionAnswering,
]
STRONG = dict(initializer_range=0.3)  # makes attention far from uniform
# FlashAttention needs values as wide as keys. Like flex attention, it takes no position bias.
FLASH = dict(d_v=D_K, **STRONG)
SOURCE_MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
TARGET_MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
CONFIGS = [VanillaEncoderConfig, VanillaDecoderConfig, VanillaSeq2SeqConfig]


def short_name(model_class):
    return model_class.__name__.removeprefix("Vanilla")


def over(classes):
    return pytest.mark.parametrize("model_class", classes, ids=short_name)


every_config = pytest.mark.parametrize("config_class", CONFIGS, ids=lambda c: c.model_type)
attentions = pytest.mark.parametrize("attention", ["eager", "sdpa"])


def build(model_class, attention="sdpa", **changes):
    """Return a small model in evaluation mode, with d_k != d_v and biases and norms that matter.

    `attention` is its implementation of attention, and `changes` are fields of its config.
    """
    is_pair = model_class.config_class is VanillaSeq2SeqConfig
    depth = (
        dict(encoder_layers=LAYERS, decoder_layers=LAYERS)
        if is_pair
        else dict(num_hidden_layers=LAYERS)
    )
    sizes = (
        dict(
            vocab_size=V, d_model=D, d_ff=20, h=HEADS, d_k=D_K, d_v=D_V, max_position_embeddings=20
        )
        | depth
    )
    # its head reads the state at an end token
    if model_class is not VanillaSeq2SeqForSequenceClassification:
        sizes |= dict(eos_token_id=None)  # tests set the length of generated sequences
    model = model_class(model_class.config_class(**sizes | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "relative_positions" in name:
                parameter += torch.empty_like(parameter).uniform_(-0.3, 0.3)
    model.set_attn_implementation(attention)
    return model.eval()


def decoder_half(pair, model_class, attention="sdpa"):
    """Return the decoder of the encoder-decoder model `pair` as a `model_class` with its
    weights."""
    body = getattr(pair, "model", pair)
    config = VanillaDecoderConfig(**pair.config.to_dict() | dict(
        model_type="vanilla-decoder", is_encoder_decoder=False,
        num_hidden_layers=pair.config.decoder_layers, add_cross_attention=True, auto_map=None,
        architectures=None,
    ))  # fmt: skip
    decoder = model_class(config).eval()
    decoder.set_attn_implementation(attention)
    weights = body.decoder.state_dict()
    if model_class is VanillaDecoderForCausalLM:
        head = {
            name: tensor for name, tensor in pair.state_dict().items() if name.startswith("lm_head")
        }
        weights = {f"model.{name}": tensor for name, tensor in weights.items()} | head
    decoder.load_state_dict(weights)
    return decoder


# Few buckets, so that short sequences reach the logarithmic ones and what is beyond.
RELATIVE = dict(
    position_embedding_type="relative",
    relative_attention_num_buckets=8,
    relative_attention_max_distance=5,
)
POSITIONS = {
    "sinusoidal": dict(position_embedding_type="sinusoidal"),
    "learned": dict(position_embedding_type="learned"),
    "rotary": dict(position_embedding_type="rotary"),
    "relative": RELATIVE,
    "none": dict(position_embedding_type="none"),
    "window": dict(sliding_window=3),
    "rotary, window": dict(position_embedding_type="rotary", sliding_window=3),
    "relative, window": dict(sliding_window=3, **RELATIVE),
}
positions = pytest.mark.parametrize("changes", POSITIONS.values(), ids=list(POSITIONS))


def is_pair(model):
    return model.config.is_encoder_decoder


def tokens(rows=3, length=LENGTH):
    return torch.randint(3, V, (rows, length))


def inputs(model, rows=3):
    """Return the minimum arguments of `forward`, random, for `rows` inputs."""
    if model.main_input_name == "pixel_values":
        return dict(
            pixel_values=torch.randn(
                rows, model.config.num_channels, *pair(model.config.image_size)
            )
        )
    if isinstance(model, VanillaEncoderForMultipleChoice):
        return dict(input_ids=torch.randint(3, V, (rows, 2, LENGTH)))
    arguments = dict(input_ids=tokens(rows))
    if isinstance(model, READS_TWICE):
        arguments["input_ids"][:, -1] = END
        return arguments | dict(decoder_input_ids=tokens(rows))
    return arguments | dict(decoder_input_ids=tokens(rows, 5)) if is_pair(model) else arguments


def result(outputs):
    """Return the states in the `outputs` of a base model, or the logits of a head.

    If a head has two kinds of logits, the result is (B, all of them).
    """
    if "last_hidden_state" in outputs:
        return outputs.last_hidden_state
    logits = [value for name, value in outputs.items() if name.endswith("logits")]
    return logits[0] if len(logits) == 1 else torch.cat([kind.flatten(1) for kind in logits], 1)


def assert_same(got, expected, tolerance=1e-5):
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def list_weights(model):
    """Return {name: float64 array} of the weights, for the functions of `reference.py`."""
    return {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}


def numpy(tensor):
    return tensor.detach().double().numpy()


# --------------------------------------------------------------------------------------- generation


def logits_after(model, prompt, target, **arguments):
    """Return the logits (B, V) of the next token after `prompt` and `target`, without a cache.

    In an encoder-decoder model, `prompt` is the source and `target` follows the start token.
    `arguments` are those of `forward`.
    """
    with torch.no_grad():
        if is_pair(model):
            start = torch.full((len(target), 1), START)
            return model(
                prompt,
                decoder_input_ids=torch.cat([start, target], 1),
                use_cache=False,
                **arguments,
            ).logits[:, -1]
        return model(torch.cat([prompt, target], 1), use_cache=False, **arguments).logits[:, -1]


def generated(model, prompt, **settings):
    """Generate from `prompt` and return only the new tokens. `settings` are generation options.

    No token may repeat; otherwise a random model would repeat one token and prove little.
    """
    settings = (
        dict(pad_token_id=0, decoder_start_token_id=START, max_new_tokens=8, no_repeat_ngram_size=1)
        | settings
    )
    output = model.generate(prompt, generation_config=GenerationConfig(**settings))
    return output[:, 1 if is_pair(model) else prompt.shape[1] :]


# ------------------------------------------------------------------------------------------ padding

LENGTHS = [6, 3, 5]
PADDING = 4


def padded(rows, side):
    """Return (ids, mask, positions) of `rows` of different lengths, padded on `side`.

    The padding is an ordinary token, so that reading it would show.
    """
    ids, mask = torch.full((len(rows), LENGTH), PADDING), torch.zeros(len(rows), LENGTH, dtype=int)
    for i, row in enumerate(rows):
        where = slice(0, len(row)) if side == "right" else slice(LENGTH - len(row), LENGTH)
        ids[i, where], mask[i, where] = row, 1
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


# ------------------------------------------------------------------------------------------- losses


def cross_entropy(logits, labels, divisor=None):
    """Return the mean of -log softmax(logits)[label] over the labels that are not -100.

    The sum is divided by `divisor` instead of their number, if it is passed.
    """
    total, count = 0.0, 0
    for row, label in zip(
        numpy(logits).reshape(-1, logits.shape[-1]), labels.flatten().tolist(), strict=True
    ):
        if label != -100:
            total += np.log(np.exp(row - row.max()).sum()) + row.max() - row[label]
            count += 1
    return total / (count if divisor is None else int(divisor))


def tokens_with_ends(*eos_positions):
    """Return a row for each of `eos_positions`, which are the positions of its end tokens."""
    ids = tokens(len(eos_positions))
    for row, ends in zip(ids, eos_positions, strict=True):
        row[list(ends)] = END
    return ids


def packed(rows):
    return torch.cat(rows)[None], torch.cat([torch.arange(len(row)) for row in rows])[None]


def use_attention(model, name):
    """Set the attention function of `model` without the check that its package is installed."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = name
    return model
