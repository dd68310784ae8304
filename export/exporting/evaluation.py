"""Task metrics of a model on text, run by torch from a checkpoint or by onnxruntime from its
export.

| model | text | metric |
|---|---|---|
| seq2seq language model | source and references, line by line | BLEU of the generated text |
| decoder language model | any text | perplexity of each token given those before it in its window |
| masked language model | one text a line | pseudo-perplexity of each token given its whole line |
| sequence classifier | one text a line, one label a line | accuracy |

Pseudo-perplexity (Salazar et al. 2020) masks one token at a time and reads all other tokens.
"""

import os
from collections.abc import Callable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding

from vanilla_transformer.training.data import read_files, read_lines, read_text
from vanilla_transformer.training.metrics import bleu as corpus_bleu
from vanilla_transformer.training.metrics import check_tokenize

from ..errors import UsageError
from ..heads import HEADS
from ..inference.export_info import MANIFEST
from ..inference.inputs import pad_sequences
from ..inference.logits import log_sum_exp
from ..inference.options import Options, check, check_single
from ..inference.rows import GenerationRequest
from ..proof.outcome import step_logits
from ..text.checks import check_tokens

WINDOW = 256  # tokens a decoder sees at most; windows do not overlap
MAX_LOGITS = 1 << 26  # held at once, 256 MB


def evaluate(
    directory: str | os.PathLike,
    source: str | os.PathLike | None = None,
    references: str | os.PathLike | None = None,
    text: str | os.PathLike | None = None,
    labels: str | os.PathLike | None = None,
    batch_size: int = 32,
    dtype: str | None = None,
    workers: int | None = None,
    variant: str | None = None,
    device: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the metric of the checkpoint or export `directory`.

    The result has the metric by name, `engine`, the number of `sentences` or `tokens`, and for BLEU
    its `signature`. The class of the model determines the metric and its files: `bleu` of
    translations (`source`, `references`), `perplexity` of a language model (`text`),
    `pseudo_perplexity` of a masked language model (`text`), and `accuracy` of a classifier (`text`,
    `labels`).

    Args:
        source, references, text: text files with one sentence a line; for `perplexity` any text.
        labels: file with one label a line: its name (as in the config's `label2id`) or id.
        batch_size: rows that the model reads at once.
        dtype: dtype of an export's weights; by default the first.
        workers: number of threads that generate batches with an export, as in `Runtime`.
        variant: variant of a checkpoint's weights: "fp16" reads model.fp16.safetensors.
        device: device that an export runs on, as in `Runtime`; a checkpoint runs on the CPU.
        options: generation options and languages for BLEU, as in `TextRuntime.generate`. They take
            precedence over the checkpoint's settings. `bleu_tokenize` is sacreBLEU's `tokenize`:
            "13a" by default, "none" for tokenized text. BLEU is cased.

    Raises:
        UsageError: for files and options that the metric does not use, for a missing file argument,
            for `dtype`, `workers` or `device` of a checkpoint, `variant` of an export, and for
            invalid generation options.
        ValueError: for files that do not match, for a model without a metric, and for a label that
            the model does not have.
        FileNotFoundError: if a file does not exist.
    """
    engine = load_engine(directory, {"dtype": dtype, "workers": workers, "device": device}, variant)
    name = HEADS[engine.architecture].metric
    if name is None:
        scored = ", ".join(name for name, head in HEADS.items() if head.metric)
        raise ValueError(f"{engine.architecture} has no metric, expected one of {scored}")
    metric, parameters = METRICS[name]
    inputs = {"source": source, "references": references, "text": text, "labels": labels}
    files = {name: Path(file) for name, file in inputs.items() if file is not None}
    if set(files) != set(parameters):
        expected, got = (
            " and ".join(f"--{name}" for name in names) or "none" for names in (parameters, files)
        )
        raise UsageError(f"a {engine.architecture} is evaluated on {expected}, got {got}")
    if options and metric is not bleu:
        raise UsageError(
            f"generation options {sorted(options)} have no effect on the {metric.__name__}, "
            "expected none"
        )
    return {
        **metric(engine, *(files[name] for name in parameters), batch_size, **options),
        "engine": engine.name,
    }


def load_engine(
    directory: str | os.PathLike, runtime: dict[str, Any], variant: str | None = None
) -> "Engine":
    """Return the model in `directory`. `runtime` has the arguments of `Runtime` for an export, and
    `variant` is for a checkpoint: they are None where the model has none of them."""
    if (Path(directory) / MANIFEST).is_file():
        if variant is not None:
            raise UsageError(
                f"variant={variant!r} is not supported for an export ({directory}), expected a "
                "checkpoint"
            )
        return OnnxEngine(directory, **runtime)
    for name, value in runtime.items():
        if value is not None:
            raise UsageError(
                f"{name}={value!r} is not supported for a checkpoint ({directory}), expected "
                "an export"
            )
    return TorchEngine(directory, variant)


def compare(
    export: str | os.PathLike,
    checkpoint: str | os.PathLike,
    dtype: str | None = None,
    variant: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Return the metric of an export and of its checkpoint on the same files.

    The keys are metric (its name), onnxruntime and torch (its values), and difference (export -
    checkpoint).
    `settings` are the files and options of the metric, such as `source` and `references`. `dtype`
    selects the weights of the export, `variant` those of the checkpoint.
    """
    result = evaluate(export, dtype=dtype, **settings)
    expected = evaluate(checkpoint, variant=variant, **settings)
    metric = next(iter(result))
    difference = result[metric] - expected[metric]
    return {
        "metric": metric,
        "onnxruntime": result[metric],
        "torch": expected[metric],
        "difference": round(difference, 6),
    }


# -------------------------------------------------------------------------------------- the metrics


def bleu(
    engine: "Engine",
    source: Path,
    references: Path,
    batch_size: int,
    /,
    bleu_tokenize: str = "13a",
    **options: Any,
) -> dict[str, Any]:
    try:
        check_tokenize(bleu_tokenize)
    except ValueError as error:
        raise UsageError(str(error)) from None
    options = check_single(options, "BLEU scores")
    sources, targets = read_files([source, references])
    outputs = engine.generate(sources, batch_size, **options)
    score, signature = corpus_bleu(outputs, targets, bleu_tokenize)
    return {"bleu": round(score, 2), "signature": signature, "sentences": len(sources)}


def perplexity(engine: "Engine", text: Path, batch_size: int) -> dict[str, Any]:
    [encoding] = engine.encode([read_text(text)], special_tokens=False)
    ids = np.array(encoding.ids)
    if len(ids) < 2:
        raise ValueError(f"{text} has {len(ids)} tokens, expected at least 2")
    window = min(WINDOW, engine.config["max_position_embeddings"])
    windows = [ids[start : start + window] for start in range(0, len(ids), window)]
    check_tokens(ids.max(), engine.config["vocab_size"])
    predicted, total = len(ids) - len(windows), 0.0
    windows = [row for row in windows if len(row) > 1]
    size = rows_at_once(engine, window, batch_size)
    for same in (windows[:-1], windows[-1:]):  # the last window may be shorter
        for start in range(0, len(same), size):
            rows = np.stack(same[start : start + size])
            place = 1
            for logits in engine.steps(rows):
                end = place + logits.shape[1]
                total += sum_nll(logits, rows[:, place:end])
                place = end
    return {"perplexity": round(float(np.exp(total / predicted)), 4), "tokens": predicted}


def pseudo_perplexity(engine: "Engine", text: Path, batch_size: int) -> dict[str, Any]:
    mask_token = engine.mask_token_id
    if mask_token is None:
        raise ValueError("the tokenizer has no mask token, which pseudo-perplexity needs")
    encodings = engine.encode(read_lines(text), special_tokens=True)
    masked = [
        (ids, position)
        for ids, specials in [(e.ids, e.special_tokens_mask) for e in encodings]  # lists, made once
        for position, special in enumerate(specials)
        if not special
    ]
    rows, positions = zip(*masked)
    size = rows_at_once(engine, max(map(len, rows)), batch_size)
    total = 0.0
    for places, ids, mask in padded_batches(engine, rows, size):
        at = np.arange(len(places)), np.take(positions, places)
        tokens = ids[at]
        ids[at] = mask_token
        total += sum_nll(engine.logits(ids, mask)[at][:, None], tokens[:, None])
    return {"pseudo_perplexity": round(float(np.exp(total / len(rows))), 4), "tokens": len(rows)}


def accuracy(engine: "Engine", text: Path, labels: Path, batch_size: int) -> dict[str, Any]:
    texts, expected = read_files([text, labels])
    names = {str(name): int(index) for index, name in engine.config["id2label"].items()}
    names |= {str(index): index for index in names.values() if str(index) not in names}
    if unknown := set(expected) - names.keys():
        raise ValueError(
            f"{labels} has labels {sorted(unknown)[:5]}, expected some of {sorted(names)}"
        )
    rows = [encoding.ids for encoding in engine.encode(texts, special_tokens=True)]
    right = 0
    for places, ids, mask in padded_batches(engine, rows, batch_size):
        numbers = [names[expected[place]] for place in places]
        right += int((engine.logits(ids, mask).argmax(axis=-1) == numbers).sum())
    return {"accuracy": round(right / len(texts), 4), "sentences": len(texts)}


# Each metric of `heads.HEADS` -> its function, and the files that it takes.
METRICS: dict[str, tuple[Callable[..., dict[str, Any]], tuple[str, ...]]] = {
    "bleu": (bleu, ("source", "references")),
    "perplexity": (perplexity, ("text",)),
    "pseudo_perplexity": (pseudo_perplexity, ("text",)),
    "accuracy": (accuracy, ("text", "labels")),
}


def sum_nll(logits: np.ndarray, tokens: np.ndarray) -> float:
    """Return the sum of -log p(token) for logits (B, T, V) and the tokens (B, T) that follow each
    position."""
    rows = logits.reshape(-1, logits.shape[-1])
    maximum, log_sum = log_sum_exp(rows)
    correct = rows[np.arange(len(rows)), tokens.ravel()]
    return float((maximum + log_sum).sum(dtype=np.float64) - correct.sum(dtype=np.float64))


def rows_at_once(engine: "Engine", length: int, batch_size: int) -> int:
    """Return how many rows of `length` tokens the model reads at once: up to `batch_size`, and
    `MAX_LOGITS`."""
    return max(1, min(batch_size, MAX_LOGITS // (length * engine.config["vocab_size"])))


def padded_batches(
    engine: "Engine", rows: Sequence[list[int]], size: int
) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
    """Yield indices of at most `size` of the `rows` of token ids, with their ids and mask (B, S),
    see `batches`."""
    for places in batches(rows, size):
        yield (
            places,
            *pad_sequences([rows[place] for place in places], engine.config["pad_token_id"]),
        )


# -------------------------------------------------------------------------------------- the engines
# Both have the same methods. Their logits are float32.


class OnnxEngine:
    """An export, run by onnxruntime."""

    name = "onnxruntime"

    def __init__(self, export: str | os.PathLike, **runtime: Any):
        from ..text_runtime import TextRuntime

        self.text = TextRuntime(export, **runtime)
        self.runtime = self.text.runtime
        self.encode = self.text.encode
        self.architecture = self.runtime.architecture
        self.config = self.runtime.config

    @property
    def mask_token_id(self) -> int | None:
        return self.text.tokenizer_settings.special_tokens["mask_token"]

    def generate(self, texts: list[str], batch_size: int, /, **options: Any) -> list[str]:
        return self.text.generate(texts, **options)

    def logits(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return the first output of a model that reads full sequences, for `ids` and `mask` (B,
        S)."""
        return self.runtime.encode(ids, mask)

    def steps(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the logits (B, t, V) before each of `ids` (B, T) but the first: at once if the
        graph returns all logits, else one step for each token."""
        first, length = ids[:, :1], ids.shape[1]
        request = GenerationRequest(Options(length - 1), first, np.ones_like(first))
        steps = [length - 2] if length > 2 else []
        return step_logits(self.runtime.model, request, ids[:, 1:], steps)


class TorchEngine:
    """A checkpoint, run by torch in float32."""

    name = "torch"

    def __init__(self, checkpoint: str | os.PathLike, variant: str | None = None):
        from vanilla_transformer.checkpoint import load_tokenizer

        from .loading import load_checkpoint

        self.model = load_checkpoint(checkpoint, variant)
        if self.model.can_generate():
            # transformers needs single rows for it
            self.model.generation_config.prompt_lookup_num_tokens = None
        self.text = load_tokenizer(checkpoint)
        self.architecture = type(self.model).__name__
        self.config = self.model.config.to_dict()

    @property
    def mask_token_id(self) -> int | None:
        return self.text.mask_token_id

    def encode(self, texts: list[str], special_tokens: bool) -> list[Encoding]:
        tokenizer = self.text.backend_tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer.encode_batch(texts, add_special_tokens=special_tokens)

    def generate(
        self,
        texts: list[str],
        batch_size: int,
        /,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        **options: Any,
    ) -> list[str]:
        options = check(options) | self.chosen_languages(src_lang, tgt_lang)
        beams = options.get("num_beams", 1)
        if beams > self.model.config.vocab_size:
            raise UsageError(
                f"num_beams is {beams}, expected at most {self.model.config.vocab_size}, the "
                "vocabulary size"
            )
        seed = options.pop("seed", None)
        if seed is not None:
            import transformers

            transformers.set_seed(seed)
        outputs = [""] * len(texts)
        for batch in batches(texts, batch_size):
            rows = [texts[index] for index in batch]
            inputs = self.text(rows, padding=True, return_tensors="pt", return_token_type_ids=False)
            check_tokens(inputs["input_ids"].max(), self.model.config.vocab_size)
            # `generate` is a mixin's method and has no type.
            tokens = self.model.generate(**inputs, **options)  # type: ignore[operator]
            decoded = self.text.batch_decode(tokens, skip_special_tokens=True)
            for index, output in zip(batch, decoded, strict=True):
                outputs[index] = output
        return outputs

    def chosen_languages(self, src_lang: str | None, tgt_lang: str | None) -> dict[str, int]:
        """Set the tokenizer's source language, and return options of `generate` that select the
        target language.

        Raises UsageError for an unknown language, and for a model without languages. The languages
        have their names in the tokenizer; None for its default. Without any, nothing is set.
        """
        if src_lang is None and tgt_lang is None:
            return {}
        if not hasattr(self.text, "src_lang"):
            raise UsageError(
                f"src_lang is {src_lang!r} and tgt_lang {tgt_lang!r}, expected None: the model "
                "has no languages"
            )
        from vanilla_transformer.pipelines_vanilla_transformer import choose_languages

        try:
            return choose_languages(self.model, self.text, src_lang, tgt_lang)
        except ValueError as error:
            raise UsageError(str(error)) from None

    def logits(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return the model's first output for `ids` and `mask` (B, S), computed without
        gradients."""
        import torch

        check_tokens(ids.max(), self.model.config.vocab_size)
        with torch.no_grad():
            logits = self.model(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))[0]
            return logits.numpy()

    def steps(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the logits (B, T - 1, V) before all `ids` (B, T) but the first, at once."""
        yield self.logits(ids[:, :-1], np.ones_like(ids[:, :-1]))


Engine = OnnxEngine | TorchEngine


def batches(rows: Sequence[Sized], size: int) -> list[list[int]]:
    """Return lists of at most `size` indices of `rows`, sorted by length, shortest first."""
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    return [order[start : start + size] for start in range(0, len(order), size)]
