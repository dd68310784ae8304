"""Tokens in, tokens out: an export directory, run with onnxruntime and numpy, without torch."""

import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from .engine.alignments import alignments
from .engine.capacity import batch_together, call_batches
from .engine.inputs import (
    Generated,
    GenerationInput,
    check_options,
    encoder_feeds,
    generation_inputs,
)
from .engine.limits import arrange_workers, offline_workers
from .engine.loop import Engine
from .engine.model import OnnxModel, check_threads, find_target, main_roles, open_export
from .errors import UsageError
from .inference.devices import available_cpus, require, require_onnxruntime
from .inference.export_info import ExportInfo
from .inference.inputs import pad_sequences
from .inference.options import Options
from .inference.session import SessionChanges
from .shared.options import FLAG, check_option, is_int64
from .targets.registry import default_target


class Runtime:
    """A loaded export directory.

    Args:
        directory: directory written by `vanilla-transformer export`.
        threads: CPU threads per operator, 1 to 1024; by default all that this process may use.
        arena: whether onnxruntime keeps memory between runs.
        device: `"cpu"` or `"cuda"`, by default that of the target. The portable target in fp32 also
            has `"tensorrt"`, which compiles full-sequence graphs. Decoders run on CUDA then,
            because TensorRT would compile them for each size of their caches.
        engine_cache: directory where TensorRT keeps compiled engines; by default they are not kept.
        dtype: dtype of the weights, by default the default dtype of the export.
        workers: number of batches for continuous batching of many rows. They share `threads`. The
            default depends on the model.
        changes: changes to how onnxruntime runs the graphs, to find the cause of a wrong result.

    Raises:
        FileNotFoundError, ValueError: if the directory is incomplete, changed or replaced, see
            `read_export_info`; ValueError for an unknown target, dtype or config, and for a graph
            that onnxruntime cannot load, that does not match the config, or that keeps data outside
            the export.
        UsageError: for an invalid number of threads, a device that the target does not support, a
            dtype that the export does not have, an `engine_cache` without TensorRT or inside the
            export, for `workers` other than 1 to `threads` or without continuous batching, and for
            `changes` that the device does not have.
        OSError: if CUDA or TensorRT is requested but not available. The error has a remedy.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        threads: int | None = None,
        arena: bool = True,
        device: str | None = None,
        engine_cache: str | os.PathLike | None = None,
        dtype: str | None = None,
        workers: int | None = None,
        changes: SessionChanges | None = None,
    ):
        require_onnxruntime()
        check_threads(threads)
        check_option("arena", arena, FLAG)
        self.info: ExportInfo = open_export(directory, dtype)
        self.architecture, self.dtype = self.info.architecture, self.info.dtype
        self.config, self.specs, self.defaults = (
            self.info.config,
            self.info.specs,
            self.info.defaults,
        )
        self.target: str = self.info.manifest["target"]
        self.arena, self.device = arena, self._checked_device(device)
        self.engine_cache = self._checked_engine_cache(engine_cache)
        if changes is not None:
            changes.check(self.device)
        if self.device != "cpu":
            require(self.device, self.info.manifest["activations"])
        # onnxruntime's own default is the host's cores, not the process's.
        self.threads = threads or available_cpus()
        self.workers = self._checked_workers(workers)
        self.model = OnnxModel(
            self.info,
            self.threads,
            device=self.device,
            arena=arena,
            engine_cache=self.engine_cache,
            changes=changes or SessionChanges(),
        )
        self.model.open(main_roles(self.info))
        if self.info.generates:
            _ = self.model.factory  # which raises for what cannot be opened

    @property
    def rows_are_independent(self) -> bool:
        """True if the outputs of a row are the same bits alone and in any batch, on all CPUs."""
        return self.dtype in find_target(self.info).independent_dtypes

    @property
    def max_tokens(self) -> int:
        """Maximum tokens that `outputs` gets at a time from the tasks of a text or image
        runtime."""
        return self.model.max_tokens

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `Runtime` by name with which another process opens the same export.

        They are all arguments but the directory, and `workers` only with a step graph, so the
        results are the same.
        """
        names = ("threads", "arena", "device", "engine_cache", "dtype")
        workers = {"workers": self.workers} if self.info.step else {}
        return {name: getattr(self, name) for name in names} | workers

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how pickle and `copy` open the export again, by its directory and arguments."""
        return functools.partial(type(self), self.info.directory, **self.arguments), ()

    def close(self) -> None:
        """Free the memory of the graphs. Later calls raise ValueError. Closing again changes
        nothing.

        A runtime that nothing refers to any more frees its memory too. A runtime is also a context
        manager, which closes it.
        """
        if (worker_model := vars(self).pop("_worker_model", None)) is not None:
            worker_model.close()
        self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _checked_device(self, device: str | None) -> str:
        target = find_target(self.info)
        devices = target.devices(main_roles(self.info), self.dtype)
        selected = device or target.default_device
        if selected not in devices:
            export = f"{self.architecture}, target {self.target!r}, dtype {self.dtype!r}"
            raise UsageError(
                f"device {device!r} is not supported by this export ({export}), expected one "
                f"of {list(devices)}"
            )
        return selected

    def _checked_engine_cache(self, engine_cache: str | os.PathLike | None) -> Path | None:
        if engine_cache is None:
            return None
        if self.device != "tensorrt":
            raise UsageError(
                f"engine_cache has no effect on device {self.device!r}, expected device='tensorrt'"
            )
        if Path(engine_cache).resolve().is_relative_to(self.info.directory):
            raise UsageError(
                f"engine_cache is {engine_cache}, inside the export: expected a directory "
                "outside of it"
            )
        return Path(engine_cache)

    def _checked_workers(self, workers: int | None) -> int:
        if workers is None:
            return offline_workers(self.config, self.threads) if self.info.step else 1
        if not (is_int64(workers) and 1 <= workers <= self.threads):
            raise UsageError(
                f"workers must be a whole number from 1 to {self.threads}, the threads, "
                f"got {workers!r}"
            )
        if not self.info.step:
            export = f"{self.architecture}, target {self.target!r}"
            raise UsageError(
                f"workers={workers} is not supported by this export ({export}), expected None: "
                "continuous batching needs a cpu export of a model that generates"
            )
        return workers

    def encode(
        self,
        input_ids: np.ndarray | None = None,
        attention_mask: np.ndarray | None = None,
        token_type_ids: np.ndarray | None = None,
        **inputs: np.ndarray,
    ) -> np.ndarray:
        """Return the first output of the encoder: `last_hidden_state` (B, S, D), or the `logits` of
        the head.

        `input_ids`, `attention_mask` (0 for padding) and `token_type_ids` are (B, S). `inputs` are
        other inputs of the graph by name, such as `pixel_values`.

        Raises:
            ValueError: for inputs of a wrong shape or range, and for a seq2seq model whose encoder
                only returns keys and values for its decoder.
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
        """Return all outputs of the encoder graph by name, (B, S, ...) per token or (B, ...) per
        sequence.

        Rows of similar length run together. Outputs of padding may be 0.

        Args:
            input_ids: integers (B, S), for multiple choice (B, C, S). Rows are padded on the right,
                or on either side for a decoder-only model.
            attention_mask: 1 for tokens, 0 for padding, by default all 1.
            token_type_ids: by default all 0.
            decoder_input_ids, decoder_attention_mask: (B, T), for a seq2seq model that returns
                states.
            inputs: other inputs of the graph by name. A vision model takes only `pixel_values`
                (B, C, H, W).

        Raises:
            ValueError: for an input that is missing or unknown to the graph; for an empty
                batch, shapes that do not fit each other, ids outside the vocabulary, token types
                the model does not have, zeros between ones in a decoder's mask, a sequence longer
                than a learned position table, a row without the end token that a seq2seq classifier
                reads, or a model without an encoder.
        """
        arguments = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": decoder_attention_mask,
            **inputs,
        }
        return self.model.outputs(encoder_feeds(self.info, arguments))

    def generate(
        self,
        input_ids: np.ndarray,
        attention_mask: np.ndarray | None = None,
        decoder_input_ids: np.ndarray | None = None,
        seeds: Sequence[int] | None = None,
        **options: Any,
    ) -> np.ndarray:
        """Return token ids (B * N, T) like `transformers.generate`, N `num_return_sequences` per
        input.

        Rows of one input are adjacent. They begin with the start token for seq2seq, or with the
        prompt for a decoder-only model. They are padded at the end with the pad token. If there is
        none, or if it is 0 in beam search, they are padded with the end token.

        Options take precedence over generation_config.json. They have the meanings and defaults of
        transformers.

        Args:
            input_ids: token ids (B, S), padded on either side. Prompts of a decoder-only model are
                returned padded on the left.
            attention_mask: mask (B, S); by default 0 for pad tokens, unless the pad token is also
                an end token. Masked tokens between others count as positions of a source; a prompt
                of a decoder-only model may not have any.
            decoder_input_ids: decoder prompts (B, P) for seq2seq, with or without the start token.
                They are returned too. They count for `max_length` and `min_length`, but not for
                `max_new_tokens` and the score.
            seeds: one seed per input, without `seed`; by default derived from `seed` and the number
                of the input. The first input has `seed` itself.
            max_new_tokens: maximum number of new tokens; if max_length is set, by default what that
                leaves (20)
            max_length: maximum number of tokens including the prompt; ignored if max_new_tokens is
                set, here or in generation_config.json (None)
            num_beams: number of beams of beam search; 1 is greedy search, or sampling if do_sample
                is true (1)
            length_penalty: beam search: scores are divided by length^length_penalty (1.0)
            early_stopping: beam search: stop at num_beams finished sequences, or 'never' while
                better ones are possible (False)
            num_return_sequences: number of sequences per input: samples, or the best of num_beams
                (1)
            do_sample: sample tokens instead of choosing the most likely (False)
            temperature: with do_sample: temperature by which logits are divided (1.0)
            top_k: with do_sample: keep this many of the most likely tokens; 0 keeps all (50)
            top_p: with do_sample: nucleus sampling, which keeps the smallest set of tokens whose
                probabilities sum to at least top_p (1.0)
            min_p: with do_sample: minimum probability of a token, relative to the most likely one
                (0.0)
            seed: seed of sampling, from which inputs derive theirs; default: a random seed (None)
            repetition_penalty: penalty for tokens that occurred before; above 1 makes them less
                likely (1.0)
            no_repeat_ngram_size: n-grams of this size may not repeat; 0 turns it off (0)
            bad_words_ids: token sequences that are never generated (None)
            min_new_tokens: minimum number of new tokens before the end token (0)
            min_length: minimum number of tokens including the prompt; ignored if min_new_tokens is
                set, here or in generation_config.json (None)
            forced_bos_token_id: token to generate first (None)
            forced_eos_token_id: token to generate last if max_new_tokens is reached (None)
            suppress_tokens: tokens that are never generated (None)
            begin_suppress_tokens: tokens that are never generated first (None)
            renormalize_logits: beam search: normalize probabilities again after all options above
                (False)
            eos_token_id: token that ends a sequence; default: the model's (None)
            pad_token_id: token that fills finished sequences; default: the model's (None)
            decoder_start_token_id: first decoder token of an encoder-decoder model; default: the
                model's (None)

        Raises:
            UsageError: for an unknown option, an invalid value, options that cannot be combined,
                and a request that needs more memory than this machine has.
            ValueError: for inputs of a wrong shape or range, a row without tokens, zeros between
                ones in the mask of a decoder's prompt, more tokens than a learned position table
                has rows, or a field of generation_config.json that this runtime does not apply.
                Also if onnxruntime fails, for example because the prompts need too much memory.
        """
        inputs = self.inputs(input_ids, attention_mask, decoder_input_ids, options, seeds=seeds)
        return padded_sequences(inputs, self.sequences(inputs))

    def generate_with_scores(
        self,
        input_ids: np.ndarray,
        attention_mask: np.ndarray | None = None,
        decoder_input_ids: np.ndarray | None = None,
        seeds: Sequence[int] | None = None,
        **options: Any,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Generate as `generate` does, with its arguments, and return (token ids (B * N, T), scores
        (B * N,)). N is `num_return_sequences`.

        The score is sum(log p) / length^length_penalty of the new tokens, including the end token.
        In beam search it equals `sequences_scores` of transformers. Without beams, p is the softmax
        of the processed logits, before temperature, top_k, top_p and min_p.
        """
        inputs = self.inputs(input_ids, attention_mask, decoder_input_ids, options, True, seeds)
        results = self.sequences(inputs)
        scores = [sequence.score for of_input in results for sequence in of_input]
        return padded_sequences(inputs, results), np.array(scores, np.float32)

    def stream(
        self, input_ids: np.ndarray, attention_mask: np.ndarray | None = None, **options: Any
    ) -> Iterator[np.ndarray]:
        """Yield the new token of each row (B * N,) after each step. Finished rows get the pad
        token. Arguments and options are those of `generate`, but `seeds` and `decoder_input_ids`
        are not accepted. N is `num_return_sequences`.

        Raises:
            ValueError: for invalid inputs, raised before the iterator is returned.
            UsageError: for an invalid option, and for beam search, whose tokens are only known at
                the end. It is raised before the iterator is returned too.
        """
        return self.stream_inputs(self.inputs(input_ids, attention_mask, None, options))

    def stream_inputs(self, inputs: list[GenerationInput]) -> Iterator[np.ndarray]:
        """Yield the tokens of `stream` for rows that `inputs` returned."""
        if (num_beams := inputs[0].options.num_beams) > 1:
            raise UsageError(f"num_beams is {num_beams}, expected num_beams=1 to stream")
        return self._streamed(inputs)

    def _streamed(self, inputs: list[GenerationInput]) -> Iterator[np.ndarray]:
        """Yield the tokens of `stream`. Raises ValueError if this runtime is closed before the last
        token."""
        for tokens in Engine([batch_together(self.model, inputs)]).stream(inputs):
            self.model.check_open()
            yield tokens

    def alignments(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        """Return how much each token of a target attends to each token of its source: float32
        weights (T, S) for each pair of rows. The rows of weights sum to 1.

        They are the mean cross-attention of the heads in `alignment` of the manifest. The encoder
        runs again, and the alignment graph once, whatever the number of tokens.

        Args:
            sources: token ids of each source, without padding.
            targets: token ids of each target as `generate` returns them, without padding: T tokens
                after the start token.

        Raises:
            ValueError: for an export without an alignment graph, rows without tokens, numbers of
                rows that differ, ids outside the vocabulary, and more tokens than a learned
                position table has rows.
        """
        return alignments(self.model, sources, targets)

    def check_options(self, options: dict[str, Any] | Options) -> Options:
        """Return `options`, with those of generation_config.json, or else defaults, for all that is
        not set.

        Raises UsageError or ValueError for options that are wrong whatever the inputs are. Raises
        ValueError for a model that does not generate.
        """
        return check_options(self.info, options).for_prompt(1)

    def inputs(
        self,
        input_ids: np.ndarray,
        attention_mask: np.ndarray | None,
        decoder_input_ids: np.ndarray | None,
        options: dict[str, Any] | Options,
        is_scored: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> list[GenerationInput]:
        """Check the arguments of a call of `generate` and return its rows, for `sequences`.

        `is_scored` is True if scores are returned.

        Raises:
            UsageError: for an unknown option, an invalid value, options that cannot be combined,
                and rows that need more memory than this machine has.
            ValueError: for inputs of a wrong shape or range, or too many tokens.
        """
        return generation_inputs(
            self.info, input_ids, attention_mask, decoder_input_ids, options, is_scored, seeds
        )

    def sequences(self, inputs: list[GenerationInput]) -> list[list[Generated]]:
        """Return the `num_return_sequences` sequences of each of `inputs`, which `inputs` returned
        at once."""
        batches = call_batches(self.model, lambda: self._worker_model, self.workers, inputs)
        return Engine(batches).run(inputs)

    @functools.cached_property
    def _worker_model(self) -> OnnxModel:
        """The model with the threads of a worker, whose graphs are opened on first use."""
        threads = arrange_workers(self.config, self.threads, self.workers).threads
        return self.model.with_threads(threads)


def padded_sequences(inputs: list[GenerationInput], results: list[list[Generated]]) -> np.ndarray:
    """Return prompts with their new tokens (B * N, T), for the N sequences of each of B `inputs`.

    Sequences are filled at the end. Prompts are padded on the left, to equal lengths.
    """
    options = inputs[0].options
    rows = [
        [*[options.pad_token_id or 0] * row.padding, *row.prompt, *sequence.tokens]
        for row, of_row in zip(inputs, results, strict=True)
        for sequence in of_row
    ]
    return pad_sequences(rows, options.fill_token_id)[0]
