"""Runs an export directory with onnxruntime and numpy; torch is never imported."""

import collections
import copy
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np

from .errors import UsageError
from .heads import HEADS
from .inference import options as option_fields
from .inference.config import check_config, generation_defaults
from .inference.decoder import (
    CandidateDecoder,
    DecoderFactory,
    GenerationRequest,
    LoadedExport,
    check_memory,
)
from .inference.devices import CUDA, TENSORRT, processors, require, require_onnxruntime
from .inference.export_info import Artifact, open_artifact
from .inference.inputs import (
    check_contiguous,
    check_ends,
    check_input,
    check_inputs,
    check_patches,
    check_positions,
    move_padding,
    num_positions,
    run_by_length,
)
from .inference.options import Options, as_list, is_int64, resolve, special_token
from .inference.prompt_lookup import tokens_by_lookup
from .inference.search import Search, start_search
from .inference.session import Session, Sessions
from .scheduler.capacity import LEAST_ROWS, arrangement, workers_of_many_rows
from .specs.sequences import token_inputs
from .targets.registry import default_target, get_target, known_targets
from .targets.target import Target

if find_spec("onnxruntime") is None:  # it is imported when graphs are loaded
    raise ImportError(
        "onnxruntime is not installed: pip install 'vanilla-transformer[cpu]', or [gpu] for "
        "onnxruntime-gpu"
    )

MAX_TOKENS = 256  # of one run of a graph that reads whole sequences, for each thread
MAX_THREADS = 1024
# rows that it is worth to run in workers at once: what is left at the end hardly matters any more
MOST_TOGETHER = 4096


class Runtime:
    """An export directory, loaded.

    Args:
        directory: what `vanilla-transformer export` wrote.
        threads: processor threads of one operator, 1 to 1024; by default as many as this process
            may use.
        arena: whether onnxruntime keeps memory from one run for the next; without, it gives it back
            and asks for it again.
        device: `"cpu"` or `"cuda"`, by default that of the target; or, for the portable target in
            fp32, `"tensorrt"`, which compiles what reads whole sequences. Decoders, whose caches
            grow, are on CUDA then: each size would be compiled.
        engine_cache: the directory where TensorRT keeps what it compiled for the next time; by
            default it keeps nothing.
        dtype: which of the export's weights, by default the first that it was made with.
        continuous: opens the graph whose rows join and leave between two steps instead of the
            decoder, if the export has one, see `step`; then `generate` and what follows from it
            raise ValueError.
        loads: whether the graphs are loaded. Without, this checks inputs and options for another
            process, which runs them.
        workers: batches beside each other, each with its share of `threads`, in which many rows
            run: one that has ended leaves, and the next one joins. By default as many as suit the
            model.

    Raises:
        FileNotFoundError, ValueError: if the directory is incomplete or changed, see
            `read_artifact`, or replaced meanwhile; ValueError for a target, dtype or config this
            runtime does not know, and for a graph that onnxruntime cannot load, that does not fit
            the config, or that keeps data outside the export.
        UsageError: for a number of threads other than 1 to 1024, a device that does not go with the
            target, a dtype that the export has not, an `engine_cache` without TensorRT or inside
            the export, and for `workers` other than 1 to `threads`, or of an export whose rows
            cannot join and leave.
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
        continuous: bool = False,
        workers: int | None = None,
        loads: bool = True,
    ):
        if loads:
            require_onnxruntime()
        if threads is not None and not (is_int64(threads) and 1 <= threads <= MAX_THREADS):
            raise UsageError(
                f"threads must be a whole number from 1 to {MAX_THREADS}, got {threads!r}"
            )
        self.artifact: Artifact = open_artifact(directory)
        self.architecture: str = self.artifact.manifest["architecture"]
        if (mode := self.artifact.manifest.get("generate")) is not None:
            found = (
                f"{self.artifact.directory} has one graph that generates by itself, by "
                f"{mode} search"
            )
            raise ValueError(f"{found}: run that in onnxruntime, or export without --generate")
        if self.architecture not in HEADS:
            found = f"{self.artifact.directory} has the architecture {self.architecture!r}"
            raise ValueError(f"{found}, expected one of {', '.join(HEADS)}")
        self.config = self.artifact.config
        self._target = target_of(self.artifact)
        self.target: str = self._target.name
        if dtype is not None and dtype not in self.artifact.dtypes:
            raise UsageError(
                f"{directory} has no dtype {dtype!r}, expected one of {self.artifact.dtypes}"
            )
        self.dtype = dtype or self.artifact.dtypes[0]
        check_config(self.config, self.artifact.directory / "config.json")
        activations = self.artifact.manifest["activations"]
        specs = self._target.graph_specs(self.config, self.architecture, self.dtype, activations)
        step: str | None = self.artifact.manifest.get("step")
        self.step = step if continuous else None
        left_out = {"decoder" if self.step == "step" else "step", "lookup"}
        self.specs = {role: spec for role, spec in specs.items() if role not in left_out}
        # This one is opened when it is first needed.
        self._lookup_specs = {role: specs[role] for role in ("lookup",) if role in specs}
        self._worker_specs = (
            {role: specs[role] for role in ("encoder", step) if role in specs}
            if step in specs
            else {}
        )
        self.defaults = generation_defaults(
            self.artifact.generation_config, self.artifact.directory / "generation_config.json"
        )
        self.device = self._checked_device(device)
        self.engine_cache = self._checked_engine_cache(engine_cache)
        if self.device != "cpu":
            require(self.device)
        # onnxruntime's own default is the host's cores, not the process's.
        self.threads = threads or processors()
        self.workers = self._checked_workers(workers)
        self.sessions: dict[str, Session] = {}
        self.decoders: DecoderFactory | None = None
        if loads:
            self._open(arena)

    @property
    def arguments(self) -> dict[str, Any]:
        """With which another process opens the same export for the same results."""
        workers = {"workers": self.workers} if self._worker_specs else {}
        return {"threads": self.threads, "device": self.device, "dtype": self.dtype, **workers}

    def _checked_device(self, device: str | None) -> str:
        devices = self._target.devices(self.specs.keys(), self.dtype)
        chosen = device or self._target.default_device
        if chosen not in devices:
            found = f"{self.architecture}, target {self.target!r}, dtype {self.dtype!r}"
            raise UsageError(
                f"device {device!r} does not go with {found}, expected one of {list(devices)}"
            )
        return chosen

    def _checked_engine_cache(self, engine_cache: str | os.PathLike | None) -> Path | None:
        if engine_cache is None:
            return None
        if self.device != "tensorrt":
            raise UsageError(
                f"engine_cache is of no use on device {self.device!r}, expected device='tensorrt'"
            )
        if Path(engine_cache).resolve().is_relative_to(self.artifact.directory):
            raise UsageError(
                f"engine_cache is {engine_cache}, inside the export: expected a place outside, "
                "its files stay"
            )
        return Path(engine_cache)

    def _checked_workers(self, workers: int | None) -> int:
        if workers is None:
            return workers_of_many_rows(self.config, self.threads) if self._worker_specs else 1
        if not (is_int64(workers) and 1 <= workers <= self.threads):
            raise UsageError(
                f"workers must be a whole number from 1 to {self.threads}, the threads, "
                f"got {workers!r}"
            )
        if not self._worker_specs:
            found = f"{self.architecture}, target {self.target!r}"
            raise UsageError(
                f"workers is {workers}, expected None: rows of this export, {found}, cannot join "
                "and leave a batch"
            )
        return workers

    def _open(self, arena: bool) -> None:
        """Loads the graphs, once all that can be said of them is known to be right. Weights are
        compared with their hashes while onnxruntime loads them."""
        directory = self.artifact.directory
        files = self.artifact.manifest["files"]
        for spec in (self.specs | self._lookup_specs).values():
            if spec.file not in files:
                raise ValueError(f"{directory}/manifest.json lists no {spec.file}: export again")
        try:
            self.artifact.check_listed()
            self.artifact.check_hashes(".onnx")
            contents = {}
            for role, spec in self.specs.items():
                if spec.is_on_demand:
                    content = self.artifact.read(spec.file)
                    assert content is not None  # the manifest lists it
                    contents[role] = content
            self._sessions = Sessions(
                directory, self.specs, contents, self._providers, self.threads, arena
            )
            self.sessions = self._sessions.open()
        finally:  # before an error that only follows from other weights
            self.artifact.check_unchanged()
        if "decoder" in self.specs and self.step is None:
            specs = self.specs | self._lookup_specs
            loaded = LoadedExport(
                self.config,
                specs,
                self.sessions,
                self._make_session,
                self.device,
                self.encode_source,
            )
            self.decoders = self._target.open(loaded)

    def _make_session(self, role: str, sizes: dict[str, int] | None = None) -> Session:
        """As `Sessions.make`, also of a graph that is no part of what was opened."""
        session = dataclasses.replace(self._sessions, specs=self.specs | self._lookup_specs).make(
            role, sizes
        )
        if role in self._lookup_specs:
            self.artifact.check_unchanged()
        return session

    @functools.cached_property
    def _in_workers(self) -> "Runtime":
        """This export as workers run it: with the encoder that is open, and a step with the threads
        of a worker, opened when it is first needed, unless that is the decoder."""
        opened = copy.copy(self)
        opened.step = self.artifact.manifest["step"]
        opened.specs = self._worker_specs
        opened.threads = arrangement(self.config, self.threads, self.workers).threads
        opened.sessions = dict(self.sessions)
        if opened.step not in self.sessions or opened.threads != self.threads:
            sessions = dataclasses.replace(
                self._sessions, specs=opened.specs, threads=opened.threads
            )
            opened.sessions[opened.step] = sessions.make(opened.step)
            self.artifact.check_unchanged()
        return opened

    def encode(
        self,
        input_ids: np.ndarray | None = None,
        attention_mask: np.ndarray | None = None,
        token_type_ids: np.ndarray | None = None,
        **inputs: np.ndarray,
    ) -> np.ndarray:
        """The first of `outputs`: `last_hidden_state` (B, S, D), or the `logits` of the model's
        head.

        Raises:
            ValueError: as `outputs`; for a seq2seq model whose encoder returns only what its
                decoder takes.
        """
        spec = self.specs.get("encoder")
        if spec is not None and spec.outputs[0].name.startswith("present"):
            remedy = f"use --target {default_target()}"
            raise ValueError(
                f"the encoder of this export returns keys and values for its decoder only: {remedy}"
            )
        return next(
            iter(self.outputs(input_ids, attention_mask, token_type_ids, **inputs).values())
        )

    def outputs(
        self,
        input_ids: np.ndarray | None = None,
        attention_mask: np.ndarray | None = None,
        token_type_ids: np.ndarray | None = None,
        decoder_input_ids: np.ndarray | None = None,
        decoder_attention_mask: np.ndarray | None = None,
        **inputs: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """All that the encoder graph returns, by name: of each token (B, S, ...), or of the
        sequence (B, ...).

        `input_ids` (B, S) integers, rows padded on the right (a decoder's on either side), for
        multiple choice (B, C, S); `attention_mask`, 1 for tokens that are not padding, by default
        all, and `token_type_ids`, by default 0, of the same shape; `decoder_input_ids` and
        `decoder_attention_mask` (B, T), for a seq2seq model that returns states; and what else the
        graph takes, by name; for a model of images only `pixel_values` (B, C, H, W). Rows of
        similar length run together; what is returned for padding may be 0.

        Raises:
            ValueError: for an input that is missing, or that the graph does not take; for an empty
                batch, shapes that do not fit each other, ids outside the vocabulary, token types
                the model does not have, a mask with holes for a decoder, a sequence longer than a
                learned position table, a row without the end token that a seq2seq classifier reads,
                or a model without an encoder.
        """
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": decoder_attention_mask,
            **inputs,
        }
        feeds = self.feeds(given)
        return run_by_length(
            self._session("encoder"), self.specs["encoder"], feeds, MAX_TOKENS * self.threads
        )

    def feeds(self, given: dict[str, Any]) -> dict[str, np.ndarray]:
        """What the encoder graph takes, by name, of what was `given` to `outputs`. Raises as
        that."""
        if "encoder" not in self.specs:
            raise ValueError(f"{self.architecture} has no encoder: use generate")
        spec = self.specs["encoder"]
        if "token_type_ids" not in {tensor.name for tensor in spec.inputs} and not np.any(
            given.get("token_type_ids")
        ):
            # zeros are what tokenizers give for models without types
            given = {**given, "token_type_ids": None}
        feeds = check_inputs(spec.inputs, given, self.architecture)
        self._check_sequences(feeds)
        return feeds

    def _check_sequences(self, feeds: dict[str, np.ndarray]) -> None:
        """What the model asks of tokens and images, beyond the types and ranges of the graph."""
        if "pixel_values" in feeds:
            check_patches(feeds["pixel_values"], self.config)
        for prefix in ("", "decoder_"):
            if f"{prefix}input_ids" not in feeds:
                continue
            ids = feeds[f"{prefix}input_ids"]
            mask = feeds[f"{prefix}attention_mask"]
            check_positions(num_positions(ids, mask, self.config), self.config)
            if prefix or self.config["model_type"] == "vanilla-decoder":
                check_contiguous(mask, f"{prefix}attention_mask")
        if HEADS[self.architecture].needs_end_token:
            check_ends(
                feeds["input_ids"],
                feeds["attention_mask"],
                as_list(self.config.get("eos_token_id")),
            )

    def _session(self, role: str) -> Session:
        if role not in self.sessions:
            raise ValueError("the export was opened with loads=False, expected True to run it")
        return self.sessions[role]

    def encode_source(self, ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
        """As `outputs`, of what has been checked."""
        feeds = {"input_ids": ids, "attention_mask": mask}
        return run_by_length(
            self._session("encoder"), self.specs["encoder"], feeds, MAX_TOKENS * self.threads
        )

    def generate(
        self,
        input_ids: np.ndarray,
        attention_mask: np.ndarray | None = None,
        decoder_input_ids: np.ndarray | None = None,
        seeds: Sequence[int] | None = None,
        **options: Any,
    ) -> np.ndarray:
        """Token ids (B * N, T) as `transformers.generate` returns them: after the start token for
        seq2seq, after the prompt for a decoder, padded at the end, by beam search with the end
        token if the pad token is 0; the N `num_return_sequences` of each input stand together.

        `input_ids` (B, S), rows padded on either side; `attention_mask` (B, S), by default 0 where
        `input_ids` have the pad token, unless that is an end token too. Tokens between others may
        be masked in a source, whose positions count them; not in a decoder's prompts, which come
        back padded on the left. `decoder_input_ids` (B, P), for seq2seq only, are what each target
        begins with, after the start token, which they may begin with themselves; they come back
        too, and count for `max_length` and `min_length`, not for `max_new_tokens` and the score.
        `seeds`, one for each input in place of `seed`, make the samples of an input independent of
        the other inputs.

        Options, over those of generation_config.json and with the meaning and defaults they have in
        transformers:

            max_new_tokens: new tokens at most (20)
            max_length: as max_new_tokens, with the prompt; max_new_tokens goes before it (None)
            num_beams: hypotheses of beam search; 1 is greedy search, or sampling (1)
            length_penalty: of beam search: scores are divided by length^length_penalty (1.0)
            early_stopping: of beam search: stop at num_beams finished ones, or 'never' while better
                ones are possible (False)
            num_return_sequences: sequences for each input: samples, or the best of num_beams (1)
            do_sample: draw tokens instead of taking the likeliest (False)
            temperature: of sampling: logits are divided by it (1.0)
            top_k: of sampling: draw from so many likeliest tokens; 0 is all (50)
            top_p: of sampling: draw from the fewest tokens that are as likely together (1.0)
            min_p: of sampling: draw from tokens this likely in relation to the likeliest (0.0)
            seed: of sampling: the same seed draws the same tokens; without one they differ (None)
            repetition_penalty: makes tokens that occurred less likely, above 1 (1.0)
            no_repeat_ngram_size: no so many tokens in a row occur twice; 0 is off (0)
            bad_words_ids: rows of tokens that are never generated (None)
            min_new_tokens: new tokens before the end token at least (0)
            min_length: as min_new_tokens, with the prompt; min_new_tokens goes before it (None)
            forced_bos_token_id: the first token of all, after the start token (None)
            forced_eos_token_id: the last token where max_new_tokens is reached (None)
            suppress_tokens: tokens that are never generated (None)
            begin_suppress_tokens: tokens that are not generated first (None)
            renormalize_logits: of beam search: the options before this leave probabilities that sum
                to 1 again (False)
            prompt_lookup_num_tokens: of greedy search of one row: candidates of a step, looked up
                in what was read (None)
            max_matching_ngram_size: of prompt lookup: so many of the last tokens are looked up, or
                fewer (2)
            eos_token_id: ends a sequence; that of the model if not given (None)
            pad_token_id: fills rows that ended; that of the model if not given (None)
            decoder_start_token_id: of seq2seq: the first token; that of the model if not given
                (None)

        Raises:
            UsageError: for an unknown option, a value an option cannot have, options that do not go
                together, and for more than this machine has memory for at the first step.
            ValueError: as `outputs`; for a row without tokens, a decoder's prompt with a hole in
                its mask, more tokens than a learned position table has rows, a field of
                generation_config.json that this runtime does not apply, or what onnxruntime cannot
                compute, as for prompts that take more memory than there is.
        """
        request = self.request(input_ids, attention_mask, decoder_input_ids, options)
        return self._generated(request.with_seeds(seeds))[0]

    def generate_with_scores(
        self,
        input_ids: np.ndarray,
        attention_mask: np.ndarray | None = None,
        decoder_input_ids: np.ndarray | None = None,
        seeds: Sequence[int] | None = None,
        **options: Any,
    ) -> tuple[np.ndarray, np.ndarray]:
        """What `generate` returns, and the score of each row (B * N,): sum(log p) /
        length^length_penalty of its new tokens, the end token among them. With beams these are
        transformers' `sequences_scores`, which has none without. There, p is the softmax of the
        logits after those settings that change them, but before temperature, top_k, top_p and
        min_p.
        """
        request = self.request(input_ids, attention_mask, decoder_input_ids, options, True)
        tokens, scores = self._generated(request.with_seeds(seeds))
        assert scores is not None  # the request asks for them
        return tokens, scores

    def stream(
        self, input_ids: np.ndarray, attention_mask: np.ndarray | None = None, **options: Any
    ) -> Iterator[np.ndarray]:
        """As `generate`, but yields the new token of each row (B * N,) after each step, the pad
        token where a row has ended.

        Raises:
            ValueError: as `generate`, before the first step; for more than one beam, whose tokens
                are known at the end only.
        """
        request = self.request(input_ids, attention_mask, None, options)
        if request.options.num_beams > 1:
            raise UsageError(
                f"num_beams is {request.options.num_beams}, which cannot stream: expected "
                f"num_beams=1"
            )
        return self._tokens(request, start_search(request.options, request.prompt))

    def check_options(self, options: dict[str, Any]) -> Options:
        """`options` over those of the export. Raises as `generate` does with them whatever the
        inputs are."""
        self._check_generates()
        return self._resolved(option_fields.check(options), prompt_length=1)

    def rows_together(
        self, rows: int, batch_size: int, options: dict[str, Any], is_scored: bool = False
    ) -> int:
        """How many of so many `rows` are best given to `generate` at once, or where `is_scored` to
        `generate_with_scores`: `batch_size`, more where they run in workers, or 1 with
        `prompt_lookup_num_tokens`. Raises as `check_options`."""
        resolved = self.check_options(options)
        if resolved.prompt_lookup_num_tokens is not None:
            return 1
        return MOST_TOGETHER if self._suits_workers(rows, resolved, is_scored) else batch_size

    def _suits_workers(self, rows: int, options: Options, is_scored: bool) -> bool:
        """Whether `generate` runs so many rows in workers."""
        if rows < LEAST_ROWS * self.workers or not self._worker_specs or self.decoders is None:
            return False
        from .scheduler.many_rows import has_room, is_suited

        return is_suited(options, is_scored) and has_room(
            self, self.workers, options.max_new_tokens
        )

    def decoder_factory(self) -> DecoderFactory:
        """What generates. Raises ValueError for a model that cannot, and where only the step is
        open."""
        self._check_generates()
        if self.decoders is None:
            found = f"continuous={bool(self.step)} and loads={bool(self.sessions)}"
            raise ValueError(
                f"the export was opened with {found}, expected False and True to generate"
            )
        return self.decoders

    def _check_generates(self) -> None:
        if not self.specs.keys() & {"decoder", "step"}:
            raise ValueError(f"{self.architecture} cannot generate: use encode")

    def request(
        self,
        input_ids: np.ndarray,
        attention_mask: np.ndarray | None,
        decoder_input_ids: np.ndarray | None,
        options: dict[str, Any],
        is_scored: bool = False,
    ) -> GenerationRequest:
        """What is to be generated, checked. Raises as `generate`."""
        options = option_fields.check(options)
        self._check_generates()
        ids, mask = self._prompts(input_ids, attention_mask, options)
        if not mask.any(axis=1).all():
            raise ValueError(
                f"row {int(mask.any(axis=1).argmin())} has no tokens, expected at least one in "
                f"every row"
            )
        if "encoder" in self.specs:
            return self._seq2seq_request(ids, mask, decoder_input_ids, options, is_scored)
        if decoder_input_ids is not None:
            raise ValueError(
                f"{self.architecture} takes no decoder_input_ids: its prompt is input_ids"
            )
        resolved = self._resolved(options, ids.shape[1])
        check_contiguous(mask, "attention_mask")
        check_positions(int(mask.sum(axis=1).max()) + resolved.max_new_tokens - 1, self.config)
        assert resolved.pad_token_id is not None  # see `resolve`
        ids, mask = move_padding(ids, mask, "left", resolved.pad_token_id)
        return self._fitting(GenerationRequest(resolved, ids, mask, None, is_scored))

    def _seq2seq_request(
        self,
        ids: np.ndarray,
        mask: np.ndarray,
        decoder_input_ids: np.ndarray | None,
        options: dict[str, Any],
        is_scored: bool,
    ) -> GenerationRequest:
        start = self._start_tokens(len(ids), decoder_input_ids, options)
        resolved = self._resolved(options, start.shape[1])
        check_positions(num_positions(ids, mask, self.config), self.config)
        check_positions(start.shape[1] + resolved.max_new_tokens - 1, self.config)
        assert resolved.pad_token_id is not None  # see `resolve`
        source = move_padding(ids, mask, "right", resolved.pad_token_id)
        return self._fitting(
            GenerationRequest(resolved, start, np.ones_like(start), source, is_scored)
        )

    def _fitting(self, request: GenerationRequest) -> GenerationRequest:
        """Checked before a search has a state of its rows; a decoder adds its caches."""
        self._check_lookup(request)
        check_memory(request, self.config["vocab_size"], cache_bytes=0)
        return request

    def _check_lookup(self, request: GenerationRequest) -> None:
        count = request.options.prompt_lookup_num_tokens
        if count is None:
            return
        if len(request.input_ids) > 1:
            raise UsageError(
                f"prompt_lookup_num_tokens={count} is for one row, got {len(request.input_ids)}"
            )
        if self.decoders is None or not self.decoders.takes_candidates:
            found = (
                f"prompt_lookup_num_tokens={count} does not go with this export, target "
                f"{self.target!r}"
            )
            raise UsageError(
                f"{found}, expected None: its graphs do not check several tokens of a row at once"
            )

    def _resolved(self, options: dict[str, Any], prompt_length: int) -> Options:
        return resolve(
            options, self.artifact.generation_config | self.defaults, self.config, prompt_length
        )

    def _prompts(
        self, input_ids: np.ndarray, attention_mask: np.ndarray | None, options: dict[str, Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids and mask (B, S); by default 0 where the ids have the pad token, unless that is an end
        token too."""
        pad = special_token("pad_token_id", options, self.defaults, self.config)
        ends = as_list(special_token("eos_token_id", options, self.defaults, self.config))
        if attention_mask is None and pad is not None and pad not in ends:
            attention_mask = np.asarray(input_ids) != pad
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        feeds = check_inputs(
            token_inputs(self.config, ("batch_size", "source_length")), given, self.architecture
        )
        return feeds["input_ids"], feeds["attention_mask"]

    def _start_tokens(
        self, rows: int, decoder_input_ids: np.ndarray | None, options: dict[str, Any]
    ) -> np.ndarray:
        """What each of the `rows` targets begins with (rows, P), and as in transformers the start
        token before it, unless a row has that already."""
        start = special_token("decoder_start_token_id", options, self.defaults, self.config)
        if start is None:
            raise ValueError(
                "decoder_start_token_id is None, expected the token id generation starts from"
            )
        if not 0 <= start < self.config["vocab_size"]:
            raise UsageError(
                f"decoder_start_token_id must be in [0, {self.config['vocab_size'] - 1}], got "
                f"{start}"
            )
        starts = np.full((rows, 1), start)
        if decoder_input_ids is None:
            return starts
        tensor = token_inputs(self.config, ("batch_size", "target_length"), prefix="decoder_")[0]
        ids = check_input(tensor, np.asarray(decoder_input_ids), {"batch_size": rows})
        return ids if (ids[:, 0] == start).any() else np.concatenate([starts, ids], axis=1)

    def _generated(self, request: GenerationRequest) -> tuple[np.ndarray, np.ndarray | None]:
        """What `generate_with_scores` returns; `None` for scores that were not asked for and would
        have to be computed."""
        result: tuple[np.ndarray, np.ndarray | None] | None
        if self._is_for_workers(request):
            from .scheduler import many_rows

            result = many_rows.generate(self._in_workers, request, self.workers), None
        else:
            result = self.decoder_factory().generate(request)
        if result is None:
            search = start_search(
                request.options, request.prompt, request.is_scored, self.threads, request.seeds
            )
            collections.deque(self._tokens(request, search), maxlen=0)
            result = search.result()
        new, scores = result
        prompts = np.repeat(request.input_ids, request.options.num_return_sequences, axis=0)
        return np.concatenate([prompts, new], axis=1), scores

    def _is_for_workers(self, request: GenerationRequest) -> bool:
        """As `_suits_workers`; of sources with holes the step knows nothing."""
        if not self._suits_workers(len(request.input_ids), request.options, request.is_scored):
            return False
        return request.source is None or bool((np.diff(request.source[1]) <= 0).all())

    def _tokens(self, request: GenerationRequest, search: Search) -> Iterator[np.ndarray]:
        """Drives `search`: the tokens of all rows after each step. Starts when it is first asked
        for them."""
        with closing(self.decoder_factory().start(request)) as decoder:
            logits = decoder.prefill(request.input_ids, request.attention_mask)
            if request.options.prompt_lookup_num_tokens is not None:
                candidates = cast(CandidateDecoder, decoder)  # see `_check_lookup`
                yield from tokens_by_lookup(request, candidates, search, logits[:, -1])
                return
            if request.options.rows_per_input > 1:
                decoder.expand(request.options.rows_per_input)
            while True:
                tokens, beam_idx = search.advance(logits[:, -1])
                yield tokens
                if search.finished:
                    return
                logits = decoder.step(tokens[:, None], beam_idx)

    def _providers(self, role: str) -> list[tuple[str, dict]]:
        """What runs the graph of `role`, each what those before it cannot, and their options."""
        providers: list[tuple[str, dict]] = [("CPUExecutionProvider", {})]
        if self.device != "cpu":
            # float32 is not rounded to 19 bits.
            options = {"enable_cuda_graph": "0", "use_tf32": "0"}
            providers.insert(0, (CUDA, options | self._target.provider_options(role)))
        if self.device == "tensorrt" and role == "encoder":
            providers.insert(0, (TENSORRT, self._engine_options()))
        return providers

    def _engine_options(self) -> dict[str, str]:
        """TensorRT names its engines after the graph, not the weights: each export has a directory
        of its own."""
        if self.engine_cache is None:
            return {}
        files = json.dumps(self.artifact.manifest["files"], sort_keys=True)
        path = self.engine_cache / hashlib.sha256(files.encode()).hexdigest()[:16]
        return {"trt_engine_cache_enable": "1", "trt_engine_cache_path": str(path)}


def target_of(artifact: Artifact) -> Target:
    """The target that `artifact` was made for.

    Raises:
        ValueError: for one that is not registered, and for a dtype that it does not know.
    """
    name = artifact.manifest["target"]
    try:
        target = get_target(name)
    except ValueError as error:
        raise ValueError(f"{artifact.directory} is for the target {name!r}: {error}") from None
    for dtype in artifact.dtypes:
        if dtype not in target.dtypes:
            found = f"{artifact.directory} is for the target {name!r} with dtype {dtype!r}"
            raise ValueError(f"{found}, expected one of: {known_targets()}")
    return target
