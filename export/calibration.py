"""What the products of a model read when it runs on text, so that they can be quantized with one scale for all rows.

The ranges of activations are found once, on given text, instead of in each row while the graph runs (Jacob et al. 2018,
section 3.1).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vanilla_transformer.training.data import lines_of

from .passes.quantization import Inputs, name_of_weights
from .targets.sequences import READS_CHOICES

LINES = 512  # of the text, the first ones
TOKENS = 256  # of a line, at most
BATCH = 16


def calibrate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str | os.PathLike) -> dict[bytes, Inputs]:
    """What each product of `model` reads of the first `LINES` lines of `text`, by `name_of_weights`. An encoder-decoder
    translates them, greedily.

    Raises:
        FileNotFoundError: without `text`.
        ValueError: for a line that is not UTF-8 text, for no line with a token that `tokenizer` knows, and for a token that
            the model does not have.
    """
    batches = list(read(model, tokenizer, text))
    with observed(model) as seen, torch.no_grad():
        for ids in batches:
            if model.can_generate() and model.config.is_encoder_decoder:
                longest = min(2 * ids.shape[1] + 10, model.config.max_position_embeddings - 1)  # where no end token comes
                settings = {"num_beams": 1, "do_sample": False, "max_new_tokens": longest}
                model.generate(ids, **settings)  # type: ignore[operator]  # of no type: a mixin's method
            else:
                model(ids[:, None] if type(model).__name__ == READS_CHOICES else ids)
    return seen


def read(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str | os.PathLike) -> Iterator[torch.Tensor]:
    """Rows of as many tokens each (B, S): no padding, whose states nobody reads, counts."""
    lines = [line for line in lines_of([os.fspath(text)], fault=None) if line.strip()][:LINES]
    longest = min(TOKENS, model.config.max_position_embeddings)
    rows = tokenizer(lines, truncation=True, max_length=longest)["input_ids"] if lines else []
    if not any(set(row) - set(tokenizer.all_special_ids) for row in rows):
        found = f"{text} has {len(lines)} lines and no token that the tokenizer knows"
        raise ValueError(f"{found}, expected text as the model reads it; without calibration each row has a scale of its own")
    if (most := max(map(max, filter(None, rows)))) >= (size := model.config.vocab_size):
        raise ValueError(f"the tokenizer gives the token {most}, expected one of [0, {size - 1}], the vocabulary")
    for _, group in groupby(sorted(filter(None, rows), key=len), len):
        alike = torch.tensor(list(group))
        yield from alike.split(BATCH)


@contextmanager
def observed(model: PreTrainedModel) -> Iterator[dict[bytes, Inputs]]:
    """Collects what the linear layers of `model` read. Layers with the same weights count as one."""
    seen: dict[bytes, Inputs] = {}

    def observe(module: nn.Linear, given: tuple[torch.Tensor]) -> None:
        rows = given[0].reshape(-1, given[0].shape[-1]).numpy()
        name = name_of_weights(module.weight.numpy().T)
        seen[name] = Inputs.of(rows).beside(seen[name]) if name in seen else Inputs.of(rows)

    hooks = [layer.register_forward_pre_hook(observe) for layer in model.modules() if isinstance(layer, nn.Linear)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
