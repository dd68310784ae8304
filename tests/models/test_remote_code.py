"""Tests of the code in saved checkpoints: Auto classes load it where the package is not
installed."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import vanilla_transformer
from vanilla_transformer import (
    VanillaDecoderConfig,
    VanillaEncoderConfig,
    VanillaSeq2SeqConfig,
    VanillaVisionConfig,
)

PACKAGE = Path(vanilla_transformer.__file__).parent
CONFIGS = dict(
    encoder=VanillaEncoderConfig, decoder=VanillaDecoderConfig, seq2seq=VanillaSeq2SeqConfig
)
CONFIGS |= dict(vision=VanillaVisionConfig)
AUTO_CLASSES = {
    variant: {"AutoConfig": CONFIGS[variant], **classes}
    for variant, classes in {**models.AUTO_CLASSES, "vision": models.VISION}.items()
}
MODELS = [
    (variant, name)
    for variant, classes in AUTO_CLASSES.items()
    for name in classes
    if name != "AutoConfig"
]
# These are also saved again, and loaded as a base model. Other heads change neither.
SAVED_AGAIN = ("AutoModel", "LM")
every_saved_model = pytest.mark.parametrize(
    "variant, auto_name, again",
    [
        pytest.param(*model, again, id="-".join([*model, again or "saved here"]))
        for again in ("", "again")
        for model in MODELS
        if not again or model[1].endswith(SAVED_AGAIN)
    ],
)

# Runs in a fresh process, in a directory with the checkpoints `variant/AutoClass`. Loads each,
# writes its results, saves some under `again/`, and loads that copy. `cards/AutoClass` are copies
# of model cards, one of which translates. Errors are written beside the checkpoint. transformers
# separates the code of checkpoints by folder name, so a checkpoint with other code is
# `variant/AutoClass-which`.
ELSEWHERE = (
    f"SAVED_AGAIN = {SAVED_AGAIN}"
    + """
import json
import sys
import traceback
from pathlib import Path


class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "vanilla_transformer":
            raise ImportError(f"{name} is not installed here")


sys.meta_path.insert(0, NotInstalled())
try:
    import vanilla_transformer
except ImportError:
    pass  # as on a machine without the package, where the checkpoint's own code must do
else:
    sys.exit("the package can be imported: what follows would prove nothing")

import torch
import transformers
from safetensors.torch import load_file, save_file


def outcome(outputs):
    if "last_hidden_state" in outputs:
        return outputs.last_hidden_state
    logits = [value for name, value in outputs.items() if name.endswith("logits")]
    return torch.cat([value.flatten(1) for value in logits], 1)


def is_saved_again(directory):
    is_card = directory.parent.name == "cards"
    return not is_card and directory.name.partition("-")[0].endswith(SAVED_AGAIN)


def examine(directory, given):
    auto_class = getattr(transformers, directory.name.partition("-")[0])
    model = auto_class.from_pretrained(directory, trust_remote_code=True)
    models = {"model": model}
    if is_saved_again(directory):
        models["body"] = transformers.AutoModel.from_pretrained(directory, trust_remote_code=True)
    with torch.no_grad():
        results = {name: outcome(item(**given)) for name, item in models.items()}
    for beams in (1, 3) if model.can_generate() else ():
        settings = dict(num_beams=beams, max_new_tokens=6, do_sample=False)
        results[f"{beams} beams"] = model.generate(given["input_ids"], **settings)
    results = {name: tensor.contiguous() for name, tensor in results.items()}
    save_file(results, directory / "results.safetensors")
    items = models | {"config": model.config}
    classes = {name: str(type(item)) for name, item in items.items()}
    # All classes from the first model of a variant; every checkpoint has the same code and names.
    is_first = directory.name.partition("-")[0] == "AutoModel" and directory.parts[0] != "again"
    for auto_name in model.config.auto_map.keys() - {"AutoConfig", "AutoModel"} if is_first else ():
        try:
            auto_class = getattr(transformers, auto_name)
            other = auto_class.from_pretrained(directory, trust_remote_code=True)
            classes[auto_name] = str(type(other))
        except Exception:
            classes[auto_name] = traceback.format_exc()
    (directory / "classes.json").write_text(json.dumps(classes))
    return model


for directory in map(Path, sys.argv[1:]):
    try:
        given = load_file(directory / "given.safetensors")
        model = examine(directory, given)
        if is_saved_again(directory):
            again = "again" / directory
            model.save_pretrained(again)
            examine(again, given)
        if (directory / "source.txt").exists():
            text = (directory / "source.txt").read_text()
            translate = transformers.pipeline("translation", directory, trust_remote_code=True)
            (directory / "translation.json").write_text(json.dumps(translate(text)))
    except Exception:
        (directory / "error.txt").write_text(traceback.format_exc())
"""
)


CARDS = {  # one of each task
    "AutoModelForCausalLM": "vanilla-decoder-tiny-shakespeare",
    "AutoModelForSequenceClassification": "vanilla-encoder-tiny-sst2",
    "AutoModelForSeq2SeqLM": "vanilla-seq2seq-tiny-multi30k-en-de",
}
SENTENCE = "A dog runs."

CHANGES = {  # together all kinds of positions and all optional parts of each variant
    "encoder": dict(
        N=2, position_embedding_type="relative", type_vocab_size=2, pooler_act="tanh",
        lm_transform_act="gelu", token_transform_act="gelu"
    ),
    "decoder": dict(
        N=2, position_embedding_type="rotary", sliding_window=3, add_cross_attention=True,
        final_norm=True
    ),
    "seq2seq": dict(
        encoder_layers=1,
        decoder_layers=2,
        linear_bias=False,
        share_encoder_decoder_embeddings=False,
    ),
    "vision": dict(N=2, image_size=[8, 13], patch_size=4, num_first_tokens=2, pooler_act="tanh"),
}  # fmt: skip


def write_older_code(directory):
    """Move the stacks back into modeling_, as in checkpoints of earlier versions."""
    layers, modeling = (
        directory / f"{part}_vanilla_transformer.py" for part in ("layers", "modeling")
    )
    below, stacks = re.split(r"\n# -+ stacks\n", layers.read_text())
    imports = re.split(r"\n# -+ ", below)[0] + "\nfrom .layers_vanilla_transformer import *\n"
    heads = re.sub(
        r"from \.layers_vanilla_transformer import \(.*?\)\n",
        "",
        modeling.read_text(),
        flags=re.DOTALL,
    )
    layers.write_text(below)
    modeling.write_text(imports + stacks + heads)
    assert (
        "class VanillaEncoderModel" in modeling.read_text()
        and "VanillaEncoderModel" not in layers.read_text()
    )


def read_code(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_text() for path in directory.rglob("*.py")
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Run `ELSEWHERE` on a checkpoint of each model class, on base models with older code and on
    cards.

    Return its directory.
    """
    root = tmp_path_factory.mktemp("elsewhere")
    torch.manual_seed(0)
    for variant, auto_name in MODELS:
        changes = dict(d_model=16, d_ff=20, h=2, d_k=6, d_v=10) | CHANGES[variant]
        changes |= dict(vocab_size=30) if variant != "vision" else {}
        model = AUTO_CLASSES[variant][auto_name](CONFIGS[variant](**changes))
        model.save_pretrained(root / variant / auto_name)
        save_file(models.inputs(model, rows=2), root / variant / auto_name / "given.safetensors")
    directories = [f"{variant}/{auto_name}" for variant, auto_name in MODELS]
    for variant in CONFIGS:
        directories.append(f"{variant}/AutoModel-before")
        shutil.copytree(root / variant / "AutoModel", root / directories[-1])
        write_older_code(root / directories[-1])
    for auto_name, name in CARDS.items():
        directories.append(f"cards/{auto_name}")
        shutil.copytree(PACKAGE.with_name("model_cards") / name, root / directories[-1])
        tokens = torch.tensor([[5, 6, 7]])
        given = {"input_ids": tokens}
        if auto_name == "AutoModelForSeq2SeqLM":
            given["decoder_input_ids"] = tokens.clone()
            (root / directories[-1] / "source.txt").write_text(SENTENCE)
        save_file(given, root / directories[-1] / "given.safetensors")
    cache_variables = dict(
        HF_HOME=str(root / "home"), HF_MODULES_CACHE=str(root / "modules"), HF_HUB_OFFLINE="1"
    )
    command = [sys.executable, "-c", ELSEWHERE, *directories]
    process = subprocess.run(
        command, cwd=root, env=os.environ | cache_variables, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return root


def load_model_and_results(root, variant, auto_name, again=""):
    """Return the saved model, its inputs, and the results of the process without the package."""
    error = root / variant / auto_name / "error.txt"
    assert not error.exists(), error.read_text()
    model = AUTO_CLASSES[variant][auto_name].from_pretrained(root / variant / auto_name)
    results = load_file(root / again / variant / auto_name / "results.safetensors")
    return model, load_file(root / variant / auto_name / "given.safetensors"), results


@every_saved_model
def test_loaded_classes_and_code_are_those_of_checkpoint(root, variant, auto_name, again):
    load_model_and_results(root, variant, auto_name)
    directory = root / again / variant / auto_name
    names = {name: item.__name__ for name, item in AUTO_CLASSES[variant].items()}
    classes = json.loads((directory / "classes.json").read_text())
    expected = dict(config="AutoConfig", model=auto_name)
    expected |= dict(body="AutoModel") if auto_name.endswith(SAVED_AGAIN) else {}
    for part, name in expected.items():
        assert classes[part].startswith("<class 'transformers_modules.") and classes[part].endswith(
            names[name] + "'>"
        )
    auto_map = json.loads((directory / "config.json").read_text())["auto_map"]
    assert {name: reference.rpartition(".")[2] for name, reference in auto_map.items()} == names
    code = {
        f"{module}_vanilla_transformer.py" for module in ("configuration", "layers", "modeling")
    }
    assert read_code(directory) == {name: (PACKAGE / name).read_text() for name in code}


@pytest.mark.parametrize("variant", CONFIGS)
def test_every_auto_class_of_variant_loads_checkpoint(root, variant):
    load_model_and_results(root, variant, "AutoModel")
    check_auto_classes(root / variant / "AutoModel", variant)


def check_auto_classes(directory, variant):
    classes = json.loads((directory / "classes.json").read_text())
    for auto_name in AUTO_CLASSES[variant].keys() - {"AutoConfig", "AutoModel"}:
        assert classes[auto_name].endswith(f".{AUTO_CLASSES[variant][auto_name].__name__}'>"), (
            classes[auto_name]
        )


@pytest.mark.parametrize("variant", CONFIGS)
def test_checkpoint_with_older_code_loads_and_keeps_its_code(root, variant):
    here, before = (root / variant / name for name in ("AutoModel", "AutoModel-before"))
    again = root / "again" / variant / "AutoModel-before"
    assert not (before / "error.txt").exists(), (before / "error.txt").read_text()
    check_auto_classes(before, variant)
    assert read_code(again) == read_code(before) != read_code(here)
    expected = load_file(here / "results.safetensors")["model"]
    for directory in (before, again):
        assert torch.equal(load_file(directory / "results.safetensors")["model"], expected)


@pytest.mark.parametrize("variant", CONFIGS)
def test_checkpoint_with_older_code_gets_package_code_when_saved(root, variant, tmp_path):
    shutil.copytree(root / variant / "AutoModel-before", tmp_path, dirs_exist_ok=True)
    transformers.AutoModel.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert read_code(tmp_path) == read_code(root / variant / "AutoModel")
    written, expected = (
        (path / "config.json").read_text() for path in (tmp_path, root / variant / "AutoModel")
    )
    assert json.loads(written) == json.loads(expected)


@every_saved_model
def test_outputs_match_installed_package(root, variant, auto_name, again):
    model, inputs, results = load_model_and_results(root, variant, auto_name, again)
    with torch.no_grad():
        expected = models.result(model(**inputs))
    torch.testing.assert_close(results["model"].view_as(expected), expected)
    if auto_name.endswith(SAVED_AGAIN):
        body = getattr(model, "model", model)
        torch.testing.assert_close(results["body"], body(**inputs).last_hidden_state)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    "variant, auto_name",
    [("decoder", "AutoModelForCausalLM"), ("seq2seq", "AutoModelForSeq2SeqLM")],
)
@pytest.mark.parametrize("again", ["", "again"], ids=["saved here", "saved again elsewhere"])
def test_generated_tokens_match_installed_package(root, variant, auto_name, again, beams):
    model, inputs, results = load_model_and_results(root, variant, auto_name, again)
    expected = model.generate(
        inputs["input_ids"], num_beams=beams, max_new_tokens=6, do_sample=False
    )
    assert results[f"{beams} beams"].tolist() == expected.tolist()


@pytest.mark.parametrize("auto_name", CARDS)
def test_card_gives_same_outputs_as_installed_package(root, auto_name):
    directory = root / "cards" / auto_name
    assert not (directory / "error.txt").exists(), (directory / "error.txt").read_text()
    model = getattr(transformers, auto_name).from_pretrained(directory)
    results = load_file(directory / "results.safetensors")
    with torch.no_grad():
        logits = model(**load_file(directory / "given.safetensors")).logits
    torch.testing.assert_close(results["model"].view_as(logits), logits)
    if auto_name == "AutoModelForSeq2SeqLM":
        translation = transformers.pipeline("translation", str(directory))(SENTENCE)
        assert json.loads((directory / "translation.json").read_text()) == translation
