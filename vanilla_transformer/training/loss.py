"""The loss of an update: cross-entropy with label smoothing (section 5.4), R-Drop, or teachers.

R-Drop is that of Liang et al. 2021, distillation from teachers that of Hinton et al. 2015.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from .distillation import Teachers

CACHED_ROWS = 128  # rows whose logits fit in a CPU's cache; a GPU takes all at once


def loss_function(
    check: Callable[[torch.Tensor], None],
    smoothing: float,
    r_drop: float = 0.0,
    teachers: Teachers | None = None,
) -> Callable | None:
    """Return the loss function for `Trainer`: the mean over all labels of an update.

    It is None without smoothing, R-Drop and teachers; the model's own loss is then used.

    Args:
        check: called with the sum of the losses of each batch.
        smoothing: share of the label's probability that is spread over all classes.
        r_drop: weight of R-Drop. A training batch has each row twice, the second copies in the
            order of the first.
        teachers: their `probabilities` replace the labels in training.
    """
    if not smoothing and not r_drop and teachers is None:
        return None

    def loss(
        outputs: dict, labels: torch.Tensor, num_items_in_batch: int | torch.Tensor | None = None
    ) -> torch.Tensor:
        logits = outputs["logits"].float().flatten(0, -2)
        labels = labels.flatten()
        if not torch.is_grad_enabled():
            total = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
        elif teachers:
            total = F.cross_entropy(logits, teachers.probabilities, reduction="sum")
        else:
            total = UpdateLoss.apply(logits, labels, smoothing, r_drop)
        check(total)
        return total / (labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)

    return loss


class UpdateLoss(torch.autograd.Function):
    """A cross-entropy whose gradient overwrites the logits, a few rows at a time while they are
    cached.

    It equals `F.cross_entropy` with `label_smoothing` and `reduction="sum"`, for logits (N, V) and
    labels (N,), -100 where nothing is to be predicted. `r_drop` adds that many times half the
    divergences between the two halves of the rows. On a CPU it takes about half the time.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, smoothing: float, r_drop: float
    ) -> torch.Tensor:
        gradient = logits.detach()
        size = logits.shape[-1]
        total = logits.new_zeros(())
        passes = 2 if r_drop else 1
        chunk_rows = CACHED_ROWS // passes if logits.is_cpu else max(1, len(logits))
        views = (
            gradient.view(passes, -1, size).split(chunk_rows, 1),
            labels.view(passes, -1, 1).split(chunk_rows, 1),
        )
        for rows, label in zip(*views, strict=True):
            count = label.ne(-100).float()
            label = label.clamp(min=0)
            largest = rows.amax(-1, keepdim=True)
            expected = (1 - smoothing) * rows.gather(-1, label) + smoothing * rows.mean(
                -1, keepdim=True
            )
            log_ratio = rows[0] - rows[-1] if r_drop else None
            exponents = rows.sub_(largest).exp_()
            sums = exponents.sum(-1, keepdim=True)
            normalizer = sums.log() + largest
            total += ((normalizer - expected) * count).sum()
            softmax = exponents.mul_(count / sums)
            if r_drop:
                total += add_divergence_(
                    *softmax, log_ratio - (normalizer[0] - normalizer[1]), r_drop / 2
                )
            # softmax - (1 - smoothing) at the label - smoothing / V everywhere
            softmax.sub_(smoothing / size * count).scatter_add_(-1, label, (smoothing - 1) * count)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        [gradient] = ctx.saved_tensors
        return gradient.mul_(upstream), None, None, None


def add_divergence_(
    first: torch.Tensor, second: torch.Tensor, log_ratio: torch.Tensor, weight: float
) -> torch.Tensor:
    """Return `weight` times KL(first || second) + KL(second || first), summed over the rows (N, V).

    The gradients by the logits are added to `first` and `second` in place. `log_ratio` is log(first
    / second).
    """
    forward, backward = (
        (first * log_ratio).sum(-1, keepdim=True),
        -(second * log_ratio).sum(-1, keepdim=True),
    )
    difference = (first - second).mul_(weight)
    first.addcmul_(first, log_ratio - forward, value=weight).add_(difference)
    second.addcmul_(second, log_ratio + backward, value=-weight).sub_(difference)
    return weight * (forward + backward).sum()
