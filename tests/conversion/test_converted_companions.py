"""Tests of what conversion does with the files beside the weights: tokenizers and pipelines."""

import json

import pytest
import sentencepiece
import transformers
from families import random_config, random_model
from saved_families import save_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast, pipeline

from vanilla_transformer.conversion import convert, plan_conversion
from vanilla_transformer_export import TextRuntime, export


def make_tokenizer(vocab_size, pad, eos, mask=None, template="$A </s>"):
    """Return a tokenizer of words `w3`, `w4` ... with special tokens at the ids of the model."""
    special = {pad: "<pad>", eos: "</s>"} | ({mask: "<mask>"} if mask is not None else {})
    vocabulary = {
        special.get(i, "<unk>" if i == max(special) + 1 else f"w{i}"): i for i in range(vocab_size)
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.WhitespaceSplit(),
        decoders.WordPiece(prefix="##"),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("</s>", eos)]
    )
    tokens = dict(pad_token="<pad>", eos_token="</s>", unk_token="<unk>") | (
        {"mask_token": "<mask>"} if mask else {}
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "attention_mask"],
        padding_side="left",
        **tokens,
    )


PIPELINES = [
    ("bert", "BertForMaskedLM", "fill-mask", "w7 w8 <mask> w9"),
    ("roberta", "RobertaForSequenceClassification", "text-classification", "w7 w8 w9"),
    ("distilbert", "DistilBertForTokenClassification", "token-classification", "w7 w8 w9"),
    ("gpt2", "GPT2LMHeadModel", "text-generation", "w7 w8 w9"),
    ("opt", "OPTForCausalLM", "text-generation", "w7 w8 w9"),
]


@pytest.mark.parametrize("family, architecture, task, text", PIPELINES)
def test_converted_checkpoint_gives_same_pipeline_results(
    family, architecture, task, text, tmp_path
):
    directory, model = save_checkpoint(architecture, family, tmp_path)
    config = model.config
    eos = config.eos_token_id if config.eos_token_id is not None else 2
    make_tokenizer(config.vocab_size, config.pad_token_id, eos, mask=5).save_pretrained(directory)
    convert(directory, tmp_path / "ours")
    options = dict(do_sample=False, max_new_tokens=6) if task == "text-generation" else {}
    ours, theirs = (
        pipeline(task, model=str(tmp_path / name))(text, **options) for name in ("ours", "theirs")
    )
    assert [{k: v for k, v in result.items() if "score" not in k} for result in ours] == [
        {k: v for k, v in result.items() if "score" not in k} for result in theirs
    ]
    assert [result.get("score") for result in ours] == pytest.approx(
        [result.get("score") for result in theirs], abs=1e-5
    )


def test_converted_opt_keeps_leading_token_and_generates_same_text(tmp_path):
    directory, theirs = save_checkpoint("OPTForCausalLM", "opt", tmp_path)
    tokenizer = make_tokenizer(
        theirs.config.vocab_size, theirs.config.pad_token_id, 2, template="</s> $A"
    )
    tokenizer.save_pretrained(directory)
    convert(directory, tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "onnx", cases=2)
    texts = ["w7 w8 w9", "w5"]
    result = TextRuntime(tmp_path / "onnx").generate(texts, max_new_tokens=6, min_new_tokens=6)
    for text, line in zip(texts, result, strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        assert inputs["input_ids"][0, 0] == 2
        outputs = theirs.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        assert line == tokenizer.decode(
            outputs[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
    assert any(result)


def test_words_of_a_converted_marian_are_aligned_by_the_first_head_of_the_last_layer(tmp_path):
    """The head that CTranslate2 reads, and that Marian's guided training aligns."""
    directory, _ = save_checkpoint("MarianMTModel", "marian", tmp_path, decoder_layers=3)
    convert(directory, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["alignment_heads"] == [[2, 0, "made"]]
    manifest = export(directory, tmp_path / "export", target="cpu", cases=1)
    assert manifest["alignment"] == {"heads": [[2, 0, "made"]]}


def test_converted_marian_has_a_tokenizer_and_gives_same_translations(tmp_path):
    (tmp_path / "text").write_text(
        "\n".join(f"a man sees the dog number {i} in the park" for i in range(200))
    )
    directory, _ = save_checkpoint("MarianMTModel", "marian", tmp_path)
    (tmp_path / "spm").mkdir()
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "spm" / "source"),
        vocab_size=40,
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm" / "source.model"))
    names = [
        "</s>",
        "<unk>",
        *(pieces.id_to_piece(i) for i in range(3, 38)),
        ">>deu<<",
        ">>nld<<",
        "<pad>",
    ]
    for name in ("source.spm", "target.spm"):
        (directory / name).write_bytes((tmp_path / "spm" / "source.model").read_bytes())
    (directory / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"source_lang": "en", "target_lang": "de"})
    )
    tokens = dict(pad_token_id=39, decoder_start_token_id=39, eos_token_id=0, forced_eos_token_id=0)
    config = transformers.MarianConfig(
        **{
            **random_config("marian", "", 0).to_dict(),
            **tokens,
            "vocab_size": 40,
            "decoder_vocab_size": 40,
        }
    )
    model = random_model("MarianMTModel", config)
    model.generation_config.update(
        num_beams=3, max_new_tokens=8, no_repeat_ngram_size=2, min_new_tokens=4, **tokens
    )
    model.save_pretrained(directory)
    facts = convert(directory, tmp_path / "ours")
    assert facts["notes"][0] in str(plan_conversion(directory))
    assert type(AutoTokenizer.from_pretrained(tmp_path / "ours")).__name__ == "TokenizersBackend"
    texts = ["a man sees the dog", "the park"]
    ours, theirs = (
        pipeline("translation", model=str(tmp_path / name))(texts) for name in ("ours", "theirs")
    )
    assert ours == theirs and any(result["translation_text"] for result in ours)
