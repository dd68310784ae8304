"""State dicts of torch.nn.TransformerEncoder, TransformerDecoder and Transformer, converted: the module's own numbers."""

import json
import warnings

import pytest
import torch
from reference import position_encoding
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModel

from vanilla_transformer.conversion import convert_torch, from_torch
from vanilla_transformer_export.cli import main

V, D, HEADS, INNER = 20, 12, 3, 17
MASK = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])
FED = dict(position_embedding_type="none", scale_embedding=False)
switches = pytest.mark.parametrize(
    "norm_first, activation, bias", [(False, "relu", True), (True, "gelu", True), (False, "gelu", False), (True, "relu", False)]
)


def module(norm_first=False, activation="relu", bias=True, dtype=torch.float64):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nested tensors are not used
        model = nn.Transformer(
            D, HEADS, 2, 3, INNER, 0.0, activation, batch_first=True, norm_first=norm_first, bias=bias, dtype=dtype
        )
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4)
    return model.eval()


def inputs(dtype=torch.float64):
    table = torch.randn(V, D, dtype=dtype)
    return table, torch.randint(0, V, (2, 6)), torch.randint(0, V, (2, 4))


def causal(length):
    return torch.ones(length, length).triu(1).bool()


@switches
def test_a_transformer(norm_first, activation, bias):
    theirs, (table, source, target) = module(norm_first, activation, bias), inputs()
    tables = dict(embed_tokens=table, decoder_embed_tokens=table + 1)
    ours = from_torch(theirs.state_dict(), HEADS, tables, norm_first=norm_first, hidden_act=activation, **FED)
    expected = theirs(
        table[source], table[target] + 1, tgt_mask=causal(4), src_key_padding_mask=MASK == 0, memory_key_padding_mask=MASK == 0
    )
    got = ours(source, MASK, target).last_hidden_state
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)


@switches
def test_an_encoder(norm_first, activation, bias):
    theirs, (table, source, _) = module(norm_first, activation, bias).encoder, inputs()
    ours = from_torch(theirs.state_dict(), HEADS, {"embed_tokens": table}, norm_first=norm_first, hidden_act=activation, **FED)
    expected = theirs(table[source], src_key_padding_mask=MASK == 0)
    torch.testing.assert_close(ours(source, MASK).last_hidden_state[MASK == 1], expected[MASK == 1], atol=1e-10, rtol=0)


@switches
def test_a_decoder_keeps_its_cross_attention(norm_first, activation, bias):
    theirs, (table, _, target) = module(norm_first, activation, bias).decoder, inputs()
    memory = torch.randn(2, 6, D, dtype=torch.float64)
    ours = from_torch(theirs.state_dict(), HEADS, {"embed_tokens": table}, norm_first=norm_first, hidden_act=activation, **FED)
    expected = theirs(table[target], memory, tgt_mask=causal(4), memory_key_padding_mask=MASK == 0)
    got = ours(target, encoder_hidden_states=memory, encoder_attention_mask=MASK).last_hidden_state
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)


def test_stacks_without_a_final_norm_and_another_epsilon():
    layer = nn.TransformerEncoderLayer(D, HEADS, INNER, 0.0, layer_norm_eps=0.1, batch_first=True, dtype=torch.float64)
    theirs, (table, source, _) = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), inputs()
    ours = from_torch(theirs.state_dict(), HEADS, {"embed_tokens": table}, layer_norm_eps=0.1, **FED)
    assert not ours.config.final_norm
    torch.testing.assert_close(ours(source).last_hidden_state, theirs(table[source]), atol=1e-10, rtol=0)


def test_positions_and_the_scale_of_the_paper():
    theirs, (table, source, target) = module(), inputs()
    ours = from_torch(theirs.state_dict(), HEADS, {"embed_tokens": table})
    positions = torch.tensor([position_encoding(t, D).tolist() for t in range(6)], dtype=torch.float64)
    expected = theirs(table[source] * D**0.5 + positions, table[target] * D**0.5 + positions[:4], tgt_mask=causal(4))
    torch.testing.assert_close(ours(source, decoder_input_ids=target).last_hidden_state, expected, atol=1e-10, rtol=0)
    assert ours.get_encoder().embeddings.embed_tokens.weight is ours.get_decoder().embeddings.embed_tokens.weight


def test_learned_positions():
    theirs, (table, source, _) = module().encoder, inputs()
    positions = torch.randn(9, D, dtype=torch.float64)
    tables = dict(embed_tokens=table, embed_positions=positions)
    ours = from_torch(theirs.state_dict(), HEADS, tables, scale_embedding=False)
    assert ours.config.max_position_embeddings == 9
    expected = theirs(table[source] + positions[:6])
    torch.testing.assert_close(ours(source).last_hidden_state, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_files_become_a_checkpoint(kind, tmp_path, capsys):
    theirs, (table, source, _) = module(dtype=torch.float32).encoder, inputs(torch.float32)
    save = save_file if kind == "safetensors" else torch.save
    state, tables = tmp_path / f"state.{kind}", tmp_path / f"tables.{kind}"
    save(theirs.state_dict(), state)
    save({"embed_tokens": table}, tables)
    settings = [f"num_attention_heads={HEADS}", "position_embedding_type=none", "scale_embedding=false"]
    options = [part for setting in settings for part in ("--set", setting)]
    main(["convert", str(state), str(tmp_path / "ours"), "--embeddings", str(tables), *options])
    assert json.loads(capsys.readouterr().out)["architecture"] == "VanillaEncoderModel"
    got = AutoModel.from_pretrained(tmp_path / "ours")(source).last_hidden_state
    torch.testing.assert_close(got, theirs(table[source]), atol=1e-5, rtol=1e-5)


# --------------------------------------------------------------------------------------------------------------- refusals


def refused(match, state=None, heads=HEADS, **tables):
    tables = tables or {"embed_tokens": torch.zeros(V, D, dtype=torch.float64)}
    with pytest.raises(ValueError, match=match):
        from_torch(module().state_dict() if state is None else state, heads, tables)


def test_what_is_wrong_is_named():
    state = module().state_dict()
    refused("hidden_size must be a multiple of num_attention_heads .* hidden_size=12 and num_attention_heads=5", heads=5)
    refused("embed_tokens is missing from the embeddings, got", embed_positions=torch.zeros(9, D))
    refused(r"unknown embeddings \['tokens'\], expected some of embed_tokens", tokens=torch.zeros(V, D))
    refused(r"layers.*weight has shape \(.*\), expected \(.*", embed_tokens=torch.zeros(V, 18))
    refused("extra.weight belongs to no torch.nn.Transformer", state | {"extra.weight": torch.zeros(2)})
    refused("layers.0.conv.weight belongs to no torch.nn.Transformer", state | {"encoder.layers.0.conv.weight": torch.zeros(2)})
    without = {name: tensor for name, tensor in state.items() if name != "encoder.layers.1.linear2.bias"}
    refused("missing for a VanillaSeq2SeqModel: encoder.layers.1.feed_forward.down_proj.bias", without)
    without = {name: tensor for name, tensor in state.items() if not name.startswith("encoder.norm")}
    refused("only one of encoder and decoder has a final norm", without)
    refused(
        r"the state dict has no layers, expected names as layers.0.linear1.weight, got \['norm.weight'\]",
        {"norm.weight": torch.ones(D)},
    )


def test_the_command_needs_heads_and_embeddings(tmp_path):
    save_file(module().encoder.state_dict(), tmp_path / "state.safetensors")
    save_file({"embed_tokens": torch.zeros(V, D)}, tmp_path / "tables.safetensors")
    with pytest.raises(ValueError, match="num_attention_heads must be given"):
        convert_torch(tmp_path / "state.safetensors", tmp_path / "ours", tmp_path / "tables.safetensors")
    with pytest.raises(SystemExit, match="vanilla-transformer: .*embeddings"):
        main(["convert", str(tmp_path / "state.safetensors"), str(tmp_path / "ours"), "--set", "num_attention_heads=3"])
    assert not (tmp_path / "ours").exists()
