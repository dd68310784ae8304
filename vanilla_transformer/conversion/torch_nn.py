"""Conversion of torch.nn.TransformerEncoder, TransformerDecoder and Transformer.

Their queries, keys and values are one matrix. The caller states what a state dict lacks: heads,
order of norms, activation, embeddings.
"""

import dataclasses
import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel

from .. import configuration_vanilla_transformer as configurations
from .. import modeling_vanilla_transformer as models
from ..checkpoint_config import CONFIGS, check_depth
from ..checkpoint_files import one_line, parent_hint
from ..errors import UsageError
from ..files import check_no_pointer
from .fields import Fields
from .tensors import TensorFiles

Tensors = dict[str, torch.Tensor]
EMBEDDINGS = ("embed_tokens", "embed_positions", "decoder_embed_tokens", "decoder_embed_positions")
ENCODER_NAMES = {
    "linear1": "feed_forward.up_proj",
    "linear2": "feed_forward.down_proj",
    "norm1": "self_attn_norm",
    "norm2": "feed_forward_norm",
}
DECODER_NAMES = ENCODER_NAMES | {"norm2": "cross_attn_norm", "norm3": "feed_forward_norm"}
ATTENTION = re.compile(
    r"(layers\.\d+)\.(self_attn|multihead_attn)\.(in_proj_|out_proj\.)(weight|bias)"
)
LAYER = re.compile(r"layers\.\d+\.(self_attn\.in_proj_|linear1\.)")
OTHER_PARTS = re.compile(r"(layers\.\d+)\.(\w+)\.(weight|bias)")


def from_torch(
    state_dict: Tensors, num_attention_heads: int, embeddings: Tensors, **fields: Any
) -> PreTrainedModel:
    """Return a model with the weights of a torch module, in evaluation mode.

    It is a `VanillaEncoderModel`, a `VanillaDecoderModel` (with cross-attention) or a
    `VanillaSeq2SeqModel`.

    Args:
        state_dict: of `torch.nn.TransformerEncoder`, `TransformerDecoder` or `Transformer`.
        num_attention_heads: the module's `nhead`.
        embeddings: `embed_tokens` (V, D), and `decoder_embed_tokens` (V, D) if the target has its
            own. Learned positions are `embed_positions` and `decoder_embed_positions`, (positions,
            D). If `position_ids_from` is not `"place"`, their first row is for padding.
        fields: config fields of the module, such as `norm_first`, `hidden_act` (its `activation`,
            `"relu"` by default) and `layer_norm_eps`, and of its inputs, such as `scale_embedding`,
            `position_embedding_type` and token ids.

    Raises:
        UsageError: for unknown config fields and invalid values.
        ValueError: for unknown or missing tensors, and for unknown embeddings or other shapes.
    """
    check_matrices(state_dict, embeddings)
    stacks = split_stacks(state_dict)
    weights = {}
    for side, tensors in stacks.items():
        weights |= {f"{side}{name}": tensor for name, tensor in stack_weights(tensors).items()}
        weights |= embedding_weights(embeddings, side)
    inferred = shape_fields(state_dict, stacks) | embedding_fields(embeddings, fields)
    if "encoder." in stacks:
        inferred["tie_word_embeddings"] = "decoder_embed_tokens" not in embeddings
    return build(inferred | {"num_attention_heads": num_attention_heads} | fields, weights)


def check_state_dict(file: Path) -> None:
    """Raise ValueError unless the names in `file` are those of a torch.nn.Transformer's state dict.

    It is raised for a file without tensors, and for tensors of another library, such as the weights
    of a checkpoint.
    """
    check_no_pointer(file)
    expected = (
        f"expected a checkpoint directory{parent_hint(file)}, or the file of a "
        "torch.nn.Transformer's state dict"
    )
    try:
        names = list(TensorFiles(file).shapes)
    except ValueError as error:
        raise ValueError(f"{file} is a file without tensors, {expected}: {error}") from None
    if not any(LAYER.search(name) for name in names):
        raise ValueError(
            f"{file} is a file with the tensors {', '.join(names[:3])[:200]} ..., {expected}"
        )


def check_matrices(state_dict: Tensors, embeddings: Tensors) -> None:
    if unknown := embeddings.keys() - set(EMBEDDINGS):
        raise ValueError(
            f"unknown embeddings {sorted(unknown)}, expected some of {', '.join(EMBEDDINGS)}"
        )
    if "embed_tokens" not in embeddings:
        raise ValueError(f"embed_tokens is missing from the embeddings, got {sorted(embeddings)}")
    first_maps = {
        name: tensor for name, tensor in state_dict.items() if name.endswith("linear1.weight")
    }
    for name, tensor in [*embeddings.items(), *first_maps.items()]:
        if tensor.dim() != 2 or not tensor.is_floating_point():
            raise ValueError(
                f"{name} is {list(tensor.shape)}, {tensor.dtype}, expected a matrix of "
                f"floating point"
            )


def split_stacks(state_dict: Tensors) -> dict[str, Tensors]:
    """Return {prefix: tensors without the prefix} of each stack in `state_dict`.

    The prefixes are "encoder." and "decoder.", or "" for a single stack. Raises ValueError for
    names outside of the stacks, no layers, or a final norm in only one stack.
    """
    is_encoder_decoder = any(name.startswith("encoder.") for name in state_dict)
    sides = ("encoder.", "decoder.") if is_encoder_decoder else ("",)
    stray = [name for name in state_dict if not name.startswith(sides)]
    if stray:
        raise ValueError(
            f"unknown tensors {', '.join(stray)}, expected those of a torch.nn.Transformer: leave "
            "them out of the state dict, and pass embeddings separately (--embeddings)"
        )
    if not any(".linear1.weight" in name for name in state_dict):
        raise ValueError(
            f"the state dict has no layers, expected names as layers.0.linear1.weight, got "
            f"{sorted(state_dict)[:5]}"
        )
    stacks = {
        side: {n.removeprefix(side): t for n, t in state_dict.items() if n.startswith(side)}
        for side in sides
    }
    if len({"norm.weight" in tensors for tensors in stacks.values()}) > 1:
        raise ValueError("only one of encoder and decoder has a final norm, expected both or none")
    return stacks


def shape_fields(state_dict: Tensors, stacks: dict[str, Tensors]) -> Fields:
    depths = {
        side: len({n.split(".")[1] for n in t if n.startswith("layers.")})
        for side, t in stacks.items()
    }
    names = {"": "num_hidden_layers", "encoder.": "encoder_layers", "decoder.": "decoder_layers"}
    return {names[side]: depth for side, depth in depths.items()} | {
        "intermediate_size": next(
            len(t) for n, t in state_dict.items() if n.endswith("linear1.weight")
        ),
        "final_norm": all("norm.weight" in tensors for tensors in stacks.values()),
        "linear_bias": any(name.endswith("linear1.bias") for name in state_dict),
    }


def embedding_fields(embeddings: Tensors, config_fields: Fields) -> Fields:
    vocab_size, hidden_size = embeddings["embed_tokens"].shape
    fields = {"vocab_size": vocab_size, "hidden_size": hidden_size}
    if "embed_positions" in embeddings:
        padding_rows = config_fields.get("position_ids_from", "place") != "place"
        fields["position_embedding_type"] = "learned"
        fields["max_position_embeddings"] = len(embeddings["embed_positions"]) - padding_rows
    return fields


def embedding_weights(embeddings: Tensors, side: str) -> Tensors:
    """Return {our name: embedding table} of one stack.

    `side` is the prefix of the stack's names: "encoder.", "decoder." or "". A decoder without its
    own table gets the encoder's.
    """
    weights = {}
    for name in ("embed_tokens", "embed_positions"):
        decoder_table = embeddings.get(f"decoder_{name}") if side == "decoder." else None
        table = embeddings.get(name) if decoder_table is None else decoder_table
        if table is not None:
            weights[f"{side}embeddings.{name}.weight"] = table
    return weights


def stack_weights(tensors: Tensors) -> Tensors:
    """Return the weights of one stack, the `tensors` of a torch module, under our names. Raises
    ValueError for unknown names."""
    names = DECODER_NAMES if any(".multihead_attn." in name for name in tensors) else ENCODER_NAMES
    weights = {}
    for name, tensor in tensors.items():
        if match := ATTENTION.fullmatch(name):
            weights |= attention_weights(match, tensor)
        elif (match := OTHER_PARTS.fullmatch(name)) and match[2] in names:
            weights[f"{match[1]}.{names[match[2]]}.{match[3]}"] = tensor
        elif name in ("norm.weight", "norm.bias"):
            weights[name] = tensor
        else:
            raise ValueError(f"unknown tensor {name}, expected those of a torch.nn.Transformer")
    # without biases, torch's norms have none either
    for name in [name for name in weights if name.endswith("norm.weight")]:
        weights.setdefault(name.replace("weight", "bias"), torch.zeros_like(weights[name]))
    return weights


def attention_weights(match: re.Match[str], tensor: torch.Tensor) -> Tensors:
    layer, their_name, projection, part = match.groups()
    attention = f"{layer}.{'cross_attn' if their_name == 'multihead_attn' else their_name}"
    if projection == "out_proj.":
        return {f"{attention}.o_proj.{part}": tensor}
    if tensor.dim() == 0 or len(tensor) % 3 or not len(tensor):
        raise ValueError(
            f"{match[0]} has the shape {list(tensor.shape)}, expected one matrix for queries, keys "
            "and values, with a multiple of 3 rows: convert an unchanged state dict of "
            "torch.nn.Transformer"
        )
    return {f"{attention}.{p}_proj.{part}": t for p, t in zip("qkv", tensor.chunk(3), strict=True)}


def check_fields(fields: Iterable[str], *config_classes: type[PreTrainedConfig]) -> None:
    """Raise UsageError for a name in `fields` that is no field of any of `config_classes`.

    The default are all configs of this project. Fields that every config of transformers has are
    not accepted either.
    """
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    known = {
        name for config in config_classes or CONFIGS.values() for name in config.field_names()
    } - common
    for name in fields:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise UsageError(
                f"unknown config field {name!r}"
                + (f"; did you mean {close[0]!r}?" if close else "")
            )


def build(fields: Fields, weights: Tensors) -> PreTrainedModel:
    """Return the model of `weights` in evaluation mode; their names determine its variant.

    `fields` are those of its config; a decoder's get `add_cross_attention`. Raises UsageError for
    unknown or invalid fields, and ValueError for weights that do not fit the config.
    """
    if any(name.startswith("encoder.") for name in weights):
        variant = "Seq2Seq"
    elif any(".cross_attn." in name for name in weights):
        variant = "Decoder"
        fields["add_cross_attention"] = True
    else:
        variant = "Encoder"
    config_class = getattr(configurations, f"Vanilla{variant}Config")
    check_fields(fields, config_class)
    try:
        config = config_class(**fields)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise UsageError(one_line(error)) from None
    check_depth(
        config,
        {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()},
        "the state dict",
    )
    with torch.device("meta"):
        model = getattr(models, f"Vanilla{variant}Model")(config)
    check_weights(model, weights)
    model.load_state_dict({name: tensor.clone() for name, tensor in weights.items()}, assign=True)
    model.tie_weights()
    config.dtype = model.get_input_embeddings().weight.dtype
    return model.eval()


def check_weights(model: PreTrainedModel, weights: Tensors) -> None:
    """Raise ValueError unless `weights` have the names and shapes of the model's state dict."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for what, names in (
        ("missing", expected.keys() - weights.keys()),
        ("unknown", weights.keys() - expected.keys()),
    ):
        if names:
            raise ValueError(
                f"{what} tensors of a {type(model).__name__}: {', '.join(sorted(names))}"
            )
    for name, tensor in weights.items():
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {expected[name]}")
