"""Task metrics of a model on text, run by torch from a checkpoint or by onnxruntime from its export.

| model | text | metric |
|---|---|---|
| seq2seq language model | source and target, line by line | BLEU of the generated text |
| decoder language model | any text | perplexity of each token given those before it in its window |
| masked language model | one text a line | pseudo-perplexity (Salazar et al. 2020): each token given all others of its line |
| sequence classifier | one text a line, one label a line | accuracy |
"""

import os
from contextlib import closing
from pathlib import Path

import numpy as np

from vanilla_transformer.training.data import read_lines, read_parallel, read_text

from .errors import UsageError
from .runtime.artifact import MANIFEST, json_object
from .runtime.decoder import GenerationRequest
from .runtime.inputs import pad_sequences
from .runtime.logits import log_sum_exp
from .runtime.options import Options

WINDOW = 256  # tokens a decoder sees at most; windows do not overlap
MAX_LOGITS = 1 << 26  # held at once, 256 MB


def evaluate(
    directory: str | os.PathLike,
    source: Path | None = None,
    target: Path | None = None,
    text: Path | None = None,
    labels: Path | None = None,
    batch_size: int = 32,
    dtype: str | None = None,
    **options,
) -> dict:
    """The metric of the table above, under its name, for the checkpoint or export `directory`.

    `labels` are names of the config's `label2id` or ids. BLEU is sacreBLEU's, cased, generated with the settings of the
    checkpoint and `options` (as `Runtime.generate`) over them; the option `bleu_tokenize` is sacreBLEU's `tokenize`, "13a" by
    default, "none" for text that is in tokens already. `dtype` chooses among the weights of an export, as `Runtime`.

    Returns the metric, `engine`, how much was read (`sentences` or `tokens`), and for BLEU its `signature`.

    Raises:
        UsageError: for files and options that the model's metric does not take, and as `Runtime.generate`.
        ValueError: for files that do not fit each other, for a model without a metric, and for a label that the model does
            not have.
    """
    if (Path(directory) / MANIFEST).is_file():
        engine = OnnxEngine(directory, dtype)
    elif dtype is not None:
        raise UsageError(f"dtype {dtype!r} is for an export, and {directory} is none")
    else:
        engine = TorchEngine(directory)
    if engine.architecture not in METRICS:
        raise ValueError(f"no metric for a {engine.architecture}, expected one of {', '.join(METRICS)}")
    metric, takes = METRICS[engine.architecture]
    files = {"source": source, "target": target, "text": text, "labels": labels}
    files = {name: file for name, file in files.items() if file is not None}
    if set(files) != set(takes):
        wanted, found = (" and ".join(f"--{name}" for name in names) or "none" for names in (takes, files))
        raise UsageError(f"a {engine.architecture} is evaluated on {wanted}, got {found}")
    if options and metric is not bleu:
        raise UsageError(f"options {sorted(options)} have no effect on the {metric.__name__} of a model")
    return {**metric(engine, *(files[name] for name in takes), batch_size, **options), "engine": engine.name}


def compare(export: str | os.PathLike, checkpoint: str | os.PathLike, dtype: str | None = None, **settings) -> dict:
    """`evaluate` of both with the same `settings`: the metric by engine, and the `difference` (export - checkpoint). `dtype` is
    that of the export."""
    found = evaluate(export, dtype=dtype, **settings)
    expected = evaluate(checkpoint, **settings)
    metric = next(iter(found))
    difference = found[metric] - expected[metric]
    return {"metric": metric, "onnxruntime": found[metric], "torch": expected[metric], "difference": round(difference, 6)}


# ------------------------------------------------------------------------------------------------------------ the metrics


def bleu(engine, source, target, batch_size, /, bleu_tokenize="13a", **options):
    from sacrebleu.metrics import BLEU

    if bleu_tokenize not in BLEU.TOKENIZERS:
        raise UsageError(f"bleu_tokenize must be one of {list(BLEU.TOKENIZERS)}, got {bleu_tokenize!r}")
    sources, targets = zip(*read_parallel(source, target))
    metric = BLEU(tokenize=bleu_tokenize)
    outputs = [""] * len(sources)
    for chosen in batches(sources, batch_size):
        for index, output in zip(chosen, engine.generate([sources[index] for index in chosen], **options), strict=True):
            outputs[index] = output
    score = metric.corpus_score(outputs, [list(targets)])
    return {"bleu": round(score.score, 2), "signature": str(metric.get_signature()), "sentences": len(sources)}


def perplexity(engine, text, batch_size):
    [encoding] = engine.encode([read_text(text)], special_tokens=False)
    ids = np.array(encoding.ids)
    if len(ids) < 2:
        raise ValueError(f"{text} has {len(ids)} tokens, expected at least 2")
    window = min(WINDOW, engine.config["max_position_embeddings"])
    windows = [ids[start : start + window] for start in range(0, len(ids), window)]
    total = 0.0
    vocabulary = engine.config["vocab_size"]
    if ids.max() >= vocabulary:
        raise ValueError(f"the tokenizer gives token id {ids.max()}, expected less than vocab_size, {vocabulary}")
    for chosen in batches(windows, max(1, min(batch_size, MAX_LOGITS // (window * vocabulary)))):
        for length in {len(windows[index]) for index in chosen}:  # the last window may be shorter
            rows = np.stack([windows[index] for index in chosen if len(windows[index]) == length])
            if length > 1:
                total += sum(sum_nll(logits, rows[:, start + 1 :]) for start, logits in engine.steps(rows[:, :-1]))
    predicted = len(ids) - len(windows)
    return {"perplexity": round(float(np.exp(total / predicted)), 4), "tokens": predicted}


def pseudo_perplexity(engine, text, batch_size):
    mask_token = engine.tokenizer.token_to_id(engine.mask_token or "")
    if mask_token is None:
        raise ValueError("the tokenizer has no mask token, which pseudo-perplexity needs")
    encodings = engine.encode(read_lines(text), special_tokens=True)
    rows = [(e.ids, place) for e in encodings for place, special in enumerate(e.special_tokens_mask) if not special]
    most = max(1, MAX_LOGITS // (max(len(ids) for ids, _ in rows) * engine.config["vocab_size"]))
    total = 0.0
    for chosen in batches([ids for ids, _ in rows], min(batch_size, most)):
        ids, mask = pad_sequences([rows[index][0] for index in chosen], engine.config["pad_token_id"])
        at = np.arange(len(chosen)), np.array([rows[index][1] for index in chosen])
        tokens = ids[at]
        ids[at] = mask_token
        total += sum_nll(engine.logits(ids, mask)[at][:, None], tokens[:, None])
    return {"pseudo_perplexity": round(float(np.exp(total / len(rows))), 4), "tokens": len(rows)}


def accuracy(engine, text, labels, batch_size):
    texts, wanted = zip(*read_parallel(text, labels))
    names = {str(name): int(index) for index, name in engine.config["id2label"].items()}
    names |= {str(index): index for index in names.values() if str(index) not in names}
    if unknown := set(wanted) - names.keys():
        raise ValueError(f"{labels} has labels {sorted(unknown)[:5]}, expected some of {sorted(names)}")
    encodings = engine.encode(list(texts), special_tokens=True)
    right = 0
    for chosen in batches([encoding.ids for encoding in encodings], batch_size):
        logits = engine.logits(*pad_sequences([encodings[index].ids for index in chosen], engine.config["pad_token_id"]))
        right += int((logits.argmax(axis=-1) == [names[wanted[index]] for index in chosen]).sum())
    return {"accuracy": round(right / len(texts), 4), "sentences": len(texts)}


METRICS = {
    "VanillaSeq2SeqForConditionalGeneration": (bleu, ("source", "target")),
    "VanillaDecoderForCausalLM": (perplexity, ("text",)),
    "VanillaEncoderForMaskedLM": (pseudo_perplexity, ("text",)),
    "VanillaEncoderForPreTraining": (pseudo_perplexity, ("text",)),
    "VanillaEncoderForSequenceClassification": (accuracy, ("text", "labels")),
    "VanillaDecoderForSequenceClassification": (accuracy, ("text", "labels")),
    "VanillaSeq2SeqForSequenceClassification": (accuracy, ("text", "labels")),
}


def sum_nll(logits, tokens):
    """The sum of -log p(token): logits (B, T, V) at each place, and the tokens (B, T or more) that stand behind it."""
    logits, tokens = logits.reshape(-1, logits.shape[-1]), tokens[:, : logits.shape[1]].ravel()
    maximum, log_sum = log_sum_exp(logits)
    return float((maximum + log_sum)[:, 0].sum(dtype=np.float64) - logits[np.arange(len(tokens)), tokens].sum(dtype=np.float64))


def batches(rows, size):
    """The indices of `rows`, those of similar length together."""
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    return [order[start : start + size] for start in range(0, len(order), size)]


# ------------------------------------------------------------------------------------------------------------ the engines


class OnnxEngine:
    """An export, run by onnxruntime."""

    name = "onnxruntime"

    def __init__(self, export, dtype):
        from .runtime.text import TextRuntime

        self.text = TextRuntime(export, dtype=dtype)
        self.runtime = self.text.runtime
        self.tokenizer = self.text.tokenizer
        self.generate = self.text.generate
        self.encode = self.text.encode
        self.architecture = self.runtime.artifact.manifest["architecture"]
        self.config = self.runtime.config

    @property
    def mask_token(self):
        name = "tokenizer_config.json"
        content = self.runtime.artifact.read(name) or b"{}"
        token = json_object(self.runtime.artifact.directory / name, content).get("mask_token")
        return token.get("content") if isinstance(token, dict) else token

    def logits(self, ids, mask):
        """The first output for whole sequences (B, S)."""
        return self.runtime.encode(ids, mask)

    def steps(self, ids):
        """Pairs of a place and the logits (B, t, V) after the tokens from there on, for all tokens (B, T)."""
        first = ids[:, :1]
        request = GenerationRequest(Options(max_new_tokens=max(1, ids.shape[1] - 1)), first, np.ones_like(first))
        with closing(self.runtime.decoders.start(request)) as decoder:
            if decoder.all_logits:
                yield 0, decoder.prefill(ids, np.ones_like(ids))
                return
            yield 0, decoder.prefill(first, request.attention_mask)
            for place in range(1, ids.shape[1]):
                yield place, decoder.step(ids[:, place : place + 1])


class TorchEngine:
    """A checkpoint, run by torch in float32."""

    name = "torch"

    def __init__(self, checkpoint):
        from vanilla_transformer.checkpoint import load_tokenizer

        from .exporting import load_checkpoint

        self.model = load_checkpoint(checkpoint)
        self.text = load_tokenizer(checkpoint)
        self.architecture = type(self.model).__name__
        self.config = self.model.config.to_dict()

    @property
    def mask_token(self):
        return self.text.mask_token

    @property
    def tokenizer(self):
        return self.text.backend_tokenizer

    def encode(self, texts, special_tokens):
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        return self.tokenizer.encode_batch(texts, add_special_tokens=special_tokens)

    def generate(self, texts, **options):
        if (beams := options.get("num_beams", 1)) > self.model.config.vocab_size:
            raise UsageError(f"num_beams is {beams}, expected at most {self.model.config.vocab_size}, the vocabulary")
        inputs = self.text(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
        self.check(inputs["input_ids"])
        return self.text.batch_decode(self.model.generate(**inputs, **options), skip_special_tokens=True)

    def check(self, ids):
        if ids.max() >= (size := self.model.config.vocab_size):
            raise ValueError(f"the tokenizer gives the token {ids.max()}, expected one of [0, {size - 1}], the vocabulary")

    def logits(self, ids, mask):
        import torch

        self.check(ids)
        with torch.no_grad():
            return self.model(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))[0].numpy()

    def steps(self, ids):
        yield 0, self.logits(ids, np.ones_like(ids))
