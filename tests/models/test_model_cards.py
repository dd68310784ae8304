"""Tests of model_cards/: every model behaves as its card says.

`make cards` turns the cards into repositories for the Hub.
"""

import filecmp
import functools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import sacrebleu
import torch
import transformers
import yaml
from safetensors import safe_open
from scipy.stats import binomtest
from transformers import AutoTokenizer

import vanilla_transformer
from vanilla_transformer_export import TextRuntime, evaluate, export

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "model_cards"
CARDS = sorted(path for path in FOLDER.iterdir() if path.is_dir())
AUTO = {
    "translation": transformers.AutoModelForSeq2SeqLM,
    "text-generation": transformers.AutoModelForCausalLM,
    "text-classification": transformers.AutoModelForSequenceClassification,
}
PACKAGE = Path(vanilla_transformer.__file__).parent


def metadata(card):
    """Return the metadata of the card, with numbers as strings."""
    return yaml.load((card / "README.md").read_text().split("---")[1], yaml.BaseLoader)


def task(card):
    return metadata(card)["pipeline_tag"]


def cards(*tasks, slow=()):
    """Parametrize a test by the cards of `tasks`, or all.

    Cards whose name ends with one of `slow` are slow, because another card has their task.
    """
    params = [card for card in CARDS if not tasks or task(card) in tasks]
    params = [
        pytest.param(card, marks=[pytest.mark.slow] * card.name.endswith(tuple(slow)))
        for card in params
    ]
    return pytest.mark.parametrize("card", params, ids=lambda path: path.name)


@cards()
def test_tokenizer_config_has_transformers_4_class_and_model_max_length(card):
    config, tokenizer = (
        json.loads((card / f"{name}config.json").read_text()) for name in ("", "tokenizer_")
    )
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    max_length = (
        config["max_position_embeddings"]
        if config["position_embedding_type"] == "learned"
        else None
    )
    assert tokenizer["model_max_length"] == (max_length or int(1e30))
    if task(card) != "text-classification":
        generation = json.loads((card / "generation_config.json").read_text())
        assert generation["use_cache"] is True and generation.get("max_length") == max_length


@cards("text-generation", slow=["gpu-shape"])
def test_default_pipeline_stops_at_last_position(card):
    max_length = json.loads((card / "config.json").read_text())["max_position_embeddings"]
    [result] = transformers.pipeline("text-generation", str(card))("ROMEO:", do_sample=False)
    assert len(result["generated_text"]) == max_length


def load(card):
    return AUTO[task(card)].from_pretrained(card)


@cards()
def test_card_folder_has_exactly_the_expected_files(card):
    names = {
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    }
    generation = set() if task(card) == "text-classification" else {"generation_config.json"}
    assert {path.name for path in card.iterdir()} == {
        *names,
        "curves.png",
        "examples.tsv",
        *generation,
        *code_names(card),
    }


def code_names(card):
    """Return the names of the modules that the config of `card` names, and of what they import."""
    config = json.loads((card / "config.json").read_text())
    references = [
        *config["auto_map"].values(),
        *(entry["impl"] for entry in config.get("custom_pipelines", {}).values()),
    ]
    modules = {reference.partition(".")[0] for reference in references}
    return {f"{module}.py" for module in {*modules, "layers_vanilla_transformer"}}


@cards()
def test_code_beside_card_is_link_to_package(card):
    for name in code_names(card):
        assert (card / name).is_symlink() and (card / name).samefile(PACKAGE / name)


def test_make_cards_writes_repositories_of_plain_files(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for folder in (FOLDER, PACKAGE):
        (tmp_path / folder.name).symlink_to(folder)
    subprocess.run(["make", "cards"], cwd=tmp_path, check=True, capture_output=True)
    for card in FOLDER.iterdir():
        repository = tmp_path / "build/cards" / card.name
        assert not any(path.is_symlink() for path in repository.iterdir())
        assert not filecmp.cmpfiles(card, repository, [path.name for path in card.iterdir()])[1]


@cards()
def test_tensors_are_float16_stored_once_and_load_as_float32(card):
    with safe_open(card / "model.safetensors", "pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    assert {str(tensor.dtype) for tensor in tensors} == {"torch.float16"}
    model = load(card)
    assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.float32"}
    assert (card / "model.safetensors").stat().st_size == pytest.approx(
        2 * model.num_parameters(), rel=0.02
    )
    assert (
        sum(path.stat().st_size for path in card.iterdir() if path.name != "model.safetensors")
        < 1e6
    )


def test_all_cards_together_stay_below_40_mb():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 40e6


@cards()
def test_card_has_hub_metadata_and_text_states_each_score(card):
    facts = metadata(card)
    assert {
        "language",
        "license",
        "library_name",
        "pipeline_tag",
        "datasets",
        "metrics",
        "tags",
    } <= facts.keys()
    assert facts["library_name"] == "transformers"
    results = facts["model-index"][0]["results"]
    text = (card / "README.md").read_text().split("---", 2)[2]
    for result in results:
        assert re.search(rf"\b{re.escape(result['metrics'][0]['value'])}\b", text), result


@cards()
def test_each_score_has_seed_and_confidence_interval(card):
    text = " ".join((card / "README.md").read_text().split("---", 2)[2].split())
    report = json.loads((card / "training.json").read_text())
    for result in metadata(card)["model-index"][0]["results"]:
        [metric] = result["metrics"]
        match = re.search(r"95% interval ([\d.]+) to ([\d.]+), .*\bseed \(?(\d)\b", metric["name"])
        low, high, seed = map(float, match.groups())
        assert low < float(metric["value"]) < high and seed == report["recipe"]["training"]["seed"]
        assert f"{match[1]} to {match[2]}" in text
        if metric["type"] == "accuracy":  # benchmarks/scores.py computes the others
            count = round(
                report["metrics"]["validation_samples_per_second"]
                * report["metrics"]["validation_runtime"]
            )
            right = round(report["metrics"]["validation_accuracy"] * count)
            wilson = binomtest(right, count).proportion_ci(method="wilson")
            assert (low, high) == pytest.approx((100 * wilson.low, 100 * wilson.high), abs=0.005)


def read_out_of_domain_examples(card):
    """Return the texts in "Outside its domain" of a card, and the answers stated there."""
    section = (
        (card / "README.md").read_text().split("\n## Outside its domain\n")[1].split("\n## ")[0]
    )
    result = re.findall(r"^\| `([^`]+)` \| `([^`]*)` \|$", section, re.MULTILINE)
    texts, answers = map(list, zip(*result, strict=True))
    assert (
        len(texts) >= 3
        and any(text.isupper() for text in texts)
        and any(not text.isascii() for text in texts)
    )
    return texts, answers


def read_examples(card):
    """Return the rows of the card's examples.tsv."""
    return [line.split("\t") for line in (card / "examples.tsv").read_text().splitlines()]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A function: card -> directory of its export."""
    root = tmp_path_factory.mktemp("exports")

    @functools.cache
    def make(card):
        export(card, root / card.name, cases=2)
        return root / card.name

    return make


def generate_with_torch_and_export(card, texts, directory):
    """Return the texts that torch generates, after checking that the export generates the same."""
    model, tokenizer = load(card), AutoTokenizer.from_pretrained(card)
    is_decoder = not model.config.is_encoder_decoder
    # a decoder trained on one long text generates no end token
    options = {"max_new_tokens": 40} if is_decoder else {}
    inputs = tokenizer(
        texts,
        padding=True,
        padding_side="left" if is_decoder else "right",
        return_tensors="pt",
    )
    start = inputs["input_ids"].shape[1] if is_decoder else 0
    result = tokenizer.batch_decode(
        model.generate(**inputs, **options)[:, start:], skip_special_tokens=True
    )
    assert TextRuntime(directory).generate(texts, **options) == result
    return result


# Six examples are a rough check, but a broken model is far below these bounds.


@cards("translation", slow=["en-fr"])
def test_torch_and_export_translations_are_equal_and_good(card, exported):
    sources, references = zip(*read_examples(card), strict=True)
    others, answers = read_out_of_domain_examples(card)
    outputs = generate_with_torch_and_export(card, [*sources, *others], exported(card))
    assert outputs[len(sources) :] == answers
    outputs = outputs[: len(sources)]
    assert sacrebleu.corpus_bleu(outputs, [references]).score > 25
    from_windows = ["\ufeff" + source.replace(" ", "\u00a0 ") + "\r\n" for source in sources]
    assert TextRuntime(exported(card)).generate(from_windows) == outputs


NAMES = {
    "vanilla-encoder-tiny-sst2": ["negative", "positive"],
    "vanilla-encoder-tiny-trec": ["DESC", "ENTY", "ABBR", "HUM", "LOC", "NUM"],
}


@cards("text-classification")
def test_pipeline_returns_task_labels_and_classifies_most_examples_right(card):
    config, names = json.loads((card / "config.json").read_text()), NAMES[card.name]
    assert config["id2label"] == {str(index): name for index, name in enumerate(names)}
    assert config["label2id"] == {name: index for index, name in enumerate(names)}
    classify, examples = (
        transformers.pipeline("text-classification", str(card)),
        read_examples(card),
    )
    result = [classify(text)[0]["label"] for _, text in examples]
    assert (
        sum(
            label == names[int(number)] for label, (number, _) in zip(result, examples, strict=True)
        )
        >= 5
    )


@cards("text-classification")
def test_classifier_reads_text_pairs(card):
    classify = transformers.pipeline("text-classification", str(card))
    assert "token_type_ids" not in classify.tokenizer("one", "other")
    [first_scores], [second_scores] = (
        classify([{"text": "A film .", "text_pair": text}], top_k=None)
        for text in ("Bad .", "What a joy !")
    )
    assert {result["label"] for result in first_scores} == set(
        NAMES[card.name]
    ) and first_scores != second_scores


@cards("text-classification", slow=["trec"])
def test_torch_and_export_accuracies_are_equal_and_good(card, exported, tmp_path):
    labels, texts = zip(*read_examples(card), strict=True)
    (tmp_path / "labels").write_text("\n".join(labels) + "\n")
    (tmp_path / "texts").write_text("\n".join(texts) + "\n")
    (tmp_path / "names").write_text(
        "\n".join(NAMES[card.name][int(label)] for label in labels) + "\n"
    )
    result = [
        evaluate(path, text=tmp_path / "texts", labels=tmp_path / file)["accuracy"]
        for path in (card, exported(card))
        for file in ("labels", "names")
    ]
    assert len({*result}) == 1 and result[0] >= 5 / 6 - 1e-3


@cards("text-generation", slow=["gpu-shape"])
@torch.no_grad()
def test_prompt_is_only_its_characters_in_tokenizer_pipeline_and_runtime(card, exported):
    model, tokenizer = load(card), AutoTokenizer.from_pretrained(card)
    context, rest = "ROMEO:", " I am"
    ids = [tokenizer.convert_tokens_to_ids(character) for character in context + rest]
    assert (
        tokenizer(context + rest)["input_ids"]
        == ids
        == tokenizer(context)["input_ids"] + tokenizer(rest)["input_ids"]
    )
    greedy = torch.tensor([ids[: len(context)]])
    for _ in range(5):
        greedy = torch.cat([greedy, model(greedy).logits[:, -1:].argmax(-1)], dim=1)
    expected = tokenizer.decode(greedy[0])
    actual = transformers.pipeline("text-generation", str(card))(
        context, do_sample=False, max_new_tokens=5
    )
    assert actual == [{"generated_text": expected}]
    assert [
        context + text for text in TextRuntime(exported(card)).generate([context], max_new_tokens=5)
    ] == [expected]


@cards("text-classification")
def test_out_of_domain_labels_match_card(card):
    texts, answers = read_out_of_domain_examples(card)
    result = transformers.pipeline("text-classification", str(card))(texts)
    assert [f"{entry['label']}, {entry['score']:.2f}" for entry in result] == answers


@cards("text-generation", slow=["gpu-shape"])
def test_torch_and_export_continuations_are_equal_with_low_perplexity(card, exported, tmp_path):
    texts = [text.replace("\\n", "\n") for [text] in read_examples(card)]
    others, answers = read_out_of_domain_examples(card)
    result = generate_with_torch_and_export(card, [*texts, *others], exported(card))
    assert all(result) and [text.replace("\n", "\\n") for text in result[len(texts) :]] == answers
    (tmp_path / "texts").write_text("\n".join(texts))
    for path in (card, exported(card)):
        # per character; a uniform distribution has 65
        assert evaluate(path, text=tmp_path / "texts")["perplexity"] < 9
