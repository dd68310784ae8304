"""torch.nn.TransformerEncoder, TransformerDecoder and Transformer: queries, keys and values are one matrix; what a state dict
does not hold (heads, order of norms, activation, embeddings) is given."""

import dataclasses
import difflib
import re

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel

from .. import configuration_vanilla_transformer as configurations
from .. import modeling_vanilla_transformer as models
from ..checkpoint import CONFIGS, check_depth, one_line
from ..errors import UsageError

EMBEDDINGS = ("embed_tokens", "embed_positions", "decoder_embed_tokens", "decoder_embed_positions")
ENCODER_NAMES = {
    "linear1": "feed_forward.up_proj",
    "linear2": "feed_forward.down_proj",
    "norm1": "self_attn_norm",
    "norm2": "feed_forward_norm",
}
DECODER_NAMES = ENCODER_NAMES | {"norm2": "cross_attn_norm", "norm3": "feed_forward_norm"}


def from_torch(
    state_dict: dict[str, torch.Tensor], num_attention_heads: int, embeddings: dict[str, torch.Tensor], **fields
) -> PreTrainedModel:
    """A `VanillaEncoderModel`, a `VanillaDecoderModel` (with cross-attention) or a `VanillaSeq2SeqModel` with the weights of
    a torch module, in evaluation mode.

    Args:
        state_dict: of `torch.nn.TransformerEncoder`, `TransformerDecoder` or `Transformer`.
        num_attention_heads: the module's `nhead`.
        embeddings: `embed_tokens` (V, D), and `decoder_embed_tokens` (V, D) if the target has its own; `embed_positions`
            (and `decoder_embed_positions`), (positions, D), if positions are learned; with one more row in front, that of
            padding, if `position_ids_from` is not `"place"`.
        fields: config fields that hold for the module: `norm_first`, `hidden_act` (its `activation`, `"relu"` by default),
            `layer_norm_eps`; and for how it was fed: `scale_embedding`, `position_embedding_type`, token ids ...

    Raises:
        UsageError: for fields that no config has, or whose values it refuses.
        ValueError: for tensors of none of the three modules, missing tensors, and embeddings that are unknown or of other
            shapes.
    """
    if unknown := embeddings.keys() - set(EMBEDDINGS):
        raise ValueError(f"unknown embeddings {sorted(unknown)}, expected some of {', '.join(EMBEDDINGS)}")
    if "embed_tokens" not in embeddings:
        raise ValueError(f"embed_tokens is missing from the embeddings, got {sorted(embeddings)}")
    for name, tensor in [*embeddings.items(), *((n, t) for n, t in state_dict.items() if n.endswith("linear1.weight"))]:
        if tensor.dim() != 2 or not tensor.is_floating_point():
            raise ValueError(f"{name} is {list(tensor.shape)}, {tensor.dtype}, expected a matrix of floating point")
    is_pair = any(name.startswith("encoder.") for name in state_dict)
    sides = ("encoder.", "decoder.") if is_pair else ("",)
    stacks = {side: {n.removeprefix(side): t for n, t in state_dict.items() if n.startswith(side)} for side in sides}
    if is_pair and (stray := [name for name in state_dict if not name.startswith(sides)]):
        raise ValueError(f"{', '.join(stray)} belongs to no torch.nn.Transformer")
    if not any(".linear1.weight" in name for name in state_dict):
        raise ValueError(
            f"the state dict has no layers, expected names as layers.0.linear1.weight, got {sorted(state_dict)[:5]}"
        )
    final_norms = {"norm.weight" in tensors for tensors in stacks.values()}
    if len(final_norms) > 1:
        raise ValueError("only one of encoder and decoder has a final norm, expected both or none")

    weights = {}
    for side, tensors in stacks.items():
        weights |= {f"{side}{name}": tensor for name, tensor in stack_weights(tensors).items()}
        for name in ("embed_tokens", "embed_positions"):
            table = embeddings.get(f"decoder_{name}") if side == "decoder." else None
            table = embeddings.get(name) if table is None else table
            if table is not None:
                weights[f"{side}embeddings.{name}.weight"] = table
    depths = {side: len({n.split(".")[1] for n in t if n.startswith("layers.")}) for side, t in stacks.items()}
    found = {
        "vocab_size": len(embeddings["embed_tokens"]),
        "hidden_size": embeddings["embed_tokens"].shape[-1],
        "num_attention_heads": num_attention_heads,
        "intermediate_size": next(len(t) for n, t in state_dict.items() if n.endswith("linear1.weight")),
        "final_norm": final_norms.pop(),
        "linear_bias": any(name.endswith("linear1.bias") for name in state_dict),
    }
    if "embed_positions" in embeddings:
        of_padding = fields.get("position_ids_from", "place") != "place"
        found |= {"position_embedding_type": "learned"}
        found |= {"max_position_embeddings": len(embeddings["embed_positions"]) - of_padding}
    if is_pair:
        found |= {"encoder_layers": depths["encoder."], "decoder_layers": depths["decoder."]}
        found["tie_word_embeddings"] = "decoder_embed_tokens" not in embeddings
    else:
        found["num_hidden_layers"] = depths[""]
    return build(is_pair, found | fields, weights)


def stack_weights(tensors):
    """Of one stack, under our names."""
    is_decoder = any(".multihead_attn." in name for name in tensors)
    names = DECODER_NAMES if is_decoder else ENCODER_NAMES
    found = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(layers\.\d+)\.(self_attn|multihead_attn)\.(in_proj_|out_proj\.)(weight|bias)", name):
            layer, attention, projection, part = match.groups()
            attention = f"{layer}.{'cross_attn' if attention == 'multihead_attn' else attention}"
            if projection == "out_proj.":
                found[f"{attention}.o_proj.{part}"] = tensor
            else:
                if tensor.dim() == 0 or len(tensor) % 3 or not len(tensor):
                    raise ValueError(f"{name} has the shape {list(tensor.shape)}, expected queries, keys and values in one")
                found |= {f"{attention}.{p}_proj.{part}": t for p, t in zip("qkv", tensor.chunk(3), strict=True)}
        elif match := re.fullmatch(r"(layers\.\d+)\.(\w+)\.(weight|bias)", name):
            layer, their_name, part = match.groups()
            if their_name not in names:
                raise ValueError(f"{name} belongs to no torch.nn.Transformer")
            found[f"{layer}.{names[their_name]}.{part}"] = tensor
        elif name in ("norm.weight", "norm.bias"):
            found[name] = tensor
        else:
            raise ValueError(f"{name} belongs to no torch.nn.Transformer")
    for name in [name for name in found if name.endswith("norm.weight")]:  # without biases, torch's norms have none either
        found.setdefault(name.replace("weight", "bias"), torch.zeros_like(found[name]))
    return found


def check_fields(fields: dict, *config_classes: type[PreTrainedConfig]) -> None:
    """Raises a UsageError for names that none of `config_classes`, by default all of ours, adds to those of every config."""
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    known = {name for config in config_classes or CONFIGS.values() for name in config.field_names()} - common
    for name in fields:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise UsageError(f"no config field {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))


def build(is_pair, fields, weights):
    is_decoder = any(".cross_attn." in name for name in weights)
    kind = "Seq2Seq" if is_pair else "Decoder" if is_decoder else "Encoder"
    if kind == "Decoder":
        fields["add_cross_attention"] = True
    config_class = getattr(configurations, f"Vanilla{kind}Config")
    check_fields(fields, config_class)
    try:
        config = config_class(**fields)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise UsageError(one_line(error)) from None
    check_depth(config, {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}, "the state dict")
    with torch.device("meta"):
        model = getattr(models, f"Vanilla{kind}Model")(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for what, names in (("missing", expected.keys() - weights.keys()), ("unknown", weights.keys() - expected.keys())):
        if names:
            raise ValueError(f"tensors that are {what} for a {type(model).__name__}: {', '.join(sorted(names))}")
    for name, tensor in weights.items():
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {expected[name]}")
    model.load_state_dict({name: tensor.clone() for name, tensor in weights.items()}, assign=True)
    model.tie_weights()
    config.dtype = weights["embeddings.embed_tokens.weight" if not is_pair else "encoder.embeddings.embed_tokens.weight"].dtype
    return model.eval()
