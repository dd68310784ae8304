"""A vocabulary shortlist: a model that generates some tokens of its vocabulary only, and computes no logits of the others."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedModel

from vanilla_transformer.checkpoint_files import checkpoint_directory, read_json, readers_errors
from vanilla_transformer.files import TARGET_TOKENIZER
from vanilla_transformer.training.data import lines_of

# Settings of a model that name tokens it must be able to generate.
SPECIAL_TOKENS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
)
SHORTLISTED = ".product"  # after the name of the projection to the vocabulary, its rows of the shortlist


class ShortlistHead(nn.Module):
    """(..., D) -> logits (..., V): those of `tokens` by their rows of `head` (V, D), of all others minus infinity."""

    places: torch.Tensor

    def __init__(self, head: nn.Linear, tokens: list[int]):
        super().__init__()
        self.product = nn.Linear(head.in_features, len(tokens), bias=head.bias is not None)
        self.product.weight = nn.Parameter(head.weight[tokens].detach().clone())
        if head.bias is not None:
            self.product.bias = nn.Parameter(head.bias[tokens].detach().clone())
        places = torch.full((head.out_features,), len(tokens))
        places[tokens] = torch.arange(len(tokens))
        self.register_buffer("places", places)

    def forward(self, hidden_states):
        logits = nn.functional.pad(self.product(hidden_states), (0, 1), value=-torch.inf)
        return logits.index_select(-1, self.places)


@contextmanager
def with_shortlist(model: PreTrainedModel, tokens: list[int] | None) -> Iterator[PreTrainedModel]:
    """`model` with a `ShortlistHead` of `tokens`; as it is for `None`."""
    head = model.get_output_embeddings()
    if tokens is not None:
        model.lm_head = ShortlistHead(head, tokens)
    try:
        yield model
    finally:
        if tokens is not None:
            model.lm_head = head


def with_special_tokens(model: PreTrainedModel, tokens: Iterable[int]) -> list[int]:
    """`tokens` in order, with the special ones of `model`.

    Raises:
        ValueError: for a model that does not generate, no tokens, or one outside the vocabulary.
    """
    if not model.can_generate():
        raise ValueError(f"{type(model).__name__} does not generate, expected no shortlist")
    chosen = {int(token) for token in tokens}
    size = model.config.vocab_size
    if not chosen or min(chosen) < 0 or max(chosen) >= size:
        found = f"{min(chosen)} to {max(chosen)}" if chosen else "none"
        raise ValueError(f"the tokens of a shortlist must be in [0, {size - 1}], the vocabulary, got {found}")
    for name in SPECIAL_TOKENS:
        value = getattr(model.generation_config, name, None)
        chosen.update([] if value is None else value if isinstance(value, list) else [value])
    return sorted(chosen)


def shortlist_from_text(text: str | os.PathLike, checkpoint: str | os.PathLike) -> list[int]:
    """The tokens of the lines of the file `text` by the tokenizer of `checkpoint`, that of target text if it has one, and all
    of its special ones.

    Raises:
        FileNotFoundError: if either is missing.
        ValueError: for a tokenizer that is damaged, and for a line that is not UTF-8 text or is too long for one.
    """
    directory = checkpoint_directory(checkpoint)
    has_target = (directory / TARGET_TOKENIZER).is_file()
    path = directory / (TARGET_TOKENIZER if has_target else "tokenizer.json")
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, expected the tokenizer that makes tokens of {text}")
    read_json(path)
    with readers_errors(path):
        tokenizer = Tokenizer.from_file(str(path))
    special = {token for token, facts in tokenizer.get_added_tokens_decoder().items() if facts.special}
    lines = lines_of([os.fspath(text)], fault=None)
    return sorted(special.union(*(encoding.ids for encoding in tokenizer.encode_batch(lines))))
