"""Text in, text out: a `Runtime` and the tokenizer that came with the checkpoint, without
transformers."""

import contextlib
import functools
import os
import reprlib
import threading
import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from tokenizers import Encoding, Tokenizer

from .engine.inputs import Generated, check_options, with_targets
from .errors import UsageError
from .inference import options as option_fields
from .inference.config import VISION
from .inference.export_info import MANIFEST, TARGET_TOKENIZER, ExportInfo, json_object
from .inference.inputs import pad_sequences
from .inference.options import Options
from .runtime import Runtime
from .specs.alignment import ROLE as ALIGNMENT
from .text.checks import TokenizerErrors, check_texts, check_unicode, with_names
from .text.detokenizer import Detokenizer, TokenNames
from .text.languages import Choice, read_languages, sentence_languages
from .text.placeholders import Keep
from .text.sentence_modules import SentenceModules, read_modules
from .text.tasks import (
    classification,
    embedding,
    masks,
    multi_vector_embedding,
    pairs,
    question_answering,
    reranking,
    sparse_embedding,
    tagging,
    translation,
)
from .text.tasks.alignment import Aligning, decode_texts, plain_text, unknown_token
from .text.tasks.generation import generate_rows
from .text.tasks.segments import check_unmarked
from .text.token_heads import TokenHeads, read_token_heads
from .text.tokenization_spaces import CleaningDetokenizer, clean_up
from .text.tokenizer_settings import (
    TokenizerSettings,
    read_tokenizer,
    read_tokenizer_settings,
)

TOGETHER = 64  # texts that the tokenizer cuts at once


class TextRuntime:
    """An export directory with its tokenizer.json, loaded; `options` are arguments of
    `Runtime`.

    Raises:
        FileNotFoundError: if the export has no tokenizer; see also `Runtime`.
        ValueError: if tokenizer.json is damaged or was added later; see also `Runtime`.
    """

    def __init__(self, directory: str | os.PathLike, threads: int | None = None, **options: Any):
        self._read_tokenizer(Runtime(directory, threads, **options))

    @classmethod
    def around(cls, runtime: Any) -> "TextRuntime":
        """Return the text side of `runtime`: a `Runtime`, or an object with the same `info` and
        methods."""
        text_runtime = cls.__new__(cls)
        text_runtime._read_tokenizer(runtime)
        return text_runtime

    def _read_tokenizer(self, runtime: Any) -> None:
        self.runtime = runtime
        self.info: ExportInfo = runtime.info
        self.path = self.info.directory / "tokenizer.json"
        tokenizer = read_tokenizer(self.info)
        if tokenizer is None:
            raise FileNotFoundError(
                f"{self.path} is missing: the checkpoint had no tokenizer, so this export takes "
                f"only ids"
            )
        self.tokenizer = tokenizer
        # of generated texts, if it differs
        self.target_tokenizer = read_tokenizer(self.info, TARGET_TOKENIZER) or tokenizer
        self.languages = read_languages(self.info)
        self.lock = threading.Lock()  # protects the tokenizer, whose truncation some tasks change
        self.has_cut = False  # True once there was a warning of texts that are truncated
        # None of what generates does: there a long text blocks no short one.
        self.may_cut = not self.info.generates

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how pickle and `copy` open the export again, see `Runtime`."""
        return type(self).around, (self.runtime,)

    def close(self) -> None:
        """Free the memory of the graphs, see `Runtime.close`."""
        self.runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # What is read of the export when it is first needed, and the tasks.
    translate = translation.translate
    classify = classification.classify
    zero_shot = classification.zero_shot
    rerank = reranking.rerank
    tag = tagging.tag
    answer = question_answering.answer
    fill_mask = masks.fill_mask
    embed = embedding.embed
    encode_query = embedding.encode_query
    encode_document = embedding.encode_document
    embed_sparse = sparse_embedding.embed_sparse
    embed_multi_vector = multi_vector_embedding.embed_multi_vector
    similarity = embedding.similarity
    next_sentence = pairs.next_sentence
    choose = pairs.choose

    def generate(
        self,
        texts: list[str],
        /,
        target_prefix: list[str] | None = None,
        src_lang: Choice = None,
        tgt_lang: Choice = None,
        seeds: Sequence[int] | None = None,
        return_alignments: bool = False,
        replace_unknowns: bool = False,
        keep: Keep = None,
        **options: Any,
    ) -> list[Any]:
        """Return one text for each of `texts`, or `num_return_sequences`: the translation, or the
        continuation of a decoder. With `return_alignments`, an `Alignment` replaces each text.

        Args:
            texts: the sources, or the prompts of a decoder.
            target_prefix: for encoder-decoder models only, the start of each translation: one text
                (or an empty one) per text of `texts`. The translation includes it.
            src_lang, tgt_lang: for multilingual models only, the languages of the texts and of the
                translations, by their names in the tokenizer: one for all, or a list with one per
                text. Defaults are the tokenizer's source language and the target language of
                generation_config.json.
            seeds: one per text; by default derived from the option `seed` and the number of the
                text.
            return_alignments: return an `Alignment` for each text: its `text`, its words, their
                `weights`, and its `alignments` as those of `translate`.
            replace_unknowns: replace each word with the unknown token by the word of the source
                that it is aligned with.
            keep: what stays unchanged in the texts, see `translate`. None keeps nothing.
            options: those of `Runtime.generate`.

        Raises:
            UsageError: for an unknown language, for a missing target language that the model needs,
                and for another number of `seeds`, or with `seed`.
            ValueError: for no texts, anything but a list of strings, a blank text, a text that the
                tokenizer fails on or that begins with an unknown language, a `target_prefix` of
                another length, or too many tokens. With `return_alignments`,
                `replace_unknowns` or `keep` also for an export without an alignment graph.
        """
        Aligning(return_alignments, replace_unknowns).check(self.info)
        if return_alignments:
            check_unmarked(keep=keep)
        lines = translation.marked_lines(self, texts, keep)
        # a line of placeholders only is generated for nothing
        sources = [line.text or line.raw for line in lines]
        rows, checked = self.checked_rows(sources, src_lang, tgt_lang, options, seeds)
        results = generate_rows(
            self,
            rows,
            checked,
            self.prefixes(target_prefix, len(rows)),
            seeds,
            are_aligned=[return_alignments or bool(line.marks) for line in lines],
            unknown_token=unknown_token(self, replace_unknowns),
        )
        translated = decode_texts(self, sources, rows, results, replace_unknowns)
        return translated if return_alignments else translation.join_lines(lines, translated)

    def generate_with_scores(
        self,
        texts: list[str],
        /,
        target_prefix: list[str] | None = None,
        src_lang: Choice = None,
        tgt_lang: Choice = None,
        seeds: Sequence[int] | None = None,
        replace_unknowns: bool = False,
        **options: Any,
    ) -> tuple[list[str], np.ndarray]:
        """Generate as `generate` does, with its arguments, and return (texts, scores (B * N,)). N
        is `num_return_sequences`.

        The score is sum(log p) / length^length_penalty of the new tokens, including the end token.
        """
        Aligning(False, replace_unknowns).check(self.info)
        rows, checked = self.checked_rows(texts, src_lang, tgt_lang, options, seeds)
        prefixes = self.prefixes(target_prefix, len(rows))
        unknown = unknown_token(self, replace_unknowns)
        results = generate_rows(self, rows, checked, prefixes, seeds, True, unknown_token=unknown)
        scores = np.array([result.score for result in results], np.float32)
        return self.result_texts(texts, rows, results, replace_unknowns), scores

    def result_texts(
        self,
        texts: list[str],
        rows: Sequence[Sequence[int]],
        results: Sequence[Generated],
        replace_unknowns: bool,
    ) -> list[str]:
        """Return the texts of `results`. The other arguments are those of `decode_texts`."""
        translated = decode_texts(self, texts, rows, results, replace_unknowns)
        return [*map(plain_text, translated)]

    def checked_rows(
        self,
        texts: list[str],
        src_lang: Choice,
        tgt_lang: Choice,
        options: dict[str, Any],
        seeds: Sequence[int] | None = None,
    ) -> tuple[list[list[int]], list[Options]]:
        """Return the token ids of each text, and its checked options with its target language.

        Raises UsageError and ValueError as `generate` does.
        """
        checked = check_options(self.info, options)
        rows = self.rows(texts, src_lang)
        option_fields.check_seeds(seeds, len(rows), checked.seed)
        targets = self.languages.target_options(tgt_lang, len(rows), options)
        return rows, with_targets(self.info, checked, targets)

    def stream(
        self, text: str, /, src_lang: str | None = None, tgt_lang: str | None = None, **options: Any
    ) -> Iterator[str]:
        """Return an iterator over pieces of the text that `generate` returns for `text`.

        Each piece is yielded as soon as its tokens are generated. `src_lang` and `tgt_lang` are the
        languages of a multilingual model. `options` are generation options.

        Raises:
            UsageError: if `num_return_sequences` is not 1, for beam search, and for an invalid
                option or language.
            ValueError: for a blank text, or one with too many tokens.
        """
        if options.get("num_return_sequences") not in (None, 1):
            raise UsageError(
                f"num_return_sequences must be 1 to stream, got {options['num_return_sequences']}"
            )
        options = {"num_return_sequences": 1, **options}
        rows, [checked] = self.checked_rows([text], src_lang, tgt_lang, options)
        inputs = self.runtime.inputs(*self.batch(rows), None, checked)
        return self.decode_stream(self.runtime.stream_inputs(inputs))

    @functools.cached_property
    def sentence_languages(self) -> dict[str | None, str]:
        """The code of the language whose rules split sentences, by the name of the language."""
        return sentence_languages(self.info, self.languages)

    @functools.cached_property
    def tokenizer_settings(self) -> TokenizerSettings:
        return read_tokenizer_settings(self.info, self.tokenizer)

    @functools.cached_property
    def sentence_modules(self) -> SentenceModules:
        """The sentence modules of the export; without any, the mean of the token states.

        There is a warning for each of `embedding.pooling_problems` and `embedding.text_problems`.
        """
        modules = read_modules(
            self.info.manifest.get("sentence_modules") or [],
            self.info,
            self.info.config["hidden_size"],
        )
        for problem in embedding.pooling_problems(self.info) + embedding.text_problems(self.info):
            warnings.warn(problem, stacklevel=1)
        return modules

    @functools.cached_property
    def token_heads(self) -> TokenHeads:
        """The heads of BGE-M3."""
        return read_token_heads(self.info, self.info.config["hidden_size"])

    @functools.cached_property
    def aligns_markup(self) -> bool:
        """True if markup in sentences is put around the words that theirs became. Without an
        alignment graph it is False, with a warning."""
        aligns = ALIGNMENT in self.info.specs
        if not aligns:
            warnings.warn(
                f"{self.info.directory} has no alignment graph, so each text between two tags is "
                "translated as a sentence: export again with --target cpu",
                stacklevel=1,
            )
        return aligns

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokenizer's special tokens, which are no text."""
        return frozenset(
            id for id, token in self.tokenizer.get_added_tokens_decoder().items() if token.special
        )

    @functools.cached_property
    def token_names(self) -> TokenNames:
        return TokenNames(self.tokenizer, self.special_ids, self.path)

    def detokenizer(
        self, hidden: Collection[int] | None = None
    ) -> Detokenizer | CleaningDetokenizer:
        """Return an incremental detokenizer for one row of tokens, cleaning up spaces if the
        tokenizer does. `hidden` are the tokens that are no text, by default all special ones."""
        special_ids = self.special_ids if hidden is None else hidden
        detokenizer = Detokenizer(self.tokenizer, special_ids, self.path)
        cleans_up = self.tokenizer_settings.cleans_up
        return CleaningDetokenizer(detokenizer) if cleans_up else detokenizer

    def decode_stream(self, steps: Iterator[np.ndarray]) -> Iterator[str]:
        """Yield the text of one row in parts. Each of `steps` is an array of one token."""
        detokenizer = self.detokenizer()
        for [token] in steps:
            if piece := detokenizer.add(int(token)):
                yield piece
        if rest := detokenizer.end():
            yield rest

    def tokenize(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and mask (B, S) of `texts`, padded on the right. A decoder's prompts get no
        end token."""
        return self.batch(self.rows(texts))

    def batch(self, rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        return pad_sequences(rows, self.info.config.get("pad_token_id"))

    def rows(self, texts: list[str], src_lang: Choice = None) -> list[list[int]]:
        """Return the token ids of each text in the language `src_lang`, None for the tokenizer's
        own. A decoder's prompt gets no end token.

        Raises ValueError unless `texts` are a list of strings that are not blank, and for a text
        that begins with an unknown language. Raises UsageError for an unknown `src_lang`.
        """
        texts = check_texts(texts)
        self.languages.check_words(texts)
        if src_lang is not None:
            return self.languages.rows(
                [encoding.ids for encoding in self.encodings(texts, special_tokens=False)], src_lang
            )
        encodings = self.encodings(texts, special_tokens=True)
        return [
            encoding.ids if "encoder" in self.info.specs else prompt(encoding)
            for encoding in encodings
        ]

    def encodings(self, texts: list[str], special_tokens: bool) -> Iterator[Encoding]:
        """Yield the encodings of `texts`, with or without special tokens.

        They are encoded a few at a time: an encoding takes hundreds of times the memory of its
        text.
        """
        for start in range(0, len(texts), TOGETHER):
            yield from self.encode(texts[start : start + TOGETHER], special_tokens)

    def prefixes(self, texts: list[str] | None, count: int) -> list[list[int]]:
        """Return the token ids of each of the `count` prefixes `texts`, all empty for None or for
        empty texts.

        Otherwise raises ValueError for a decoder, or if there are not `count` strings.
        """
        if texts is None or not any(texts):
            return [[]] * count
        if "encoder" not in self.info.specs:
            raise ValueError(
                "target_prefix needs an encoder-decoder model, this export is a decoder: put "
                "the prefix at the end of the prompt"
            )
        if (
            not isinstance(texts, list | tuple)
            or len(texts) != count
            or not all(isinstance(text, str) for text in texts)
        ):
            raise ValueError(
                f"target_prefix must be a list of {count} strings, as texts, got "
                f"{reprlib.repr(texts)}"
            )
        return [encoding.ids for encoding in self.encode(texts, False, self.target_tokenizer)]

    def decode(self, rows: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        """Return the text of each row of token ids, the same as `AutoTokenizer.batch_decode`.
        `skip_special_tokens` leaves out tokens such as the end token."""
        with TokenizerErrors(self.path):
            texts = self.tokenizer.decode_batch(rows, skip_special_tokens=skip_special_tokens)
        return [clean_up(text) for text in texts] if self.tokenizer_settings.cleans_up else texts

    def encode(
        self, texts: list[str], special_tokens: bool, tokenizer: Tokenizer | None = None
    ) -> list[Encoding]:
        """Return the encoding of each text, with or without special tokens.

        The default `tokenizer` is that of source texts. Raises ValueError for a text that is not
        valid Unicode, or if the tokenizer fails on a text.
        """
        for text, name in with_names(texts):
            check_unicode(text, name)
        selected = tokenizer or self.tokenizer
        with self.lock if self.may_cut else contextlib.nullcontext(), TokenizerErrors(self.path):
            if len(texts) == 1:  # without the threads of a batch
                return [selected.encode(texts[0], add_special_tokens=special_tokens)]
            return selected.encode_batch(texts, add_special_tokens=special_tokens)


def open_runtime(directory: str | os.PathLike, threads: int | None = None, **options: Any) -> Any:
    """Return a `TextRuntime`, or an `ImageRuntime` for a model that reads images. `threads` are CPU
    threads per operator, and `options` other arguments of `Runtime`, such as `device` and
    `dtype`."""
    path = Path(directory) / MANIFEST
    if path.is_file() and json_object(path, path.read_bytes()).get("model_type") == VISION:
        from .image_runtime import ImageRuntime

        return ImageRuntime(directory, threads, **options)
    return TextRuntime(directory, threads, **options)


def prompt(encoding: Encoding) -> list[int]:
    """Return the token ids that a decoder continues.

    If the tokenizer ends a text with a special token, the tokens that it added are left out.
    """
    added = encoding.special_tokens_mask
    return (
        [token for token, is_added in zip(encoding.ids, added) if not is_added]
        if added[-1:] == [1]
        else encoding.ids
    )
