"""A saved checkpoint carries its code: every Auto class loads it where the package is not installed."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from vanilla_transformer import (
    VanillaDecoderConfig,
    VanillaDecoderForCausalLM,
    VanillaDecoderModel,
    VanillaEncoderConfig,
    VanillaEncoderForMaskedLM,
    VanillaEncoderForSequenceClassification,
    VanillaEncoderModel,
    VanillaSeq2SeqConfig,
    VanillaSeq2SeqForConditionalGeneration,
    VanillaSeq2SeqModel,
)

AUTO_CLASSES = {
    "encoder": {
        "AutoConfig": VanillaEncoderConfig,
        "AutoModel": VanillaEncoderModel,
        "AutoModelForMaskedLM": VanillaEncoderForMaskedLM,
        "AutoModelForSequenceClassification": VanillaEncoderForSequenceClassification,
    },
    "decoder": {
        "AutoConfig": VanillaDecoderConfig,
        "AutoModel": VanillaDecoderModel,
        "AutoModelForCausalLM": VanillaDecoderForCausalLM,
    },
    "seq2seq": {
        "AutoConfig": VanillaSeq2SeqConfig,
        "AutoModel": VanillaSeq2SeqModel,
        "AutoModelForSeq2SeqLM": VanillaSeq2SeqForConditionalGeneration,
    },
}
MODELS = [(variant, name) for variant, classes in AUTO_CLASSES.items() for name in classes if name != "AutoConfig"]
models = pytest.mark.parametrize("variant, auto_name", MODELS)
saved = pytest.mark.parametrize("again", ["", "again"], ids=["saved here", "saved again elsewhere"])

# Runs in one fresh process, in a directory with the checkpoints `variant/AutoClass`. Loads each, keeps what it computes,
# saves it under `again/`, and loads that. What goes wrong with one is kept with it.
ELSEWHERE = """
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
    pass
else:
    sys.exit("the package can be imported: what follows would prove nothing")

import torch
import transformers
from safetensors.torch import load_file, save_file


def examine(directory, given):
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=True)
    model = getattr(transformers, directory.name).from_pretrained(directory, trust_remote_code=True)
    body = transformers.AutoModel.from_pretrained(directory, trust_remote_code=True)
    with torch.no_grad():
        results = {"model": model(**given)[0], "body": body(**given)[0]}
    for beams in (1, 3) if model.can_generate() else ():
        settings = dict(num_beams=beams, max_new_tokens=6, do_sample=False)
        results[f"{beams} beams"] = model.generate(given["input_ids"], **settings)
    save_file({name: tensor.contiguous() for name, tensor in results.items()}, directory / "results.safetensors")
    classes = {name: str(type(item)) for name, item in dict(config=config, model=model, body=body).items()}
    (directory / "classes.json").write_text(json.dumps(classes))
    return model


for directory in map(Path, sys.argv[1:]):
    try:
        given = load_file(directory.parent / "given.safetensors")
        again = "again" / directory
        examine(directory, given).save_pretrained(again)
        examine(again, given)
    except Exception:
        (directory / "error.txt").write_text(traceback.format_exc())
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The directory in which `ELSEWHERE` ran on one checkpoint of each model class."""
    root = tmp_path_factory.mktemp("elsewhere")
    for variant, classes in AUTO_CLASSES.items():
        torch.manual_seed(0)
        given = dict(input_ids=torch.randint(3, 30, (2, 6)))
        depth = dict(num_hidden_layers=2)
        if variant == "seq2seq":
            given["decoder_input_ids"] = torch.randint(3, 30, (2, 4))
            depth = dict(encoder_layers=1, decoder_layers=2)
        for auto_name, model_class in classes.items():
            if auto_name != "AutoConfig":
                config = classes["AutoConfig"](vocab_size=30, d_model=16, d_ff=20, h=2, d_k=6, d_v=10, **depth)
                model_class(config).save_pretrained(root / variant / auto_name)
        save_file(given, root / variant / "given.safetensors")
    places = dict(HF_HOME=str(root / "home"), HF_MODULES_CACHE=str(root / "modules"), HF_HUB_OFFLINE="1")
    command = [sys.executable, "-c", ELSEWHERE, *(f"{variant}/{auto_name}" for variant, auto_name in MODELS)]
    process = subprocess.run(command, cwd=root, env=os.environ | places, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    return root


def here_and_elsewhere(root, variant, auto_name, again=""):
    """The model as it was saved, its inputs, and what a process without the package made of them."""
    error = root / variant / auto_name / "error.txt"
    assert not error.exists(), error.read_text()
    model = AUTO_CLASSES[variant][auto_name].from_pretrained(root / variant / auto_name)
    results = load_file(root / again / variant / auto_name / "results.safetensors")
    return model, load_file(root / variant / "given.safetensors"), results


@models
@saved
def test_the_classes_are_those_of_the_checkpoint(root, variant, auto_name, again):
    here_and_elsewhere(root, variant, auto_name)
    directory = root / again / variant / auto_name
    names = {name: item.__name__ for name, item in AUTO_CLASSES[variant].items()}
    classes = json.loads((directory / "classes.json").read_text())
    for part, name in dict(config="AutoConfig", model=auto_name, body="AutoModel").items():
        assert classes[part].startswith("<class 'transformers_modules.") and classes[part].endswith(names[name] + "'>")
    auto_map = json.loads((directory / "config.json").read_text())["auto_map"]
    assert {name: reference.rpartition(".")[2] for name, reference in auto_map.items()} == names
    code = {path.name for path in directory.rglob("*.py")}
    assert code == {"configuration_vanilla_transformer.py", "modeling_vanilla_transformer.py"}


@models
@saved
def test_outputs_are_the_same(root, variant, auto_name, again):
    model, given, results = here_and_elsewhere(root, variant, auto_name, again)
    with torch.no_grad():
        expected, body = model(**given)[0], getattr(model, "model", model)(**given)[0]
    torch.testing.assert_close(results["model"], expected)
    torch.testing.assert_close(results["body"], body)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("variant, auto_name", [("decoder", "AutoModelForCausalLM"), ("seq2seq", "AutoModelForSeq2SeqLM")])
@saved
def test_generated_tokens_are_the_same(root, variant, auto_name, again, beams):
    model, given, results = here_and_elsewhere(root, variant, auto_name, again)
    expected = model.generate(given["input_ids"], num_beams=beams, max_new_tokens=6, do_sample=False)
    assert results[f"{beams} beams"].tolist() == expected.tolist()
