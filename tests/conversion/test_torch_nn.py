"""Conversion of state dicts of torch.nn.TransformerEncoder, TransformerDecoder and Transformer:
outputs match those of the torch module."""

import json
import warnings

import pytest
import torch
from messages import check_message, raises
from reference import position_encoding
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModel

from vanilla_transformer.conversion import convert_torch, from_torch
from vanilla_transformer_export.cli.main import main

V, D, HEADS, INNER = 20, 12, 3, 17
MASK = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])
PLAIN_EMBEDDINGS = dict(position_embedding_type="none", scale_embedding=False)
switches = pytest.mark.parametrize(
    "norm_first, activation, bias",
    [(False, "relu", True), (True, "gelu", True), (False, "gelu", False), (True, "relu", False)],
)


def make_transformer(norm_first=False, activation="relu", bias=True, dtype=torch.float64):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that nested tensors are not used
        model = nn.Transformer(
            D,
            HEADS,
            2,
            3,
            INNER,
            0.0,
            activation,
            batch_first=True,
            norm_first=norm_first,
            bias=bias,
            dtype=dtype,
        )
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4)
    return model.eval()


def make_inputs(dtype=torch.float64):
    table = torch.randn(V, D, dtype=dtype)
    return table, torch.randint(0, V, (2, 6)), torch.randint(0, V, (2, 4))


def causal_mask(length):
    return torch.ones(length, length).triu(1).bool()


@switches
def test_transformer_outputs_match_torch(norm_first, activation, bias):
    theirs, (table, source, target) = make_transformer(norm_first, activation, bias), make_inputs()
    tables = dict(embed_tokens=table, decoder_embed_tokens=table + 1)
    ours = from_torch(
        theirs.state_dict(),
        HEADS,
        tables,
        norm_first=norm_first,
        hidden_act=activation,
        **PLAIN_EMBEDDINGS,
    )
    expected = theirs(
        table[source],
        table[target] + 1,
        tgt_mask=causal_mask(4),
        src_key_padding_mask=MASK == 0,
        memory_key_padding_mask=MASK == 0,
    )
    got = ours(source, MASK, target).last_hidden_state
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)


@switches
def test_encoder_outputs_match_torch(norm_first, activation, bias):
    theirs, (table, source, _) = (
        make_transformer(norm_first, activation, bias).encoder,
        make_inputs(),
    )
    ours = from_torch(
        theirs.state_dict(),
        HEADS,
        {"embed_tokens": table},
        norm_first=norm_first,
        hidden_act=activation,
        **PLAIN_EMBEDDINGS,
    )
    expected = theirs(table[source], src_key_padding_mask=MASK == 0)
    torch.testing.assert_close(
        ours(source, MASK).last_hidden_state[MASK == 1], expected[MASK == 1], atol=1e-10, rtol=0
    )


@switches
def test_decoder_with_cross_attention_matches_torch(norm_first, activation, bias):
    theirs, (table, _, target) = (
        make_transformer(norm_first, activation, bias).decoder,
        make_inputs(),
    )
    memory = torch.randn(2, 6, D, dtype=torch.float64)
    ours = from_torch(
        theirs.state_dict(),
        HEADS,
        {"embed_tokens": table},
        norm_first=norm_first,
        hidden_act=activation,
        **PLAIN_EMBEDDINGS,
    )
    expected = theirs(
        table[target], memory, tgt_mask=causal_mask(4), memory_key_padding_mask=MASK == 0
    )
    got = ours(target, encoder_hidden_states=memory, encoder_attention_mask=MASK).last_hidden_state
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)


def test_encoder_without_final_norm_and_other_epsilon_matches_torch():
    layer = nn.TransformerEncoderLayer(
        D, HEADS, INNER, 0.0, layer_norm_eps=0.1, batch_first=True, dtype=torch.float64
    )
    theirs, (table, source, _) = (
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(),
        make_inputs(),
    )
    ours = from_torch(
        theirs.state_dict(), HEADS, {"embed_tokens": table}, layer_norm_eps=0.1, **PLAIN_EMBEDDINGS
    )
    assert not ours.config.final_norm
    torch.testing.assert_close(
        ours(source).last_hidden_state, theirs(table[source]), atol=1e-10, rtol=0
    )


def test_default_positions_and_embedding_scale_match_paper():
    theirs, (table, source, target) = make_transformer(), make_inputs()
    ours = from_torch(theirs.state_dict(), HEADS, {"embed_tokens": table})
    positions = torch.tensor(
        [position_encoding(t, D).tolist() for t in range(6)], dtype=torch.float64
    )
    expected = theirs(
        table[source] * D**0.5 + positions,
        table[target] * D**0.5 + positions[:4],
        tgt_mask=causal_mask(4),
    )
    torch.testing.assert_close(
        ours(source, decoder_input_ids=target).last_hidden_state, expected, atol=1e-10, rtol=0
    )
    assert (
        ours.get_encoder().embeddings.embed_tokens.weight
        is ours.get_decoder().embeddings.embed_tokens.weight
    )


def test_learned_positions_match_torch():
    theirs, (table, source, _) = make_transformer().encoder, make_inputs()
    positions = torch.randn(9, D, dtype=torch.float64)
    tables = dict(embed_tokens=table, embed_positions=positions)
    ours = from_torch(theirs.state_dict(), HEADS, tables, scale_embedding=False)
    assert ours.config.max_position_embeddings == 9
    expected = theirs(table[source] + positions[:6])
    torch.testing.assert_close(ours(source).last_hidden_state, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_convert_command_writes_checkpoint_from_files(kind, tmp_path, capsys):
    theirs, (table, source, _) = (
        make_transformer(dtype=torch.float32).encoder,
        make_inputs(torch.float32),
    )
    save = save_file if kind == "safetensors" else torch.save
    state, tables = tmp_path / f"state.{kind}", tmp_path / f"tables.{kind}"
    save(theirs.state_dict(), state)
    save({"embed_tokens": table}, tables)
    settings = [
        f"num_attention_heads={HEADS}",
        "position_embedding_type=none",
        "scale_embedding=false",
    ]
    options = [part for setting in settings for part in ("--set", setting)]
    main(["convert", str(state), str(tmp_path / "ours"), "--embeddings", str(tables), *options])
    assert json.loads(capsys.readouterr().out)["architecture"] == "VanillaEncoderModel"
    got = AutoModel.from_pretrained(tmp_path / "ours")(source).last_hidden_state
    torch.testing.assert_close(got, theirs(table[source]), atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------- errors


def assert_rejected(seen, expected=(), state=None, heads=HEADS, **tables):
    tables = tables or {"embed_tokens": torch.zeros(V, D, dtype=torch.float64)}
    with raises(ValueError, seen=seen, expected=expected):
        from_torch(make_transformer().state_dict() if state is None else state, heads, tables)


def test_error_names_invalid_heads_embeddings_or_tensors():
    state = make_transformer().state_dict()
    assert_rejected(("hidden_size=12", "num_attention_heads=5"), heads=5)
    assert_rejected("embed_positions", "embed_tokens", embed_positions=torch.zeros(9, D))
    assert_rejected("tokens", "embed_tokens", tokens=torch.zeros(V, D))
    assert_rejected((12, "weight"), 18, embed_tokens=torch.zeros(V, 18))
    assert_rejected("extra.weight", state=state | {"extra.weight": torch.zeros(2)})
    conv = {"encoder.layers.0.conv.weight": torch.zeros(2)}
    assert_rejected("layers.0.conv.weight", state=state | conv)
    without = {
        name: tensor for name, tensor in state.items() if name != "encoder.layers.1.linear2.bias"
    }
    missing = "encoder.layers.1.feed_forward.down_proj.bias"
    assert_rejected(("VanillaSeq2SeqModel", missing), state=without)
    without = {
        name: tensor for name, tensor in state.items() if not name.startswith("encoder.norm")
    }
    assert_rejected(("encoder", "decoder"), state=without)
    assert_rejected("norm.weight", "layers.0.linear1.weight", {"norm.weight": torch.ones(D)})


@pytest.mark.parametrize(
    "name, tensor, seen",
    [
        ("layers.0.linear1.weight", torch.tensor(1.0), ("linear1.weight", "[]", "torch.float32")),
        ("layers.0.linear1.weight", torch.ones(INNER, D).long(), "torch.int64"),
        ("layers.0.self_attn.in_proj_weight", torch.ones(35, D), "[35, 12]"),
        ("layers.99999999999.linear1.weight", torch.ones(INNER, D), "VanillaSeq2SeqModel"),
        ("layers.x.linear1.weight", torch.ones(INNER, D), "layers.x.linear1.weight"),
    ],
)
def test_invalid_tensor_is_rejected(name, tensor, seen):
    assert_rejected(seen, state=make_transformer().state_dict() | {f"encoder.{name}": tensor})


@pytest.mark.parametrize("shape", [(), (D,), (1, V, D)])
def test_embeddings_that_are_not_a_matrix_are_rejected(shape):
    assert_rejected(("embed_tokens", list(shape), "torch.float32"), embed_tokens=torch.ones(shape))


@pytest.fixture
def files(tmp_path):
    save_file(make_transformer().encoder.state_dict(), tmp_path / "state.safetensors")
    save_file(
        {"embed_tokens": torch.zeros(V, D, dtype=torch.float64)}, tmp_path / "tables.safetensors"
    )
    return tmp_path


def usage_error(capsys, files, *options):
    with pytest.raises(SystemExit) as caught:
        main(["convert", str(files / "state.safetensors"), str(files / "ours"), *options])
    assert caught.value.code == 2
    assert not (files / "ours").exists()
    return capsys.readouterr().err.splitlines()[-1]


def test_convert_requires_heads_and_embeddings(files, capsys):
    with raises(ValueError, seen="num_attention_heads"):
        convert_torch(files / "state.safetensors", files / "ours", files / "tables.safetensors")
    assert "embeddings must be given" in usage_error(
        capsys, files, "--set", "num_attention_heads=3"
    )
    assert not (files / "ours").exists()


@pytest.mark.parametrize(
    "setting, seen, expected",
    [
        ("num_attention_heads=x", "num_attention_heads", ()),
        ("num_attention_heads=1.5", "num_attention_heads", ()),
        ("num_attention_heads=7", ("hidden_size", 12, "num_attention_heads", 7), ()),
        ("num_attention_heads=1000000000000", ("num_attention_heads", 1000000000000), 268435456),
        ("layer_norm_eps=NaN", ("layer_norm_eps", "nan"), 0),
        ("N=1.5", "num_hidden_layers", ()),
        ("norm_frist=true", "norm_frist", "norm_first"),
        ("force=true", "force", ()),
        ("state_dict=1", "state_dict", ()),
        ("dtype=nope", "dtype", ()),
        ("encoder_layers=2", "encoder_layers", ()),  # a single stack has num_hidden_layers
        ("=5", "''", ()),
        ("x=" + "[" * 100_000, (), "JSON"),
        ("x=" + "9" * 5000, (), "JSON"),
        ("hidden_act=\udce9", ("hidden_act", "\\xe9"), ()),
    ],
    ids=lambda text: ascii(text)[:30],
)
def test_invalid_setting_is_usage_error(files, setting, seen, expected, capsys):
    required = ("--embeddings", str(files / "tables.safetensors"), "--set", "num_attention_heads=3")
    check_message(
        usage_error(capsys, files, *required, "--set", setting), seen=seen, expected=expected
    )


def test_num_hidden_layers_beyond_state_dict_is_rejected(files):
    with raises(ValueError, seen=("num_hidden_layers", 1000000000, "dict"), expected=2):
        from_torch(
            make_transformer().encoder.state_dict(),
            HEADS,
            {"embed_tokens": torch.zeros(V, D).double()},
            num_hidden_layers=10**9,
        )


def test_options_for_other_source_kind_are_rejected(files, capsys):
    for option in (["--dry-run"], ["--to", "bert"], ["--leave-out", "a"], ["--variant", "fp16"]):
        message = f"{option[0]} is not supported for {files / 'state.safetensors'}, a state dict"
        assert message in usage_error(capsys, files, *option)
    with pytest.raises(SystemExit) as caught:
        main(["convert", str(files), str(files / "ours"), "--embeddings", "tables.safetensors"])
    assert caught.value.code == 2
    assert (
        f"--embeddings is not supported for {files}: expected a state dict file"
        in capsys.readouterr().err
    )
