"""Small seeded checkpoints of every variant, and their exports. `conftest.py` makes each once per
session, when asked for."""

import hashlib
import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

import vanilla_transformer
from vanilla_transformer.training.tokenizer import train_tokenizer
from vanilla_transformer_export import export
from vanilla_transformer_export.heads import model_class

PAD, START, EOS = 0, 1, 2
VOCABULARY, WIDTH, HEADS, KEY_WIDTH, VALUE_WIDTH = 48, 32, 4, 6, 10
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=WIDTH,
    intermediate_size=40,
    num_attention_heads=HEADS,
    head_dim=KEY_WIDTH,
    value_head_dim=VALUE_WIDTH,
)
LEARNED = dict(
    position_embedding_type="learned",
    max_position_embeddings=40,
    scale_embedding=False,
    embedding_norm=True,
)
PRE_NORM, UNTIED = dict(norm_first=True), dict(tie_word_embeddings=False)

# name: (architecture, fields over SIZES)
CHECKPOINTS = {
    "encoder": ("VanillaEncoderModel", dict(num_hidden_layers=2)),
    "masked-lm": (
        "VanillaEncoderForMaskedLM",
        dict(num_hidden_layers=1, embedding_size=24, **LEARNED, **PRE_NORM),
    ),
    "classification": (
        "VanillaEncoderForSequenceClassification",
        dict(num_hidden_layers=1, num_labels=3, hidden_act="gelu"),
    ),
    "pretraining": (
        "VanillaEncoderForPreTraining",
        dict(
            num_hidden_layers=1,
            type_vocab_size=2,
            pooler_act="tanh",
            lm_transform_act="gelu",
            position_embedding_type="none",
        ),
    ),
    "answers": (
        "VanillaEncoderForQuestionAnswering",
        dict(num_hidden_layers=1, position_embedding_type="rotary", sliding_window=4),
    ),
    "causal": ("VanillaDecoderForCausalLM", dict(num_hidden_layers=2)),
    "causal-relative": (
        "VanillaDecoderForCausalLM",
        dict(
            num_hidden_layers=1,
            position_embedding_type="relative",
            sliding_window=6,
            linear_bias=False,
            embedding_size=24,
        ),
    ),
    "causal-learned": (
        "VanillaDecoderForCausalLM",
        dict(num_hidden_layers=1, pad_token_id=3, **LEARNED, **PRE_NORM, **UNTIED),
    ),
    "seq2seq": ("VanillaSeq2SeqForConditionalGeneration", dict(encoder_layers=1, decoder_layers=2)),
    "seq2seq-untied": (
        "VanillaSeq2SeqForConditionalGeneration",
        dict(encoder_layers=2, decoder_layers=1, pad_token_id=3, **PRE_NORM, **UNTIED),
    ),
    "seq2seq-rotary": (
        "VanillaSeq2SeqForConditionalGeneration",
        dict(
            encoder_layers=1,
            decoder_layers=1,
            position_embedding_type="rotary",
            share_encoder_decoder_embeddings=False,
        ),
    ),
}
# bias of each model's end token, by which its rows end at different times
END_BIAS = {
    "causal": 3.75,
    "causal-learned": 1.0,
    "causal-relative": 1.0,
    "seq2seq": 2.4,
    "seq2seq-untied": 2.0,
}
END_BIAS |= {"seq2seq-rotary": 2.0}


@dataclass(frozen=True)
class Exported:
    """A `model` in torch, the `checkpoint` it was saved to, and the `directory` of its export."""

    model: transformers.PreTrainedModel
    checkpoint: Path
    directory: Path


def perturbed(architecture: str, fields: dict, scale: float = 0.2) -> transformers.PreTrainedModel:
    """Return a model of `architecture`, a key of `HEADS`, from seed 0, in evaluation mode.

    `fields` are those of its config. Noise times `scale` is added, so no two weights, biases or
    norms are alike.
    """
    transformers.set_seed(0)
    class_ = getattr(vanilla_transformer, model_class(architecture))
    model = class_(class_.config_class(**fields)).eval()
    for parameter in model.parameters():
        parameter.data += scale * torch.randn_like(parameter)
    return model


def build(name: str) -> transformers.PreTrainedModel:
    """Return the model `name` of `CHECKPOINTS`, from seed 0, in evaluation mode.

    Its weights, biases and norms are all different.
    """
    architecture, fields = CHECKPOINTS[name]
    transformers.set_seed(0)
    model_class = getattr(vanilla_transformer, architecture)
    model = model_class(model_class.config_class(**SIZES, **fields)).eval()
    for parameter_name, parameter in sorted(model.named_parameters()):
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
        elif "embed" in parameter_name:
            torch.nn.init.normal_(parameter, std=WIDTH**-0.5)
        else:  # strong attention, or a random decoder would ignore its input
            torch.nn.init.xavier_uniform_(parameter, gain=1.7 if "attn" in parameter_name else 1)
    if model.can_generate():
        model.lm_head.bias.data[EOS] += END_BIAS[name]
    return model


def save_and_export(model: transformers.PreTrainedModel, checkpoint: Path, directory: Path) -> None:
    model.save_pretrained(checkpoint)
    export(checkpoint, directory, cases=3)


def copy_folder(directory: Path, parent: Path) -> Path:
    """Return a copy of `directory` that a test may change: `parent / "copy"`."""
    return Path(shutil.copytree(directory, parent / "copy"))


def with_words(directory, folder):
    """Return a copy in `folder` of the export `directory`, with a tokenizer of the words w0 to
    w47."""
    copy = copy_folder(directory, folder)
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(48)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens([AddedToken(f"w{token}", single_word=True) for token in range(3)])
    words.save(str(copy / "tokenizer.json"))
    list_file(copy, "tokenizer.json")
    return copy


def seal(directory: Path) -> None:
    """Update the manifest of the export `directory` for files that were changed on purpose."""
    manifest = json.loads((directory / "manifest.json").read_text())
    for name in manifest["files"]:
        data = (directory / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (directory / "manifest.json").write_text(json.dumps(manifest))


def list_file(directory: Path, name: str) -> None:
    """Add the file `name` of the export `directory` to its manifest."""
    files = json.loads((directory / "manifest.json").read_text())["files"]
    edit_json(directory / "manifest.json", files={**files, name: {}})
    seal(directory)


def default_graphs(manifest: dict) -> dict[str, str]:
    """Return {role: file} of the graphs that run by default."""
    return manifest["variants"][manifest["default_dtype"]]["graphs"]


def default_parity(manifest: dict) -> dict | None:
    """Return the comparison of torch with the graphs that run by default, `None` without one."""
    return manifest["variants"][manifest["default_dtype"]]["parity"]


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(directory: Path, change) -> None:
    """Save the tensors of a checkpoint again, after `change` of their dictionary."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def add_to_output(graph, name):
    """Add the tensor `name` to the first output of `graph`, because onnxruntime ignores unused
    ones."""
    output = graph.output[0].name
    [node] = [node for node in graph.node if output in node.output]
    node.output[:] = ["before" if tensor == output else tensor for tensor in node.output]
    graph.node.append(onnx.helper.make_node("Add", ["before", name], [output]))


def edit_graph(directory: Path, file: str, change) -> None:
    """Call `change` with the graph of the ONNX `file` and seal the export `directory` again."""
    model = onnx.load(directory / file)
    change(model.graph)
    onnx.save(model, directory / file)
    seal(directory)


# --------------------------------------------------------------------------------------------- text

WORDS = {
    "a": "ein", "the": "der", "man": "Mann", "dog": "Hund", "boy": "Bub", "bird": "Vogel",
    "red": "rote", "old": "alte", "big": "große", "sees": "sieht", "wants": "möchte",
    "finds": "findet",
}  # fmt: skip


SENTIMENTS = {
    "bores": "bad",
    "annoys": "bad",
    "fails": "bad",
    "shines": "good",
    "delights": "good",
    "wins": "good",
}
# lines for training a classifier: a label and a text
OPINIONS = [
    f"{label} the {thing} {word}"
    for thing in ("film", "plot", "cast")
    for word, label in SENTIMENTS.items()
]


def toy_corpus(lines: int, seed: int) -> list[tuple[str, str]]:
    """Return `lines` pairs of a sentence like "the old dog sees a bird." and its translation.

    They are translated word by word. `seed` determines them.
    """
    rng = random.Random(seed)

    def thing():
        adjectives = rng.sample(["red", "old", "big"], rng.randint(0, 1))
        return [rng.choice(["a", "the"]), *adjectives, rng.choice(["man", "dog", "boy", "bird"])]

    sentences = [[*thing(), rng.choice(["sees", "wants", "finds"]), *thing()] for _ in range(lines)]
    return [
        (" ".join(words) + ".", " ".join(WORDS[word] for word in words) + ".")
        for words in sentences
    ]


def write_corpus(directory: Path, name: str, lines: int, seed: int) -> tuple[Path, Path]:
    """Write `toy_corpus` as two files, `<name>.en` and `<name>.de`, and return their paths."""
    files = directory / f"{name}.en", directory / f"{name}.de"
    for file, side in zip(files, zip(*toy_corpus(lines, seed), strict=True), strict=True):
        file.write_text("\n".join(side) + "\n", encoding="utf-8")
    return files


def with_tokenizer(directory, size):
    """Add a tokenizer with `size` entries to the export `directory`, and return the tokenizer."""
    tokenizer = train_tokenizer(
        [text for pair in toy_corpus(50, seed=0) for text in pair], size, variant="decoder"
    )
    tokenizer.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        list_file(directory, name)
    return tokenizer
