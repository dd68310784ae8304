"""Calibration: the ranges of the inputs of matrix multiplications while the model runs on text.

With these ranges, all rows of a matmul are quantized with one scale, instead of one scale per row
that the graph computes while it runs (Jacob et al. 2018, section 3.1).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vanilla_transformer.training.data import read_all_lines

from ..graphs.input_scales import Calibration, InputStatistics
from ..graphs.weights import bare
from ..heads import HEADS, READS_CHOICES
from ..text.checks import check_tokens

LINES = 512  # first lines of the text
TOKENS = 256  # maximum of a line
BATCH = 16


def calibrate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str | os.PathLike
) -> Calibration:
    """Return statistics of what each linear layer of `model` reads on the first `LINES` lines of
    the file `text` that are not blank.

    Lines are cut at `TOKENS` tokens. An encoder-decoder translates them greedily, and then reads
    each line beside its translation.

    Raises:
        FileNotFoundError: without `text`.
        ValueError: for a line that is not UTF-8 text, for no line with a token that `tokenizer`
            knows, and for a token that the model does not have.
    """
    batches = list(read(model, tokenizer, text))
    with torch.no_grad():
        if model.can_generate() and model.config.is_encoder_decoder:
            inputs = [pair for ids in batches for pair in translate(model, ids)]
        elif HEADS[type(model).__name__].reads == READS_CHOICES:
            inputs = [{"input_ids": ids[:, None]} for ids in batches]
        else:
            inputs = [{"input_ids": ids} for ids in batches]
        with observe_inputs(model) as calibration:
            for feeds in inputs:
                model(**feeds)
    return calibration


def translate(model: PreTrainedModel, ids: torch.Tensor) -> Iterator[dict[str, torch.Tensor]]:
    """Yield inputs of `model`: rows of `ids` (B, S), and the tokens that the decoder reads for them
    in greedy search.

    They are {"input_ids": ..., "decoder_input_ids": ...} for groups of rows with equally long
    translations. What `generate` reads in rows that have ended is padding, and is left out.
    """
    # without an end token
    max_new_tokens = min(2 * ids.shape[1] + 10, model.config.max_position_embeddings - 1)
    # `generate` is a mixin's method and has no type.
    outputs = model.generate(  # type: ignore[operator]
        ids, num_beams=1, do_sample=False, max_new_tokens=max_new_tokens
    )
    lengths = [
        num_read(output, model.generation_config.eos_token_id) for output in outputs.tolist()
    ]
    for length in sorted(set(lengths)):
        rows = [row for row, other in enumerate(lengths) if other == length]
        yield {"input_ids": ids[rows], "decoder_input_ids": outputs[rows, :length]}


def num_read(output: list[int], eos_token_id: int | list[int] | None) -> int:
    """Return how many tokens of `output`, a generated sequence, the decoder has read.

    These are the tokens before the first end token, or all but the last one without an end token.
    The first token is a start token, which may equal the end token. `eos_token_id` is the end
    token, several, or None.
    """
    ends = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    return next(
        (position for position, token in enumerate(output) if position > 0 and token in ends),
        len(output) - 1,
    )


def read(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str | os.PathLike
) -> Iterator[torch.Tensor]:
    """Yield batches of token ids (B, S) of the lines in the file `text`, with rows of equal length.

    They have no padding, because its states would count though no one reads them. Raises ValueError
    if no line has a token that `tokenizer` knows, or a token is outside the vocabulary of `model`.
    """
    lines = [line for line in read_all_lines([os.fspath(text)], fault=None) if line.strip()][:LINES]
    longest = min(TOKENS, model.config.max_position_embeddings)
    rows = tokenizer(lines, truncation=True, max_length=longest)["input_ids"] if lines else []
    if not any(set(row) - set(tokenizer.all_special_ids) for row in rows):
        problem = f"{text} has {len(lines)} lines without a token that the tokenizer knows"
        raise ValueError(
            f"{problem}, expected text in the language of the model: without calibrate, each "
            "row has its own scale"
        )
    check_tokens(max(map(max, filter(None, rows))), model.config.vocab_size)
    for _, group in groupby(sorted(filter(None, rows), key=len), len):
        alike = torch.tensor(list(group))
        yield from alike.split(BATCH)


@contextmanager
def observe_inputs(model: PreTrainedModel) -> Iterator[Calibration]:
    """Yield a calibration that records what the linear layers of `model` read while it runs in the
    block."""
    calibration, generator = Calibration(), np.random.default_rng(0)

    def observe(module: nn.Linear, inputs: tuple[torch.Tensor], name: str) -> None:
        rows = inputs[0].reshape(-1, inputs[0].shape[-1]).numpy()
        calibration.observe(name, InputStatistics.sample(rows, generator))

    layers = {
        bare(name): layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)
    }
    hooks = [
        layer.register_forward_pre_hook(partial(observe, name=name))
        for name, layer in layers.items()
    ]
    try:
        yield calibration
    finally:
        for hook in hooks:
            hook.remove()
