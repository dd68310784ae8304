"""95% intervals of scores: how far they may lie from those on as much other text of the same kind.
They say nothing of other seeds, nor of what a model or its settings were chosen by."""

import numpy as np
from scipy.stats import binomtest, bootstrap

RESAMPLES = 1000  # sacreBLEU's default
STRETCHES = 32  # stretches of a running text


def corpus_interval(metric, outputs: list[str], references: list[str]) -> tuple[float, float]:
    """Return (low, high), the 95% interval of one of sacreBLEU's metrics, as `sacrebleu
    --confidence`.

    It comes from the bootstrap over the sentences `outputs` with one reference each (Koehn 2004).
    """
    score = metric.corpus_score(outputs, [references], n_bootstrap=RESAMPLES)
    return float(score._mean - score._ci), float(score._mean + score._ci)


def accuracy_interval(correct: int, count: int) -> tuple[float, float]:
    """Return (low, high), the 95% interval of the share `correct` / `count`.

    It is the score interval of a binomial (Wilson 1927).
    """
    interval = binomtest(int(correct), count).proportion_ci(0.95, method="wilson")
    return float(interval.low), float(interval.high)


def nll_interval(losses: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Return (low, high), the 95% interval of the mean of `losses` (B, T) where `labels` are not
    -100.

    Neighbors in a text are alike, so the bootstrap is over stretches of the B blocks.
    """

    def mean(total, count, axis):
        return total.sum(axis) / count.sum(axis)

    sums = losses.sum(axis=1, dtype=np.float64), (labels != -100).sum(axis=1)
    parts = [
        [part.sum() for part in np.array_split(values, min(STRETCHES, len(values)))]
        for values in sums
    ]
    interval = bootstrap(
        parts, mean, n_resamples=RESAMPLES, paired=True, vectorized=True, method="percentile", rng=0
    )
    return float(interval.confidence_interval.low), float(interval.confidence_interval.high)
