"""Clients of engines over exports, whose workers are threads of the tests."""

import asyncio

from vanilla_transformer_export import TextRuntime
from vanilla_transformer_export.engine.limits import Admission
from vanilla_transformer_export.engine.loop import Client, Engine
from vanilla_transformer_export.engine.model import open_export


def open_client(directory, workers=1, slots=None, threads=1, **sizes):
    """Return the client of an engine of the export `directory`, which is not started.

    `sizes` and the other arguments are those of `Admission`.
    """
    sizes = {"max_waiting": 10_000, **sizes}
    admission = Admission(open_export(directory), workers, threads, slots, **sizes)
    return Client(admission, Engine.open(admission))


def run(client, inputs):
    """Return the sequences that the started `client` generates from each of `inputs`."""
    return asyncio.run(client.generate(inputs))


def first_batch(client):
    """Return the batch of the first worker, for engines that are not started."""
    return client.engine.workers[0].batch


def text_client(directory, **sizes):
    """Return (the text side of the export `directory`, as `serve` has it, its started client).

    `sizes` are arguments of `open_client`.
    """
    client = open_client(directory, **sizes).start()
    return TextRuntime.around(client.admission), client
