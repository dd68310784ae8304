"""Attention of encoders with a sliding window (Beltagy et al. 2020, section 3.1) in blocks: each block of queries reads its own
keys and those of the blocks before and after it, so that time and memory grow with the length and not with its square."""

import torch
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "blocks"
MIN_BLOCK = 64  # queries: with fewer, matrices would be too small to multiply well


def has_windows(model: PreTrainedModel) -> bool:
    """Whether the attention of `model` is that of an encoder with a window. Biases are of all pairs of tokens."""
    config = model.config
    is_encoder = config.model_type == "vanilla-encoder"
    return is_encoder and config.sliding_window is not None and not config.has_relative_positions


def attend_in_blocks(model: PreTrainedModel) -> None:
    """Has `model` attend so, and give its attention the mask of the keys (B, S) as it is."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, block_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *args, attention_mask=None, **kwargs: attention_mask)
    model.set_attn_implementation(NAME)


def block_attention(module, query, key, value, attention_mask, scaling, sliding_window, **kwargs):
    """query and key (B, H, S, d), value (B, H, S, d_v), `attention_mask` (B, S) -> (B, S, H, d_v). A token looks at
    `sliding_window - 1` tokens before and after itself."""
    reach = sliding_window - 1
    block = max(reach, MIN_BLOCK)
    rows, heads, length, _ = query.shape
    count = (length + block - 1) // block
    added = count * block - length
    query = functional.pad(query, (0, 0, 0, added)).reshape(rows, heads, count, block, query.shape[3])
    key, value = (neighbours(functional.pad(states, (0, 0, block, added + block)), count, block) for states in (key, value))
    mask = functional.pad(attention_mask[:, None, :, None].to(query.dtype), (0, 0, block, added + block))
    is_key = neighbours(mask, count, block)[..., 0][..., None, :] > 0  # (B, 1, blocks, 1, 3 block)
    places = torch.arange(count * block)
    of_keys = neighbours(functional.pad(places[None, None, :, None], (0, 0, block, block)), count, block)[0, 0]
    distance = of_keys.transpose(1, 2) - places.reshape(count, block, 1)  # (blocks, block, 3 block)
    scores = query @ key.transpose(3, 4) * scaling
    scores = scores.masked_fill(~(is_key & (distance.abs() <= reach)), torch.finfo(scores.dtype).min)
    output = scores.softmax(dim=-1) @ value
    return output.reshape(rows, heads, count * block, value.shape[4])[:, :, :length].transpose(1, 2), None


def neighbours(states: torch.Tensor, count: int, block: int) -> torch.Tensor:
    """(B, H, (count + 2) * block, d) -> (B, H, count, 3 * block, d)."""
    blocks = states.reshape(*states.shape[:2], count + 2, block, states.shape[3])
    return torch.cat([blocks[:, :, :-2], blocks[:, :, 1:-1], blocks[:, :, 2:]], dim=3)
