"""A translator between English and German behind LibreTranslate's protocol."""

import httpx
import pytest
from checkpoints import EOS, copy_folder, edit_json, list_file, seal
from opened_engines import text_client
from served_models import loaded_model
from tokenizers import Tokenizer, models, pre_tokenizers
from translation_server import CARD, SLOTS, WORDS, serving

from vanilla_transformer_export import TextRuntime


@pytest.fixture(scope="session")
def directory(exported_for, tmp_path_factory):
    """An export with a tokenizer of words and language tokens, and a card with its languages."""
    result = copy_folder(exported_for("seq2seq", "cpu")[1], tmp_path_factory.mktemp("translator"))
    words = [*WORDS, *(f"v{number}" for number in range(4)), ">>deu<<", ">>fra<<", "unknown", "."]
    tokenizer = Tokenizer(
        models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="unknown")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["w0", f"w{EOS}", "unknown", ">>deu<<", ">>fra<<"])
    tokenizer.save(str(result / "tokenizer.json"))
    list_file(result, "tokenizer.json")
    edit_json(result / "generation_config.json", max_new_tokens=10, num_beams=2)
    seal(result)
    (result / "README.md").write_text(CARD)
    return result


@pytest.fixture(scope="session")
def alone(directory):
    return TextRuntime(directory, threads=1)


@pytest.fixture(scope="session")
def load(directory):
    """A function that creates a `ServedModel`. Its engine runs until all tests end."""
    engines = []

    def make(name, languages=None, given=()):
        runtime, engine = text_client(directory, slots=SLOTS, max_source=40, max_length=30)
        engines.append(engine)
        if languages is not None:
            runtime.languages = languages
        return loaded_model(name, runtime, engines[-1], given)

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def model(load):
    return load("tiny")


@pytest.fixture(scope="session")
def url(model):
    with serving(model, max_batch=4) as result:
        yield result


@pytest.fixture(scope="session")
def client(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client
