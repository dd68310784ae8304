"""Fixtures: exports of heads, translators of the cards, and one of made-up words."""

import dataclasses
import functools

import pytest
from alignments import card
from checkpoints import EOS, copy_folder, list_file
from heads import HEADS, save_head, tokenizer_for
from tokenizers import Tokenizer, models, pre_tokenizers

from vanilla_transformer_export import TextRuntime, export


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A name of `HEADS`, and settings of an export -> the checkpoint, and a runtime of the
    export."""
    result = {}

    def make(name, **settings):
        key = name, *settings.items()
        if key not in result:
            architecture, kind, fields = HEADS[name]
            folder = tmp_path_factory.mktemp("head")
            checkpoint = save_head(
                architecture, tokenizer_for(kind, architecture), folder / "checkpoint", **fields
            )
            export(checkpoint, folder / "export", cases=1, **settings)
            result[key] = checkpoint, TextRuntime(folder / "export", threads=1)
        return result[key]

    return make


@pytest.fixture(scope="session")
def shipped(tmp_path_factory):
    """A pair of languages -> a runtime of the export of its card for the target `cpu`."""

    @functools.cache
    def make(pair):
        directory = tmp_path_factory.mktemp(pair) / "export"
        export(card(pair), directory, target="cpu", cases=1)
        return TextRuntime(directory)

    return make


@pytest.fixture
def cut_at(monkeypatch):
    """Sets the longest text, in tokens, of a pipeline's tokenizer and of a runtime."""

    def cut(pipe, runtime, longest):
        monkeypatch.setattr(pipe.tokenizer, "model_max_length", longest)
        settings = dataclasses.replace(runtime.tokenizer_settings, longest=longest)
        monkeypatch.setitem(runtime.__dict__, "tokenizer_settings", settings)

    return cut


@pytest.fixture(scope="module")
def translator(exported, tmp_path_factory):
    """An export with a tokenizer of the words w0 to w47, and "." for w47."""
    directory = copy_folder(exported("seq2seq").directory, tmp_path_factory.mktemp("translator"))
    words = {f"w{token}": token for token in range(47)} | {".": 47}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["w0", f"w{EOS}"])
    tokenizer.save(str(directory / "tokenizer.json"))
    list_file(directory, "tokenizer.json")
    return TextRuntime(directory, threads=1)
