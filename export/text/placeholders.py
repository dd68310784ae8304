"""Placeholders: parts of a text that a translation keeps, such as `{name}`, `%s` and addresses."""

import re
from collections.abc import Iterable, Sequence

from ..errors import UsageError
from ..specs.alignment import ROLE
from .text_model import Translator

Keep = bool | str | Sequence[str] | None


def braces(depth: int) -> str:
    """Return a pattern of a pair of braces with `depth` levels of braces in it."""
    inner = f"|{braces(depth - 1)}" if depth else ""
    return rf"\{{(?:[^{{}}\n]++{inner})*+\}}"


IN_ADDRESS = r"\([^\s<>()]*+\)"  # a closing bracket belongs to an address that opens it
PLACEHOLDERS = "|".join(
    [
        r"%%|%(?:\(\w+\)|\d+\$)?[-+#0]?\d*(?:\.\d+)?[hlLqjzt]{0,2}[a-zA-Z@](?!\w)",  # printf
        rf"[$#%]?{braces(3)}",  # {name}, {{name}}, ${name}, #{name}, %{name}, messages of ICU
        r"</?\d+\s*/?>",  # <0>, </0>, <0/>
        rf"(?i:https?|ftp)://(?>{IN_ADDRESS}|[^\s<>)])*(?:{IN_ADDRESS}|[^\s<>.,;:!?'\"()\]])",
        r"(?:mailto:)?(?<![\w.+-])[\w.+-]++@[\w-]+(?:\.[\w-]+)+",
    ]
)
NAME = re.compile(r"\w[\w\s'-]*")  # matches as complete words
# blocks of symbols and pictographs, of which those that a vocabulary lacks are kept
EMOJI_BASE = (
    "[\u203c\u2049\u2122\u2139\u2190-\u21ff\u2300-\u23ff\u24c2\u25a0-\u27bf\u2900-\u297f"
    "\u2b00-\u2bff\u3030\u303d\u3297\u3299\U0001f000-\U0001faff]"
)
SKIN_TONES = "[\U0001f3fb-\U0001f3ff]"
TAGS = "[\U000e0020-\U000e007f]"  # of flags such as Scotland's
ONE_EMOJI = f"{EMOJI_BASE}(?:\ufe0f|{SKIN_TONES})?{TAGS}*"
EMOJI = re.compile(
    f"[\U0001f1e6-\U0001f1ff]{{2}}|[#*0-9]\ufe0f?\u20e3|{ONE_EMOJI}(?:\u200d{ONE_EMOJI})*"
)


def keep_pattern(runtime: Translator, texts: Iterable[str], keep: Keep) -> re.Pattern | None:
    """Return a pattern of what the translation of `texts` keeps, or None for nothing.

    `keep` is a regular expression, a list of strings, True for `PLACEHOLDERS`, or None. Emoji that
    the vocabulary of the model lacks are kept too. False keeps nothing.

    Raises:
        UsageError: if `keep` is something else.
        ValueError: if `keep` is set for an export without an alignment graph.
    """
    pattern = checked_pattern(keep)
    if pattern is not None:
        runtime.info.check_alignment()
    if keep is False or ROLE not in runtime.info.specs:
        return None
    patterns = [pattern or "", any_text(lacking_emoji(runtime, texts))]
    joined = "|".join(filter(None, patterns))
    return re.compile(joined) if joined else None


def checked_pattern(keep: Keep) -> str | None:
    """Return the regular expression of `keep`, None for None and False.

    Raises UsageError unless it is one, a list of strings or a boolean.
    """
    if keep is None or keep is False:
        return None
    if keep is True:
        return PLACEHOLDERS
    if isinstance(keep, str):
        try:
            re.compile(f"(?:{keep})")
        except re.error as error:
            raise UsageError(
                f"keep is {keep!r:.60}, expected a regular expression: {error}", "keep"
            ) from None
        return f"(?:{keep})"
    if isinstance(keep, list | tuple) and all(isinstance(text, str) and text for text in keep):
        return any_text(keep)
    raise UsageError(
        f"keep is {keep!r:.60}, expected True, a regular expression, or a list of strings that are "
        "not empty",
        "keep",
    )


def any_text(texts: Iterable[str]) -> str:
    """Return a pattern of any of `texts`, the longest first. Names match as complete words."""
    return "|".join(
        rf"(?<!\w){re.escape(text)}(?!\w)" if NAME.fullmatch(text) else re.escape(text)
        for text in sorted(set(texts), key=lambda text: (-len(text), text))
    )


def lacking_emoji(runtime: Translator, texts: Iterable[str]) -> list[str]:
    """Return the emoji in `texts` that the tokenizer of the model reads as unknown."""
    emoji = {match[0] for text in texts for match in EMOJI.finditer(text)}
    unknown = runtime.tokenizer_settings.special_tokens["unk_token"]
    if not emoji or unknown is None:
        return []
    encodings = runtime.encode(sorted(emoji), special_tokens=False)
    return [text for text, encoding in zip(sorted(emoji), encodings) if unknown in encoding.ids]
