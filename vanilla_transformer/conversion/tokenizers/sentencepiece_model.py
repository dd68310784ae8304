"""SentencePiece models (Kudo and Richardson 2018) as `tokenizers` with the ids of a vocab.json."""

import json
import unicodedata
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

from ...checkpoint_files import one_line, shorten
from ...files import check_no_pointer

EXTRA = "pip install 'vanilla-transformer[sentencepiece]'"
MODEL_TYPES = {1: "unigram", 2: "BPE", 3: "word", 4: "character"}
NORMAL, USER_DEFINED, BYTE = 1, 4, 6  # types of pieces
SPACES = {"add_dummy_prefix": True, "remove_extra_whitespaces": True, "escape_whitespaces": True}
OPEN, CLOSE = "\x01", "\x02"


def read_sentencepiece(path: Path, model_types: Collection[str] = ("unigram", "BPE")) -> Any:
    """Return the `ModelProto` of a .spm or .model file, whose type is one of `model_types`.

    Raises:
        FileNotFoundError: if there is no file at `path`.
        ImportError: without the packages that read it, with the name of the extra that has them.
        ValueError: for a damaged or foreign file, and a model of another type. Also for a model
            with bytes for unknown characters, or without SentencePiece's default rules for spaces.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, expected a SentencePiece model")
    model = parse(path)
    model_type = MODEL_TYPES.get(model.trainer_spec.model_type)
    if model_type not in model_types:
        raise ValueError(f"{path} has model type {model_type}, expected {' or '.join(model_types)}")
    settings = {name: getattr(model.normalizer_spec, name) for name in SPACES}
    settings["treat_whitespace_as_suffix"] = model.trainer_spec.treat_whitespace_as_suffix
    for name, value in settings.items():
        expected = SPACES.get(name, False)
        if value != expected:
            raise ValueError(
                f"{path} treats spaces otherwise: {name} is {value}, expected {expected}"
            )
    if any(piece.type == BYTE for piece in model.pieces):
        raise ValueError(f"{path} has byte_fallback=True, expected False")
    return model


def parse(path: Path) -> Any:
    """Read the SentencePiece model at `path`, of any type, and return its `ModelProto`.

    Raises:
        ImportError: if sentencepiece or protobuf is not installed.
        ValueError: if the file is damaged, or is no SentencePiece model.
    """
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise ImportError(
            f"reading {path} needs sentencepiece and protobuf, which are missing ({error}): {EXTRA}"
        ) from None
    check_no_pointer(path)
    content = path.read_bytes()
    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(content)
        is_valid = (
            bool(model.pieces)
            and model.HasField("trainer_spec")
            and model.HasField("normalizer_spec")
        )
    except DecodeError:
        is_valid = False
    if not is_valid:
        raise ValueError(
            f"{path} is not a complete SentencePiece model: expected pieces and two specs in "
            f"its {len(content)} bytes"
        )
    return model


def read_vocabulary(path: Path, tokens: Iterable[str]) -> dict[str, int]:
    """Return {piece: id} of the vocab.json at `path`.

    Raises:
        FileNotFoundError: if there is no file at `path`.
        ValueError: unless the file is a JSON object, has each id from 0 on once, and has all
            special `tokens`.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, expected the ids of all pieces")
    try:
        pairs = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=tuple)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {one_line(error)}") from None
    if not isinstance(pairs, tuple) or not pairs or not all(type(id) is int for _, id in pairs):
        raise ValueError(
            f"{path} holds {shorten(pairs)}, expected a JSON object with an id for each piece"
        )
    vocabulary = dict(pairs)
    ids = sorted(id for _, id in pairs)
    if len(vocabulary) < len(pairs) or ids != list(range(len(ids))):
        problem = (
            f"{len(ids)} ids from {ids[0]} to {ids[-1]}, {len(set(ids))} different, of "
            f"{len(vocabulary)} pieces"
        )
        raise ValueError(
            f"{path} has gaps or doubles: {problem}, expected each from 0 to {len(ids) - 1} once"
        )
    missing = [token for token in tokens if token not in vocabulary]
    if missing:
        raise ValueError(
            f"{path} lacks {', '.join(missing)}, expected the special tokens among its "
            f"{len(ids)} pieces"
        )
    return vocabulary


def make_tokenizer(
    model: Any, vocabulary: dict[str, int], unknown: str, others: Collection[str]
) -> tuple[Tokenizer, list[str]]:
    """Return a tokenizer that splits text as `model` does, and the sorted pieces that have no id.

    It adds no special tokens around the text.

    Args:
        model: a `ModelProto`.
        vocabulary: {piece: id}.
        unknown: the token for unknown characters.
        others: tokens of `vocabulary` that are not pieces of `model`.
    """
    scores = piece_scores(model)
    if model.trainer_spec.model_type == 1:
        backend = unigram(scores, vocabulary, unknown, others)
    else:
        backend = bpe(scores, vocabulary, unknown)
    tokenizer = Tokenizer(backend)
    tokenizer.normalizer = normalizers.Sequence(list(normalization(model.normalizer_spec, scores)))
    is_split = model.trainer_spec.split_by_whitespace
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always", split=is_split)
    steps = [
        decoders.Replace(Regex(f"[{OPEN}{CLOSE}]"), ""),
        decoders.Replace("▁", " "),
        decoders.Fuse(),
    ]
    # `Strip` panics on an empty text
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Replace(Regex(r"^\s+|\s+$"), "")])
    return tokenizer, sorted(scores.keys() - vocabulary.keys())


def missing_notes(missing: list[str], model: str) -> list[str]:
    """Return a note for users about the `missing` pieces of the file `model`, no note for none."""
    few = ", ".join(missing[:5])
    note = f"vocab.json lacks {len(missing)} of the pieces of {model}, {few}"
    return [f"{note}: text is cut without them"] if missing else []


def piece_scores(model: Any) -> dict[str, float]:
    """Return {piece: score} of the pieces that `model`, a `ModelProto`, splits text into.

    User-defined pieces get SentencePiece's score for their length, so that they always win.
    """
    normal = {piece.piece: piece.score for piece in model.pieces if piece.type == NORMAL}
    best = max(normal.values(), default=0.0)
    user_defined = {
        piece.piece: len(piece.piece) * best - 0.1
        for piece in model.pieces
        if piece.type == USER_DEFINED
    }
    return normal | user_defined


def unigram(
    scores: dict[str, float], vocabulary: dict[str, int], unknown: str, others: Collection[str]
) -> Unigram:
    low = min(scores.values())  # what an unknown piece scores follows from the lowest
    visible = scores.keys() | set(others)
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    rows = [
        (piece if piece in visible else f"{OPEN}{piece}{CLOSE}", scores.get(piece, low))
        for piece in pieces
    ]
    return Unigram(rows, unk_id=vocabulary[unknown], byte_fallback=False)


def bpe(scores: dict[str, float], vocabulary: dict[str, int], unknown: str) -> BPE:
    pieces = sorted(scores.keys() & vocabulary.keys(), key=lambda piece: -scores[piece])
    known = set(pieces)
    pairs = (
        (piece[:length], piece[length:]) for piece in pieces for length in range(1, len(piece))
    )
    merges = [pair for pair in pairs if known.issuperset(pair)]
    return BPE(
        vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=False
    )


def normalization(spec: Any, pieces: Iterable[str]) -> Iterator[normalizers.Normalizer]:
    """Yield the normalizers of `spec`, a model's `normalizer_spec`. They also strip and join
    spaces.

    The last ones put the marks `OPEN` and `CLOSE` around each run of characters that no piece has.
    """
    alphabet = {character for piece in pieces for character in piece} | {" ", "▁"}
    if spec.precompiled_charsmap:
        if "nfkc" in spec.name:
            yield from compositions(alphabet)
        yield normalizers.Precompiled(spec.precompiled_charsmap)
    yield normalizers.Replace(Regex(f"[{OPEN}{CLOSE}]"), "")
    yield normalizers.Replace(Regex(" {2,}"), " ")
    yield normalizers.Replace(Regex("^ | $"), "")
    known = "".join(
        f"\\{character}" if character in "\\]^-[" else character for character in sorted(alphabet)
    )
    yield normalizers.Replace(Regex(f"(?<![^{known}])(?=[^{known}])"), OPEN)
    yield normalizers.Replace(Regex(f"(?<=[^{known}])(?![^{known}])"), CLOSE)


def compositions(alphabet: Iterable[str]) -> Iterator[normalizers.Normalizer]:
    """Yield normalizers that compose vowel signs of two characters, as in Telugu and Tamil.

    They come before `Precompiled`, which applies the model's table to single characters if a
    grapheme has many bytes, and then misses these pairs. Each composes one character of `alphabet`,
    the characters of the model's pieces.
    """
    for character in sorted(alphabet):
        parts = unicodedata.decomposition(character).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            pair = "".join(chr(int(part, 16)) for part in parts)
            if unicodedata.category(pair[0]).startswith("M"):
                yield normalizers.Replace(pair, character)
