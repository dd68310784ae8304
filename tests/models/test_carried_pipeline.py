"""Tests of the translation pipeline code that checkpoints carry.

Transformers 5 removed this pipeline. A checkpoint has its code, so that the pipeline also works
where this package is not installed.
"""

import json
import subprocess
from pathlib import Path

import pytest
import standins
from checkpoints import edit_json, write_corpus
from hub import running
from transformers import pipeline

from vanilla_transformer import (
    TranslationPipeline,
    VanillaSeq2SeqConfig,
    VanillaSeq2SeqForConditionalGeneration,
)
from vanilla_transformer.training.averaging import average
from vanilla_transformer.training.recipe import Recipe
from vanilla_transformer.training.run import train
from vanilla_transformer_export import export

NAME, TEXT = "someone/translator", "the old dog sees a bird."
CODE = "pipelines_vanilla_transformer.py"
TRANSLATION = {
    "translation": {
        "impl": "pipelines_vanilla_transformer.TranslationPipeline",
        "pt": ["AutoModelForSeq2SeqLM"],
        "type": "text",
    }
}
CARDS = sorted((Path(__file__).parents[2] / "model_cards").glob("vanilla-seq2seq-*"))

# Print the results of several ways to load the pipeline as JSON, without the package. Arguments: a
# Hub id, a directory, and an output directory.
CODE_WITHOUT_PACKAGE = """
import json, sys
sys.modules["vanilla_transformer"] = None  # as if it were not installed
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

name, directory, out = sys.argv[1:]
text, found = "the old dog sees a bird.", {}


def say(key, make):
    try:
        translate = make()
        module = type(translate).__module__.rpartition(".")[2]
        found[key] = [translate.task, module, translate(text, max_new_tokens=5)]
    except Exception as error:
        found[key] = [type(error).__name__, str(error)]
    return locals().get("translate")


made = say("named", lambda: pipeline("translation", model=name, trust_remote_code=True))
say("inferred", lambda: pipeline(model=name, trust_remote_code=True))
say("untrusted", lambda: pipeline("translation", model=name, trust_remote_code=False))
say("pair", lambda: pipeline("translation_en_to_de", model=name, trust_remote_code=True))
made.save_pretrained(f"{out}/pipeline")
say("saved as a pipeline", lambda: pipeline(model=f"{out}/pipeline", trust_remote_code=True))
for key, source in (("id", name), ("directory", directory)):
    for auto_class in (AutoModelForSeq2SeqLM, AutoTokenizer):
        auto_class.from_pretrained(source, trust_remote_code=True).save_pretrained(f"{out}/{key}")
    say(f"saved from the {key}", lambda: pipeline(model=f"{out}/{key}", trust_remote_code=True))
print(json.dumps(found))
"""
# The same with the package, without and with trust_remote_code. Arguments: a Hub id and an output
# directory.
CODE_WITH_PACKAGE = """
import json, sys
import vanilla_transformer
from transformers import pipeline

text, found = "the old dog sees a bird.", {}
for task in ("translation", "translation_en_to_de", "text2text-generation", None):
    for trust in (None, True):
        given = {"model": sys.argv[1], "trust_remote_code": trust}
        run = pipeline(**given) if task is None else pipeline(task, **given)
        found[f"{task}, {trust}"] = [run.task, type(run).__module__, run(text, max_new_tokens=5)]
run.save_pretrained(sys.argv[2])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    standins.translator(directory)
    edit_json(directory / "config.json", custom_pipelines=TRANSLATION)
    VanillaSeq2SeqForConditionalGeneration.from_pretrained(directory).save_pretrained(directory)
    (directory / "README.md").write_text(
        "---\nlibrary_name: transformers\npipeline_tag: translation\n---\n"
    )
    return directory


@pytest.fixture(scope="module")
def expected(checkpoint):
    return pipeline("translation", model=str(checkpoint))(TEXT, max_new_tokens=5)


@pytest.mark.slow
def test_pipeline_works_without_package(checkpoint, expected, tmp_path):
    """Load from a Hub, from a directory and from copies saved from both."""
    with running() as hub:
        hub.add(NAME, checkpoint)
        process = hub.run(
            tmp_path / "home", "-c", CODE_WITHOUT_PACKAGE, NAME, str(checkpoint), str(tmp_path)
        )
    assert process.returncode == 0, process.stderr[-3000:]
    results = json.loads(process.stdout.splitlines()[-1])
    untrusted, pair = results.pop("untrusted"), results.pop("pair")
    assert results.keys() > {"named", "inferred"}
    assert results == dict.fromkeys(results, ["translation", CODE.removesuffix(".py"), expected])
    assert untrusted[0] == "ValueError" and "trust_remote_code" in untrusted[1]
    assert pair[0] == "KeyError" and "removed" in pair[1]  # as the cards say
    for folder in ("pipeline", "id", "directory"):
        assert (tmp_path / folder / CODE).read_bytes() == (checkpoint / CODE).read_bytes()
        assert (
            json.loads((tmp_path / folder / "config.json").read_text())["custom_pipelines"]
            == TRANSLATION
        )


def test_installed_package_needs_no_trust_remote_code(checkpoint, expected, tmp_path):
    with running() as hub:
        hub.add(NAME, checkpoint)
        process = hub.run(
            tmp_path / "home",
            "-c",
            CODE_WITH_PACKAGE,
            NAME,
            str(tmp_path / "saved"),
            stdin=subprocess.DEVNULL,
        )
    assert process.returncode == 0, process.stderr[-3000:]
    results = json.loads(process.stdout.splitlines()[-1])
    assert len(results) == 8
    for key, (task, module, result) in results.items():
        expected_task = key.partition(",")[0].replace("None", "translation")
        assert (task, module) == (
            expected_task,
            "vanilla_transformer.pipelines_vanilla_transformer",
        )
        assert list(result[0].values()) == list(expected[0].values())
    assert (tmp_path / "saved" / CODE).read_bytes() == (checkpoint / CODE).read_bytes()


def test_custom_pipelines_key_is_dropped_on_load_and_written_on_save(checkpoint, tmp_path):
    config = VanillaSeq2SeqConfig.from_pretrained(checkpoint)
    assert not hasattr(config, "custom_pipelines")
    assert config.to_dict()["custom_pipelines"] == TRANSLATION
    assert "_translates" not in config.to_json_string(use_diff=False)
    model = VanillaSeq2SeqForConditionalGeneration.from_pretrained(checkpoint)
    model.save_pretrained(tmp_path / "again")
    assert (
        json.loads((tmp_path / "again" / "config.json").read_text())["custom_pipelines"]
        == TRANSLATION
    )
    assert (tmp_path / "again" / CODE).read_bytes() == (checkpoint / CODE).read_bytes()
    assert type(pipeline("translation", model=str(checkpoint))) is TranslationPipeline


def test_custom_pipelines_key_is_not_added_and_foreign_value_is_kept(checkpoint, tmp_path):
    model = VanillaSeq2SeqForConditionalGeneration.from_pretrained(checkpoint)
    fields_without_key = {
        key: value for key, value in model.config.to_dict().items() if key != "custom_pipelines"
    }
    VanillaSeq2SeqConfig.from_dict(fields_without_key).save_pretrained(tmp_path)
    assert "custom_pipelines" not in json.loads((tmp_path / "config.json").read_text())
    assert not (tmp_path / CODE).exists()
    foreign_pipelines = {
        "summarization": {"impl": "theirs.Pipeline", "pt": ["AutoModelForSeq2SeqLM"]}
    }
    config = VanillaSeq2SeqConfig.from_dict(
        {**fields_without_key, "custom_pipelines": foreign_pipelines}
    )
    assert config.custom_pipelines == config.to_dict()["custom_pipelines"] == foreign_pipelines


def test_average_keeps_custom_pipelines_and_export_drops_it(checkpoint, tmp_path):
    average([checkpoint, checkpoint], tmp_path / "mean")
    assert (
        json.loads((tmp_path / "mean" / "config.json").read_text())["custom_pipelines"]
        == TRANSLATION
    )
    assert (tmp_path / "mean" / CODE).exists()
    average([checkpoint], tmp_path / "mean", force=True)
    export(checkpoint, tmp_path / "onnx", cases=1)
    assert "custom_pipelines" not in json.loads((tmp_path / "onnx" / "config.json").read_text())


def test_train_writes_custom_pipelines_for_translation(checkpoint, tmp_path):
    write_corpus(tmp_path, "train", 20, 0)
    data = {"directory": str(tmp_path), "train": ["train.en", "train.de"]}
    shape = {**standins.SHAPE, "encoder_layers": 1, "decoder_layers": 1}
    settings = {
        "max_steps": 1,
        "tokens_per_update": 128,
        "learning_rate": 1e-3,
        "save_strategy": "no",
    }
    train(Recipe("translation", data, {"vocab_size": 60}, shape, settings), tmp_path / "result")
    assert (
        json.loads((tmp_path / "result" / "config.json").read_text())["custom_pipelines"]
        == TRANSLATION
    )
    card = (tmp_path / "result" / "README.md").read_text()
    assert (
        'pipeline("translation", model=..., trust_remote_code=True)' in card
        and "translation_xx_to_yy" in card
    )
    # test_remote_code.py runs this code without the package
    assert (tmp_path / "result" / CODE).read_bytes() == (checkpoint / CODE).read_bytes()


@pytest.mark.parametrize("card", CARDS, ids=lambda path: path.name)
def test_translation_cards_have_custom_pipelines_and_document_limits(card):
    assert json.loads((card / "config.json").read_text())["custom_pipelines"] == TRANSLATION
    text = (card / "README.md").read_text()
    assert (
        'pipeline("translation", model=name, trust_remote_code=True)' in text
        and "translation_xx_to_yy" in text
    )
