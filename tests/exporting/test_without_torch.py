"""Exports without torch and transformers: the same files as with them, and one-line errors where
they are needed."""

import json
import os
import resource
import shutil
import subprocess
import sys
import warnings
from subprocess import PIPE

import numpy as np
import pytest
import torch
from checkpoints import copy_folder, default_parity, edit_json, perturbed
from command_line import read_error
from graph_variants import sizes, variants, variants_of_head
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import vanilla_transformer
from vanilla_transformer.checkpoint_config import CONFIGS
from vanilla_transformer.checkpoint_files import bare
from vanilla_transformer.standins import weight_shapes
from vanilla_transformer_export import Runtime, export, verify
from vanilla_transformer_export.graphs.config import Config
from vanilla_transformer_export.graphs.weights import tied_names
from vanilla_transformer_export.heads import GENERATORS, HEADS, model_class

# Reads the arguments of one command per line, and prints its error (or None), output and warnings.
COMMANDS = """
import contextlib, io, json, sys
for name in ("torch", "transformers"):
    sys.modules[name] = None
from vanilla_transformer_export.cli.main import main
for line in sys.stdin:
    error, output, errors = None, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            main(json.loads(line))
        except SystemExit as exit:
            error = str(exit.code) if isinstance(exit.code, str) else errors.getvalue()
    print(json.dumps([error, output.getvalue(), errors.getvalue()]), flush=True)
assert sys.modules["torch"] is sys.modules["transformers"] is None
"""
CONFIG_FIELDS = """
import json, sys
from pathlib import Path
for name in ("torch", "transformers"):
    sys.modules[name] = None
from vanilla_transformer.source import Source
for line in sys.stdin:
    source = Source.open(Path(line.strip()))
    print(json.dumps([source.architecture, source.config().to_dict()]))
"""
IGNORED = {"_name_or_path", "transformers_version", "auto_map", "_from_model_config"}  # in configs
SPLADE = {"": "Transformer", "1_SpladePooling": "SpladePooling"}  # folders of modules
PYTHON = [sys.executable, "-W", "always", "-c"]
SIZES = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4}
MODELS = {
    "encoder": (
        "VanillaEncoderForSequenceClassification",
        {"num_hidden_layers": 2, "num_labels": 3, "pooler_act": "tanh", "type_vocab_size": 2},
    ),
    "decoder": (
        "VanillaDecoderForCausalLM",
        {"num_hidden_layers": 2, "position_embedding_type": "rotary"},
    ),
    "seq2seq": (
        "VanillaSeq2SeqForConditionalGeneration",
        {"encoder_layers": 1, "decoder_layers": 2},
    ),
    "sparse": ("VanillaEncoderForMaskedLM", {"num_hidden_layers": 1}),
    "m3": ("VanillaEncoderM3Model", {"num_hidden_layers": 1}),
    "vision": (
        "VanillaVisionForImageClassification",
        {"num_hidden_layers": 1, "image_size": 12, "patch_size": 4},
    ),
}
ROTARY = [
    {"position_embedding_type": "rotary", **fields}
    for fields in (
        {},
        {"rope_theta": 50.0},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"full_attention": {"rope_theta": 5}, "sliding_attention": {}}},
    )
]
EXPORTS = {
    "encoder": ["--target", "cpu", "--dtype", "int4"],
    "encoder ": ["--dtype", "fp32,int8", "--opset", "20", "--triton", "TRITON"],
    "decoder": ["--target", "cpu", "--dtype", "int8"],
    "decoder ": ["--target", "cuda", "--dtype", "fp16"],
    "decoder  ": ["--target", "portable", "--generate", "greedy"],
    "seq2seq": ["--target", "cpu", "--shortlist", "TEXT"],
    "seq2seq ": ["--target", "cpu", "--dtype", "int8", "--generate", "beam"],
    "seq2seq in shards": ["--target", "portable", "--dtype", "int8"],
    "seq2seq in float16": ["--target", "cpu"],
    "sparse": ["--target", "cpu", "--dtype", "int8"],
    "m3": ["--target", "cpu", "--dtype", "int8"],
    "vision": ["--image-size", "free"],
}


def run(code, lines, **settings):
    settings |= {"capture_output": True, "text": True}
    done = subprocess.run([*PYTHON, code], input="\n".join(lines), **settings)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def without_torch():
    """Commands -> the error or None, the output and the warnings of each, in a process without
    torch."""
    with subprocess.Popen([*PYTHON, COMMANDS], stdin=PIPE, stdout=PIPE, text=True) as process:

        def answer(arguments):
            print(json.dumps([str(word) for word in arguments]), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield lambda *commands: [answer(arguments) for arguments in commands]
    assert process.returncode == 0


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Checkpoints of `MODELS` with a tokenizer of the words w0 to w47; seq2seq also in shards and
    in half precision."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, (architecture, fields) in MODELS.items():
        common = {
            key: size for key, size in SIZES.items() if key != "vocab_size" or name != "vision"
        }
        model = perturbed(architecture, {**common, **fields})
        model.save_pretrained(folder / name)
        if name == "seq2seq":
            model.save_pretrained(folder / "seq2seq in shards", max_shard_size="30KB")
            model.half().save_pretrained(folder / "seq2seq in float16")
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for path, kind in SPLADE.items()
    ]
    (folder / "sparse/modules.json").write_text(json.dumps(modules))
    (folder / "sparse/1_SpladePooling").mkdir()
    (folder / "sparse/1_SpladePooling/config.json").write_text("{}")
    for name, size in {"sparse_linear": 1, "colbert_linear": SIZES["hidden_size"]}.items():
        head = torch.nn.Linear(SIZES["hidden_size"], size)
        save_file(head.state_dict(), folder / f"m3/{name}.safetensors")
    words = Tokenizer(
        models.WordLevel({f"w{number}": number for number in range(48)}, unk_token="w3")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    for directory in folder.iterdir():
        words.save(str(directory / "tokenizer.json"))
    (folder / "text").write_text("w9 w4 w30\nw31 w32 w40\n")
    return folder


def read_files(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def without_parity(manifest):
    """Return `manifest` with the graphs of each dtype and without the results of verification."""
    kept = {name: fact for name, fact in manifest.items() if name != "parity_reason"}
    graphs = {dtype: facts["graphs"] for dtype, facts in manifest["variants"].items()}
    return {**kept, "variants": graphs}


def test_files_match_export_with_torch(checkpoints, tmp_path, without_torch):
    assert len(list((checkpoints / "seq2seq in shards").glob("*.safetensors"))) > 1
    commands = []
    for name, options in EXPORTS.items():
        places = {"TRITON": str(tmp_path / f"{name}-triton"), "TEXT": str(checkpoints / "text")}
        words = [places.get(word, word) for word in options]
        commands.append(
            ["export", checkpoints / name.strip(), tmp_path / f"{name}-without", *words]
        )
    for name, (error, output, warned) in zip(EXPORTS, without_torch(*commands), strict=True):
        assert error is None, (name, error)
        assert json.loads(output)["parity"] is None or "--generate" in EXPORTS[name]
        assert warned.count("parity is not checked, torch is not installed") == 1
    for name, options in EXPORTS.items():
        arguments = dict(
            zip(
                (option.removeprefix("--").replace("-", "_") for option in options[::2]),
                options[1::2],
            )
        )
        arguments.pop("triton", None)
        if "shortlist" in arguments:
            arguments["shortlist"] = checkpoints / "text"
        for key, change in {"dtype": lambda value: value.split(","), "opset": int}.items():
            if key in arguments:
                arguments[key] = change(arguments[key])
        expected = export(
            checkpoints / name.strip(), tmp_path / f"{name}-with", cases=1, **arguments
        )
        actual, others = (read_files(tmp_path / f"{name}-{how}") for how in ("without", "with"))
        manifest = json.loads(actual.pop("manifest.json"))
        assert others.pop("manifest.json")
        assert (others.pop("reference.npz", None) is None) == ("--generate" in options)
        assert actual == others, name
        expected["files"].pop("reference.npz", None)
        assert manifest["parity_reason"].startswith("torch is not installed: ")
        assert without_parity(manifest) == without_parity(expected)
        assert "parity_reason" not in expected or default_parity(expected) is None


def test_export_without_torch_can_be_verified_and_run(checkpoints, tmp_path, without_torch):
    from vanilla_transformer_export import load_checkpoint

    [[error, *_]] = without_torch(
        ["export", checkpoints / "seq2seq", tmp_path / "out", "--target", "cpu"]
    )
    assert error is None
    assert (
        verify(
            tmp_path / "out", model := load_checkpoint(checkpoints / "seq2seq"), cases=6
        ).failures
        == []
    )
    ids = np.random.default_rng(0).integers(4, 48, (2, 5))
    expected = model.generate(torch.from_numpy(ids), max_new_tokens=7)
    assert Runtime(tmp_path / "out").generate(ids, max_new_tokens=7).tolist() == expected.tolist()


def test_manifest_has_versions_of_installed_packages_only(checkpoints, tmp_path, monkeypatch):
    from importlib import metadata

    from vanilla_transformer_export.exporting import export as exporting

    def version(name):
        if name in ("torch", "transformers"):
            raise metadata.PackageNotFoundError(name)
        return metadata.version(name)

    monkeypatch.setattr(exporting, "version", version)
    manifest = export(checkpoints / "encoder", tmp_path / "out", cases=1)
    assert manifest["versions"].keys() == {"vanilla-transformer", "onnx"}


# ------------------------------------------------------------------------------ configs and weights


@pytest.mark.parametrize("architecture", HEADS)
def test_weight_shapes_match_torch_model(architecture):
    """The model classes are imported again with stand-ins; those with torch stay what they are."""
    name = vanilla_transformer.VanillaEncoderModel.__module__
    modules = {key: sys.modules[key] for key in ("torch", "transformers", name)}
    is_body = architecture in ("VanillaEncoderModel", "VanillaVisionModel", *GENERATORS)
    for fields in (variants if is_body else variants_of_head)(architecture).values():
        class_ = getattr(vanilla_transformer, model_class(architecture))
        with torch.device("meta"):
            model = class_(class_.config_class(**sizes(architecture) | fields))
        config = Config(model.config, architecture)
        assert weight_shapes(model_class(architecture), model.config) == {
            name: tuple(value.shape) for name, value in model.state_dict().items()
        }
        tied = {bare(name) for name in model.get_expanded_tied_weights_keys(all_submodels=True)}
        assert tied <= {*tied_names(config)}
    assert modules == {key: sys.modules[key] for key in modules}


def test_config_fields_match_transformers(tmp_path):
    """Some of the files have all fields, others only the fields without a default."""
    expected = {}
    for model_type, config_class in CONFIGS.items():
        name = list(config_class.auto_classes().values())[0]
        cases = [
            {},
            {"N": 3, "h": 2, "d_k": 6},
            {"num_labels": 5},
            {"id2label": {0: "a", 1: "b", 2: "c"}},
        ]
        for number, fields in enumerate(cases + ROTARY * (model_type != "vanilla-vision")):
            directory = tmp_path / f"{model_type}-{number}"
            config = config_class(**fields, architectures=[name])
            config.save_pretrained(directory)
            short = {
                **fields,
                "model_type": model_type,
                "architectures": [name],
                "dtype": "float32",
            }
            for path, content in {
                directory: None,
                tmp_path / f"{model_type}-{number}-short": short,
            }.items():
                if content is not None:
                    path.mkdir()
                    (path / "config.json").write_text(json.dumps(content))
                expected[path] = (
                    name,
                    json.loads(json.dumps(config_class.from_pretrained(path).to_dict())),
                )
    actual = run(CONFIG_FIELDS, map(str, expected))
    for (name, fields), (path, (reference, values)) in zip(actual, expected.items(), strict=True):
        assert (name, without(fields, IGNORED)) == (reference, without(values, IGNORED)), path


def without(content, names):
    return {name: value for name, value in content.items() if name not in names}


def test_generation_config_matches_transformers(checkpoints, tmp_path, without_torch):
    changes = {"missing": None, "invalid": {"eos_token_id": -1}}
    changes |= {"settings": {"max_length": 30, "num_beams": 4, "temperature": 0.5}}
    for name, settings in changes.items():
        shutil.copytree(checkpoints / "seq2seq", tmp_path / name)
        if settings is None:
            (tmp_path / name / "generation_config.json").unlink()
        else:
            edit_json(tmp_path / name / "generation_config.json", **settings)
    commands = [["export", tmp_path / name, tmp_path / f"{name}-without"] for name in changes]
    assert [error for error, *_ in without_torch(*commands)] == [None] * 3
    for name in changes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            export(tmp_path / name, tmp_path / f"{name}-with", cases=1)
        actual, expected = (
            json.loads((tmp_path / f"{name}-{how}" / "generation_config.json").read_text())
            for how in ("without", "with")
        )
        assert without(actual, IGNORED) == without(expected, IGNORED), name


# ------------------------------------------------------------------------------------------- errors


def change_weights(checkpoint, change):
    path = checkpoint / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def pickle_weights(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    torch.save({}, checkpoint / "pytorch_model.bin")


def add_infinity(weights):
    weights["model.layers.0.feed_forward.up_proj.bias"][3] = torch.inf


FAULTS = {
    "no weights": (pickle_weights, "has no weights: expected model.safetensors, found config.json"),
    "a missing tensor": (
        lambda path: change_weights(
            path, lambda weights: weights.pop("model.norm.weight", weights.pop("classifier.bias"))
        ),
        "do not fit VanillaEncoderForSequenceClassification: 1 are missing: classifier.bias",
    ),
    "one more": (
        lambda path: change_weights(path, lambda weights: weights.update(more=torch.ones(2))),
        "1 are unexpected: more",
    ),
    "another shape": (
        lambda path: change_weights(
            path, lambda weights: weights.update({"classifier.bias": torch.ones(4)})
        ),
        "1 are of another shape: classifier.bias (4,) for (3,)",
    ),
    "integers": (
        lambda path: change_weights(
            path,
            lambda weights: weights.update({"classifier.bias": torch.ones(3, dtype=torch.int64)}),
        ),
        "1 are not floating point: classifier.bias",
    ),
    "infinity": (
        lambda path: change_weights(path, add_infinity),
        "has 1 of 40 values that are NaN or infinite",
    ),
    "a file that is cut": (
        lambda path: truncate(path / "model.safetensors"),
        "is not a complete safetensors file",
    ),
    "a later option": (
        lambda path: edit_json(path / "config.json", position_embedding_type="alibi"),
        "'relative', 'learned_relative', 'disentangled', 'none'), got alibi",
    ),
    "a size that is none": (
        lambda path: edit_json(path / "config.json", hidden_size=0),
        "hidden_size must be at least 1, got 0",
    ),
    "an unknown activation": (
        lambda path: edit_json(path / "config.json", hidden_act="exp"),
        "'exp'",
    ),
    "another depth": (
        lambda path: edit_json(path / "config.json", num_hidden_layers=9),
        "num_hidden_layers is 9 in the config of",
    ),
    "another class": (
        lambda path: edit_json(path / "config.json", architectures=["VanillaEncoderForIdeas"]),
        "architecture VanillaEncoderForIdeas, expected one of VanillaEncoderModel",
    ),
}


def test_damaged_checkpoint_is_one_line_error_with_and_without_torch(
    checkpoints, tmp_path, without_torch
):
    commands = []
    for name, (damage, _) in FAULTS.items():
        damage(shutil.copytree(checkpoints / "encoder", tmp_path / name))
        commands.append(["export", tmp_path / name, tmp_path / "out" / name])
    for (name, (_, words)), [error, output, _], command in zip(
        FAULTS.items(), without_torch(*commands), commands, strict=True
    ):
        for line in (error, read_error(*command)):
            assert line and words in line and "\n" not in line, (name, line)
        assert not output
    assert not (tmp_path / "out").exists()


def test_error_names_truncated_shard(checkpoints, tmp_path, without_torch):
    checkpoint = copy_folder(checkpoints / "seq2seq in shards", tmp_path)
    shard = sorted(checkpoint.glob("*.safetensors"))[1]
    truncate(shard)
    [[error, *_]] = without_torch(["export", checkpoint, tmp_path / "out"])
    assert f"{shard} is not a complete safetensors file" in error and os.listdir(tmp_path) == [
        checkpoint.name
    ]


def test_full_disk_leaves_nothing_behind(checkpoints, tmp_path):
    command = ["export", str(checkpoints / "seq2seq"), str(tmp_path / "out")]
    options = (["--target", "cpu"], ["--dtype", "fp32,int8"], ["--generate", "greedy"])
    lines = [json.dumps([*command, *words]) for words in options]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # noqa: E731
    expected = f"File too large while {tmp_path / 'out'} was written, expected room for all of it"
    for error, *_ in run(COMMANDS, lines, preexec_fn=limit):
        assert expected in error and "\n" not in error
    assert os.listdir(tmp_path) == []


def test_error_names_extra_for_features_that_need_torch(checkpoints, tmp_path, without_torch):
    bert, gpt2 = tmp_path / "bert", tmp_path / "gpt2"
    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 30,
    }
    BertModel(BertConfig(**shape)).save_pretrained(bert)
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=30)).save_pretrained(gpt2)
    words = copy_folder(checkpoints / "encoder", tmp_path / "words")
    (words / "tokenizer.json").unlink()
    (words / "vocab.txt").write_text("a\nb\n")
    int8 = ["--target", "cpu", "--dtype", "int8", "--calibrate", checkpoints / "text"]
    errors = {
        (bert,): (
            f"{bert} is a checkpoint of another family (model_type bert, architecture BertModel), "
            "whose conversion"
        ),
        (
            gpt2,
            "--keep",
            tmp_path / "kept",
        ): f"{gpt2} is a checkpoint of another family (model_type gpt2",
        (words,): f"{words} has no tokenizer.json, and building it from the other files",
        (checkpoints / "seq2seq", *int8): "calibrate runs the model, which",
    }
    commands = [
        ["export", checkpoint, tmp_path / "out", *options] for checkpoint, *options in errors
    ]
    for words, [error, *_] in zip(errors.values(), without_torch(*commands), strict=True):
        assert error.startswith(f"vanilla-transformer: {words}")
        assert error.endswith(
            " needs torch and transformers: pip install 'vanilla-transformer[torch]'"
        )
    assert not (tmp_path / "out").exists() and not (tmp_path / "kept").exists()


def test_import_error_of_model_names_torch_extra():
    code = (
        "import sys; sys.modules['torch'] = None; from vanilla_transformer import "
        "VanillaEncoderModel"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    expected = (
        "VanillaEncoderModel needs torch and transformers: pip install 'vanilla-transformer[torch]'"
    )
    assert done.stderr.splitlines()[-1] == f"ImportError: vanilla_transformer.{expected}"
