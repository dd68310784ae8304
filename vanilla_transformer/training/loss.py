"""The loss of an update: cross-entropy with label smoothing (section 5.4 of the paper), and R-Drop (Liang et al. 2021)."""

import torch
from torch.nn import functional as F

ROWS = 128  # whose logits stay in a CPU's cache; a GPU takes all at once


def loss_function(check, smoothing: float, r_drop: float = 0.0):
    """The mean over all labels of an update, as `Trainer` takes it; `check` is given the sum over those of a batch. `None`
    without smoothing and R-Drop, for which the model's own loss is taken. With R-Drop a batch of training has each row twice,
    the second halves in the order of the first."""
    if not smoothing and not r_drop:
        return None

    def loss(outputs, labels, num_items_in_batch=None):
        logits, labels = outputs["logits"].float().flatten(0, -2), labels.flatten()
        is_training = torch.is_grad_enabled()
        if is_training and not r_drop:
            total = SmoothedCrossEntropy.apply(logits, labels, smoothing)
        else:
            total = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
        if is_training and r_drop:
            total = total + r_drop / 2 * divergence(logits[labels != -100])
        check(total)
        return total / (labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)

    return loss


def divergence(logits):
    """Of the two halves of logits (2N, V), KL(first || second) + KL(second || first), summed over N."""
    first, second = logits.log_softmax(-1).chunk(2)
    return ((first.exp() - second.exp()) * (first - second)).sum()


class SmoothedCrossEntropy(torch.autograd.Function):
    """As `F.cross_entropy` with `label_smoothing` and `reduction="sum"`, for logits (N, V) and labels (N,), -100 where nothing
    is to be predicted; but the gradient takes the place of the logits, a few rows at a time, while they are in the cache. That
    takes about half the time on a CPU."""

    @staticmethod
    def forward(ctx, logits, labels, smoothing):
        gradient, size, total = logits.detach(), logits.shape[-1], logits.new_zeros(())
        counts, labels = labels.ne(-100)[:, None].float(), labels.clamp(min=0)[:, None]
        each = ROWS if logits.is_cpu else max(1, len(logits))
        for rows, label, count in zip(gradient.split(each), labels.split(each), counts.split(each), strict=True):
            largest = rows.amax(-1, keepdim=True)
            expected = (1 - smoothing) * rows.gather(-1, label) + smoothing * rows.mean(-1, keepdim=True)
            exponents = rows.sub_(largest).exp_()
            sums = exponents.sum(-1, keepdim=True)
            total += ((sums.log() + largest - expected) * count).sum()
            # softmax - (1 - smoothing) at the label - smoothing / V everywhere
            exponents.mul_(count / sums).sub_(smoothing / size * count).scatter_add_(-1, label, (smoothing - 1) * count)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx, upstream):
        [gradient] = ctx.saved_tensors
        return gradient.mul_(upstream), None, None
