"""Random prompts, and the tokens that torch generates for them."""

import numpy as np
import torch
from checkpoints import PAD, VOCABULARY

LENGTHS = (7, 1, 4, 9, 2, 9)


def prompts(lengths=LENGTHS, side="right", seed=0, pad=PAD):
    """Return random ids and mask (B, S) of rows of these `lengths`, padded on `side` with `pad`.

    The tokens are ordinary ones.
    """
    rng = np.random.default_rng(seed)
    return pad_rows([rng.integers(4, VOCABULARY, length) for length in lengths], side, pad)


def pad_rows(rows, side="right", pad=PAD):
    """Return ids and mask (B, S) of `rows` of tokens, padded on `side` with `pad`."""
    longest = max(map(len, rows))
    ids, mask = np.full((len(rows), longest), pad), np.zeros((len(rows), longest), np.int64)
    for number, row in enumerate(rows):
        real = slice(0, len(row)) if side == "right" else slice(longest - len(row), longest)
        ids[number, real], mask[number, real] = row, 1
    return ids, mask


@torch.no_grad()
def in_torch(exported, name, ids, mask, **options):
    model = exported(name).model
    return model.generate(
        torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), **options
    ).numpy()


def prompts_for(exported, name, **kwargs):
    """Return `prompts` for the model `name`: a decoder's are padded on the left, others on the
    right.

    `exported` is the fixture that has the model, and `kwargs` are arguments of `prompts`.
    transformers reads a decoder's prompts padded on the left only.
    """
    side = "right" if name.startswith("seq2seq") else "left"
    return prompts(**{"side": side, "pad": exported(name).model.config.pad_token_id, **kwargs})


def new_from(name, ids):
    """Return the index of the first new token in rows that the model `name` generated from
    `ids`."""
    return 1 if name.startswith("seq2seq") else ids.shape[1]
