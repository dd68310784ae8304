"""Checkpoints and their exports, one for each head, and what runs Transformers.js over them."""

import functools
import json
import shutil
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Tokenizer,
    OPTConfig,
    OPTForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import vanilla_transformer as vanilla
from vanilla_transformer.conversion import convert
from vanilla_transformer.training.tokenizer import train_tokenizer
from vanilla_transformer_export import export

HERE, CARDS = Path(__file__).parent, Path(__file__).parents[3] / "model_cards"
LINES = [
    "the film wins and the cast shines, but the plot bores.",
    "who sees the old man? the big dog finds a red bird.",
    "a boy wants naïve cafés; Äpfel sind 1234 oder 3.5.",
    "this text is about sport, or about politics.",
] * 4
# of no fixed ratio
WIDTHS = dict(
    hidden_size=24, intermediate_size=32, num_attention_heads=2, head_dim=10, value_head_dim=14
)


def labels(*names: str) -> dict:
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }


NLI, NAMES = labels("contradiction", "neutral", "entailment"), labels("O", "B-PER", "I-PER")
# Keys and values as wide as each other, and together wider than the residual stream.
T5 = dict(
    position_embedding_type="relative", norm_type="rms_norm", norm_first=True, gated=True,
    hidden_act="gelu_new", linear_bias=False, head_dim=16, value_head_dim=16,
)  # fmt: skip
# name: (class, kind of tokenizer, fields of the config)
HEADS = {
    "features": ("VanillaEncoderModel", "bpe", dict(norm_first=True)),
    "mask": ("VanillaEncoderForMaskedLM", "byte-bpe", dict(position_embedding_type="learned")),
    "labels": ("VanillaEncoderForSequenceClassification", "word", dict(type_vocab_size=2, **NAMES)),
    "nli": ("VanillaEncoderForSequenceClassification", "bpe", dict(type_vocab_size=2, **NLI)),
    "names": (
        "VanillaEncoderForTokenClassification",
        "word",
        dict(position_embedding_type="rotary", **NAMES),
    ),
    "answers": ("VanillaEncoderForQuestionAnswering", "word", dict(type_vocab_size=2)),
    "decoder": ("VanillaDecoderForCausalLM", "byte-bpe", dict(position_embedding_type="relative")),
    "grouped": (
        "VanillaDecoderForCausalLM", "byte-bpe",
        dict(position_embedding_type="rotary", num_key_value_heads=1, use_qk_norm=True),
    ),
    "characters": (
        "VanillaDecoderForCausalLM", "character", dict(position_embedding_type="learned")
    ),
    "decoder-features": ("VanillaDecoderModel", "bpe", {}),
    "decoder-labels": ("VanillaDecoderForSequenceClassification", "bpe", NAMES),
    "seq2seq": (
        "VanillaSeq2SeqForConditionalGeneration", "bpe", dict(position_embedding_type="rotary")
    ),
    "t5": ("VanillaSeq2SeqForConditionalGeneration", "bpe", T5),
    "m2m": (
        "VanillaSeq2SeqForConditionalGeneration", "bpe",
        dict(position_embedding_type="learned", position_ids_from="ids", norm_first=True),
    ),
    "mpnet": (
        "VanillaEncoderModel", "bpe",
        dict(
            position_embedding_type="learned_relative", position_ids_from="ids", embedding_norm=True
        ),
    ),
}  # fmt: skip
VOCABULARY = {"bpe": 100, "byte-bpe": 300, "word": 44, "character": None}


def head(name: str, path: Path) -> None:
    """A checkpoint whose weights are large enough for outputs that differ."""
    architecture, kind, fields = HEADS[name]
    transformers.set_seed(0)
    model_class = getattr(vanilla, architecture)
    variant = next(
        name for name in ("encoder", "decoder", "seq2seq") if name in architecture.lower()
    )
    tokenizer = train_tokenizer(
        LINES, VOCABULARY[kind], kind, variant, token_types=fields.get("type_vocab_size", 0) > 1
    )
    depth = (
        dict(encoder_layers=1, decoder_layers=2)
        if "Seq2Seq" in architecture
        else dict(num_hidden_layers=2)
    )
    model = model_class(
        model_class.config_class(vocab_size=len(tokenizer), **WIDTHS | depth | fields)
    )
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def bert(path: Path) -> None:
    """A converted BERT that was trained to tell whether one text follows from another."""
    transformers.set_seed(0)
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        LINES, trainers.WordPieceTrainer(vocab_size=90, special_tokens=special)
    )
    path.mkdir()
    vocabulary = tokenizer.get_vocab()
    (path / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.get)))
    transformers.BertTokenizer.from_pretrained(path).save_pretrained(path)
    sizes = dict(hidden_size=24, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=len(vocabulary), initializer_range=0.3, **sizes, **NLI)
    )
    model.save_pretrained(path)


def opt(path: Path) -> None:
    """A converted OPT: its tokenizer puts </s> in front of each prompt."""
    transformers.set_seed(0)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=sorted(alphabet)
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", 2)]
    )
    path.mkdir()
    tokens = dict(bos_token="</s>", eos_token="</s>", unk_token="</s>", pad_token="<pad>")
    GPT2Tokenizer(tokenizer_object=tokenizer, add_bos_token=True, **tokens).save_pretrained(path)
    sizes = dict(
        hidden_size=24,
        word_embed_proj_dim=24,
        ffn_dim=32,
        num_attention_heads=2,
        num_hidden_layers=2,
    )
    model = OPTForCausalLM(
        OPTConfig(vocab_size=300, init_std=0.3, max_position_embeddings=64, **sizes)
    )
    model.save_pretrained(path)


def vit(path: Path) -> None:
    """A converted ViT, with the image processor that its kind has."""
    transformers.set_seed(0)
    sizes = dict(
        hidden_size=24,
        intermediate_size=32,
        num_attention_heads=2,
        num_hidden_layers=2,
        image_size=32,
        patch_size=8,
    )
    model = ViTForImageClassification(
        ViTConfig(**sizes, initializer_range=0.3, **labels("cat", "dog", "bird"))
    )
    model.save_pretrained(path)
    content = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 32, "width": 32},
        "do_resize": True,
    }
    content |= {
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 2,
    }
    (path / "preprocessor_config.json").write_text(
        json.dumps(content | {"rescale_factor": 1 / 255})
    )


FAMILIES = {"bert": bert, "opt": opt, "vit": vit}


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """`checkpoints/NAME` and `exports/NAME`, which `exported` fills."""
    return tmp_path_factory.mktemp("javascript")


@pytest.fixture(scope="session")
def exported(root):
    """The name of a head, of a converted family or of a card, and a precision -> its checkpoint,
    exported."""

    @functools.cache
    def make(name: str, dtype: str = "fp32") -> Path:
        checkpoint = CARDS / name if (CARDS / name).is_dir() else root / "checkpoints" / name
        if name in HEADS and not checkpoint.is_dir():
            head(name, checkpoint)
        elif name in FAMILIES and not checkpoint.is_dir():
            FAMILIES[name](root / name)
            convert(root / name, checkpoint)
        export(
            checkpoint,
            root / "exports" / (name if dtype == "fp32" else f"{name}-{dtype}"),
            cases=2,
            dtype=dtype,
        )
        return checkpoint

    return make


def answer(command: list, jobs: list[dict]) -> list[dict]:
    done = subprocess.run(
        command, input=json.dumps(jobs), cwd=HERE, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def node(root):
    """Runs jobs, see run.mjs, in Node."""
    assert shutil.which("node"), "expected Node: https://nodejs.org"
    return lambda *jobs: answer(["node", "node.mjs", root / "exports"], jobs)


@pytest.fixture(scope="session")
def browser(root):
    """Runs jobs in a browser, over what a server here has; `browser.paths` are those that were
    asked for."""
    chromium = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    assert chromium, "expected Chromium"

    class Handler(SimpleHTTPRequestHandler):
        extensions_map = {
            ".html": "text/html",
            ".mjs": "text/javascript",
            ".js": "text/javascript",
            ".wasm": "application/wasm",
        }

        def translate_path(self, path):
            found = super().translate_path(path)
            return (
                str(root / Path(found).relative_to(HERE)) if path.startswith("/exports/") else found
            )

        def log_message(self, form, *args):
            paths.append(self.path)

    paths = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=HERE))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    def run(*jobs):
        return answer(
            ["node", "browser.mjs", chromium, f"http://127.0.0.1:{server.server_port}/page.html"],
            jobs,
        )

    run.paths = paths
    yield run
    server.shutdown()
    thread.join()
