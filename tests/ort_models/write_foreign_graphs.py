"""Write graphs of tiny seeded models with optimum-onnx 0.1.0, and what torch computes, to
foreign_graphs.tar.xz: `python write_foreign_graphs.py`.

It ran once, with optimum-onnx 0.1.0, transformers 4.57 and torch 2.13 in an environment of their
own: they exclude the versions that the other tests need.
"""

import json
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from optimum.exporters.onnx import main_export
from transformers import BertConfig, BloomConfig, GPT2Config, MarianConfig, T5Config

SIZES = {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1}
GPT2 = GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=48, bos_token_id=2, **SIZES)
BLOOM = BloomConfig(hidden_size=16, n_layer=2, n_head=2, bos_token_id=2, **SIZES)
MARIAN = MarianConfig(
    d_model=16,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=24,
    decoder_ffn_dim=24,
    max_position_embeddings=48,
    decoder_start_token_id=0,
    forced_eos_token_id=None,
    **SIZES,
)
T5 = T5Config(
    d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0, **SIZES
)
BERT = BertConfig(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=48,
    num_labels=3,
    **SIZES,
)
TEXT, TARGETS = "text-generation", "text2text-generation"
# name: (class, config, task)
EXPORTS = {
    "bert": ("BertForSequenceClassification", BERT, "text-classification"),
    "gpt2": ("GPT2LMHeadModel", GPT2, f"{TEXT}-with-past"),
    "gpt2-no-cache": ("GPT2LMHeadModel", GPT2, TEXT),
    "bloom": ("BloomForCausalLM", BLOOM, f"{TEXT}-with-past"),  # without position_ids
    "marian": ("MarianMTModel", MARIAN, f"{TARGETS}-with-past"),  # merged and split
    "marian-no-cache": ("MarianMTModel", MARIAN, TARGETS),
    "t5": ("T5ForConditionalGeneration", T5, f"{TARGETS}-with-past"),
}
IDS = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 1, 1]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
TARGET_IDS = torch.tensor([[0, 20, 21, 22], [0, 23, 24, 25]])
SEARCHES = {"greedy": {}, "beams": {"num_beams": 3, "num_return_sequences": 2}}
SEARCHES["penalty"] = {"repetition_penalty": 3.0}


def make(name, config):
    transformers.set_seed(0)
    model = getattr(transformers, name)(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    return model


@torch.no_grad()
def compute(model):
    """Return the outputs of the model and the tokens that it generates."""
    left = {"input_ids": IDS.flip(1), "attention_mask": MASK.flip(1)}
    right = {"input_ids": IDS, "attention_mask": MASK}
    is_decoder = model.can_generate() and not model.config.is_encoder_decoder
    inputs = left if is_decoder else right
    more = {"decoder_input_ids": TARGET_IDS} if model.config.is_encoder_decoder else {}
    if isinstance(model, transformers.GPT2LMHeadModel):
        more = {"position_ids": (left["attention_mask"].cumsum(1) - 1).clamp(min=0)}
    results = {"logits": model(**inputs, **more).logits.tolist()}
    if model.can_generate():
        for search, options in SEARCHES.items():
            tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False, **options)
            results[search] = tokens.tolist()
    arguments = {name: value.tolist() for name, value in (inputs | more).items()}
    return {"inputs": arguments, **results}


def write(folder):
    for name, (architecture, config, task) in EXPORTS.items():
        model = make(architecture, config)
        source, out = folder / "source" / name, folder / "out" / name
        model.save_pretrained(source)
        model = type(model).from_pretrained(source).eval()  # Marian's positions are not saved
        main_export(str(source), output=out, task=task, do_validation=False)
        (out / "expected.json").write_text(json.dumps(compute(model)))
    return folder / "out"


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        out = write(Path(temporary))
        with tarfile.open("foreign_graphs.tar.xz", "w:xz") as archive:
            archive.add(out, ".")
