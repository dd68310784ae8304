"""Models of every config option, and their logits by the float64 reference."""

import numpy as np
import torch
from reference import Paper, decoder_lm, encoder_lm, seq2seq_lm

from vanilla_transformer import (
    VanillaDecoderConfig,
    VanillaDecoderForCausalLM,
    VanillaEncoderConfig,
    VanillaEncoderForMaskedLM,
    VanillaSeq2SeqConfig,
    VanillaSeq2SeqForConditionalGeneration,
)

VOCABULARY, LENGTH, SOURCE_LENGTH = 23, 7, 5
# Changes to the model of the paper: fields of our config, and the same for the reference.
PRE_NORM = dict(norm_first=True), dict(norm_first=True, final_norm=True)
# Few buckets, so that seven tokens reach the logarithmic buckets and the distances beyond.
RELATIVE = (
    dict(
        position_embedding_type="relative",
        relative_attention_num_buckets=8,
        relative_attention_max_distance=5,
    ),
    dict(positions="relative", buckets=8, max_distance=5),
)
PAPER_BIASES = dict(attention_bias=False, lm_head_bias=False)
CHANGES = {
    "paper": ({}, {}),
    "pre-norm": PRE_NORM,
    "pre-norm without a final norm": (
        dict(norm_first=True, final_norm=False), dict(norm_first=True)
    ),
    "post-norm with a final norm": (dict(final_norm=True), dict(final_norm=True)),
    "learned positions": (
        dict(position_embedding_type="learned", max_position_embeddings=7),
        dict(positions="learned"),
    ),
    "rotary positions": (dict(position_embedding_type="rotary"), dict(positions="rotary")),
    "rotary positions with another base": (
        dict(position_embedding_type="rotary", rope_parameters={"rope_theta": 50}),
        dict(positions="rotary", rope_theta=50.0),
    ),
    "relative positions": RELATIVE,
    "no positions": (dict(position_embedding_type="none"), dict(positions="none")),
    "window of two": (dict(sliding_window=2), dict(window=2)),
    "window of three, rotary": (
        dict(sliding_window=3, position_embedding_type="rotary"), dict(window=3, positions="rotary")
    ),
    "window of three, relative": (
        dict(sliding_window=3, **RELATIVE[0]), dict(window=3, **RELATIVE[1])
    ),
    "learned and relative positions": (
        dict(RELATIVE[0], position_embedding_type="learned_relative", max_position_embeddings=7),
        dict(RELATIVE[1], positions="learned_relative"),
    ),
    "root mean square": (
        dict(norm_type="rms_norm", norm_first=True),
        dict(rms_norm=True, norm_first=True, final_norm=True),
    ),
    "root mean square everywhere": (
        dict(norm_type="rms_norm", embedding_norm=True, layer_norm_eps=0.1),
        dict(rms_norm=True, embedding_norm=True, eps=0.1)
    ),
    "gated": (dict(gated=True, hidden_act="gelu"), dict(gated=True, activation="gelu")),
    "gated without biases": (dict(gated=True, linear_bias=False), dict(gated=True, bias=False)),
    "gelu": (dict(hidden_act="gelu"), dict(activation="gelu")),
    "d_k != d_v != D / h": (dict(head_dim=3, value_head_dim=5), dict(d_k=3, d_v=5)),
    "d_k alone": (dict(head_dim=5), dict(d_k=5, d_v=5)),
    "three heads": (dict(num_attention_heads=3), dict(h=3, d_k=4, d_v=4)),
    "five heads that do not divide D": (
        dict(h=5, head_dim=2, value_head_dim=3), dict(h=5, d_k=2, d_v=3)
    ),
    "embedding norm": (dict(embedding_norm=True), dict(embedding_norm=True)),
    "no embedding scale": (dict(scale_embedding=False), dict(scale_embedding=False)),
    "no biases in the layers": (dict(linear_bias=False), dict(bias=False)),
    "biases of the paper": (PAPER_BIASES, PAPER_BIASES),
    "no bias in the projection": (dict(lm_head_bias=False), dict(lm_head_bias=False)),
    "untied": (dict(tie_word_embeddings=False), dict(tied=False)),
    "large epsilon": (dict(layer_norm_eps=0.1), dict(eps=0.1)),
    "everything": (
        dict(
            norm_first=True, position_embedding_type="learned", max_position_embeddings=9,
            hidden_act="gelu", head_dim=3, value_head_dim=5, num_attention_heads=3,
            embedding_norm=True, scale_embedding=False, lm_head_bias=False,
            tie_word_embeddings=False, linear_bias=False, final_norm=False, sliding_window=4
        ),
        dict(
            norm_first=True, positions="learned", activation="gelu", h=3, d_k=3, d_v=5,
            embedding_norm=True, scale_embedding=False, lm_head_bias=False, tied=False, bias=False,
            window=4
        ),
    ),
    "everything, rotary": (
        dict(
            norm_first=True, position_embedding_type="rotary", head_dim=4, value_head_dim=5,
            num_attention_heads=3, linear_bias=False, sliding_window=3, layer_norm_eps=1e-3
        ),
        dict(
            norm_first=True, final_norm=True, positions="rotary", h=3, d_k=4, d_v=5, bias=False,
            window=3, eps=1e-3
        ),
    ),
    "keys and values of two heads": (
        dict(num_attention_heads=4, num_key_value_heads=2, head_dim=4, value_head_dim=5),
        dict(h=4, key_heads=2, d_k=4, d_v=5),
    ),
    "one head of keys and values, rotary": (
        dict(num_key_value_heads=1, position_embedding_type="rotary", head_dim=4),
        dict(key_heads=1, positions="rotary", d_k=4, d_v=4),
    ),
    "norms of heads": (
        dict(use_qk_norm=True, position_embedding_type="rotary", head_dim=4),
        dict(qk_norm=True, positions="rotary", d_k=4, d_v=4),
    ),
    "norms of outputs": (
        dict(sandwich_norm=True, norm_first=True, norm_type="rms_norm"),
        dict(sandwich=True, norm_first=True, final_norm=True, rms_norm=True),
    ),
    "no first norm": (
        dict(skip_first_prenorm=True, norm_first=True, embedding_norm=True),
        dict(skips_first_norm=True, norm_first=True, final_norm=True, embedding_norm=True),
    ),
    "angles over a factor": (
        dict(
            position_embedding_type="rotary",
            rope_parameters={"rope_type": "linear", "rope_theta": 50, "factor": 2.5},
        ),
        dict(positions="rotary", rope_theta=50.0, rope_factor=2.5),
    ),
    "narrow embeddings": (dict(embedding_size=8), dict(e=8)),
    "narrow embeddings and a norm": (
        dict(embedding_size=8, embedding_norm=True), dict(e=8, embedding_norm=True)
    ),
    "wide embeddings, learned positions, untied": (
        dict(
            embedding_size=14, position_embedding_type="learned", max_position_embeddings=7,
            scale_embedding=False, tie_word_embeddings=False, norm_first=True
        ),
        dict(
            e=14, positions="learned", scale_embedding=False, tied=False, norm_first=True,
            final_norm=True
        ),
    ),
    # Changes of one or two variants only.
    "a window in the first layer": (
        dict(sliding_window=2, layer_types=["sliding_attention", "full_attention"]),
        dict(window=2, wide_layers=(1,)),
    ),
    "a base for each type of layers": (
        dict(
            sliding_window=2, layer_types=["full_attention", "sliding_attention"],
            position_embedding_type="rotary", rope_parameters={
                "full_attention": {"rope_theta": 300.0}, "sliding_attention": {"rope_theta": 50.0}
            },
        ),
        dict(
            window=2, wide_layers=(0,), positions="rotary", rope_theta=50.0, wide_theta=300.0
        ),
    ),
    "disentangled positions": (
        dict(
            position_embedding_type="disentangled", relative_attention_num_buckets=5,
            relative_attention_max_distance=5,
        ),
        dict(positions="disentangled", buckets=5, max_distance=5),
    ),
    "token types": (dict(type_vocab_size=3), {}),
    "token types and a norm": (
        dict(type_vocab_size=3, embedding_norm=True), dict(embedding_norm=True)
    ),
    "transform in front of the projection": (
        dict(lm_transform_act="gelu"), dict(lm_transform="gelu")
    ),
    "narrow embeddings, token types and a transform": (
        dict(embedding_size=8, embedding_norm=True, type_vocab_size=3, lm_transform_act="gelu"),
        dict(e=8, embedding_norm=True, lm_transform="gelu"),
    ),
    "each side its own embeddings": (
        dict(share_encoder_decoder_embeddings=False), dict(shared=False)
    ),
}  # fmt: skip
TIED = ["lm_head.weight", "model.decoder.embeddings.embed_tokens.weight"]
VARIANTS = {
    "encoder": (VanillaEncoderConfig, VanillaEncoderForMaskedLM, dict(num_hidden_layers=2)),
    "decoder": (VanillaDecoderConfig, VanillaDecoderForCausalLM, dict(num_hidden_layers=2)),
    "seq2seq": (
        VanillaSeq2SeqConfig,
        VanillaSeq2SeqForConditionalGeneration,
        dict(encoder_layers=2, decoder_layers=2),
    ),
}


def build(variant, change="paper", attention="eager"):
    """Return a float64 model with random parameters, its weights and the settings of the reference.

    Norms and biases are random too. float32 represents all weights exactly.
    """
    config_class, model_class, depth = VARIANTS[variant]
    ours, theirs = CHANGES[change]
    sizes = (
        dict(vocab_size=VOCABULARY, hidden_size=12, intermediate_size=20, num_attention_heads=2)
        | depth
    )
    if "h" in ours:
        del sizes["num_attention_heads"]
    model = model_class(config_class(**sizes | ours)).eval()
    model.set_attn_implementation(attention)
    paper = Paper(**dict(d_model=12, h=2, d_k=6, d_v=6, N=2) | theirs)
    weights = randomize(model)
    model.double()
    if paper.tied:
        tied = TIED if paper.shared else TIED[:1]
        weights = {name: array for name, array in weights.items() if name not in tied}
    return model, weights, paper


def randomize(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.7, 0.7)
    return {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}


def token_rows(length):
    return torch.randint(0, VOCABULARY, (3, length))


# Three rows: one full, one padded on the right, one padded on the left.
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1]])


def assert_close(logits, expected, mask=None):
    """Check that logits are within 1e-10 in float64, or 1e-5 (relative beyond 1) in float32.

    Padded positions are ignored.
    """
    real = np.ones(expected.shape[:2], bool) if mask is None else mask.bool().numpy()
    got, expected = logits.detach().double().numpy()[real], expected[real]
    allowed = 1e-10 if logits.dtype == torch.float64 else 1e-5 * np.maximum(1, np.abs(expected))
    assert np.all(np.abs(got - expected) <= allowed), (
        f"largest difference {np.abs(got - expected).max():.1e}"
    )


def expected_logits(variant, weights, paper, batch):
    """Return the logits of the reference, computed row by row."""
    columns = [batch[name].numpy() for name in ("tokens", "mask", "positions")]
    if variant == "seq2seq":
        rows = zip(batch["source"].numpy(), batch["source_mask"].numpy(), *columns, strict=True)
        return np.stack([seq2seq_lm(weights, paper, *row) for row in rows])
    if "types" in batch:
        columns.append(batch["types"].numpy())
    lm = encoder_lm if variant == "encoder" else decoder_lm
    return np.stack([lm(weights, paper, *row) for row in zip(*columns, strict=True)])
