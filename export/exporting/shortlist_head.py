"""A model in torch that computes the logits of a shortlist only."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

# after the name of the projection to the vocabulary, its rows of the shortlist
SHORTLISTED = ".product"


class ShortlistHead(nn.Module):
    """An output layer, (..., D) -> logits (..., V). `tokens` have the logits of their rows of
    `head` (V, D), all others minus infinity."""

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
    """Yield `model`, whose head gives all but `tokens` minus infinity in the block. None leaves it
    unchanged."""
    head = model.get_output_embeddings()
    if tokens is not None:
        model.lm_head = ShortlistHead(head, tokens)
    try:
        yield model
    finally:
        if tokens is not None:
            model.lm_head = head
