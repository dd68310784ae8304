"""The names and shapes of the weights that a checkpoint must have, and the check of its files
before graphs are written."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vanilla_transformer.checkpoint_config import check_depth
from vanilla_transformer.checkpoint_files import check_tensors, stored_tensors, weight_files

from ..heads import HEADS
from ..specs.sequences import axis_size, pair
from .config import Config
from .weights import CheckpointWeights, tied_names

Shape = tuple[int, ...]
Shapes = Iterator[tuple[str, Shape]]  # names of weights without the prefix "model."
# Of activations that have weights: their shapes by what follows "activation." in their names.
ACTIVATIONS: dict[str, dict[str, Shape]] = {
    "prelu": {"weight": (1,)},
    "xielu": {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()},
}
CLASSIFIERS = (
    "SequenceClassification",
    "MultipleChoice",
    "TokenClassification",
    "QuestionAnswering",
)


def load_checked_weights(checkpoint: Path, config: Config) -> CheckpointWeights:
    """Return the weights in `checkpoint`, after a check of its files that needs no torch.

    Raises:
        FileNotFoundError: without safetensors weights.
        ValueError: for files that are damaged, and for weights that are missing, too many, of other
            shapes or not finite.
    """
    stored = {
        name: facts
        for file in weight_files(checkpoint)
        for name, facts in stored_tensors(file).items()
    }
    check_depth(config, stored, checkpoint)
    check_tensors(
        config.architecture, expected_weights(config), tied_names(config), stored, checkpoint
    )
    weights = CheckpointWeights(checkpoint, config)
    for name in stored:
        check_finite(name, weights[name], checkpoint)
    return weights


def check_finite(name: str, values: np.ndarray, where: Path) -> None:
    with np.errstate(all="ignore"):
        is_finite = np.isfinite(values.sum())  # also false for finite values whose sum is too large
    wrong = 0 if is_finite else values.size - int(np.isfinite(values).sum())
    if wrong:
        raise ValueError(
            f"{name} of {where} has {wrong} of {values.size} values that are NaN or infinite"
        )


def expected_weights(config: Config) -> dict[str, Shape]:
    """Return {name: shape} of the weights of a model with this config. Names have no prefix
    "model."."""
    body = vision(config) if config.model_type == "vanilla-vision" else tokens(config)
    return dict([*body, *pooler(config), *head(config)])


# ------------------------------------------------------------------------------------------- stacks


def tokens(config: Config) -> Shapes:
    """Yield (name, shape) of the weights of the stacks that read tokens."""
    *others, last = ("encoder.", "decoder.") if config.is_seq2seq else ("",)
    for prefix in (*others, last):
        yield from stack(config, prefix)
    if config.model_type != "vanilla-encoder" and config.embedding_size != config.hidden_size:
        yield from linear(
            f"{last}output_projection", config.hidden_size, config.embedding_size, has_bias=False
        )


def vision(config: Config) -> Shapes:
    size, count = config.hidden_size, config.num_first_tokens
    yield from linear(
        "embeddings.embed_patches", config.num_channels * math.prod(pair(config.patch_size)), size
    )
    yield "embeddings.first_tokens", (count, size)
    yield "embeddings.positions", (count + math.prod(config.grid), size)
    yield from layers(config, "")


def pooler(config: Config) -> Shapes:
    """Yield (name, shape) of the weights of the pooler, if the head reads the first token's state
    through one."""
    is_pooled = HEADS[config.architecture].is_pooled
    if config.head in ("SequenceClassification", "MultipleChoice"):
        is_pooled = getattr(config, "classifier_pooling", None) == "cls"
    act = getattr(config, "pooler_act", None)
    if is_pooled and act:
        yield from linear("pooler.dense", config.hidden_size, config.hidden_size)
        yield from activation("pooler", act)


def stack(config: Config, prefix: str) -> Shapes:
    yield from embeddings(config, f"{prefix}embeddings")
    if config.has_relative_positions:
        buckets = config.relative_attention_num_buckets
        yield f"{prefix}relative_positions.bias.weight", (buckets, config.num_attention_heads)
    if config.has_disentangled_positions:
        buckets, size = 2 * config.relative_attention_num_buckets, config.hidden_size
        yield f"{prefix}relative_positions.embed.weight", (buckets, size)
        yield from norm(config, f"{prefix}relative_positions.norm", size)
    yield from layers(config, prefix)


def embeddings(config: Config, name: str) -> Shapes:
    yield f"{name}.embed_tokens.weight", (config.vocab_size, config.embedding_size)
    if config.has_learned_positions:
        rows = config.max_position_embeddings + (config.position_ids_from != "place")
        yield f"{name}.embed_positions.weight", (rows, config.position_size)
    if types := getattr(config, "type_vocab_size", 0):
        yield f"{name}.embed_token_types.weight", (types, config.position_size)
    if config.embedding_norm:
        yield from norm(config, f"{name}.norm", config.position_size)
    if config.embedding_size != config.hidden_size:
        yield from linear(
            f"{name}.projection", config.embedding_size, config.hidden_size, config.embedding_norm
        )


def layers(config: Config, prefix: str) -> Shapes:
    attentions = ("self_attn", "cross_attn") if prefix == "decoder." else ("self_attn",)
    for number in range(config.depth(prefix)):
        yield from layer(config, f"{prefix}layers.{number}", attentions)
    if config.final_norm:
        yield from norm(config, f"{prefix}norm", config.hidden_size)


def layer(config: Config, name: str, attentions: tuple[str, ...]) -> Shapes:
    size, inner = config.hidden_size, config.intermediate_size
    attention_bias, linear_bias = config.attention_bias, config.linear_bias
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    widths = {
        "q": heads * config.head_dim,
        "k": key_heads * config.head_dim,
        "v": key_heads * config.value_head_dim,
    }
    for attention in attentions:
        for part, width in widths.items():
            yield from linear(f"{name}.{attention}.{part}_proj", size, width, attention_bias)
        yield from linear(
            f"{name}.{attention}.o_proj", heads * config.value_head_dim, size, attention_bias
        )
        if config.use_qk_norm:
            for part in "qk":
                yield from norm(config, f"{name}.{attention}.{part}_norm", config.head_dim)
        skips = getattr(config, "skip_first_prenorm", False) and name.endswith("layers.0")
        if not skips:
            yield from norm(config, f"{name}.{attention}_norm", size)
    for part in ("gate", "up") if config.gated else ("up",):
        yield from linear(f"{name}.feed_forward.{part}_proj", size, inner, linear_bias)
    yield from linear(f"{name}.feed_forward.down_proj", inner, size, linear_bias)
    yield from activation(f"{name}.feed_forward", config.hidden_act)
    yield from norm(config, f"{name}.feed_forward_norm", size)
    if config.sandwich_norm:
        for part in ("self_attn", "feed_forward"):
            yield from norm(config, f"{name}.{part}_output_norm", size)


# -------------------------------------------------------------------------------------------- parts


def linear(name: str, in_size: int, out_size: int, has_bias: bool = True) -> Shapes:
    yield f"{name}.weight", (out_size, in_size)
    if has_bias:
        yield f"{name}.bias", (out_size,)


def norm(config: Config, name: str, size: int) -> Shapes:
    yield f"{name}.weight", (size,)
    if config.norm_type == "layer_norm":
        yield f"{name}.bias", (size,)


def activation(name: str, act: str) -> Shapes:
    for part, shape in ACTIVATIONS.get(act, {}).items():
        yield f"{name}.activation.{part}", shape


# -------------------------------------------------------------------------------------------- heads


def head(config: Config) -> Shapes:
    """Yield (name, shape) of the weights of the head: first its linear layers that read states."""
    size = (
        config.hidden_size
        if config.model_type in ("vanilla-encoder", "vanilla-vision")
        else config.embedding_size
    )
    labels = len(config.id2label)
    for name, outputs in HEADS[config.architecture].linear.items():
        yield from linear(name, size, int(axis_size(outputs, config.to_dict())))
    if config.head in ("MaskedLM", "SparseEmbedding", "PreTraining"):
        yield from lm_transform(config)
    yield from classifier_transform(config)
    match config.head:
        case "MaskedLM" | "SparseEmbedding" | "PreTraining" | "CausalLM" | "ConditionalGeneration":
            yield from linear(
                "lm_head", config.embedding_size, config.vocab_size, config.lm_head_bias
            )
        case "ImageClassification":
            yield from linear("classifier", config.num_first_tokens * size, labels)
        case "SequenceClassification" if config.model_type == "vanilla-decoder":
            yield from linear("score", size, labels, has_bias=False)
        case "SequenceClassification":
            if config.is_seq2seq:
                yield from linear("dense", size, config.hidden_size)
            yield from linear("classifier", config.hidden_size, labels)


def classifier_transform(config: Config) -> Shapes:
    """Yield (name, shape) of the weights between an encoder's states and a classifier, none by
    default."""
    if config.head == "TokenClassification" and getattr(config, "token_transform_act", None):
        yield from linear("transform.0", config.hidden_size, config.hidden_size)
        for name, shape in activation("transform", config.token_transform_act):
            yield name.replace("activation", "1"), shape
    elif config.head in CLASSIFIERS and (act := getattr(config, "classifier_act", None)):
        yield from transform(config, act, config.hidden_size)


def lm_transform(config: Config) -> Shapes:
    """Yield (name, shape) of the weights between an encoder's states and the projection to the
    vocabulary.

    They map `hidden_size` to `embedding_size`. With `lm_transform_act` they are a linear layer, its
    activation and a norm. Otherwise they are one matrix, or none if the sizes are equal.
    """
    if config.lm_transform_act:
        yield from transform(config, config.lm_transform_act, config.embedding_size)
    elif config.embedding_size != config.hidden_size:
        yield from linear("transform", config.hidden_size, config.embedding_size, has_bias=False)


def transform(config: Config, act: str, size: int) -> Shapes:
    yield from linear("transform.dense", config.hidden_size, size)
    yield from activation("transform", act)
    yield from norm(config, "transform.norm", size)
