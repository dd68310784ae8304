"""Other implementations with their weights copied into ours: the same numbers, the same generated tokens."""

import numpy as np
import pytest
import torch
from reference import position_encoding
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    MarianMTModel,
)

from vanilla_transformer import (
    VanillaDecoderConfig,
    VanillaDecoderForCausalLM,
    VanillaEncoderConfig,
    VanillaEncoderModel,
    VanillaSeq2SeqConfig,
    VanillaSeq2SeqForConditionalGeneration,
    VanillaSeq2SeqModel,
)

VOCABULARY, D, HEADS, INNER, LAYERS = 40, 16, 4, 24, 2
ATTENTIONS = pytest.mark.parametrize("attention", ["eager", "sdpa"])
TOLERANCE = dict(atol=1e-5, rtol=1e-5)
RIGHT_PADDED = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
LEFT_PADDED = RIGHT_PADDED.flip(1)


def randomise(model):
    """Every parameter, biases and norms too: freshly built models have zeros and ones where copying could go wrong."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):  # around 1, so that what is in front of it stays visible
                module.weight += 1
    return model.eval()


def load(model, weights, attention="sdpa"):
    """All of them: a name that is missing or too much is an error."""
    model.load_state_dict(weights, strict=True)
    model.set_attn_implementation(attention)
    return model.eval()


def linear(name, layer):
    return {f"{name}.weight": layer.weight.data, f"{name}.bias": layer.bias.data}


def real(states, mask):
    return states[mask.bool()]


# --------------------------------------------------------------------------------------------------- torch.nn.Transformer


def torch_layer(prefix, layer):
    """`nn.TransformerEncoderLayer` or `nn.TransformerDecoderLayer`: queries, keys and values are one matrix."""
    weights = linear(prefix + "feed_forward.up_proj", layer.linear1)
    weights |= linear(prefix + "feed_forward.down_proj", layer.linear2)
    attentions, norms = {"self_attn": layer.self_attn}, ["self_attn_norm", "feed_forward_norm"]
    if isinstance(layer, nn.TransformerDecoderLayer):
        attentions["cross_attn"] = layer.multihead_attn
        norms.insert(1, "cross_attn_norm")
    for name, attention in attentions.items():
        for i, projection in enumerate("qkv"):
            weights[f"{prefix}{name}.{projection}_proj.weight"] = attention.in_proj_weight.data.chunk(3)[i]
            weights[f"{prefix}{name}.{projection}_proj.bias"] = attention.in_proj_bias.data.chunk(3)[i]
        weights |= linear(f"{prefix}{name}.o_proj", attention.out_proj)
    for i, norm in enumerate(norms, start=1):
        weights |= linear(prefix + norm, getattr(layer, f"norm{i}"))
    return weights


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@ATTENTIONS
def test_torch_nn_transformer(attention, padded, activation, norm_first):
    # `nn.Transformer` puts a final norm behind post-norm stacks too, which the paper does not: its stacks by hand.
    common = dict(dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first)
    final = (lambda: nn.LayerNorm(D)) if norm_first else (lambda: None)
    theirs = nn.Transformer(
        D,
        HEADS,
        custom_encoder=nn.TransformerEncoder(
            nn.TransformerEncoderLayer(D, HEADS, INNER, **common), LAYERS, final(), enable_nested_tensor=False
        ),
        custom_decoder=nn.TransformerDecoder(nn.TransformerDecoderLayer(D, HEADS, INNER, **common), LAYERS, final()),
        batch_first=True,
    )
    randomise(theirs)
    sizes = dict(vocab_size=VOCABULARY, d_model=D, h=HEADS, d_ff=INNER, encoder_layers=LAYERS, decoder_layers=LAYERS)
    ours = VanillaSeq2SeqModel(VanillaSeq2SeqConfig(**sizes, hidden_act=activation, norm_first=norm_first))
    table = torch.randn(VOCABULARY, D)
    weights = {f"{side}.embeddings.embed_tokens.weight": table for side in ("encoder", "decoder")}
    for side, stack in (("encoder", theirs.encoder), ("decoder", theirs.decoder)):
        for i, layer in enumerate(stack.layers):
            weights |= torch_layer(f"{side}.layers.{i}.", layer)
        if norm_first:
            weights |= linear(f"{side}.norm", stack.norm)
    load(ours, weights, attention)

    source, target = torch.randint(0, VOCABULARY, (3, 6)), torch.randint(0, VOCABULARY, (3, 5))
    source_mask = RIGHT_PADDED if padded else torch.ones_like(RIGHT_PADDED)
    target_mask = source_mask[:, :5]
    positions = torch.tensor(np.stack([position_encoding(t, D) for t in range(6)]), dtype=torch.float32)
    expected = theirs(
        table[source] * D**0.5 + positions,
        table[target] * D**0.5 + positions[:5],
        tgt_mask=torch.ones(5, 5).triu(1).bool(),
        src_key_padding_mask=source_mask == 0,
        memory_key_padding_mask=source_mask == 0,
        tgt_key_padding_mask=target_mask == 0,
    )
    got = ours(source, source_mask, target, target_mask).last_hidden_state
    torch.testing.assert_close(real(got, target_mask), real(expected, target_mask), **TOLERANCE)


# ------------------------------------------------------------------------------------------------------------------- BERT


def from_bert(bert):
    embeddings = bert.embeddings
    weights = {
        "embeddings.embed_tokens.weight": embeddings.word_embeddings.weight.data,
        # Every token is of type 0: a constant on each position.
        "embeddings.embed_positions.weight": embeddings.position_embeddings.weight.data
        + embeddings.token_type_embeddings.weight.data[0],
    } | linear("embeddings.norm", embeddings.LayerNorm)
    for i, layer in enumerate(bert.encoder.layer):
        attention = layer.attention
        parts = {
            "self_attn.q_proj": attention.self.query,
            "self_attn.k_proj": attention.self.key,
            "self_attn.v_proj": attention.self.value,
            "self_attn.o_proj": attention.output.dense,
            "self_attn_norm": attention.output.LayerNorm,
            "feed_forward.up_proj": layer.intermediate.dense,
            "feed_forward.down_proj": layer.output.dense,
            "feed_forward_norm": layer.output.LayerNorm,
        }
        for name, part in parts.items():
            weights |= linear(f"layers.{i}.{name}", part)
    return weights


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@ATTENTIONS
def test_bert(attention, padded):
    sizes = dict(vocab_size=VOCABULARY, hidden_size=D, intermediate_size=INNER, num_hidden_layers=LAYERS)
    sizes |= dict(num_attention_heads=HEADS, max_position_embeddings=10, layer_norm_eps=1e-12, hidden_act="gelu")
    bert = randomise(BertModel(BertConfig(**sizes), add_pooling_layer=False))
    config = VanillaEncoderConfig(**sizes, position_embedding_type="learned", embedding_norm=True, scale_embedding=False)
    ours = load(VanillaEncoderModel(config), from_bert(bert), attention)
    tokens, mask = torch.randint(0, VOCABULARY, (3, 6)), RIGHT_PADDED if padded else torch.ones_like(RIGHT_PADDED)
    got, expected = (model(tokens, attention_mask=mask).last_hidden_state for model in (ours, bert))
    torch.testing.assert_close(real(got, mask), real(expected, mask), **TOLERANCE)


# ------------------------------------------------------------------------------------------------------------------ GPT-2


def from_gpt2(gpt2):
    body = gpt2.transformer
    weights = {
        "model.embeddings.embed_tokens.weight": body.wte.weight.data,
        "model.embeddings.embed_positions.weight": body.wpe.weight.data,
        "lm_head.weight": body.wte.weight.data,
    } | linear("model.norm", body.ln_f)

    def conv1d(name, weight, bias):  # GPT-2's `Conv1D` is a linear layer whose matrix is stored (in, out)
        return {f"{name}.weight": weight.T, f"{name}.bias": bias}

    for i, block in enumerate(body.h):
        layer = f"model.layers.{i}."
        qkv = zip(block.attn.c_attn.weight.data.chunk(3, dim=1), block.attn.c_attn.bias.data.chunk(3), strict=True)
        for projection, (weight, bias) in zip("qkv", qkv, strict=True):
            weights |= conv1d(f"{layer}self_attn.{projection}_proj", weight, bias)
        for name, part in {
            "self_attn.o_proj": block.attn.c_proj,
            "feed_forward.up_proj": block.mlp.c_fc,
            "feed_forward.down_proj": block.mlp.c_proj,
        }.items():
            weights |= conv1d(layer + name, part.weight.data, part.bias.data)
        weights |= linear(layer + "self_attn_norm", block.ln_1) | linear(layer + "feed_forward_norm", block.ln_2)
    return weights


def gpt2_pair(attention):
    sizes = dict(vocab_size=VOCABULARY, n_positions=30, n_embd=D, n_layer=LAYERS, n_head=HEADS, n_inner=INNER)
    gpt2 = randomise(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)))
    config = VanillaDecoderConfig(
        vocab_size=VOCABULARY, d_model=D, d_ff=INNER, h=HEADS, N=LAYERS, max_position_embeddings=30,
        position_embedding_type="learned", scale_embedding=False, norm_first=True, hidden_act="gelu_new",
        lm_head_bias=False,
    )  # fmt: skip
    return gpt2, load(VanillaDecoderForCausalLM(config), from_gpt2(gpt2), attention)


@pytest.mark.parametrize("mask", [torch.ones_like(RIGHT_PADDED), RIGHT_PADDED], ids=["full", "right-padded"])
@ATTENTIONS
def test_gpt2(attention, mask):
    gpt2, ours = gpt2_pair(attention)
    tokens = torch.randint(0, VOCABULARY, (3, 6))
    got, expected = (model(tokens, attention_mask=mask).logits for model in (ours, gpt2))
    torch.testing.assert_close(real(got, mask), real(expected, mask), **TOLERANCE)


@ATTENTIONS
def test_gpt2_generates_the_same_tokens_from_left_padded_prompts(attention):
    gpt2, ours = gpt2_pair(attention)
    tokens = torch.randint(3, VOCABULARY, (3, 6)).masked_fill(LEFT_PADDED == 0, 0)
    generation = GenerationConfig(max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=2)
    got, expected = (m.generate(tokens, attention_mask=LEFT_PADDED, generation_config=generation) for m in (ours, gpt2))
    assert len(expected[:, 6:].unique()) > 5, "a model that repeats itself proves little"
    assert got.tolist() == expected.tolist()


# ----------------------------------------------------------------------------------------------------------------- Marian


def from_marian(marian):
    """Marian puts all sines first and then all cosines, the paper interleaves them. Positions are added to the residual
    stream, whose order is nobody's concern: reorder every weight that reads it or writes to it."""
    order = torch.arange(D).view(2, D // 2).T.flatten()  # ours 0, 1, 2, 3 ... is theirs 0, D/2, 1, D/2 + 1 ...

    def reads(name, layer):
        return {f"{name}.weight": layer.weight.data[:, order], f"{name}.bias": layer.bias.data}

    def writes(name, layer):
        return {f"{name}.weight": layer.weight.data[order], f"{name}.bias": layer.bias.data[order]}

    table = marian.model.shared.weight.data[:, order]
    weights = {f"model.{side}.embeddings.embed_tokens.weight": table for side in ("encoder", "decoder")}
    weights |= {"lm_head.weight": table, "lm_head.bias": marian.final_logits_bias[0]}
    for side, stack in (("encoder", marian.model.encoder), ("decoder", marian.model.decoder)):
        for i, layer in enumerate(stack.layers):
            name = f"model.{side}.layers.{i}."
            attentions = {"self_attn": (layer.self_attn, layer.self_attn_layer_norm)}
            if side == "decoder":
                attentions["cross_attn"] = (layer.encoder_attn, layer.encoder_attn_layer_norm)
            for ours, (attention, norm) in attentions.items():
                for projection in ("q_proj", "k_proj", "v_proj"):
                    weights |= reads(f"{name}{ours}.{projection}", getattr(attention, projection))
                weights |= writes(f"{name}{ours}.o_proj", attention.out_proj) | writes(f"{name}{ours}_norm", norm)
            weights |= reads(name + "feed_forward.up_proj", layer.fc1)
            weights |= writes(name + "feed_forward.down_proj", layer.fc2)
            weights |= writes(name + "feed_forward_norm", layer.final_layer_norm)
    return weights


PAD = VOCABULARY - 1  # Marian pads, and starts generating, with the last token


def marian_pair(attention):
    config = MarianConfig(
        vocab_size=VOCABULARY, d_model=D, encoder_layers=LAYERS, decoder_layers=3, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=INNER, decoder_ffn_dim=INNER, activation_function="swish",
        scale_embedding=True, max_position_embeddings=64, pad_token_id=PAD, decoder_start_token_id=PAD, eos_token_id=0,
    )  # fmt: skip
    marian = MarianMTModel(config)
    sinusoids = marian.model.encoder.embed_positions.weight.data.clone()
    randomise(marian)
    for stack in (marian.model.encoder, marian.model.decoder):
        stack.embed_positions.weight.data.copy_(sinusoids)
    marian.final_logits_bias.uniform_(-1, 1)
    ours = VanillaSeq2SeqConfig(
        vocab_size=VOCABULARY, d_model=D, d_ff=INNER, h=HEADS, encoder_layers=LAYERS, decoder_layers=3,
        hidden_act="swish", pad_token_id=PAD, decoder_start_token_id=PAD, eos_token_id=0,
    )  # fmt: skip
    return marian, load(VanillaSeq2SeqForConditionalGeneration(ours), from_marian(marian), attention)


def padded_source():
    return torch.randint(1, PAD, (3, 6)).masked_fill(RIGHT_PADDED == 0, PAD)


@ATTENTIONS
def test_marian(attention):
    marian, ours = marian_pair(attention)
    given = dict(input_ids=padded_source(), attention_mask=RIGHT_PADDED)
    given |= dict(decoder_input_ids=torch.randint(0, VOCABULARY, (3, 5)), decoder_attention_mask=RIGHT_PADDED[:, :5])
    got, expected = (model(**given) for model in (ours, marian))
    torch.testing.assert_close(real(got.logits, RIGHT_PADDED[:, :5]), real(expected.logits, RIGHT_PADDED[:, :5]), **TOLERANCE)


@pytest.mark.parametrize("beams", [1, 4], ids=["greedy", "4 beams"])
@ATTENTIONS
def test_marian_generates_the_same_tokens(attention, beams):
    marian, ours = marian_pair(attention)
    given = dict(input_ids=padded_source(), attention_mask=RIGHT_PADDED)
    generation = GenerationConfig(
        max_new_tokens=20, num_beams=beams, length_penalty=0.6, bad_words_ids=[[PAD]], pad_token_id=PAD, eos_token_id=0,
        decoder_start_token_id=PAD, forced_eos_token_id=0, do_sample=False, no_repeat_ngram_size=2,
    )  # fmt: skip
    got, expected = (model.generate(**given, generation_config=generation) for model in (ours, marian))
    assert len(expected.unique()) > 5, "a model that repeats itself proves little"
    assert got.tolist() == expected.tolist()
