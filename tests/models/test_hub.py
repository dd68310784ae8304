"""Tests with a local Hub over HTTP.

Pushed models load again unchanged, and commands accept a Hub id in place of a directory.
"""

import filecmp
import json
import shutil

import pytest
import torch
from checkpoints import OPINIONS, write_corpus
from command_line import main
from hub import running
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Normalize,
    Pooling,
    Transformer,
)
from standins import SHAPE, classifier, translator
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from vanilla_transformer import VanillaSeq2SeqForConditionalGeneration

pytestmark = pytest.mark.slow  # a minute, mostly for the pushed model

# Call the command for each line of JSON, in one process. For each print a line with the exit code
# and the output.
CALLS = """
import contextlib, io, json, sys
from vanilla_transformer_export.cli.main import main

for line in sys.stdin:
    out, code = io.StringIO(), 0
    sys.argv = ["vanilla-transformer"]
    with contextlib.redirect_stdout(out):
        try:
            main(json.loads(line))
        except SystemExit as stop:
            code = stop.code
    print(json.dumps({"code": code, "out": out.getvalue()}), flush=True)
"""

TRANSLATOR, CLASSIFIER, BERT, PICKLED = (
    "someone/translator",
    "someone/classifier",
    "someone/bert",
    "someone/pickled",
)
CONVERTED, EMBEDDER = "someone/converted", "someone/embedder"
# Commands that only print, from the folder of sources and the folder of data.
PRINTED = {
    "info": lambda source, data: ["info", source / TRANSLATOR, "--json"],
    "evaluate": lambda source, data: [
        "evaluate",
        source / CLASSIFIER,
        "--text",
        data / "texts",
        "--labels",
        data / "labels",
    ],
    "verify": lambda source, data: ["verify", data / "export", source / TRANSLATOR, "--cases", 3],
    "dry run": lambda source, data: ["convert", source / BERT, data / "nowhere", "--dry-run"],
}
# Commands that write, from the folder of sources and the output.
WRITTEN = {
    "export": lambda source, out: ["export", source / TRANSLATOR, out],
    "shortlist": lambda source, out: [
        "export",
        source / TRANSLATOR,
        out,
        "--shortlist",
        out.parents[1] / "train.de",
    ],
    "convert": lambda source, out: ["convert", source / BERT, out],
    "convert modules": lambda source, out: ["convert", source / EMBEDDER, out],
    "convert pickles": lambda source, out: ["convert", source / PICKLED, out],
    "convert back": lambda source, out: ["convert", source / CONVERTED, out, "--to", "bert"],
    "average": lambda source, out: [
        "average",
        source / CLASSIFIER,
        source / CLASSIFIER,
        "--output",
        out,
    ],
    "attention": lambda source, out: [
        "attention",
        source / CLASSIFIER,
        "the film wins",
        "--output",
        out / "maps.png",
    ],
    "train": lambda source, out: [
        "train",
        out.parents[1] / "recipe.toml",
        "--output",
        out,
        *training_overrides(source),
    ],
}


class Ids:
    """A stand-in for the folder of repositories: joining a name returns the Hub id."""

    def __truediv__(self, name):
        return name


def training_overrides(source):
    keys = {"model.path": str(source / CLASSIFIER), "tokenizer.path": str(source / CLASSIFIER)}
    keys["training.teachers"] = [str(source / CLASSIFIER)]
    return [part for key, value in keys.items() for part in ("--set", f"{key}={json.dumps(value)}")]


def save_bert(directory, tokenizer_directory):
    torch.manual_seed(0)
    config = BertConfig(vocab_size=15, num_hidden_layers=1, max_position_embeddings=32, **SHAPE)
    BertForMaskedLM(config).save_pretrained(directory)
    AutoTokenizer.from_pretrained(tokenizer_directory).save_pretrained(directory)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with the repositories and with the texts that commands read."""
    root = tmp_path_factory.mktemp("data")
    torch.manual_seed(0)
    translator(root / TRANSLATOR), classifier(root / CLASSIFIER)
    save_bert(root / BERT, root / CLASSIFIER), save_bert(root / PICKLED, root / CLASSIFIER)
    torch.save(
        load_file(root / PICKLED / "model.safetensors"), root / PICKLED / "pytorch_model.bin"
    )
    shutil.copy(root / PICKLED / "pytorch_model.bin", root / BERT)
    (root / PICKLED / "model.safetensors").unlink()
    (root / TRANSLATOR / "run" / "checkpoint-2").mkdir(parents=True)
    shutil.copy(root / TRANSLATOR / "model.safetensors", root / TRANSLATOR / "run" / "checkpoint-2")
    labels, texts = zip(*(line.split(" ", 1) for line in OPINIONS))
    (root / "labels").write_text("\n".join(labels) + "\n")
    (root / "texts").write_text("\n".join(texts) + "\n")
    (root / "train.txt").write_text("\n".join(OPINIONS) + "\n")
    write_corpus(root, "train", 20, 0)
    (root / "recipe.toml").write_text(
        f'task = "sequence-classification"\n[data]\ndirectory = "{root}"\ntrain = "train.txt"\n'
        "[training]\nmax_steps = 2\ntokens_per_update = 128\nlearning_rate = 1e-3\nsave_strategy "
        '= "no"\n'
    )
    main(["convert", str(root / BERT), str(root / CONVERTED)])
    modules = [
        Transformer(str(root / BERT)),
        Pooling(SHAPE["hidden_size"]),
        Dense(SHAPE["hidden_size"], 4),
        Normalize(),
    ]
    SentenceTransformer(modules=modules, device="cpu").save(str(root / EMBEDDER))
    for name, size in {"sparse_linear": 1, "colbert_linear": 4}.items():  # as of BGE-M3
        head = torch.nn.Linear(SHAPE["hidden_size"], size)
        torch.save(head.state_dict(), root / EMBEDDER / f"{name}.pt")
    main(["export", str(root / TRANSLATOR), str(root / "export")])
    return root


@pytest.fixture(scope="module")
def hub(data):
    with running() as hub:
        for name in (TRANSLATOR, CLASSIFIER, BERT, PICKLED, CONVERTED, EMBEDDER):
            hub.add(name, data / name)
        yield hub


@pytest.fixture(scope="module")
def results(hub, data, tmp_path_factory):
    """Results of all commands run with Hub ids, by name."""
    calls = [make(Ids(), data) for make in PRINTED.values()]
    calls += [make(Ids(), data / "ids" / name) for name, make in WRITTEN.items()]
    lines = "".join(json.dumps([str(part) for part in call]) + "\n" for call in calls)
    process = hub.run(tmp_path_factory.mktemp("home"), "-c", CALLS, input=lines)
    assert process.returncode == 0, process.stderr[-3000:]
    result = [json.loads(line) for line in process.stdout.splitlines()]
    return dict(zip([*PRINTED, *WRITTEN], result, strict=True))


@pytest.mark.parametrize("name", PRINTED)
def test_command_prints_the_same_for_hub_id_and_directory(name, results, data, capsys):
    assert results[name]["code"] == 0, results[name]
    main([str(part) for part in PRINTED[name](data, data)])
    expected = capsys.readouterr().out
    if name == "dry run":
        assert len(expected.splitlines()) > 10
    assert results[name]["out"] == expected


@pytest.mark.parametrize("name", WRITTEN)
def test_command_writes_the_same_for_hub_id_and_directory(name, results, data):
    assert results[name]["code"] == 0, results[name]
    actual, expected = data / "ids" / name, data / "directories" / name
    main([str(part) for part in WRITTEN[name](data, expected)])
    files = sorted(
        path.relative_to(expected).as_posix() for path in expected.rglob("*") if path.is_file()
    )
    assert files == sorted(
        path.relative_to(actual).as_posix() for path in actual.rglob("*") if path.is_file()
    )
    assert ("tokenizer.json" in files) == (name != "attention")
    for weights in ("2_Dense/model.safetensors", "colbert_linear.safetensors"):
        assert (weights in files) == (name == "convert modules")
    # These files contain the source of the model, or times.
    varying_files = (
        {"training.json", "curves.png"} if name == "train" else {"tokenizer_config.json"}
    )
    assert filecmp.cmpfiles(
        actual, expected, set(files) - varying_files - {"README.md"}, shallow=False
    )[1:] == ([], [])
    if name != "attention":
        actual_config, expected_config = (
            json.loads((path / "tokenizer_config.json").read_text()) for path in (actual, expected)
        )
        offline = {"local_files_only"}  # depends on the process that wrote the file
        assert {key: actual_config[key] for key in actual_config.keys() - offline} == {
            key: expected_config[key] for key in expected_config.keys() - offline
        }


def test_export_of_hub_id_generates_text_of_model(results, data, capsys):
    assert results["export"]["code"] == 0
    text = "the old dog sees a bird."
    # an untrained model repeats its start token
    settings = dict(max_new_tokens=5, no_repeat_ngram_size=1, suppress_tokens=[0, 1, 2, 3])
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    main(["generate", str(data / "ids" / "export"), text, *flags])
    model = VanillaSeq2SeqForConditionalGeneration.from_pretrained(data / TRANSLATOR)
    tokenizer = AutoTokenizer.from_pretrained(data / TRANSLATOR)
    ids = model.generate(**tokenizer(text, return_tensors="pt"), **settings)
    expected = tokenizer.decode(ids[0], skip_special_tokens=True)
    assert expected and capsys.readouterr().out == f"{expected}\n"


def test_only_required_files_are_downloaded(results, hub):
    downloads = [
        line.partition("/resolve/")[2].split("/", 1)[1]
        for line in hub.requests
        if line.startswith("GET /someone")
    ]
    pickles = [
        line
        for line in hub.requests
        if line.startswith("HEAD") and line.endswith("pytorch_model.bin")
    ]
    assert "tokenizer.json" in downloads
    assert {path for path in downloads if "/" in path} == {
        f"{name}/config.json" for name in ("1_Pooling", "2_Dense", "3_Normalize")
    }
    assert not [path for path in downloads if path.endswith(".py")]
    assert pickles and all(f"/{PICKLED}/" in line for line in pickles)


PUSH_BETWEEN = """
import sys
from huggingface_hub import upload_file
from vanilla_transformer.source import Source

source = Source.open(sys.argv[1])
upload_file(path_or_fileobj=b"new", path_in_repo="vocab.txt", repo_id=sys.argv[1])
print(source.download().joinpath("vocab.txt").read_text())
"""


@pytest.mark.slow
def test_files_are_of_the_commit_that_was_opened(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "bert"}')
    (model / "vocab.txt").write_text("old")
    with running() as hub:
        hub.add("someone/moving", model)
        process = hub.run(tmp_path, "-c", PUSH_BETWEEN, "someone/moving")
        assert (process.stdout, hub.files("someone/moving")["vocab.txt"]) == ("old\n", b"new")
        resolved = [line for line in hub.requests if line.startswith("GET /api/models/someone")]
        assert len([line for line in resolved if "/revision/main" in line]) == 1


# ---------------------------------------------------------------------------------- without the Hub


def command(hub, home, *arguments, **changes):
    settings = {"env": {**hub.environment(home), **changes}}
    return hub.run(home, "-m", "vanilla_transformer_export", *map(str, arguments), **settings)


@pytest.mark.slow
def test_offline_export_is_rejected_until_cache_has_tokenizer(hub, tmp_path):
    code = (
        f"import vanilla_transformer, transformers; "
        f"transformers.AutoModelForSeq2SeqLM.from_pretrained({TRANSLATOR!r})"
    )
    assert hub.run(tmp_path, "-c", code).returncode == 0
    offline = command(hub, tmp_path, "export", TRANSLATOR, tmp_path / "out", HF_HUB_OFFLINE="1")
    expected = (
        f"the cache has no tokenizer of {TRANSLATOR}, and cannot say whether the Hub has one: run "
        f"`hf download {TRANSLATOR}`"
    )
    assert offline.returncode == 1 and f"vanilla-transformer: {expected}" in offline.stderr
    assert not (tmp_path / "out").exists()
    # an export with the Hub fills the cache
    assert command(hub, tmp_path, "export", TRANSLATOR, tmp_path / "out").returncode == 0
    again = command(hub, tmp_path, "export", TRANSLATOR, tmp_path / "again", HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert filecmp.cmp(
        tmp_path / "out" / "tokenizer.json", tmp_path / "again" / "tokenizer.json", shallow=False
    )


@pytest.mark.slow
def test_missing_or_partly_cached_repository_is_reported_in_one_line(hub, tmp_path):
    for changes, reason in (
        ({}, "the Hub has no repository of this name, or none that this login may read"),
        ({"HF_HUB_OFFLINE": "1"}, "it is not in the cache and the Hub cannot be reached"),
    ):
        process = command(hub, tmp_path, "info", "someone/nothing", **changes)
        expected = (
            "vanilla-transformer: someone/nothing is neither a checkpoint directory nor on the "
            f"Hub: {reason}"
        )
        assert (process.returncode, process.stderr.splitlines()[-1]) == (1, expected)
    assert command(hub, tmp_path, "info", TRANSLATOR).returncode == 0  # info reads only the config
    process = command(hub, tmp_path, "export", TRANSLATOR, tmp_path / "out", HF_HUB_OFFLINE="1")
    assert (
        "the cache has only a part of it and the Hub cannot be reached"
        in process.stderr.splitlines()[-1]
    )


# ------------------------------------------------------------------------------------ push and pull

PUSH = """
import sys
import torch
from transformers import AutoTokenizer
from vanilla_transformer import VanillaSeq2SeqForConditionalGeneration

model = VanillaSeq2SeqForConditionalGeneration.from_pretrained(sys.argv[1])
AutoTokenizer.from_pretrained(sys.argv[1]).push_to_hub(sys.argv[2])
model.push_to_hub(sys.argv[2])
with torch.no_grad():
    model.lm_head.bias.add_(1)
model.push_to_hub(sys.argv[2], revision="v2")
"""
PULL = """
import sys
sys.modules["vanilla_transformer"] = None  # as if it were not installed
from safetensors.torch import save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

for revision in ("main", "v2"):
    options = {"revision": revision, "trust_remote_code": True}
    model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], **options)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    save_file({"bias": model.lm_head.bias.detach()}, f"{sys.argv[2]}/{revision}.safetensors")
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
print(tokenizer("the old dog sees a bird.")["input_ids"])
"""


@pytest.mark.slow
def test_pushed_revisions_load_without_package(hub, data, tmp_path):
    process = hub.run(tmp_path, "-c", PUSH, str(data / TRANSLATOR), "someone/pushed")
    assert process.returncode == 0, process.stderr[-3000:]
    files = hub.files("someone/pushed")
    code = {f"{part}_vanilla_transformer.py" for part in ("configuration", "layers", "modeling")}
    assert files.keys() >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "README.md",
        *code,
    }
    assert (
        json.loads(files["config.json"])["auto_map"]
        == json.loads((data / TRANSLATOR / "config.json").read_text())["auto_map"]
    )
    process = hub.run(tmp_path, "-c", PULL, "someone/pushed", str(tmp_path))
    assert process.returncode == 0, process.stderr[-3000:]
    model = VanillaSeq2SeqForConditionalGeneration.from_pretrained(data / TRANSLATOR)
    for revision, added in (("main", 0), ("v2", 1)):
        torch.testing.assert_close(
            load_file(tmp_path / f"{revision}.safetensors")["bias"], model.lm_head.bias.data + added
        )
    ids = AutoTokenizer.from_pretrained(data / TRANSLATOR)("the old dog sees a bird.")["input_ids"]
    assert process.stdout.strip() == str(ids)
