"""Models in the format of Marian and OPUS-MT: *.npz, decoder.yml, *vocab.yml, source.spm and
target.spm.

`write_checkpoint` converts them to the format of transformers' Marian, with the names and configs
of transformers 4: matrices are transposed, and the embeddings get a row for padding. The module
`marian` converts the result. As in transformers, sinusoids are the paper's; the frequencies of
Marian itself are 10000^(-i / (d_model / 2 - 1)).
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import GenerationConfig, MarianConfig

from ..checkpoint_files import readers_errors, shorten
from ..files import WEIGHTS, check_no_pointer
from .tensors import write_safetensors

YAML_LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # all values are strings
MODEL_CONFIG = "special:model.yml"
PIECES = ("source.spm", "target.spm")
# required values of a model's config; a missing field means the first of several values
REQUIRED = {"type": "transformer", "tied-embeddings-all": "true"}
EXPECTED = {
    "layer-normalization": "false",
    "right-left": "false",
    "transformer-ffn-depth": "2",
    "transformer-decoder-ffn-depth": ("0", "2"),
    "transformer-decoder-dim-ffn": "0",
    "transformer-decoder-autoreg": "self-attention",
    "transformer-no-projection": "false",
    "transformer-no-affine": "false",
    "transformer-postprocess-emb": "d",
    "transformer-postprocess": "dan",  # dropout, add, normalize
    "transformer-postprocess-top": "",
    "transformer-preprocess": "",
    "transformer-tied-layers": ([], ""),
    "transformer-train-position-embeddings": "false",
    "transformer-pool": "false",
    "transformer-rnn-projection": "false",
    "ulr": "false",
    "ulr-dim-emb": "0",
    "output-omit-bias": "false",
    "lemma-dim-emb": "0",
    "transformer-ffn-activation": ("swish", "relu"),
}
# tensors of a layer: Marian's name -> transformers' name
LAYER = {
    f"{part}_{kind}{letter}": f"{name}.{projection}.{'weight' if kind == 'W' else 'bias'}"
    for part, name in (("self", "self_attn"), ("context", "encoder_attn"))
    for kind in "Wb"
    for letter, projection in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("o", "out_proj"))
}
LAYER |= {
    "ffn_W1": "fc1.weight",
    "ffn_b1": "fc1.bias",
    "ffn_W2": "fc2.weight",
    "ffn_b2": "fc2.bias",
}
LAYER |= {
    f"{part}_ln_{kind}": f"{name}_layer_norm.{parameter}"
    for part, name in (
        ("self_Wo", "self_attn"),
        ("context_Wo", "encoder_attn"),
        ("ffn_ffn", "final"),
    )
    for kind, parameter in (("scale", "weight"), ("bias", "bias"))
}


def write_checkpoint(source: Path, out: Path) -> None:
    """Write the Marian model in `source` to the empty directory `out`, as a checkpoint of
    transformers.

    Raises:
        FileNotFoundError: if a file is missing, or there are several models or vocabularies.
        ValueError: for damaged files, and for a model that is not the paper's Transformer with one
            embedding matrix for source, target and output.
    """
    file, vocabulary_file = only(source, "*.npz"), only(source, "*vocab.yml")
    for name in ("decoder.yml", *PIECES):
        if not (source / name).is_file():
            raise FileNotFoundError(
                f"{source} lacks {name}: expected a model with a SentencePiece tokenizer"
            )
    for path in (file, vocabulary_file, *(source / name for name in ("decoder.yml", *PIECES))):
        check_no_pointer(path)
    decoder = read_yaml(source / "decoder.yml")
    vocabulary = read_vocabulary(vocabulary_file)
    with readers_errors(file), np.load(file, allow_pickle=False) as arrays:
        config = marian_config(read_model_config(arrays), vocabulary)
        rows = len(arrays["Wemb"]) if "Wemb" in arrays else 0
        if rows != len(vocabulary):
            raise ValueError(
                f"Wemb has {rows} rows, expected {len(vocabulary)}, the tokens of {vocabulary_file}"
            )
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors(arrays)}
        write_safetensors(out / WEIGHTS, shapes, tensors(arrays))
    config.save_pretrained(out)
    generation_config(config, decoder, source).save_pretrained(out)
    vocabulary["<pad>"] = config.pad_token_id
    (out / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (out / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "MarianTokenizer", "separate_vocabs": False})
    )
    for name in PIECES:
        shutil.copyfile(source / name, out / name)


def only(source: Path, pattern: str) -> Path:
    matches = sorted(source.glob(pattern))
    if len(matches) != 1:
        raise FileNotFoundError(
            f"{source} has {[file.name for file in matches]} for {pattern}, expected one file"
        )
    return matches[0]


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Numbers and booleans in it are strings.

    Raises ValueError if the file is not YAML or holds something else.
    """
    with readers_errors(path):
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=YAML_LOADER)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {shorten(content)}, expected names and values")
    return content


def read_vocabulary(path: Path) -> dict[str, int]:
    """Return {token: id} of a vocab.yml.

    Raises ValueError unless the ids start at 0 without gaps, `</s>` and `<unk>` are among the
    tokens, and `<pad>` is not.
    """
    content = read_yaml(path)
    with readers_errors(path):
        vocabulary = {token: int(number) for token, number in content.items()}
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise ValueError(
            f"{path} has {len(vocabulary)} tokens, expected the ids 0 to {len(vocabulary) - 1} "
            f"once each"
        )
    for token in ("</s>", "<unk>"):
        if token not in vocabulary:
            raise ValueError(
                f"{path} has no {token}, expected the vocabulary of a translation model"
            )
    if "<pad>" in vocabulary:
        raise ValueError(f"{path} has <pad>, expected none: padding gets a row of its own")
    return vocabulary


def read_model_config(arrays: Any) -> dict[str, Any]:
    """Return the config that Marian stores in `arrays`, the opened .npz file, as YAML text.

    Raises:
        ValueError: if there is no such array, or its YAML has no names and values.
    """
    if MODEL_CONFIG not in arrays:
        raise ValueError(f"{MODEL_CONFIG} is missing, expected a Marian model")
    text = arrays[MODEL_CONFIG].astype(np.uint8).tobytes().decode("utf-8").rstrip("\0")
    fields = yaml.load(text, Loader=YAML_LOADER)
    if not isinstance(fields, dict):
        raise ValueError(f"{MODEL_CONFIG} holds {shorten(fields)}, expected names and values")
    return fields


def marian_config(fields: dict[str, Any], vocabulary: dict[str, int]) -> MarianConfig:
    for name, expected in (REQUIRED | EXPECTED).items():
        values = expected if isinstance(expected, tuple) else (expected,)
        actual = fields.get(name, None if name in REQUIRED else values[0])
        if actual not in values:
            expected_values = " or ".join(repr(value) for value in values)
            raise ValueError(
                f"{MODEL_CONFIG} has {name}={actual!r}, which cannot be converted: expected "
                f"{expected_values}"
            )

    def size(name: str) -> int:
        value = fields.get(name)
        if not re.fullmatch(r"[1-9]\d{0,8}", str(value)):
            raise ValueError(
                f"{MODEL_CONFIG} has {name}={value!r}, which cannot be converted: expected a whole "
                f"number above 0"
            )
        return int(value)

    sides = {"encoder": "enc-depth", "decoder": "dec-depth"}
    padding, end = len(vocabulary), vocabulary["</s>"]
    return MarianConfig(
        vocab_size=padding + 1,
        d_model=size("dim-emb"),
        **{f"{side}_layers": size(depth) for side, depth in sides.items()},
        **{f"{side}_attention_heads": size("transformer-heads") for side in sides},
        **{f"{side}_ffn_dim": size("transformer-dim-ffn") for side in sides},
        activation_function=fields.get("transformer-ffn-activation", "swish"),
        max_position_embeddings=size("dim-emb"),  # transformers' value; sinusoids have no limit
        scale_embedding=True,
        pad_token_id=padding,
        bos_token_id=0,
        eos_token_id=end,
        decoder_start_token_id=padding,
        forced_eos_token_id=end,
        architectures=["MarianMTModel"],
        dtype=torch.float32,
    )


def generation_config(
    config: MarianConfig, decoder: dict[str, Any], source: Path
) -> GenerationConfig:
    with readers_errors(source / "decoder.yml"):
        beams = int(decoder.get("beam-size", 12))  # the default of Marian's decoder
    padding = config.pad_token_id
    return GenerationConfig(
        num_beams=beams,
        max_length=512,
        bad_words_ids=[[padding]],
        pad_token_id=padding,
        decoder_start_token_id=padding,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        forced_eos_token_id=config.eos_token_id,
    )


def tensors(arrays: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) with transformers' names for `arrays`, the opened .npz file.

    Each tensor is read when the iterator reaches it. Raises ValueError for a tensor that is not a
    matrix of floating point, or whose name is unknown.
    """
    for name in arrays:
        if name != MODEL_CONFIG:
            array = torch.from_numpy(np.atleast_2d(arrays[name]))
            if not array.is_floating_point() or array.ndim > 2:
                raise ValueError(
                    f"{name} is {array.dtype} {list(array.shape)}, expected a matrix of "
                    f"floating point"
                )
            yield rename_tensors(name, array)


def rename_tensors(name: str, array: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Return (name, tensor) as transformers has them, for the tensor `array` that Marian calls
    `name`.

    Marian stores vectors as one row, and matrices transposed. The embeddings and their bias get a
    zero row for the padding token. Raises ValueError for an unknown name.
    """
    if name == "Wemb":
        return "model.shared.weight", torch.cat([array, torch.zeros_like(array[:1])])
    if name == "decoder_ff_logit_out_b":
        return "final_logits_bias", torch.cat([array, torch.zeros_like(array[:, :1])], dim=1)
    match = re.fullmatch(r"(encoder|decoder)_l(\d+)_(\w+)", name)
    if not match or match[3] not in LAYER:
        raise ValueError(
            f"unknown tensor {name}, expected the tensors of a Transformer as in the paper"
        )
    is_matrix = "_W" in match[3] and "_ln_" not in match[3]
    return (
        f"model.{match[1]}.layers.{int(match[2]) - 1}.{LAYER[match[3]]}",
        array.T if is_matrix else array[0],
    )
