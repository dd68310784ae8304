"""Every directory of model_cards/ is a Hub repository that is ready to push, and does what its card says."""

import json
import re
from pathlib import Path

import pytest
import sacrebleu
import yaml
from safetensors import safe_open
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import vanilla_transformer
from vanilla_transformer_export.build import export
from vanilla_transformer_export.text import TextRuntime

CARDS = sorted(path for path in (Path(__file__).parents[1] / "model_cards").iterdir() if path.is_dir())
PACKAGE = Path(vanilla_transformer.__file__).parent
pytestmark = pytest.mark.parametrize("card", CARDS, ids=lambda path: path.name)


def metadata(card):
    return yaml.safe_load((card / "README.md").read_text().split("---")[1])


def test_the_code_beside_the_weights_is_the_package_s(card):
    config = json.loads((card / "config.json").read_text())
    named = {reference.partition(".")[0] for reference in config["auto_map"].values()}
    assert named == {"configuration_vanilla_transformer", "modeling_vanilla_transformer"}
    modules = {f"{part}_vanilla_transformer.py" for part in ("configuration", "layers", "modeling")}
    assert {path.name for path in card.glob("*.py")} == modules
    for module in modules:
        assert (card / module).read_text() == (PACKAGE / module).read_text(), f"copy {module} from the package"


def test_tensors_are_float16_stored_once_and_load_as_float32(card):
    with safe_open(card / "model.safetensors", "pt") as file:
        assert {str(file.get_tensor(name).dtype) for name in file.keys()} == {"torch.float16"}  # noqa: SIM118
    model = AutoModelForSeq2SeqLM.from_pretrained(card)
    assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.float32"}
    assert (card / "model.safetensors").stat().st_size == pytest.approx(2 * model.num_parameters(), rel=0.02)
    assert sum(path.stat().st_size for path in card.iterdir()) < 12e6


def test_the_card_has_the_metadata_of_the_hub_and_says_the_score_it_lists(card):
    facts = metadata(card)
    assert {"language", "license", "library_name", "pipeline_tag", "datasets", "metrics", "tags"} <= facts.keys()
    assert facts["library_name"] == "transformers"
    results = facts["model-index"][0]["results"]
    text = (card / "README.md").read_text().split("---", 2)[2]
    for result in results:
        assert re.search(rf"\b{result['metrics'][0]['value']}\b", text), result


def test_both_engines_translate_the_examples_alike_and_well(card, tmp_path):
    pairs = [line.split("\t") for line in (card / "examples.tsv").read_text().splitlines()]
    sources, references = ([pair[side] for pair in pairs] for side in (0, 1))
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(card), AutoTokenizer.from_pretrained(card)
    inputs = tokenizer(sources, padding=True, return_tensors="pt")
    translations = tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True)
    export(card, tmp_path / "onnx")
    assert TextRuntime(tmp_path / "onnx").generate(sources) == translations
    # Six sentences say little, but a model that is broken in any way is far below.
    assert sacrebleu.corpus_bleu(translations, [references]).score > 25
