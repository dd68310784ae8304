"""A server of models that read whole sequences, in a thread of this process."""

import contextlib

from served import served

from vanilla_transformer_export.serving.encoder_runtime import batched
from vanilla_transformer_export.serving.models import ServedModel
from vanilla_transformer_export.serving.protocols import (
    open_inference,
    openai_api,
    pipelines,
    rerank_api,
    text_embeddings,
)

PROTOCOLS = (
    openai_api.PROTOCOL,
    text_embeddings.PROTOCOL,
    rerank_api.PROTOCOL,
    pipelines.PROTOCOL,
    open_inference.PROTOCOL,
)


@contextlib.contextmanager
def serving(runtimes, **settings):
    """Yield a server of `runtimes`, {name: runtime}, which run through the server's queue.

    `settings` are those of the server.
    """
    models = {
        name: ServedModel(name, runtime, encoder=batched(runtime, workers=2))
        for name, runtime in runtimes.items()
    }
    try:
        with served(protocols=PROTOCOLS, **settings) as server:
            server.server.service.models.models.update(models)
            yield server
    finally:
        for model in models.values():
            model.encoder.close()
