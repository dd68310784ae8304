"""sacreBLEU's metrics of generated text, cased, in percent, for training and for exports."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import UsageError
from .names import check_name

if TYPE_CHECKING:
    from sacrebleu.metrics import BLEU  # in the extra "train", imported when needed


def bleu(
    outputs: Sequence[str], references: Sequence[str], tokenize: str = "13a"
) -> tuple[float, str]:
    """Return the BLEU of all `outputs` in percent, with one reference each, and sacreBLEU's
    signature.

    Args:
        tokenize: sacreBLEU's name of a tokenization; "none" for text that is in tokens already.

    Raises:
        UsageError: for a tokenization that sacreBLEU does not have, or that needs a package that is
            not installed.
        ValueError: for another number of references than of outputs.
    """
    metric = bleu_metric(tokenize)
    check_counts(outputs, references)
    score = metric.corpus_score(list(outputs), [list(references)]).score
    # a perfect score may be rounded to 100.00000000000004
    return min(score, 100.0), str(metric.get_signature())


def chrf(outputs: Sequence[str], references: Sequence[str]) -> float:
    """Return the chrF of all `outputs` in percent, with one reference for each.

    Raises:
        ValueError: for another number of references than of outputs.
    """
    from sacrebleu.metrics import CHRF

    check_counts(outputs, references)
    return CHRF().corpus_score(list(outputs), [list(references)]).score


def bleu_metric(tokenize: str = "13a", key: str = "bleu_tokenize") -> "BLEU":
    """Return sacreBLEU's BLEU metric with the tokenization `tokenize`. Errors call the setting
    `key`.

    Raises:
        UsageError: for a tokenization that sacreBLEU does not have, or that needs a package that is
            not installed.
    """
    from sacrebleu.metrics import BLEU

    check_tokenize(tokenize, key)
    try:
        # without `force` it warns of tokenized text
        return BLEU(tokenize=tokenize, force=tokenize == "none")
    except (ImportError, RuntimeError) as error:  # Japanese and Korean need packages of their own
        raise UsageError(f"{key} is {tokenize!r}, which is not available: {error}") from None


def check_tokenize(tokenize: str, key: str = "bleu_tokenize") -> None:
    """Raise UsageError if `tokenize` is no tokenization of sacreBLEU. The message calls the setting
    `key` and suggests the nearest name."""
    from sacrebleu.metrics import BLEU

    check_name(key, tokenize, BLEU.TOKENIZERS)


def check_counts(outputs: Sequence[str], references: Sequence[str]) -> None:
    if len(outputs) != len(references):
        raise ValueError(
            f"there are {len(references)} references, expected {len(outputs)}, one for each output"
        )
