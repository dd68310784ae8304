"""Attention maps of checkpoints: the weights of each head as arrays and as figures."""

import os
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL.Image import Image  # which matplotlib needs
from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase
from transformers.image_utils import load_image

from .attention_figures import (
    AttentionMaps,
    ImageAttentionMaps,
    check_length,
    plot,
    save_figure,
)
from .checkpoint import load_checkpoint, load_image_processor, load_tokenizer
from .checkpoint_files import readers_errors
from .errors import UsageError
from .files import check_no_pointer
from .info import depth_fields
from .modeling_vanilla_transformer import shift_tokens_right

# names of the outputs of seq2seq models by kind of attention
OUTPUTS = {
    "encoder": "encoder_attentions",
    "decoder": "decoder_attentions",
    "cross": "cross_attentions",
}


def save_attention_maps(
    checkpoint: str | os.PathLike,
    out: str | os.PathLike,
    *texts: str,
    layer: int | None = None,
    head: int | None = None,
    kind: str | None = None,
    force: bool = False,
    variant: str | None = None,
) -> None:
    """Draw the attention maps of `texts` with a checkpoint, and write the figure to the file `out`.

    `texts` are a source and, for a seq2seq model, a target. For a model of images, `texts` is the
    path of one image. The ending of `out` is the format. An existing `out` is replaced only with
    `force`. `layer` and `head`, counted from 0, select maps; by default all are drawn. `kind` is
    "encoder", "decoder" or "cross" for a seq2seq model. `variant` "fp16" reads the weights in
    model.fp16.safetensors.

    Raises:
        FileExistsError: if `out` exists without `force`.
        UsageError: if the ending of `out` is not an image format, for a kind, layer or head that
            the model does not have, and for a target that the model does not read.
        FileNotFoundError: if files of the checkpoint, or the image, are missing.
        ValueError: for damaged files, a text without tokens or with more than maps can show, and an
            image of a size that the model does not read.
    """

    def draw() -> Figure:
        model = load_checkpoint(checkpoint, variant)
        return plot(compute_maps(model, checkpoint, texts, kind), layer, head)

    save_figure(out, force, [checkpoint], draw)


def compute_maps(
    model: PreTrainedModel, checkpoint: str | os.PathLike, texts: tuple[str, ...], kind: str | None
):
    if model.main_input_name != "pixel_values":
        return attention_maps(model, load_tokenizer(checkpoint), *texts, kind=kind)
    if kind is not None or len(texts) > 1:
        raise UsageError(
            f"{type(model).__name__} reads one image, got kind={kind!r} and {len(texts)} arguments"
        )
    [path] = texts
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path!r} is not a file, expected an image")
    check_no_pointer(path)
    try:
        image = load_image(path)
    except (OSError, SyntaxError) as error:
        raise ValueError(f"{path} is not a complete image: {error}") from None
    return image_attention_maps(model, load_image_processor(checkpoint), image)


def image_attention_maps(
    model: PreTrainedModel, processor: BaseImageProcessor, image: Image
) -> ImageAttentionMaps:
    """Return the attention from the first token to the patches of `image`, for each layer and head.

    `model` is left in evaluation mode, with the eager attention implementation. `processor` makes
    the model's input of the image.

    Raises:
        ValueError: for an image of a size that the model does not read.
    """
    model.eval().set_attn_implementation("eager")  # other implementations return no weights
    pixel_values = processor(image, return_tensors="pt")["pixel_values"]
    seen = processor(image, do_rescale=False, do_normalize=False, return_tensors="np")[
        "pixel_values"
    ][0]
    with torch.no_grad():
        outputs = model.base_model(pixel_values, output_attentions=True)
    rows, columns = (
        side // patch for side, patch in zip(pixel_values.shape[2:], model.config.patch_shape)
    )
    weights = torch.cat(outputs.attentions)[:, :, 0, model.config.num_first_tokens :].unflatten(
        -1, (rows, columns)
    )
    pixels = np.broadcast_to(seen.transpose(1, 2, 0), (*seen.shape[1:], 3))  # one channel is gray
    return ImageAttentionMaps(weights.double().numpy(), pixels, model.config.patch_shape)


def attention_maps(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    target: str | None = None,
    kind: str | None = None,
) -> AttentionMaps:
    """Return the attention maps of the text `source`, with special tokens except for a decoder.

    For seq2seq models `kind` is "encoder", "decoder" or "cross" (the default); other models have
    only their self-attention. The default `target` is the model's own translation, by its
    generation settings without sampling. `model` is left in evaluation mode, with the eager
    attention implementation.

    Raises:
        UsageError: for a kind that the model does not have, a target for a model that reads one
            text, and a missing target for one that cannot generate.
        ValueError: for a text without tokens or with more than maps can show.
    """
    name = type(model).__name__
    is_encoder_decoder = model.config.is_encoder_decoder
    kinds = (
        tuple(OUTPUTS)
        if is_encoder_decoder
        else (model.config.model_type.removeprefix("vanilla-"),)
    )
    kind = kinds[-1] if kind is None else kind
    if kind not in kinds:
        raise UsageError(f"{name} has no {kind!r} attention, expected one of {', '.join(kinds)}")
    if target is not None and not is_encoder_decoder:
        raise UsageError(f"{name} reads one text, got the target {target!r} too")
    for text in [source] if target is None else [source, target]:
        check_tokens(model, tokenizer, text)
    model.eval().set_attn_implementation("eager")  # other implementations return no weights
    # A decoder continues the text, so the text has no end token.
    has_ends = kinds != ("decoder",)
    ids = tokenizer(source, return_tensors="pt", add_special_tokens=has_ends)["input_ids"]
    inputs = {"input_ids": ids}
    read = {kinds[0]: ids}
    with torch.no_grad():
        if is_encoder_decoder:
            inputs["decoder_input_ids"] = read["decoder"] = decoder_input_ids(
                model, tokenizer, ids, target
            )
        outputs = model.base_model(**inputs, output_attentions=True)
    queries = read["decoder" if kind == "cross" else kind]
    keys = ids if kind == "cross" else queries
    weights = (
        torch.cat(outputs[OUTPUTS[kind] if is_encoder_decoder else "attentions"]).double().numpy()
    )
    return AttentionMaps(
        kind, weights, *(tokenizer.convert_ids_to_tokens(row[0]) for row in (queries, keys))
    )


def check_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    # a damaged tokenizer may panic here for the first time
    with readers_errors(tokenizer.name_or_path or "the tokenizer"):
        ids = tokenizer(text)["input_ids"]
        text_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not text_ids:
        raise ValueError(f"the text {text!r} has no tokens, expected at least one")
    largest = max(ids)
    size = model.config.vocab_size
    if largest >= size:
        raise ValueError(
            f"the tokenizer returned token id {largest}, expected less than vocab_size={size}"
        )
    maps = (
        max(getattr(model.config, name) for name in depth_fields(model.config))
        * model.config.num_attention_heads
    )
    check_length(len(ids), maps)


def decoder_input_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: torch.Tensor,
    target: str | None,
) -> torch.Tensor:
    """Return the inputs of the decoder (1, T): the start token and all target tokens but the last,
    which is only predicted.

    The target is the text `target`. If it is `None`, the model generates the target for the source
    tokens `ids`. Raise UsageError if the model cannot generate."""
    if target is not None:
        return shift_tokens_right(
            tokenizer(text_target=target, return_tensors="pt")["input_ids"], model.config
        )
    if not model.can_generate():
        raise UsageError(f"{type(model).__name__} cannot generate, expected a target")
    return model.generate(ids, do_sample=False, num_return_sequences=1)[:, :-1]
