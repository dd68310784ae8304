"""Runs an export directory with onnxruntime and numpy; torch is never imported."""

import os
from dataclasses import fields, replace

import numpy as np

from .artifact import Artifact, read_artifact
from .graphs import TARGETS, graph_specs
from .search import Options, beam_search, greedy

try:
    import onnxruntime
except ImportError:
    raise ImportError(
        "onnxruntime is not installed: pip install 'vanilla-transformer[cpu]', or [gpu] for onnxruntime-gpu"
    ) from None

from .decoding import FixedCaches, GrowingCaches, cross_states

# Fields of generation_config.json that change neither greedy nor beam search: bookkeeping, what only sampling reads, and
# what only an assistant model reads. Any other field must be at its default here, or is refused.
NO_EFFECT = {
    *("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "transformers_version", "use_cache"),
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind"),
    *("target_lookbehind", "max_length"),
}
DEFAULTS = {"repetition_penalty": 1, "encoder_repetition_penalty": 1, "num_return_sequences": 1, "num_beam_groups": 1}


class Runtime:
    """An export directory, loaded.

    Args:
        directory: what `vanilla-transformer export` wrote.
        threads: processor threads of one operator; by default as many as this process may use.

    Raises:
        FileNotFoundError, ValueError: if the directory is incomplete or changed, see `read_artifact`.
    """

    def __init__(self, directory: str | os.PathLike, threads: int | None = None):
        self.artifact: Artifact = read_artifact(directory)
        self.config = self.artifact.config
        self.target = self.artifact.manifest.get("target", "portable")
        if self.target not in TARGETS:
            raise ValueError(f"{directory} is for the target {self.target!r}, expected one of {', '.join(TARGETS)}")
        self.specs = graph_specs(self.config, self.artifact.manifest["architecture"], self.target)
        self.sessions = {role: self._session(spec.file, threads) for role, spec in self.specs.items()}

    def encode(
        self, input_ids: np.ndarray, attention_mask: np.ndarray | None = None, token_type_ids: np.ndarray | None = None
    ) -> np.ndarray:
        """The first of `outputs`: `last_hidden_state` (B, S, D), or the `logits` of the model's head.

        Raises:
            ValueError: as `outputs`; for a seq2seq model of the cpu target, whose encoder returns no states of its own.
        """
        if self.target == "cpu" and "decoder" in self.sessions:
            raise ValueError("the encoder of this export returns keys and values for its decoder only: use --target portable")
        return next(iter(self.outputs(input_ids, attention_mask, token_type_ids).values()))

    def outputs(
        self, input_ids: np.ndarray, attention_mask: np.ndarray | None = None, token_type_ids: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """All that the encoder graph returns, by name: of each token (B, S, ...), or of the sequence (B, ...).

        `input_ids` (B, S) integers, rows padded on the right; `attention_mask` (B, S), 1 for real tokens, by default all;
        `token_type_ids` (B, S), by default 0.

        Raises:
            ValueError: for an empty batch, ids outside the vocabulary, token types the model does not have, a mask of
                another shape, a sequence beyond a learned position table, or a model without an encoder.
        """
        if "encoder" not in self.sessions:
            raise ValueError(f"{self.artifact.manifest['architecture']} has no encoder: use generate")
        ids, mask = self._checked(input_ids, attention_mask)
        self._check_positions(ids.shape[1])
        feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": self._token_types(token_type_ids, ids)}
        spec = self.specs["encoder"]
        names = [tensor.name for tensor in spec.outputs]
        values = self.sessions["encoder"].run(names, {tensor.name: feeds[tensor.name] for tensor in spec.inputs})
        return dict(zip(names, values, strict=True))

    def generate(self, input_ids: np.ndarray, attention_mask: np.ndarray | None = None, **options) -> np.ndarray:
        """Token ids (B, T) as `transformers.generate` returns them: behind the start token for seq2seq, behind the prompt
        for a decoder, padded at the end.

        `input_ids` (B, S), rows padded on either side; `attention_mask` (B, S), by default 0 where `input_ids` have the
        pad token. A decoder's prompts come back padded on the left. Options, over those of generation_config.json:
        `max_new_tokens` (what `max_length` leaves behind the prompt, or 20), `num_beams` (1: greedy), `length_penalty`
        (1.0), `early_stopping` (False).

        Raises:
            ValueError: as `encode`; for a row without tokens, more tokens than a learned position table has rows, an
                unknown option, or a field of generation_config.json that this runtime does not apply.
        """
        if "decoder" not in self.sessions:
            raise ValueError(f"{self.artifact.manifest['architecture']} cannot generate: use encode")
        if attention_mask is None and self.config.get("pad_token_id") is not None:
            attention_mask = np.asarray(input_ids) != self.config["pad_token_id"]
        ids, mask = self._checked(input_ids, attention_mask)
        if not mask.any(axis=1).all():
            raise ValueError(f"row {int(mask.any(axis=1).argmin())} has no tokens, expected at least one in every row")
        settings = self._settings(options, prompt_length=1 if "encoder" in self.sessions else ids.shape[1])
        if "encoder" in self.sessions:
            self._check_positions(settings.max_new_tokens)
            source, ids, mask = padded(ids, mask, "right", settings.pad_token_id), self._start_tokens(len(ids)), None
        else:
            self._check_positions(int(mask.sum(axis=1).max()) + settings.max_new_tokens - 1)
            source = None
        decoding, *prompts = self.decoding(ids, mask, source, settings.max_new_tokens)
        first = decoding.start(*prompts)
        if settings.num_beams == 1:
            new = greedy(decoding.next, first, settings)
        else:
            decoding.repeat(settings.num_beams)
            new = beam_search(decoding.next, np.repeat(first, settings.num_beams, axis=0), settings)
        prompt = ids if mask is None else padded(ids, mask, "left", settings.pad_token_id)[0]
        return np.concatenate([prompt, new], axis=1)

    def decoding(self, ids, mask, source, new_tokens):
        """What decodes the prompts `ids` with `mask` (B, T) behind `source`, a pair of ids and mask, or `None` without an
        encoder, with room for `new_tokens` more; and the prompts as it takes them, to start with."""
        session, spec = self.sessions["decoder"], self.specs["decoder"]
        mask = np.ones_like(ids) if mask is None else mask
        if self.target == "portable":
            prompts = padded(ids, mask, "left", 0)
            feeds = (
                {} if source is None else {"encoder_hidden_states": self.encode(*source), "encoder_attention_mask": source[1]}
            )
            return GrowingCaches(session, spec, feeds, len(ids)), *prompts
        prompts = padded(ids, mask, "right", 0)
        feeds = {} if source is None else {**cross_states(self.outputs(*source)), "encoder_attention_mask": source[1]}
        return FixedCaches(session, spec, feeds, len(ids), ids.shape[1] + new_tokens), *prompts

    def _start_tokens(self, rows):
        start = self.artifact.generation_config.get("decoder_start_token_id", self.config["decoder_start_token_id"])
        if start is None:
            raise ValueError("decoder_start_token_id is None, expected the token id generation starts from")
        return np.full((rows, 1), start)

    def _settings(self, options, prompt_length):
        """generation_config.json with `options` over it."""
        known = {field.name for field in fields(Options)} - {"eos_token_ids", "pad_token_id"}
        if unknown := options.keys() - known:
            raise ValueError(f"unknown generation options {sorted(unknown)}, expected some of {sorted(known)}")
        saved = {name: value for name, value in self.artifact.generation_config.items() if value is not None}
        for name, value in saved.items():
            if name not in known | NO_EFFECT and value != DEFAULTS.get(name, 0) and not name.startswith("_"):
                raise ValueError(f"generation_config.json sets {name} to {value!r}, which this runtime does not apply")
        if "max_length" in saved:
            saved.setdefault("max_new_tokens", saved["max_length"] - prompt_length)
        eos = self.artifact.generation_config.get("eos_token_id", self.config["eos_token_id"])
        settings = Options(
            eos_token_ids=() if eos is None else tuple(np.atleast_1d(eos).tolist()),
            pad_token_id=saved.get("pad_token_id") or self.config["pad_token_id"] or 0,
        )
        settings = replace(settings, **{name: value for name, value in {**saved, **options}.items() if name in known})
        if settings.early_stopping not in (True, False, "never"):
            raise ValueError(f"early_stopping must be True, False or 'never', got {settings.early_stopping!r}")
        for name in ("max_new_tokens", "num_beams"):
            if getattr(settings, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(settings, name)} behind {prompt_length} tokens")
        return settings

    def _checked(self, input_ids, attention_mask):
        """int64 arrays, or an error: onnxruntime can end the process on an empty batch."""
        ids = np.asarray(input_ids)
        if ids.ndim != 2 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise ValueError(
                f"input_ids must be integers of shape (batch, length), both at least 1, got {ids.dtype} {ids.shape}"
            )
        if ids.min() < 0 or ids.max() >= self.config["vocab_size"]:
            raise ValueError(
                f"token ids must be in [0, {self.config['vocab_size'] - 1}], the vocabulary, got {ids.min()} to {ids.max()}"
            )
        mask = np.ones_like(ids) if attention_mask is None else np.asarray(attention_mask)
        if mask.shape != ids.shape:
            raise ValueError(f"attention_mask must have shape {ids.shape}, got shape {mask.shape}")
        if not np.isin(mask, (0, 1)).all():
            raise ValueError(f"attention_mask must be 0s and 1s, got {np.unique(mask).tolist()}")
        return ids.astype(np.int64), mask.astype(np.int64)

    def _token_types(self, token_type_ids, ids):
        """As the models: all 0 by default, and zeros are accepted where there are no types."""
        types = np.zeros_like(ids) if token_type_ids is None else np.asarray(token_type_ids)
        if types.shape != ids.shape:
            raise ValueError(f"token_type_ids must have shape {ids.shape}, got shape {types.shape}")
        count = self.config.get("type_vocab_size", 0)
        if types.min() < 0 or types.max() >= max(count, 1):
            raise ValueError(f"token_type_ids must be in [0, {max(count, 1) - 1}], got {types.min()} to {types.max()}")
        return types.astype(np.int64)

    def _check_positions(self, length):
        rows = self.config["max_position_embeddings"]
        if self.config["position_embedding_type"] == "learned" and length > rows:
            raise ValueError(f"{length} tokens, prompt and new ones together, are beyond the {rows} learned positions")

    def _session(self, file, threads):
        options = onnxruntime.SessionOptions()
        # onnxruntime's own default is the host's cores, not the process's.
        options.intra_op_num_threads = threads or len(os.sched_getaffinity(0))
        path = str(self.artifact.directory / file)
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def padded(ids, mask, side, pad_token_id):
    """Moves the real tokens of each row together, all padding to its `side`: the new ids and mask."""
    order = np.argsort(mask if side == "left" else 1 - mask, axis=1, kind="stable")
    ids, mask = np.take_along_axis(ids, order, axis=1), np.take_along_axis(mask, order, axis=1)
    return np.where(mask == 1, ids, pad_token_id), mask
