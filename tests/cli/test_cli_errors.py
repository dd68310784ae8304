"""Tests of command errors, which are one line without a traceback."""

import json
import shutil

import pytest
import torch
from checkpoints import copy_folder, with_tokenizer
from command_line import command, main, read_error
from messages import check_message
from safetensors.torch import load_file, save_file
from training_command import training


@pytest.mark.parametrize("text", ["hidden_size", ""])
def test_set_without_key_and_value_is_usage_error(text, corpus, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*training(corpus, text), "--output", str(tmp_path / "model")])
    assert caught.value.code == 2
    assert "expected key=value" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, seen, expected",
    [
        (["info", ""], "''", ()),
        (["export", "a", ""], "''", ()),
        (["average", "", "--output", "a"], "''", ()),
        (["attention", "a", "\udce9", "--output", "a.png"], "\\xe9", ()),
        (["verify", "a", "b", "--seed", "-1"], -1, (0, "2**63")),
        (["verify", "a", "b", "--cases", "9" * 30], "9" * 30, "2**63"),
        (["verify", "a", "b", "--cases", "9" * 5000], "9" * 40, 1),
        (["export", "a", "b", "--target", "tpu"], "tpu", ()),
        (["export", "a", "b", "--dtype", "fp8"], "fp8", ("fp32", "int8")),
        (["export", "a", "b", "--dtype", "int8,"], "''", ("fp32", "int8")),
        (["export", "a", "b", "--dtype", "int4"], ("portable", "int4"), ()),
    ],
    ids=lambda value: (
        " ".join(value)[:40].encode("ascii", "replace").decode() if isinstance(value, list) else ""
    ),
)
def test_invalid_argument_values_are_usage_errors(
    arguments, seen, expected, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    check_message(capsys.readouterr().err.splitlines()[-1], seen=seen, expected=expected)
    assert list(tmp_path.iterdir()) == []


def test_command_error_is_one_line_on_stderr_and_exit_status_1(tmp_path):
    done = command("predict", tmp_path / "nowhere", "a dog")
    assert (done.returncode, done.stdout) == (1, "")
    [message] = done.stderr.splitlines()
    assert message.startswith("vanilla-transformer: ")
    check_message(message, seen=tmp_path / "nowhere")
    # a verb that imports torch, in this process
    assert str(tmp_path / "nowhere") in read_error("export", tmp_path / "nowhere", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_path_without_export_is_an_error(tmp_path, exported):
    assert "manifest.json" in read_error("generate", tmp_path, "text")
    assert "does not exist" in read_error("generate", tmp_path / "nowhere", "text")
    assert "does not exist" in read_error(
        "verify", tmp_path / "nowhere", exported("encoder").checkpoint
    )


def test_existing_output_is_an_error_without_force(exported, tmp_path, corpus):
    (tmp_path / "kept").touch()
    assert "--force" in read_error("export", exported("encoder").checkpoint, tmp_path)
    assert "--force" in read_error(*training(corpus), "--output", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_checkpoint_with_wrong_tensor_shape_is_an_error(exported, tmp_path):
    checkpoint = shutil.copytree(exported("encoder").checkpoint, tmp_path / "checkpoint")
    weights = load_file(checkpoint / "model.safetensors")
    weights["embeddings.embed_tokens.weight"] = torch.zeros(5, 32)
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    assert "embeddings.embed_tokens.weight" in read_error("export", checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "settings, seen, expected",
    [
        (["model.hidden_size=wide"], "hidden_size", ()),
        (["model.dropout=1.5"], 1.5, (0, 1)),
        (["model.hidden_size=34", "model.num_attention_heads=4"], ("hidden_size", 34), ()),
        (["tokenizer.vocab_size=10"], "tokenizer.vocab_size", 10),
        (["model.hidden_act=rellu"], "rellu", ()),
        (["model.dropuot=0.3"], "dropuot", "dropout"),
        (["training.learning_rat=1"], "learning_rat", "learning_rate"),
        (["modle.dropout=0.3"], "modle", "model"),
        (["task=translating"], "translating", "translation"),
        (["training.tokens_per_batch=300"], ("tokens_per_update", 4096), 300),
        (
            ["training.average_last=3", "training.load_best_model_at_end=true"],
            ("average_last", 3),
            (),
        ),
        (
            ["training.average_last=3", "training.save_strategy=no"],
            ("average_last", 3, "save_strategy", "no"),
            (),
        ),
        (["training.tokens_per_update=8"], (), 8),
    ],
)
def test_invalid_recipe_setting_is_an_error(corpus, tmp_path, settings, seen, expected):
    settings = ["tokenizer.vocab_size=60", *settings]
    check_message(
        read_error(*training(corpus, *settings), "--output", tmp_path / "model"),
        seen=seen,
        expected=expected,
    )
    assert list(tmp_path.iterdir()) == []


def test_unknown_recipe_error_lists_known_recipes(tmp_path):
    assert "conll2003, digits, multi30k-en-de" in read_error(
        "train", "multi30k", "--output", tmp_path / "model"
    )


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    "split, files, seen",
    [
        ("train", ("train.en", "val.de"), (200, 20)),
        ("train", ("empty", "empty"), ("line 1", "empty")),
        ("train", ("train.en", "."), ("is a directory",)),
        ("validation", ("val.en", "nowhere"), ("nowhere", "does not exist")),
        ("test", ("nowhere", "val.de"), ("nowhere", "does not exist")),
    ],
)
def test_error_of_parallel_files_names_their_key(corpus, tmp_path, split, files, seen, more):
    folder = corpus[0].parent
    (folder / "empty").touch()
    paths = json.dumps([str(folder / name) for name in files])
    settings = ["tokenizer.vocab_size=60", f"data.{split}={paths}"]
    message = read_error(*training(corpus, *settings), "--output", tmp_path / "model", *more)
    check_message(message, seen=(f"data.{split}", *seen))
    assert list(tmp_path.iterdir()) == []


SMALL = ("model.hidden_size=8", "model.num_attention_heads=2", "model.num_hidden_layers=1")


@pytest.mark.parametrize(
    "task, text, seen, expected",
    [
        ("causal-lm", "", "data.train", "block_size=16"),
        ("masked-lm", "", "data.train", "one sentence"),
        ("pretraining", "one\ntwo\n", "data.train", "2 documents"),
        ("sequence-classification", "A a dog\n", ("data.train", "A"), "two"),
        ("sequence-classification", "", "data.train", "label"),
        ("token-classification", "dog O\n", ("data.train", "O"), "two"),
        ("token-classification", "", "data.train", "sentence"),
        ("question-answering", "", "data.train", "SQuAD"),
        ("masked-lm", "".join(map(chr, range(0x4E00, 0x4F2C))), 306, "tokenizer.vocab_size"),
    ],
)
def test_error_of_unusable_text_names_key(tmp_path, task, text, seen, expected):
    (tmp_path / "text").write_text(text)
    (tmp_path / "recipe.toml").write_text(f'task = "{task}"')
    settings = [f"data.train={tmp_path / 'text'}", "tokenizer.vocab_size=300", *SMALL]
    settings += ["data.block_size=16"] if task == "causal-lm" else []
    words = [word for setting in settings for word in ("--set", setting)]
    message = read_error("train", tmp_path / "recipe.toml", *words, "--output", tmp_path / "model")
    check_message(message, seen=seen, expected=expected)
    assert not (tmp_path / "model").exists()


def test_verify_exits_with_1_and_lists_differences(exported, tmp_path, capsys):
    other = type(exported("encoder").model)(exported("encoder").model.config)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(SystemExit) as caught:
        main(
            ["verify", str(exported("encoder").directory), str(tmp_path / "other"), "--cases", "2"]
        )
    assert caught.value.code.count("5e-05") == 2  # a string: exit status 1
    assert "3 failures" in capsys.readouterr().out  # two cases, and their mean


def test_generate_without_tokenizer_is_an_error(exported):
    assert "tokenizer.json" in read_error("generate", exported("causal").directory, "text")


def test_generate_rejects_unavailable_device_and_engine_cache_on_cpu(exported, tmp_path):
    directory = exported("seq2seq").directory
    assert "CUDA" in read_error("generate", directory, "text", "--device", "cuda")
    flags = ("--device", "cpu", "--engine-cache", tmp_path)
    assert "expected device='tensorrt'" in read_error("generate", directory, "text", *flags)


def test_generate_with_encoder_is_an_error(exported, tmp_path):
    directory = copy_folder(exported("encoder").directory, tmp_path)
    with_tokenizer(directory, 48)
    message = read_error("generate", directory, "the dog")
    check_message(message, seen=("generate", "VanillaEncoderModel"), expected="embed")


def test_decoder_continues_text_like_transformers(exported, tmp_path, capsys):
    directory = copy_folder(exported("causal").directory, tmp_path)
    tokenizer = with_tokenizer(directory, 48)
    texts = ["the old dog", "a man sees the", "red bird", "a big boy wants"]
    main(["generate", str(directory), *texts, "--max-new-tokens", "6", "--num-beams", "1"])
    result = capsys.readouterr().out
    for text, line in zip(texts, result.removesuffix("\n").split("\n"), strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        new = exported("causal").model.generate(ids, max_new_tokens=6, do_sample=False)[
            0, ids.shape[1] :
        ]
        assert line == tokenizer.decode(new, skip_special_tokens=True)
    assert result.strip()


def test_tokenizer_larger_than_vocabulary_is_an_error(exported, tmp_path):
    directory = copy_folder(exported("causal").directory, tmp_path)
    with_tokenizer(directory, 60)
    assert "[0, 47]" in read_error("generate", directory, "der große alte Bub findet")
