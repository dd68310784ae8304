"""Models as a server has them, and a server of models that read whole sequences, in a thread of
this process."""

import contextlib

from served import served

from vanilla_transformer_export.engine.limits import Arrangement
from vanilla_transformer_export.heads import TRANSLATE, has_task
from vanilla_transformer_export.serving.models import ModelPlan, OpenModel, ServedModel, batched
from vanilla_transformer_export.serving.protocols import (
    open_inference,
    openai_api,
    pipelines,
    rerank_api,
    text_embeddings,
)
from vanilla_transformer_export.text.languages import Directions, read_directions

PROTOCOLS = (
    openai_api.PROTOCOL,
    text_embeddings.PROTOCOL,
    pipelines.PROTOCOL,
    open_inference.PROTOCOL,
    rerank_api.PROTOCOL,
)


def loaded_model(name, runtime, scheduler=None, given=(), encoder=None):
    """Return a model of a server that is loaded already.

    `scheduler` and `encoder` are those of `OpenModel`, and `given` are language pairs.
    """
    directions = Directions((), {}, False)
    if has_task(runtime.info.architecture, TRANSLATE):
        directions = read_directions(runtime.info, runtime.languages, given)
    created = int(runtime.info.directory.stat().st_mtime)
    plan = ModelPlan(runtime.info, Arrangement(2, 1), None, directions, created=created)
    model = ServedModel(name, plan, open=None, changed=None)
    model.put(OpenModel(plan, runtime, scheduler or encoder))
    return model


@contextlib.contextmanager
def serving(runtimes, **settings):
    """Yield a server of `runtimes`, {name: runtime}, which run through the server's queue.

    `settings` are those of the server.
    """
    models = {
        name: loaded_model(name, runtime, encoder=batched(runtime, workers=2))
        for name, runtime in runtimes.items()
    }
    try:
        with served(protocols=PROTOCOLS, **settings) as server:
            server.server.service.models.models.update(models)
            yield server
    finally:
        for model in models.values():
            model.encoder.close()
