"""From one language to another; any text to text."""

from itertools import chain

import numpy as np
from transformers import DataCollatorForSeq2Seq

from ...configuration_vanilla_transformer import VanillaSeq2SeqConfig
from ...modeling_vanilla_transformer import VanillaSeq2SeqForConditionalGeneration
from ..data import SOURCES, read_columns

CONFIG, MODEL = VanillaSeq2SeqConfig, VanillaSeq2SeqForConditionalGeneration
PIPELINE = "translation"
# Each split is a file of the source and one of the target, line by line.
DATA = (*SOURCES, "streaming", "train", "validation", "test")
FILES = ("source", "target")
EVALUATION = ("bleu_tokenize",)  # of sacreBLEU, "13a" by default
METRICS = ("bleu", "chrf")

draw = None
reduce = None  # the metrics take generated tokens


def read(data, split):
    return read_columns(data, split, FILES)


def texts(dataset):
    return chain(dataset["source"], dataset["target"])


def config_fields(text, data):
    return {}


def encode(columns, tokenizer, data):
    return {"input_ids": tokenizer(columns["source"])["input_ids"], "labels": tokenizer(columns["target"])["input_ids"]}


def examples(rows, data, split):
    return rows


def collator(tokenizer, model):
    return DataCollatorForSeq2Seq(tokenizer, model)


def metrics(tokenizer, config, evaluation, rows):
    return lambda prediction: scores_of_ids(*prediction, tokenizer, evaluation.get("bleu_tokenize", "13a"))


def scores_of_ids(predictions: np.ndarray, labels: np.ndarray, tokenizer, bleu_tokenize: str = "13a") -> dict:
    """sacreBLEU and chrF (cased), and BLEU's signature, of generated ids against label ids, both (B, T) padded with -100 or
    the pad token."""
    bleu, chrf = corpus_metrics(bleu_tokenize)
    outputs, references = (texts_of_ids(ids, tokenizer) for ids in (predictions, labels))
    score, chrf_score = (metric.corpus_score(outputs, [references]).score for metric in (bleu, chrf))
    return {"bleu": score, "chrf": chrf_score, "signature": str(bleu.get_signature())}


def corpus_metrics(bleu_tokenize: str):
    """sacreBLEU's BLEU and chrF."""
    from sacrebleu.metrics import BLEU, CHRF

    return BLEU(tokenize=bleu_tokenize, force=bleu_tokenize == "none"), CHRF()  # or it warns of text in tokens


def texts_of_ids(ids: np.ndarray, tokenizer) -> list[str]:
    return tokenizer.batch_decode(np.where(ids == -100, tokenizer.pad_token_id, ids), skip_special_tokens=True)
