"""A server of encoders and generators, and Triton's client."""

import pytest
import tritonclient.http as triton
from open_inference_client import GENERATORS, READERS
from opened_engines import text_client
from served_models import loaded_model, serving
from serving_load import with_words

from vanilla_transformer_export import TextRuntime


@pytest.fixture(scope="session")
def server(exported, tmp_path_factory):
    """A server of all models."""
    exports = {
        name: with_words(exported(name).directory, tmp_path_factory.mktemp(name))
        for name in READERS + GENERATORS
    }
    generators = {}
    for name in GENERATORS:
        generators[name] = loaded_model(name, *text_client(exports[name]))
    with serving(
        {name: TextRuntime(exports[name], threads=1) for name in READERS}, max_batch=8
    ) as result:
        result.server.service.models.models.update(generators)
        result.exports = exports
        yield result
    for model in generators.values():
        model.client.close()


@pytest.fixture(scope="session")
def client(server):
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as result:
        yield result
