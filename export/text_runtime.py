"""Text in, text out: a `Runtime` and the tokenizer that came with the checkpoint, without
transformers."""

import os
import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .engine.inputs import check_options, with_targets
from .errors import UsageError
from .inference.config import VISION
from .inference.export_info import MANIFEST, json_object
from .inference.options import Options, check_seeds
from .runtime import Runtime
from .text.checks import is_strings
from .text.languages import Choice
from .text.tasks import (
    classification,
    embedding,
    masks,
    question_answering,
    reranking,
    tagging,
    translation,
)
from .text.tasks.segments import (
    Keep,
    check_aligning,
    check_unmarked,
    plain_text,
)
from .text.text_model import TextModel


class TextRuntime(TextModel):
    """An export directory with its tokenizer.json, loaded; `options` are arguments of
    `Runtime`.

    Raises:
        FileNotFoundError: if the export has no tokenizer; see also `Runtime`.
        ValueError: if tokenizer.json is damaged or was added later; see also `Runtime`.
    """

    def __init__(self, directory: str | os.PathLike, threads: int | None = None, **options: Any):
        super().__init__(Runtime(directory, threads, **options))

    @classmethod
    def around(cls, runtime: Any) -> "TextRuntime":
        """Return the text side of `runtime`: a `Runtime`, or an object with the same `info` and
        methods."""
        text_runtime = cls.__new__(cls)
        TextModel.__init__(text_runtime, runtime)
        return text_runtime

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how pickle and `copy` open the export again, see `Runtime`."""
        return type(self).around, (self.runtime,)

    # the tasks
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
    embed_sparse = embedding.embed_sparse
    embed_multi_vector = embedding.embed_multi_vector
    similarity = embedding.similarity
    next_sentence = classification.next_sentence
    choose = classification.choose

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
        check_aligning(
            self.info, return_alignments=return_alignments, replace_unknowns=replace_unknowns
        )
        if return_alignments:
            check_unmarked(keep=keep)
        lines = translation.marked_lines(self, texts, keep)
        # a line of placeholders only is generated for nothing
        sources = [line.text or line.raw for line in lines]
        are_aligned = [return_alignments or bool(line.marks) for line in lines]
        rows, checked = self.checked_rows(sources, src_lang, tgt_lang, options, seeds)
        prefixes = self.prefixes(target_prefix, len(rows))
        unknown = translation.unknown_token(self, replace_unknowns)
        results = self.generate_rows(
            rows, checked, prefixes, seeds, are_aligned=are_aligned, unknown_token=unknown
        )
        translated = translation.decode_texts(self, sources, rows, results, unknown)
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
        check_aligning(self.info, replace_unknowns=replace_unknowns)
        rows, checked = self.checked_rows(texts, src_lang, tgt_lang, options, seeds)
        prefixes = self.prefixes(target_prefix, len(rows))
        unknown = translation.unknown_token(self, replace_unknowns)
        results = self.generate_rows(rows, checked, prefixes, seeds, True, unknown_token=unknown)
        translated = translation.decode_texts(self, texts, rows, results, unknown)
        scores = np.array([result.score for result in results], np.float32)
        return [*map(plain_text, translated)], scores

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
        check_seeds(seeds, len(rows), checked.seed)
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

    def decode_stream(self, steps: Iterator[np.ndarray]) -> Iterator[str]:
        """Yield the text of one row in parts. Each of `steps` is an array of one token."""
        detokenizer = self.detokenizer()
        for [token] in steps:
            if piece := detokenizer.add(int(token)):
                yield piece
        if rest := detokenizer.end():
            yield rest

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
        if not is_strings(texts) or len(texts) != count:
            raise ValueError(
                f"target_prefix must be a list of {count} strings, as texts, got "
                f"{reprlib.repr(texts)}"
            )
        encodings = self.encode([*texts], False, self.target_tokenizer)
        return [encoding.ids for encoding in encodings]


def open_runtime(directory: str | os.PathLike, threads: int | None = None, **options: Any) -> Any:
    """Return a `TextRuntime`, or an `ImageRuntime` for a model that reads images. `threads` are CPU
    threads per operator, and `options` other arguments of `Runtime`, such as `device` and
    `dtype`."""
    path = Path(directory) / MANIFEST
    if path.is_file() and json_object(path, path.read_bytes()).get("model_type") == VISION:
        from .image_runtime import ImageRuntime

        return ImageRuntime(directory, threads, **options)
    return TextRuntime(directory, threads, **options)
