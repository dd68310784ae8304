"""A bound for greedy decoding on a GPU: the model's products and attention over caches of fixed
size, written out in plain torch and replayed as one CUDA graph for each step. Nothing else is done:
all rows are full, and none ends before the others.

Shapes: B rows, T tokens read at once, H heads, D hidden_size.
"""

from functools import partial

import torch
from torch.nn import functional

from vanilla_transformer.layers_vanilla_transformer import sinusoidal_positions, split_heads


def captured(function, device):
    """Return a function that replays `function` as a CUDA graph; on a CPU, return it unchanged.

    `device` is where it computes.
    """
    if device.type == "cpu":
        return function
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()  # first use of a library initializes things that cannot be captured
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


class GraphDecoder:
    """Greedy search of one of our models, whose steps are replayed as a CUDA graph.

    Its positions must be learned or sinusoidal. It takes all memory once, for `rows` inputs of
    `length` tokens and `new_tokens` after each.
    """

    @torch.no_grad()
    def __init__(self, model, rows, length, new_tokens):
        self.model, self.decoder, self.is_encoder_decoder = (
            model,
            model.get_decoder(),
            model.config.is_encoder_decoder,
        )
        self.new_tokens, self.prompt = new_tokens, 1 if self.is_encoder_decoder else length
        slots = self.prompt + new_tokens
        zeros = partial(torch.zeros, device=model.device)
        self.order = torch.arange(slots, device=model.device)
        self.positions = self.position_table(slots)
        self.source, self.tokens = (
            zeros(rows, length, dtype=torch.long),
            zeros(rows, slots, dtype=torch.long),
        )
        if self.is_encoder_decoder:
            self.tokens[:, 0] = model.config.decoder_start_token_id
        self.last = zeros(1, dtype=torch.long)  # position of the token that a step reads
        self.projections, self.caches, self.cross = [], [], []
        for attention in (layer.self_attn for layer in self.decoder.layers):
            heads, widths = (
                model.config.num_attention_heads,
                (attention.head_dim, attention.value_head_dim),
            )
            self.caches.append(
                [zeros(rows, heads, slots, width, dtype=model.dtype) for width in widths]
            )
            parts = (attention.q_proj, attention.k_proj, attention.v_proj)
            self.projections.append(
                [torch.cat([getattr(part, name) for part in parts]) for name in ("weight", "bias")]
            )
        self.start = captured(self.read_prompt, model.device)
        self.step = captured(self.read_last, model.device)

    def position_table(self, slots):
        if self.model.config.position_embedding_type == "learned":
            return self.decoder.embeddings.embed_positions.weight
        return sinusoidal_positions(
            self.order[None], self.model.config.hidden_size, self.model.dtype
        )[0]

    @torch.no_grad()
    def generate(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the greedy tokens (B, new_tokens) after `ids` (B, T), both on the host."""
        (self.source if self.is_encoder_decoder else self.tokens[:, : self.prompt]).copy_(ids)
        self.start()
        for _ in range(self.new_tokens - 1):
            self.step()
        return self.tokens[:, self.prompt :].cpu()

    def read_prompt(self):
        if self.is_encoder_decoder:
            states = self.model.get_encoder()(self.source).last_hidden_state
            self.cross = [
                self.keys_and_values(layer.cross_attn, states) for layer in self.decoder.layers
            ]
        self.read(self.order[: self.prompt])
        self.last.fill_(self.prompt)

    def read_last(self):
        self.read(self.last)
        self.last.add_(1)

    def keys_and_values(self, attention, states):
        projected = (
            (attention.k_proj, attention.head_dim),
            (attention.v_proj, attention.value_head_dim),
        )
        return [
            split_heads(projection(states), width).contiguous() for projection, width in projected
        ]

    def read(self, positions):
        """Read the tokens at `positions` (T,) of each row, and store the top token after the last
        of them."""
        embeddings = self.decoder.embeddings
        states = embeddings.embed_tokens(self.tokens[:, positions]) * embeddings.scale
        states = embeddings.norm(states + self.positions[positions])
        visible = self.order <= positions[:, None]
        for number, layer in enumerate(self.decoder.layers):
            attend = partial(self.self_attention, layer.self_attn, number, positions, visible)
            states = layer.residual(states, attend, layer.self_attn_norm)
            if self.is_encoder_decoder:
                attend = partial(self.cross_attention, layer.cross_attn, number)
                states = layer.residual(states, attend, layer.cross_attn_norm)
            states = layer.residual(states, layer.feed_forward, layer.feed_forward_norm)
        logits = self.model.lm_head(self.decoder.norm(states[:, -1]))
        self.tokens.index_copy_(1, positions[-1:] + 1, logits.argmax(dim=-1, keepdim=True))

    def self_attention(self, attention, number, positions, visible, states):
        widths = [
            projection.out_features
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        query, *new = functional.linear(states, *self.projections[number]).split(widths, dim=-1)
        cache = self.caches[number]
        for kept, part in zip(cache, new, strict=True):
            kept.index_copy_(2, positions, split_heads(part, kept.shape[-1]))
        return attend(attention, query, *cache, visible)

    def cross_attention(self, attention, number, states):
        return attend(attention, attention.q_proj(states), *self.cross[number], None)


def attend(attention, query, key, value, mask):
    """Return attention (B, T, D) of `query` (B, T, H * d) over `key` and `value` (B, H, slots, d).

    It uses the output projection of `attention`; `mask` is True where a token may look, `None` for
    everywhere.
    """
    query = split_heads(query, attention.head_dim)
    attended = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=attention.scaling
    )
    return attention.o_proj(attended.transpose(1, 2).flatten(2))
