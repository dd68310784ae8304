"""Fixtures: a decoder and an encoder behind OpenAI's API, and its client."""

import openai
import pytest
from openai_server import OneByOne, serve_engine, with_tokenizer
from served_models import loaded_model

from vanilla_transformer_export import TextRuntime
from vanilla_transformer_export.serving.models import batched


@pytest.fixture(scope="module")
def decoder(exported, tmp_path_factory):
    """Whose pad token is another than 0, with learned positions for 40."""
    return TextRuntime(
        with_tokenizer(exported("causal-learned").directory, tmp_path_factory.mktemp("decoder")),
        threads=1,
    )


@pytest.fixture(scope="module")
def encoder(exported, tmp_path_factory):
    return TextRuntime(
        with_tokenizer(exported("encoder").directory, tmp_path_factory.mktemp("encoder")), threads=1
    )


@pytest.fixture(scope="module")
def engine(decoder):
    return OneByOne(decoder.runtime)


@pytest.fixture(scope="module")
def url(decoder, encoder, engine):
    read = TextRuntime(encoder.runtime.info.directory, threads=1)
    with serve_engine(
        loaded_model("decoder", decoder, engine),
        loaded_model("encoder", read, encoder=batched(read)),
    ) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def fresh(engine):
    engine.reset()
