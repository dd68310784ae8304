"""Tests of weight files with a variant in their names, against transformers."""

import pytest
import torch
import transformers
from checkpoints import SIZES, perturbed
from command_line import main, read_error, read_json
from families import assert_exact, compute_outputs, make_arguments, random_config, random_model
from messages import check_message, raises

import vanilla_transformer
from vanilla_transformer.conversion import convert, plan_conversion
from vanilla_transformer.training.averaging import average
from vanilla_transformer_export import Runtime, load_checkpoint

SHARDED = dict(max_shard_size="20KB")


@pytest.fixture(scope="module")
def bert():
    return random_model("BertForMaskedLM", random_config("bert", "BertForMaskedLM", 0))


@pytest.fixture(scope="module")
def other_bert(bert):
    """A model with the config of `bert` and other weights."""
    model = transformers.BertForMaskedLM(bert.config).eval()
    model.tie_weights()
    return model


def save_pickled(model, directory, name):
    model.config.save_pretrained(directory)
    torch.save(model.state_dict(), directory / name)


def assert_converted(source, model, out, **settings):
    facts = convert(source, out, **settings)
    ours = getattr(vanilla_transformer, facts["architecture"]).from_pretrained(out).eval()
    arguments = make_arguments(model)
    assert_exact(
        compute_outputs(ours, arguments)["logits"],
        compute_outputs(model, arguments)["logits"],
        torch.float32,
    )


@pytest.mark.parametrize("variant", ["fp16", "bf16", "non_ema", "v1.5"])
@pytest.mark.parametrize("options", [{}, SHARDED], ids=["whole", "shards"])
@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "beside others"])
def test_variant_weights_match_transformers(bert, other_bert, tmp_path, variant, options, is_alone):
    source = tmp_path / "source"
    if not is_alone:
        other_bert.save_pretrained(source)
    bert.save_pretrained(source, variant=variant, **options)
    theirs = transformers.BertForMaskedLM.from_pretrained(source, variant=variant).eval()
    assert_converted(source, theirs, tmp_path / "out", variant=variant)


def test_index_may_be_named_like_shards(bert, tmp_path):
    bert.save_pretrained(tmp_path / "source", variant="fp16", **SHARDED)
    index = tmp_path / "source" / "model.safetensors.index.fp16.json"
    index.rename(index.with_name("model.fp16.safetensors.index.json"))
    assert_converted(tmp_path / "source", bert, tmp_path / "out", variant="fp16")


def test_pickled_variant_is_converted(bert, other_bert, tmp_path):
    """Safetensors without the variant do not take precedence over the pickle."""
    other_bert.save_pretrained(tmp_path / "source")
    save_pickled(bert, tmp_path / "source", "pytorch_model.fp16.bin")
    assert_converted(tmp_path / "source", bert, tmp_path / "out", variant="fp16")


def test_config_changes_apply_to_variant(bert, tmp_path):
    bert.save_pretrained(tmp_path / "source", variant="fp16")
    plan = plan_conversion(
        tmp_path / "source", config={"architectures": "BertModel"}, variant="fp16"
    )
    assert type(plan.model).__name__ == "VanillaEncoderModel"


def test_missing_variant_flag_error_names_files_and_flags(bert, tmp_path):
    bert.save_pretrained(tmp_path / "source", variant="fp16")
    bert.save_pretrained(tmp_path / "source", variant="bf16", **SHARDED)
    for words in (["convert"], ["convert", "--dry-run"], ["export"], ["info"]):
        out = [tmp_path / "out"] if words in (["convert"], ["export"]) else []
        message = read_error(words[0], tmp_path / "source", *out, *words[1:])
        variants = ("model.fp16.safetensors", "model.safetensors.index.bf16.json")
        names = ("model.safetensors", "pytorch_model.bin", "--variant fp16", "--variant bf16")
        check_message(message, seen=tmp_path / "source", expected=(*names, *variants))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "verb", ["convert", "export", "info", "verify", "evaluate", "average", "attention"]
)
def test_unknown_variant_error_names_existing_variant(tmp_path, verb):
    source = tmp_path / "source"
    model = perturbed("VanillaEncoderModel", SIZES)
    model.save_pretrained(source, variant="fp16")
    if verb in ("convert", "export"):
        source = tmp_path / "bert"
        transformers.BertModel(random_config("bert", "BertModel", 0)).save_pretrained(
            source, variant="fp16"
        )
    words = {"verify": [tmp_path, source], "attention": [source, "a"]}.get(verb, [source])
    output = {"convert": "out", "export": "out", "average": "out", "attention": "out.png"}.get(verb)
    words += ["--output", tmp_path / output] if output else []
    message = read_error(verb, *words, "--variant", "bf16")
    check_message(
        message, seen=(source, "bf16"), expected=("model.bf16.safetensors", "config.json")
    )
    assert message.endswith(" fp16") and not (tmp_path / "out").exists()


def test_missing_shard_error_names_directory_and_shard(bert, tmp_path):
    bert.save_pretrained(tmp_path / "source", variant="fp16", **SHARDED)
    [first, *_] = sorted((tmp_path / "source").glob("*-00001-of-*"))
    first.unlink()
    with raises(FileNotFoundError, seen=(tmp_path / "source", first.name)):
        convert(tmp_path / "source", tmp_path / "out", variant="fp16")


# ---------------------------------------------------------------------------------------- the verbs


@pytest.fixture
def ours(tmp_path):
    """Our checkpoint with the weights of a variant beside other weights, and its model."""
    model = perturbed("VanillaEncoderForMaskedLM", SIZES)
    perturbed("VanillaEncoderForMaskedLM", SIZES, scale=0.1).save_pretrained(tmp_path / "ours")
    model.save_pretrained(tmp_path / "ours", variant="fp16", **SHARDED)
    return tmp_path / "ours", model


def test_load_average_and_info_read_variant(ours, tmp_path):
    source, model = ours
    loaded = load_checkpoint(source, variant="fp16")
    assert all(
        torch.equal(*pair) for pair in zip(loaded.parameters(), model.parameters(), strict=True)
    )
    average([source, source], tmp_path / "mean", variant="fp16")
    mean = load_checkpoint(tmp_path / "mean")
    assert all(
        torch.allclose(*pair) for pair in zip(mean.parameters(), model.parameters(), strict=True)
    )
    facts = [read_json("info", source, "--json", *more) for more in ([], ["--variant", "fp16"])]
    assert facts[0] == facts[1]


def test_export_and_verify_read_variant(ours, tmp_path, capsys):
    source, model = ours
    main(["export", str(source), str(tmp_path / "export"), "--variant", "fp16"])
    ids = torch.randint(4, SIZES["vocab_size"], (2, 5))
    result = Runtime(tmp_path / "export").outputs(
        input_ids=ids.numpy(), attention_mask=torch.ones_like(ids).numpy()
    )
    assert_exact(torch.from_numpy(result["logits"]), model(ids).logits.detach(), torch.float32)
    main(["verify", str(tmp_path / "export"), str(source), "--cases", "2", "--variant", "fp16"])
    with raises(SystemExit, seen="logits"):  # the weights without a variant differ
        main(["verify", str(tmp_path / "export"), str(source), "--cases", "2"])
