"""Runs an export directory with onnxruntime and numpy; torch is never imported."""

import hashlib
import json
import math
import os
import weakref
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np

from .artifact import Artifact, read_artifact
from .config import check_config, generation_defaults
from .errors import UsageError
from .external_data import check_external_data
from .graphs import DTYPES, KNOWN_DTYPES, graph_specs
from .logits import Processors
from .search import EXPECTED, ROOM, Options, Scores, as_list, beam_search, checked, is_whole, one_by_one

try:
    import onnxruntime
except ImportError:
    raise ImportError(
        "onnxruntime is not installed: pip install 'vanilla-transformer[cpu]', or [gpu] for onnxruntime-gpu"
    ) from None

from .decoding import BeamCaches, GrowingCaches, Pool, RaggedCaches, SlotCaches, cross_states, filled, position_bytes
from .doctor import CUDA, TENSORRT, processors, require, require_onnxruntime, require_running
from .session import Session

require_onnxruntime()

# Fields of generation_config.json that change no token: bookkeeping, where caches lie and how the model runs, what else
# `transformers.generate` returns, and what only an assistant model reads. Any other that is not applied must be at its default.
NO_EFFECT = {
    *("bos_token_id", "transformers_version", "use_cache", "cache_implementation", "cache_config", "max_cache_len"),
    *("prefill_chunk_size", "compile_config", "disable_compile", "continuous_batching_config"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind"),
    *("target_lookbehind", "max_matching_ngram_size"),
}
SAMPLING_ONLY = {"typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"}
DEFAULTS = {"encoder_repetition_penalty": 1, "num_beam_groups": 1, "typical_p": 1, "guidance_scale": 1}
# How long idle threads wait awake for work: longer than from one step to the next, and shorter than what onnxruntime does, tens
# of milliseconds, in which those of an encoder keep the processors from the decoder's.
SPIN_MICROSECONDS = "300"
# Of one run of an encoder: what it may hold of padding, what it must hold of tokens to be worth a run, and what it may hold of
# them for each thread, where more would only take memory.
MAX_PADDING, MIN_TOKENS, MAX_TOKENS = 0.15, 128, 256
# Sizes of the cuda target's caches are multiples of these, so that other batches find the same captured graphs: 1, 2, 4 rows
# and multiples of 8 as well.
SLOTS, SOURCE, ROWS = 64, 32, 8
MAX_THREADS = 1024
DEVICES = {"portable": ("cpu", "cuda", "tensorrt"), "cpu": ("cpu",), "cuda": ("cpu", "cuda")}


class Runtime:
    """An export directory, loaded.

    Args:
        directory: what `vanilla-transformer export` wrote.
        threads: processor threads of one operator, 1 to 1024; by default as many as this process may use.
        arena: whether onnxruntime keeps memory from one run for the next; without, it gives it back and asks for it again.
        device: `"cpu"` or `"cuda"`, by default that of the target; or, for the portable target in fp32, `"tensorrt"`, which
            compiles what reads whole sequences. Decoders, whose caches grow, are on CUDA then: each size would be compiled.
        engine_cache: the directory where TensorRT keeps what it compiled for the next time; by default it keeps nothing.
        dtype: which of the export's weights, by default the first that it was made with.

    Raises:
        FileNotFoundError, ValueError: if the directory is incomplete or changed, see `read_artifact`, or replaced meanwhile;
            ValueError for a target, dtype or config this runtime does not know, and for a graph that onnxruntime cannot load,
            that does not fit the config, or that keeps data outside the export.
        UsageError: for a number of threads other than 1 to 1024, a device that does not go with the target, a dtype that the
            export has not, and an `engine_cache` without TensorRT or inside the export.
        OSError: if CUDA or TensorRT is asked for and cannot be used, with what to do about it.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        threads: int | None = None,
        arena: bool = True,
        device: str | None = None,
        engine_cache: str | os.PathLike | None = None,
        dtype: str | None = None,
    ):
        if threads is not None and not (is_whole(threads) and 1 <= threads <= MAX_THREADS):
            raise UsageError(f"threads must be a whole number from 1 to {MAX_THREADS}, got {threads!r}")
        self.artifact: Artifact = read_artifact(directory)
        self.config = self.artifact.config
        self.target = self.artifact.manifest.get("target", "portable")
        for known in self.artifact.dtypes:
            if known not in DTYPES.get(self.target, ()):
                found = f"{directory} is for the target {self.target!r} with dtype {known!r}"
                raise ValueError(f"{found}, expected one of: {KNOWN_DTYPES}")
        if dtype is not None and dtype not in self.artifact.dtypes:
            raise UsageError(f"{directory} has no dtype {dtype!r}, expected one of {self.artifact.dtypes}")
        self.dtype = dtype = dtype or self.artifact.dtypes[0]
        activations = self.artifact.manifest.get("activations", dtype)
        check_config(self.config, self.artifact.directory / "config.json")
        self.specs = graph_specs(self.config, self.artifact.manifest["architecture"], self.target, dtype, activations)
        generation = self.artifact.directory / "generation_config.json"
        self.defaults = generation_defaults(self.artifact.generation_config, generation)
        self.device = device or ("cuda" if self.target == "cuda" else "cpu")
        compiles = "encoder" in self.specs and dtype == "fp32"
        devices = [name for name in DEVICES[self.target] if compiles or name != "tensorrt"]
        if self.device not in devices:
            found = f"{self.artifact.manifest['architecture']}, target {self.target!r}, dtype {dtype!r}"
            raise UsageError(f"device {device!r} does not go with {found}, expected one of {devices}")
        if engine_cache is not None and self.device != "tensorrt":
            raise UsageError(f"engine_cache is of no use on device {self.device!r}, expected device='tensorrt'")
        if engine_cache is not None and Path(engine_cache).resolve().is_relative_to(self.artifact.directory):
            raise UsageError(f"engine_cache is {engine_cache}, inside the export: expected a place outside, its files stay")
        self.engine_cache = engine_cache
        if self.device != "cpu":
            require(self.device)
        # onnxruntime's own default is the host's cores, not the process's.
        self.threads = threads or processors()
        self.arena = arena
        # The decoder first: its largest matrix, the last one, is there twice while onnxruntime brings it into its own layout.
        roles = sorted(self.specs.keys() - {"beams"})
        self.graphs = {role: self._graph(role) for role in self.specs}
        for file in self.artifact.manifest["files"]:
            if file.endswith(".onnx"):
                check_external_data(self.artifact.directory, file, self.artifact.manifest["files"])
        self.sessions = {role: self._session(role) for role in roles}
        self.artifact.check_unchanged()
        if "decoder" in self.specs:
            self.position_bytes = position_bytes(self.specs["decoder"])
        if self.target == "cuda" and "decoder" in self.specs:
            self.pool = Pool(self.sessions["decoder"], self.specs["decoder"], self.device)

    def encode(
        self,
        input_ids: np.ndarray,
        attention_mask: np.ndarray | None = None,
        token_type_ids: np.ndarray | None = None,
        **decoder: np.ndarray,
    ) -> np.ndarray:
        """The first of `outputs`: `last_hidden_state` (B, S, D), or the `logits` of the model's head.

        Raises:
            ValueError: as `outputs`; for a seq2seq model of the cpu target, whose encoder returns no states of its own.
        """
        if self.target != "portable" and "decoder" in self.sessions:
            raise ValueError("the encoder of this export returns keys and values for its decoder only: use --target portable")
        return next(iter(self.outputs(input_ids, attention_mask, token_type_ids, **decoder).values()))

    def outputs(
        self,
        input_ids: np.ndarray,
        attention_mask: np.ndarray | None = None,
        token_type_ids: np.ndarray | None = None,
        decoder_input_ids: np.ndarray | None = None,
        decoder_attention_mask: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """All that the encoder graph returns, by name: of each token (B, S, ...), or of the sequence (B, ...).

        `input_ids` (B, S) integers, rows padded on the right (a decoder's on either side), for multiple choice (B, C, S);
        `attention_mask`, 1 for real tokens, by default all, and `token_type_ids`, by default 0, of the same shape;
        `decoder_input_ids` and `decoder_attention_mask` (B, T), for a seq2seq model that returns states. Rows of similar length
        run together; what is returned for padding may be 0.

        Raises:
            ValueError: for an empty batch, ids outside the vocabulary, token types the model does not have, a mask of
                another shape, or with holes for a decoder, a sequence beyond a learned position table, decoder tokens that
                are missing or have no use, a row without the end token that a seq2seq classifier reads, or a model without
                an encoder.
        """
        if "encoder" not in self.sessions:
            raise ValueError(f"{self.artifact.manifest['architecture']} has no encoder: use generate")
        ids, mask = self._checked(input_ids, attention_mask)
        self._check_positions(self._counted(ids, mask))
        if self.config["model_type"] == "vanilla-decoder":
            check_together(mask, "attention_mask")
        if self.artifact.manifest["architecture"] == "VanillaSeq2SeqForSequenceClassification":
            check_ends(ids, mask, as_list(self.config.get("eos_token_id")))
        feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": self._token_types(token_type_ids, ids)}
        spec = self.specs["encoder"]
        names = {tensor.name for tensor in spec.inputs}
        if ("decoder_input_ids" in names) != (decoder_input_ids is not None):
            takes = "takes" if "decoder_input_ids" in names else "takes no"
            raise ValueError(f"{self.artifact.manifest['architecture']} {takes} decoder_input_ids")
        if decoder_input_ids is not None:
            ids, mask = self._checked(decoder_input_ids, decoder_attention_mask, "decoder_")
            self._check_positions(self._counted(ids, mask))
            check_together(mask, "decoder_attention_mask")
            if len(ids) != len(feeds["input_ids"]):
                raise ValueError(f"decoder_input_ids must have {len(feeds['input_ids'])} rows as input_ids, got {len(ids)}")
            feeds |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        feeds = {name: feeds[name] for name in names}
        return run_by_length(self.sessions["encoder"], spec, feeds, MAX_TOKENS * self.threads)

    def generate(
        self,
        input_ids: np.ndarray,
        attention_mask: np.ndarray | None = None,
        decoder_input_ids: np.ndarray | None = None,
        **options,
    ) -> np.ndarray:
        """Token ids (B * N, T) as `transformers.generate` returns them: behind the start token for seq2seq, behind the prompt
        for a decoder, padded at the end, by beam search with the end token if the pad token is 0; the N `num_return_sequences`
        of each input stand together.

        `input_ids` (B, S), rows padded on either side; `attention_mask` (B, S), by default 0 where `input_ids` have the
        pad token, unless that is an end token too. Tokens between others may be masked in a source, whose positions count
        them; not in a decoder's prompts, which come back padded on the left. `decoder_input_ids` (B, P), for seq2seq only, are
        what each target begins with, behind the start token, which they may begin with themselves; they come back too, and
        count for `max_length` and `min_length`, not for `max_new_tokens` and the score.

        Options, over those of generation_config.json and with the meaning and defaults they have in transformers:
        `max_new_tokens`, or `max_length` with the prompt (20 new ones); `min_new_tokens` or `min_length` (0); `num_beams`
        (1: greedy), `length_penalty` (1.0), `early_stopping` (False), `num_return_sequences` (1); `do_sample` (False) with
        `temperature` (1.0), `top_k` (50), `top_p` (1.0), `min_p` (0.0) and `seed`, a number from which the same tokens are
        drawn again; `repetition_penalty` (1.0), `no_repeat_ngram_size` (0), `bad_words_ids`, `suppress_tokens`,
        `begin_suppress_tokens`, `forced_bos_token_id`, `forced_eos_token_id`; `eos_token_id` (one or several),
        `pad_token_id`, `decoder_start_token_id`.

        Raises:
            UsageError: for an unknown option, a value an option cannot have, options that do not go together, and for more
                than this machine has memory for at the first step.
            ValueError: as `encode`; for a row without tokens, a decoder's prompt with a hole in its mask, more tokens than a
                learned position table has rows, a field of generation_config.json that this runtime does not apply, or what
                onnxruntime cannot compute, as for prompts that take more memory than there is.
        """
        return self._generated(self._request(input_ids, attention_mask, decoder_input_ids, checked(options)))[0]

    def generate_with_scores(
        self,
        input_ids: np.ndarray,
        attention_mask: np.ndarray | None = None,
        decoder_input_ids: np.ndarray | None = None,
        **options,
    ) -> tuple[np.ndarray, np.ndarray]:
        """What `generate` returns, and the score of each row (B * N,): sum(log p) / length^length_penalty of its new tokens,
        the end token among them. With beams these are transformers' `sequences_scores`, which has none without. There, p is the
        softmax of the logits behind those settings that change them, but before temperature, top_k, top_p and min_p.
        """
        return self._generated(self._request(input_ids, attention_mask, decoder_input_ids, checked(options)), is_scored=True)

    def stream(self, input_ids: np.ndarray, attention_mask: np.ndarray | None = None, **options) -> Iterator[np.ndarray]:
        """As `generate`, but yields the new token of each row (B * N,) after each step, the pad token where a row has ended.

        Raises:
            ValueError: as `generate`, before the first step; for more than one beam, whose tokens are known at the end only.
        """
        settings, *request = self._request(input_ids, attention_mask, None, checked(options))
        if settings.num_beams > 1:
            raise UsageError(f"num_beams is {settings.num_beams}, which cannot stream: expected num_beams=1")
        return self._tokens(settings, *request)

    def check_options(self, options: dict) -> None:
        """Raises as `generate` does with `options` whatever the inputs are."""
        self._check_generates()
        self._settings(checked(options), prompt_length=1)

    def _check_generates(self):
        if "decoder" not in self.sessions:
            raise ValueError(f"{self.artifact.manifest['architecture']} cannot generate: use encode")

    def _request(self, input_ids, attention_mask, decoder_input_ids, options):
        """What is to be generated, checked: settings, the tokens (B, P) before the first new one, padded on the left, their
        mask, and the source of seq2seq, ids and mask, or `None`."""
        self._check_generates()
        pad, eos = self._special("pad_token_id", options), self._special("eos_token_id", options)
        if attention_mask is None and pad is not None and pad not in as_list(eos):
            attention_mask = np.asarray(input_ids) != pad
        ids, mask = self._checked(input_ids, attention_mask)
        if not mask.any(axis=1).all():
            raise ValueError(f"row {int(mask.any(axis=1).argmin())} has no tokens, expected at least one in every row")
        if "encoder" in self.sessions:
            start = self._start_tokens(len(ids), decoder_input_ids, options)
            settings = self._settings(options, start.shape[1])
            self._check_positions(start.shape[1] + settings.max_new_tokens - 1)
            return settings, start, np.ones_like(start), padded(ids, mask, "right", settings.pad_token_id)
        if decoder_input_ids is not None:
            raise ValueError(f"{self.artifact.manifest['architecture']} takes no decoder_input_ids: its prompt is input_ids")
        settings = self._settings(options, ids.shape[1])
        check_together(mask, "attention_mask")
        self._check_positions(int(mask.sum(axis=1).max()) + settings.max_new_tokens - 1)
        return settings, *padded(ids, mask, "left", settings.pad_token_id), None

    def _generated(self, request, is_scored=False):
        """What `generate_with_scores` returns; without `is_scored`, `None` for scores that would have to be computed."""
        settings, ids, mask, _ = request
        scores, stays = None, self._stays_on_device(*request)
        if settings.num_beams > 1:
            new, scores = self._beams_on_device(*request) if stays else beam_search(*self._first_logits(*request))
        elif stays and not is_scored:
            new = self._greedy_on_device(*request)
        else:
            sums = Scores(len(ids) * settings.num_return_sequences) if is_scored else None
            new = np.stack(list(self._tokens(*request, scores=sums)), axis=1)
            scores = sums.normalized(settings.length_penalty) if is_scored else None
        return np.concatenate([np.repeat(ids, settings.num_return_sequences, axis=0), new], axis=1), scores

    def _tokens(self, *request, scores=None):
        """Starts when it is first asked for a token."""
        yield from one_by_one(*self._first_logits(*request), scores)

    def _stays_on_device(self, settings, ids, mask, source):
        """Whether the graph itself can choose each token."""
        if self.target != "cuda" or settings.do_sample or self.config.get("sliding_window") is not None:
            return False
        if settings.num_beams > 1 and settings.candidates > self.config["vocab_size"]:  # the graph takes as many of each beam
            return False
        return not Processors(settings, ids, padding=(mask == 0).sum(axis=1))

    def _beams_on_device(self, settings, ids, mask, source):
        """As `search.beam_search`."""
        decoding, *prompts = self.decoding(ids, mask, source, settings.max_new_tokens, settings.num_beams)
        return decoding.beam_search(*prompts, settings, self._searches)

    def _greedy_on_device(self, settings, ids, mask, source):
        """As `search.one_by_one`."""
        decoding, *prompts = self.decoding(ids, mask, source, settings.max_new_tokens)

        def ends(tokens):  # (B, t): whether the row has ended at or before each token
            return np.isin(tokens, settings.eos_token_ids).cumsum(axis=1) > 0

        new = decoding.greedy(*prompts, settings.max_new_tokens, lambda tokens: ends(tokens)[:, -1].all())
        has_ended = ends(new)
        behind = np.pad(has_ended, ((0, 0), (1, 0)))[:, :-1]
        return np.where(behind, settings.pad_token_id, new)[:, : 1 + (~has_ended).sum(axis=1).max()]

    def _searches(self, sizes):
        """A session of the beams' graph whose axes have these `sizes`, and its spec: no shape is left to compute."""
        return self._session("beams", sizes), self.specs["beams"]

    def _first_logits(self, settings, ids, mask, source):
        """What a search begins with."""
        rows_per_input = max(settings.num_beams, settings.num_return_sequences)
        decoding, *prompts = self.decoding(ids, mask, source, settings.max_new_tokens, rows_per_input)
        logits = decoding.start(*prompts)
        if rows_per_input > 1:
            decoding.repeat(rows_per_input)
            if settings.num_beams == 1:  # the beams of an input begin as one
                logits = np.repeat(logits, rows_per_input, axis=0)
        return decoding.next, logits, settings, Processors(settings, ids, padding=(mask == 0).sum(axis=1))

    def decoding(self, ids, mask, source, new_tokens, rows_per_input=1):
        """What decodes the prompts `ids` with `mask` (B, T) behind `source`, a pair of ids and mask, or `None` without an
        encoder, with room for `new_tokens` more in each of `rows_per_input`; and the prompts as it takes them."""
        session, spec = self.sessions["decoder"], self.specs["decoder"]
        mask = np.ones_like(ids) if mask is None else mask
        # Caches grow as tokens come, but for those of the cuda target.
        room = new_tokens * rows_per_input if self.target == "cuda" else min(new_tokens, ROOM)
        self._check_memory(len(ids), ids.shape[1] + room, new_tokens, rows_per_input)
        if self.target == "portable":
            prompts = padded(ids, mask, "left", 0)
            feeds = (
                {} if source is None else {"encoder_hidden_states": self.encode(*source), "encoder_attention_mask": source[1]}
            )
            return GrowingCaches(session, spec, feeds, len(ids)), *prompts
        if self.target == "cuda":
            sizes = {"batch_size": bucket_of(len(ids)), "slots": round_up(ids.shape[1] + room, SLOTS)}
            return self._slots(source, sizes, rows_per_input), ids, mask
        capacity = ids.shape[1] + room
        if source is None:
            return RaggedCaches(session, spec, len(ids), capacity), *padded(ids, mask, "right", 0)
        feeds = {**cross_states(self.outputs(*source)), "encoder_attention_mask": source[1]}
        return BeamCaches(session, spec, feeds, len(ids), capacity), ids, mask

    def _check_memory(self, inputs, positions, new_tokens, rows_per_input):
        """Two copies of the logits must fit, and on the CPU the caches with what they have room for at first."""
        rows = inputs if self.target == "cuda" else inputs * rows_per_input
        caches = rows * positions * self.position_bytes if self.device == "cpu" else 0
        needed, most = 2 * 4 * inputs * rows_per_input * self.config["vocab_size"] + caches, memory()
        if needed > most:
            options = f"{inputs} inputs, {rows_per_input} sequences or beams of each and max_new_tokens={new_tokens}"
            raise UsageError(f"{options} take {needed / 1e9:.0f} GB or more, expected at most the {most / 1e9:.0f} GB here")

    def _slots(self, source, sizes, beams):
        """Caches on the device, with the keys and values of `source` where there is an encoder."""
        if source is None:
            buffers = self._buffers(sizes)
        else:
            added = -source[0].shape[1] % SOURCE
            ids, mask = (filled(np.pad(array, ((0, 0), (0, added))), sizes["batch_size"]) for array in source)
            buffers = self._buffers({**sizes, "source_length": ids.shape[1]})
            binding = self.sessions["encoder"].io_binding()
            for name, array in zip(("input_ids", "attention_mask"), (ids, mask), strict=True):
                binding.bind_cpu_input(name, array)
            for name, states in cross_states({tensor.name: tensor for tensor in self.specs["encoder"].outputs}).items():
                binding.bind_ortvalue_output(states.name, buffers.states[name])
            self.sessions["encoder"].run_bound(binding)
        decoding = SlotCaches(buffers, None if source is None else mask, self.config.get("sliding_window"), beams)
        weakref.finalize(decoding, self.pool.free.append, buffers)
        return decoding

    def _buffers(self, sizes):
        try:
            return self.pool.take(sizes)
        except Exception as error:  # onnxruntime's own have no other class in common
            raise UsageError(f"caches of {sizes['slots']} slots, which hold max_new_tokens, cannot be made: {error}") from None

    def _start_tokens(self, rows, decoder_input_ids, options):
        """What each of the `rows` targets begins with (rows, P), and as in transformers the start token before it, unless a row
        has that already."""
        start = self._special("decoder_start_token_id", options)
        if start is None:
            raise ValueError("decoder_start_token_id is None, expected the token id generation starts from")
        if not 0 <= start < self.config["vocab_size"]:
            raise UsageError(f"decoder_start_token_id must be in [0, {self.config['vocab_size'] - 1}], got {start}")
        starts = np.full((rows, 1), start)
        if decoder_input_ids is None:
            return starts
        ids, _ = self._checked(decoder_input_ids, None, "decoder_")
        if len(ids) != rows:
            raise ValueError(f"decoder_input_ids must have {rows} rows as input_ids, got {len(ids)}")
        return ids if (ids[:, 0] == start).any() else np.concatenate([starts, ids], axis=1)

    def _special(self, name, options):
        """A special token: that of the options, else of generation_config.json, else of the model."""
        for fields_given in (options, self.defaults):
            if name in fields_given:
                return fields_given[name]
        return self.config.get(name)

    def _settings(self, options, prompt_length):
        """generation_config.json with `options` over it, where `None` is as if it were not given."""
        given = {**{name: value for name, value in self.defaults.items() if value is not None}, **options}
        for name, value in self.artifact.generation_config.items():
            applies = name in EXPECTED.keys() | NO_EFFECT or (name in SAMPLING_ONLY and not given.get("do_sample"))
            if not applies and value is not None and value != DEFAULTS.get(name, 0) and not name.startswith("_"):
                raise ValueError(
                    f"generation_config.json sets {name:.200} to {value!r:.200}, which this runtime does not apply"
                )
        if "top_k" in given:
            given["top_k"] = given["top_k"] or 0  # the only default that `None` turns off
        given |= self._lengths(given, prompt_length)
        pad, eos = self._special("pad_token_id", options), self._special("eos_token_id", options)
        given["eos_token_ids"] = tuple(as_list(eos))
        given["pad_token_id"] = next((token for token in (pad, *given["eos_token_ids"]) if token is not None), 0)
        known = {field.name for field in fields(Options)}
        settings = Options(**{name: value for name, value in given.items() if name in known and value is not None})
        settings.check_vocabulary(self.config["vocab_size"])
        return settings

    def _lengths(self, given, prompt_length):
        """New tokens, at most and at least, behind a prompt with its padding. `max_new_tokens` and `min_new_tokens` go before
        `max_length` and `min_length`, wherever either stands; the default ends at `max_position_embeddings`."""
        most, least = given.get("max_new_tokens"), given.get("min_new_tokens")
        if most is None:
            longest = given.get("max_length")
            if longest is None:
                longest = min(prompt_length + Options.max_new_tokens, self.config["max_position_embeddings"])
            if longest <= prompt_length:
                raise UsageError(f"max_length must be more than the {prompt_length} tokens of the prompt, got {longest}")
            most = longest - prompt_length
        if least is None:
            least = max(0, (given.get("min_length") or 0) - prompt_length)
        return {"max_new_tokens": most, "min_new_tokens": least}

    def _checked(self, input_ids, attention_mask, prefix=""):
        """int64 arrays, or an error: onnxruntime can end the process on an empty batch."""
        ids = np.asarray(input_ids)
        shape = "(batch, choices, length), all" if self._has_choices() else "(batch, length), both"
        if ids.ndim != 2 + self._has_choices() or ids.size == 0 or ids.dtype.kind not in "iu":
            raise ValueError(f"{prefix}input_ids must be integers of shape {shape} at least 1, got {ids.dtype} {ids.shape}")
        if ids.min() < 0 or ids.max() >= self.config["vocab_size"]:
            raise ValueError(
                f"token ids must be in [0, {self.config['vocab_size'] - 1}], the vocabulary, got {ids.min()} to {ids.max()}"
            )
        mask = np.ones_like(ids) if attention_mask is None else np.asarray(attention_mask)
        if mask.shape != ids.shape:
            raise ValueError(f"{prefix}attention_mask must have shape {ids.shape}, got shape {mask.shape}")
        if mask.dtype.kind not in "biuf" or not np.isin(mask, (0, 1)).all():
            found = np.unique(mask).tolist() if mask.dtype.kind in "biuf" else mask.dtype
            raise ValueError(f"{prefix}attention_mask must be 0s and 1s, got {found}")
        return ids.astype(np.int64), mask.astype(np.int64)

    def _has_choices(self):
        return self.artifact.manifest["architecture"] == "VanillaEncoderForMultipleChoice"

    def _token_types(self, token_type_ids, ids):
        """As the models: all 0 by default, and zeros are accepted where there are no types."""
        types = np.zeros_like(ids) if token_type_ids is None else np.asarray(token_type_ids)
        if types.shape != ids.shape:
            raise ValueError(f"token_type_ids must have shape {ids.shape}, got shape {types.shape}")
        if types.dtype.kind not in "biu":
            raise ValueError(f"token_type_ids must be integers, got {types.dtype}")
        count = self.config.get("type_vocab_size") or 0
        if types.min() < 0 or types.max() >= max(count, 1):
            found = f"got {types.min()} to {types.max()}: type_vocab_size is {count}"
            raise ValueError(f"token_type_ids must be in [0, {max(count, 1) - 1}], {found}")
        return types.astype(np.int64)

    def _counted(self, ids, mask):
        """How many positions the longest row takes, by what the model counts, see `VanillaTransformerConfig`."""
        counts = self.config.get("position_ids_from") or "place"
        if counts == "place":
            return ids.shape[-1]
        real = mask == 1 if counts == "mask" else ids != self.config["pad_token_id"]
        return int(real.sum(axis=-1).max())

    def _check_positions(self, length):
        rows = self.config["max_position_embeddings"]
        if self.config["position_embedding_type"] == "learned" and length > rows:
            raise ValueError(f"{length} tokens, prompt and new ones together, are beyond the {rows} learned positions")

    def _graph(self, role):
        """The graph of `role` as onnxruntime opens it: its path, or for sessions that are made later its content."""
        file = self.specs[role].file
        if file not in self.artifact.manifest["files"]:
            raise ValueError(f"{self.artifact.directory}/manifest.json lists no {file}: export again")
        return self.artifact.read(file) if role == "beams" else str(self.artifact.directory / file)

    def _session(self, role, sizes=None):
        """Of the graph of `role`, with some axes fixed to `sizes`."""
        options = onnxruntime.SessionOptions()
        options.enable_cpu_mem_arena = self.arena
        for axis, size in (sizes or {}).items():
            options.add_free_dimension_override_by_name(axis, size)
        options.intra_op_num_threads = self.threads
        options.add_session_config_entry("session.intra_op.spin_duration_us", SPIN_MICROSECONDS)
        path, providers = self.artifact.directory / self.specs[role].file, self._providers(role)
        session = Session(self.graphs[role], options, providers, path)
        for provider, _ in providers:
            require_running(provider, session.inner.get_providers())
        check_graph(session.inner, self.specs[role], path)
        return session

    def _providers(self, role):
        """What runs the graph of `role`, each what those before it cannot, and their options."""
        providers = [("CPUExecutionProvider", {})]
        if self.device != "cpu":
            # Steps of a decoder are replayed; float32 is not rounded to 19 bits; norms are computed in float32.
            replays = self.target == "cuda" and role != "encoder"
            given = {"enable_cuda_graph": str(int(replays)), "use_tf32": "0", "enable_skip_layer_norm_strict_mode": "1"}
            providers.insert(0, (CUDA, given))
        if self.device == "tensorrt" and role == "encoder":
            providers.insert(0, (TENSORRT, self._engine_options()))
        return providers

    def _engine_options(self):
        """TensorRT names its engines after the graph, not the weights: each export has a directory of its own."""
        if self.engine_cache is None:
            return {}
        files = json.dumps(self.artifact.manifest["files"], sort_keys=True)
        path = Path(self.engine_cache) / hashlib.sha256(files.encode()).hexdigest()[:16]
        return {"trt_engine_cache_enable": "1", "trt_engine_cache_path": str(path)}


def check_graph(session, spec, path):
    """Raises ValueError if the graph takes or returns anything but what `spec`, which follows from config.json, says."""
    for found, expected in ((session.get_inputs(), spec.inputs), (session.get_outputs(), spec.outputs)):
        found = {value.name: value for value in found}
        if differ := found.keys() ^ {tensor.name for tensor in expected}:
            raise ValueError(f"{path} does not fit config.json: only one of them has {min(differ)}, export again")
        for tensor in expected:
            value = found[tensor.name]
            kind = f"tensor({tensor.dtype.replace('float32', 'float')})"
            sizes = [size if isinstance(size, str) else own for own, size in zip(value.shape, tensor.shape)]
            if (value.type, sizes, len(value.shape)) != (kind, list(tensor.shape), len(tensor.shape)):
                wanted = f"as config.json says {kind} {list(tensor.shape)}: export again"
                raise ValueError(f"{path} has {tensor.name} of {value.type} {value.shape}, expected {wanted}")


def memory() -> float:
    """Bytes of memory of this machine, infinite where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return math.inf


def bucket_of(rows: int) -> int:
    """The next power of two, or from `ROWS` on the next multiple of that."""
    return round_up(rows, ROWS) if rows > ROWS else 1 << (rows - 1).bit_length()


def round_up(number, multiple):
    return -(-number // multiple) * multiple


def run_by_length(session, spec, feeds, max_tokens):
    """The outputs of `spec`, by name. Rows run with others of similar length, so that a ragged batch pays for little padding;
    what no run covers is 0."""
    names, groups, results = [tensor.name for tensor in spec.outputs], length_groups(feeds["attention_mask"], max_tokens), {}
    if len(groups) == 1:
        return dict(zip(names, session.run(names, feeds), strict=True))
    for rows, longest in groups:
        own = {name: array[rows] for name, array in feeds.items()}
        own |= {name: array[..., :longest] for name, array in own.items() if not name.startswith("decoder_")}
        for tensor, values in zip(spec.outputs, session.run(names, own), strict=True):
            rest = zip(tensor.shape[1:], values.shape[1:])
            sizes = [feeds["input_ids"].shape[-1] if axis == "source_length" else size for axis, size in rest]
            whole = results.setdefault(tensor.name, np.zeros((len(feeds["input_ids"]), *sizes), values.dtype))
            whole[(rows, *map(slice, values.shape[1:]))] = values
    return results


def length_groups(mask, max_tokens):
    """The rows of `mask` (B, ..., S) in groups, longest first, each with the length it needs. A group ends where one row more
    would make it more than `max_tokens`, or padding more than `MAX_PADDING` of it, if it has `MIN_TOKENS`."""
    ends = mask * np.arange(1, mask.shape[-1] + 1)
    lengths = np.maximum(ends.reshape(len(mask), -1).max(axis=1), 1).tolist()
    groups, tokens = [], 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        size = (len(groups[-1]) + 1) * lengths[groups[-1][0]] if groups else 0
        is_padded = tokens >= MIN_TOKENS and size - tokens - lengths[row] > MAX_PADDING * size
        if not groups or size > max_tokens or is_padded:
            groups.append([])
            tokens = 0
        groups[-1].append(row)
        tokens += lengths[row]
    return [(np.array(rows), lengths[rows[0]]) for rows in groups]


def padded(ids, mask, side, pad_token_id):
    """Moves each row, with its holes, so that all padding is on its `side`: the new ids and mask."""
    first = mask.argmax(axis=1) if side == "right" else -mask[:, ::-1].argmax(axis=1)
    places = (np.arange(mask.shape[1]) + first[:, None]) % mask.shape[1]
    ids, mask = np.take_along_axis(ids, places, axis=1), np.take_along_axis(mask, places, axis=1)
    return np.where(mask == 1, ids, pad_token_id), mask


def check_together(mask, name):
    """Raises ValueError for a row of `mask` (B, T) with a hole: a decoder counts its positions by the ones."""
    begins = mask[:, 1:] > mask[:, :-1]
    if (begins.sum(axis=1) + mask[:, 0]).max() > 1:
        row, place = next((row, place + 1) for row, place in np.argwhere(begins) if mask[row, : place + 1].any())
        raise ValueError(f"row {row} of {name} has ones again at place {place}, behind zeros: expected its ones together")


def check_ends(ids, mask, eos_token_ids):
    """Raises ValueError for a row of `ids` (B, S) that has tokens, but none that ends it."""
    endless = mask.any(axis=1) & ~(np.isin(ids, eos_token_ids) & (mask == 1)).any(axis=1)
    if endless.any():
        raise ValueError(f"row {int(endless.argmax())} of input_ids has no end token, expected one of {eos_token_ids} in it")
