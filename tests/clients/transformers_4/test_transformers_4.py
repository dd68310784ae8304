"""Tests with transformers 4: it loads our tokenizers, and our model code raises ImportError."""

import json
import subprocess
from pathlib import Path

import pytest
import transformers
from transformers import AutoConfig, AutoModel, AutoTokenizer, pipeline

ROOT = Path(__file__).parents[3]
CARDS = sorted(path for path in (ROOT / "model_cards").iterdir() if path.is_dir())
TEXTS = [
    "ROMEO: I am </s> here",
    "A man is running.",
    "What does w7 w9 stand for ?",
    " e\u0301 \u6f22 \u00a0\n",
    "",
]
PAIR = ["One film .", "Another one"]
# A script for the environment of the project. It runs our commands on checkpoints saved by
# transformers 5, and prints the outputs of transformers 5 for cards and written checkpoints.
WRITE = """
import json, shutil, sys
from pathlib import Path
from tokenizers import Tokenizer, models, pre_tokenizers, processors
import transformers
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerFast
import vanilla_transformer
from vanilla_transformer.conversion import convert
from vanilla_transformer.training.averaging import average
from vanilla_transformer_export import export

cards, texts, pair, out = json.loads(sys.argv[1])
out = Path(out)

def source(name, model, tokenizer):
    model.save_pretrained(out / name)
    tokenizer.save_pretrained(out / name)
    convert(out / name, out / f"{name}-ours")
    return [out / f"{name}-ours"]

vocabulary = {"w0": 0, "</s>": 2, "<x>": 1, **{f"w{i}": i for i in range(3, 30)}}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
words.post_processor = processors.TemplateProcessing(
    single="</s> $A", pair="</s> $A $B", special_tokens=[("</s>", 2)]
)
words = PreTrainedTokenizerFast(
    tokenizer_object=words, eos_token="</s>", unk_token="w0", extra_special_tokens=["<x>"]
)
small = dict(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
opt = transformers.OPTConfig(**small, ffn_dim=8, word_embed_proj_dim=8, max_position_embeddings=20)
bert = transformers.BertConfig(**small, intermediate_size=8)
names = "[PAD] [UNK] [CLS] [SEP] [MASK] a man is run ##ning one film another . ?".split()
found = [Path(card) for card in cards]
found += source("opt", transformers.OPTForCausalLM(opt), words)
pieces = BertTokenizer(vocab={name: i for i, name in enumerate(names)})
found += source("bert", transformers.BertModel(bert), pieces)
shutil.copytree(cards[0], out / "saved")
AutoTokenizer.from_pretrained(cards[0]).save_pretrained(out / "saved")
settings = json.loads((out / "saved" / "tokenizer_config.json").read_text())
assert settings["tokenizer_class"] == "TokenizersBackend"
average([out / "saved", out / "saved"], out / "averaged")
export(out / "saved", out / "exported", cases=1)
found += [out / "averaged", out / "exported"]

def said(path):
    tokenizer = AutoTokenizer.from_pretrained(path)
    encoded = [dict(tokenizer(text)) for text in texts] + [dict(tokenizer(*pair))]
    decoded = [tokenizer.decode(one["input_ids"]) for one in encoded]
    special = sorted(tokenizer.all_special_tokens + tokenizer.extra_special_tokens)
    return [encoded, decoded, special, tokenizer.model_max_length]

print("FOUND " + json.dumps([transformers.__version__, {str(path): said(path) for path in found}]))
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return the outputs of transformers 5 for each directory."""
    arguments = json.dumps(
        [list(map(str, CARDS)), TEXTS, PAIR, str(tmp_path_factory.mktemp("written"))]
    )
    done = subprocess.run(
        [ROOT / ".venv/bin/python", "-c", WRITE, arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    version, outputs = json.loads(done.stdout.split("FOUND ")[1])
    assert version.startswith("5.") and transformers.__version__.startswith("4.57.")
    return outputs


def test_tokenizers_match_transformers_5(expected):
    assert len(expected) == len(CARDS) + 4
    for path, (encoded, decoded, special, max_length) in expected.items():
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
        assert [dict(tokenizer(text)) for text in TEXTS] + [dict(tokenizer(*PAIR))] == encoded, path
        assert [
            tokenizer.decode(encoding["input_ids"], clean_up_tokenization_spaces=False)
            for encoding in encoded
        ] == decoded, path
        assert set(special) == set(tokenizer.all_special_tokens), path
        assert tokenizer.model_max_length == max_length, path
        assert any(encoding["input_ids"] for encoding in encoded)


@pytest.mark.parametrize("card", CARDS, ids=lambda path: path.name)
def test_model_code_error_names_required_transformers_version(card):
    auto_class = getattr(
        transformers, list(json.loads((card / "config.json").read_text())["auto_map"])[-1]
    )
    loads = [AutoConfig.from_pretrained, AutoModel.from_pretrained, auto_class.from_pretrained]
    for load in [*loads, lambda path, **options: pipeline("feature-extraction", path, **options)]:
        with pytest.raises(ImportError, match=f"5.23.*{transformers.__version__}"):
            load(str(card), trust_remote_code=True)
