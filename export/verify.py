"""Compares an export directory with its checkpoint, in torch, over a seeded sample of shapes and paddings."""

import os
from dataclasses import dataclass, field

import numpy as np
import torch

from .runtime import Decoding, Runtime, padded

TOLERANCE = 1e-4  # times max(1, |value|), float32
LATER_STEPS = (1, 3, 1)  # tokens fed per step once a cache is there


@dataclass
class Report:
    """What was compared, and what differed. `ties` are greedy tokens that differ where torch's own two best logits are
    closer than twice the tolerance; each difference beyond the tolerance is a line of `failures`."""

    cases: int = 0
    values: int = 0
    tokens: int = 0
    max_error: float = 0.0
    ties: int = 0
    failures: list[str] = field(default_factory=list)

    def summary(self) -> dict:
        return {
            "cases": self.cases,
            "values": self.values,
            "max_error": self.max_error,
            "tolerance": TOLERANCE,
            "tokens": self.tokens,
            "ties": self.ties,
            "failures": len(self.failures),
        }

    def __str__(self):
        return (
            f"{self.cases} cases, {self.values} values: largest error {self.max_error:.1e} (tolerance {TOLERANCE:.0e} x "
            f"max(1, |value|)); {self.tokens} greedy tokens, {self.ties} ties; {len(self.failures)} failures"
        )

    def compare(self, found, expected, real, case):
        """`found` and `expected` (B, ..., C) where the boolean `real` (B, ...) says so; an error is relative above 1."""
        if not np.isfinite(found).all():
            self.failures.append(f"{case}: values that are not finite")
            return
        found, expected = found[real], expected[real]
        errors = np.abs(found - expected) / np.maximum(1, np.abs(expected))
        self.values += errors.size
        self.max_error = max(self.max_error, float(errors.max(initial=0)))
        if errors.size and errors.max() > TOLERANCE:
            self.failures.append(f"{case}: error {errors.max():.1e}, expected at most {TOLERANCE:.0e}")

    def compare_tokens(self, found, expected, real, case):
        """The greedy choice of both, (B, T, V) logits; `real` (B, T)."""
        found, expected = found[real], expected[real]
        self.tokens += len(found)
        best, second = np.sort(expected, axis=-1)[:, :-3:-1].T
        tied = best - second < 2 * TOLERANCE * np.maximum(1, np.abs(best))
        differs = found.argmax(axis=-1) != expected.argmax(axis=-1)
        self.ties += int((differs & tied).sum())
        if (wrong := int((differs & ~tied).sum())) > 0:
            self.failures.append(f"{case}: {wrong} of {len(found)} greedy tokens differ")


def verify(directory: str | os.PathLike, model, cases: int = 60, seed: int = 0) -> Report:
    """`model` is the checkpoint in torch, float32 and in evaluation mode; `directory` its export.

    Each case is a batch of 1 to 5 rows of 1 to 33 random tokens: full rows, rows of different lengths padded on the
    right, or the same with one row that is all padding (a decoder: padded on the left). Decoders are compared at the
    first step and at later ones, with torch reading the whole sequence at once, without a cache.
    """
    runtime = Runtime(directory)
    check_same_model(runtime, model)
    compare = {"encoder": compare_encoder, "decoder": compare_decoder, "seq2seq": compare_seq2seq}
    compare = compare[model.config.model_type.removeprefix("vanilla-")]
    rng, report = np.random.default_rng(seed), Report()
    longest = 33
    if model.config.position_embedding_type == "learned":
        longest = min(longest, model.config.max_position_embeddings - sum(LATER_STEPS))
    for number in range(cases):
        padding = ("none", "right", "empty row")[number % 3]
        ids, mask = sample(rng, model.config.vocab_size, longest, padding)
        with torch.no_grad():
            compare(runtime, model, ids, mask, rng, report, f"case {number} {ids.shape}, padding: {padding}")
        report.cases += 1
    return report


def check_same_model(runtime, model):
    """The architecture and every size must be the checkpoint's, or comparing would fail inside numpy."""
    sizes = ("vocab_size", "hidden_size", "num_attention_heads", "head_dim", "value_head_dim", "num_hidden_layers")
    sizes += ("decoder_layers", "num_labels")
    found = {"architecture": runtime.artifact.manifest["architecture"], **runtime.config}
    found["num_labels"] = len(runtime.config["id2label"])
    expected = {"architecture": type(model).__name__, **{name: getattr(model.config, name, None) for name in sizes}}
    for name, value in expected.items():
        if found.get(name, value) != value:
            export = runtime.artifact.directory
            raise ValueError(f"{export} is an export of a model with {name} {found[name]}, not of the checkpoint: {value}")


def sample(rng, vocab_size, longest, padding):
    """Random ids and a mask, both (B, S)."""
    shape = rng.integers(1, 6), rng.integers(1, longest + 1)
    ids, mask = rng.integers(0, vocab_size, shape), np.ones(shape, np.int64)
    if padding != "none":
        lengths = rng.integers(1, shape[1] + 1, shape[0])
        lengths[rng.integers(shape[0])] = shape[1]
        if padding == "empty row" and shape[0] > 1:
            lengths[rng.integers(shape[0])] = 0
        mask = (np.arange(shape[1]) < lengths[:, None]).astype(np.int64)
    return ids, mask


def compare_encoder(runtime, model, ids, mask, rng, report, case):
    types = rng.integers(0, max(model.config.type_vocab_size, 1), ids.shape)
    found = runtime.outputs(ids, mask, types)
    expected = model(*map(torch.from_numpy, (ids, mask, types)))
    for spec in runtime.specs["encoder"].outputs:
        real = mask == 1 if "source_length" in spec.shape else mask.any(axis=1)
        report.compare(found[spec.name], expected[spec.name].numpy(), real, f"{case}, {spec.name}")


def compare_seq2seq(runtime, model, ids, mask, rng, report, case):
    hidden = runtime.encode(ids, mask)
    encoder = model.get_encoder()(torch.from_numpy(ids), torch.from_numpy(mask))
    report.compare(hidden, encoder.last_hidden_state.numpy(), mask == 1, case + ", encoder")
    first = rng.integers(1, 5)
    tokens = rng.integers(0, model.config.vocab_size, (len(ids), first + sum(LATER_STEPS)))
    decoding = Decoding(
        runtime.sessions["decoder"],
        runtime.specs["decoder"],
        {"encoder_hidden_states": hidden, "encoder_attention_mask": mask},
    )
    expected = model(
        attention_mask=torch.from_numpy(mask),
        encoder_outputs=encoder,
        decoder_input_ids=torch.from_numpy(tokens),
        use_cache=False,
    ).logits
    real = np.repeat(mask.any(axis=1)[:, None], tokens.shape[1], axis=1)
    compare_steps(decoding, tokens, first, expected.numpy(), real, report, case)


def compare_decoder(runtime, model, ids, mask, rng, report, case):
    ids, mask = padded(ids, mask, "left", 0)
    later = rng.integers(0, model.config.vocab_size, (len(ids), sum(LATER_STEPS)))
    tokens = np.concatenate([ids, later], axis=1)
    whole_mask = np.concatenate([mask, np.ones_like(later)], axis=1)
    positions = np.maximum(whole_mask.cumsum(axis=1) - 1, 0)
    expected = model(
        torch.from_numpy(tokens), torch.from_numpy(whole_mask), torch.from_numpy(positions), use_cache=False
    ).logits
    decoding = Decoding(runtime.sessions["decoder"], runtime.specs["decoder"], {"attention_mask": mask})
    compare_steps(decoding, tokens, ids.shape[1], expected.numpy(), whole_mask == 1, report, case)


def compare_steps(decoding, tokens, first, expected, real, report, case):
    """Feeds `tokens` (B, T) in pieces, the first of `first` tokens, and compares the logits of each piece."""
    start = 0
    for number, length in enumerate((first, *LATER_STEPS)):
        piece = slice(start, start + length)
        found = decoding.step(tokens[:, piece], None)
        where = f"{case}, step {number}"
        report.compare(found, expected[:, piece], real[:, piece], where)
        report.compare_tokens(found, expected[:, piece], real[:, piece], where)
        start += length
