"""Without HTTP, from token ids to tokens: our engine with all captions in its queue, the longest
first, the runtime with all in one call, which runs in workers, its whole batches sorted by length,
and CTranslate2, each at several settings in a process of its own. `TextRuntime` does the same from
texts to texts. After a round that warms them up and another, the best two of each kind go on, in
turns."""

import asyncio
import importlib.util
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from engines import CONTEXT
from measure import spread
from serving_models import CTRANSLATE2, DTYPES

# kind: (threads beside each other, threads of each, inputs of each)
SETTINGS = {
    "engine": [(2, 1, 32), (2, 1, 64), (2, 1, 128), (1, 2, 32), (1, 2, 64), (1, 1, 64)],
    "workers": [(2, 1, 64), (1, 2, 32)],  # the runtime decides the inputs itself
    "texts": [(2, 1, 64), (1, 2, 32)],  # here too
    "runtime": [(2, 1, 32), (2, 1, 64), (2, 1, 128), (1, 2, 32), (1, 2, 64), (1, 2, 128)],
    "ctranslate2": [(2, 1, 16), (2, 1, 32), (2, 1, 64), (1, 2, 64)],
}
FINALISTS = 2


def engine(
    folder: Path, dtype: str, beams: int, workers: int, threads: int, inputs: int
) -> Callable:
    """Return a function from rows of token ids to their translations by our engine.

    Args:
        folder: directory of the model.
        dtype: which of its exports.
        beams: the number of beams.
        workers: the number of workers.
        threads: CPU threads of each.
        inputs: the inputs that the slots of all workers hold, each with its beams.
    """
    from vanilla_transformer_export.engine.inputs import check_options
    from vanilla_transformer_export.engine.limits import Admission
    from vanilla_transformer_export.engine.loop import Client, Engine
    from vanilla_transformer_export.engine.model import open_export

    info = open_export(folder / dtype)
    options = check_options(info, {"num_beams": beams})  # once for all rows of a call
    admission = Admission(info, workers, threads, slots=inputs * beams, max_waiting=10**6)
    client = Client(admission, Engine.open(admission)).start()

    async def answers(ids):
        return await client.generate(admission.admit_all(ids, [options] * len(ids)))

    def generate(ids):
        order = sorted(range(len(ids)), key=lambda index: -len(ids[index]))
        results = asyncio.run(answers([ids[index] for index in order]))
        tokens = dict(zip(order, (result[0].tokens for result in results)))
        return [tokens[index] for index in range(len(ids))]

    return generate


def workers(
    folder: Path, dtype: str, beams: int, workers: int, threads: int, inputs: int
) -> Callable:
    """Return a function from rows of token ids to their translations, all in one call of the
    runtime.

    Args:
        folder: directory of the model.
        dtype: which of its exports.
        beams: the number of beams.
        workers: the number of workers of the runtime.
        threads: CPU threads of each.
        inputs: not used, because the runtime decides.
    """
    from vanilla_transformer_export import Runtime
    from vanilla_transformer_export.inference.inputs import pad_sequences

    runtime = Runtime(folder / dtype, threads=workers * threads, workers=workers)
    return lambda ids: runtime.generate(*pad_sequences(ids, 0), num_beams=beams)[:, 1:].tolist()


def texts(
    folder: Path, dtype: str, beams: int, workers: int, threads: int, inputs: int
) -> Callable:
    """Return a function from texts to their translations, all in one call of `TextRuntime`.

    The arguments are those of `workers`.
    """
    from vanilla_transformer_export import TextRuntime

    runtime = TextRuntime(folder / dtype, threads=workers * threads, workers=workers)
    return lambda texts: runtime.generate(texts, num_beams=beams)


def runtime(
    folder: Path, dtype: str, beams: int, workers: int, threads: int, inputs: int
) -> Callable:
    """Return a function from rows of token ids to their translations, in batches of similar length.

    The longest come first.

    Args:
        folder: directory of the model.
        dtype: which of its exports.
        beams: the number of beams.
        workers: the number of runtimes beside each other.
        threads: CPU threads of each.
        inputs: the inputs of a batch.
    """
    from vanilla_transformer_export import Runtime
    from vanilla_transformer_export.engine import capacity
    from vanilla_transformer_export.inference.inputs import pad_sequences

    # otherwise many rows would run in workers
    capacity.MIN_JOINING = capacity.MIN_BEAM_INPUTS = math.inf
    runtimes = [Runtime(folder / dtype, threads=threads) for _ in range(workers)]

    def generate(ids):
        order = sorted(range(len(ids)), key=lambda index: -len(ids[index]))
        batches = [order[start : start + inputs] for start in range(0, len(ids), inputs)][::-1]
        tokens = [None] * len(ids)

        def work(runtime):
            while batches:
                indices = batches.pop()
                rows = pad_sequences([ids[index] for index in indices], 0)
                generated = runtime.generate(*rows, num_beams=beams)
                for index, row in zip(indices, generated[:, 1:].tolist()):
                    tokens[index] = row

        running = [threading.Thread(target=work, args=[model]) for model in runtimes]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        return tokens

    return generate


def ctranslate2(
    folder: Path, dtype: str, beams: int, workers: int, threads: int, inputs: int
) -> Callable:
    """Return a function from rows of token ids to their translations by CTranslate2.

    It sorts by length itself.

    Args:
        folder: directory of the model.
        dtype: which of its exports.
        beams: the number of beams.
        workers: CTranslate2's `inter_threads`.
        threads: its `intra_threads`.
        inputs: the inputs of a batch.
    """
    import ctranslate2

    from vanilla_transformer_export import Runtime

    max_new_tokens = Runtime(folder / dtype).defaults["max_new_tokens"]
    name = CTRANSLATE2[dtype]
    model = ctranslate2.Translator(
        str(folder / f"ctranslate2-{name}"),
        compute_type=name,
        inter_threads=workers,
        intra_threads=threads,
    )

    def generate(ids):
        source = [[str(token) for token in row] for row in ids]
        results = model.translate_batch(
            source, beam_size=beams, max_decoding_length=max_new_tokens, max_batch_size=inputs
        )
        return [[int(token) for token in row.hypotheses[0]] for row in results]

    return generate


def loaded_memory(export: Path) -> dict:
    """Return {"loaded": …, "slots": …} in bytes: a process with `export` and an engine but no
    server, and its slots.

    The slots are not touched yet.
    """
    from serving_servers import memory_bytes

    from vanilla_transformer_export.engine.limits import Admission, arrange_workers, slot_bytes
    from vanilla_transformer_export.engine.loop import Engine
    from vanilla_transformer_export.engine.model import open_export
    from vanilla_transformer_export.inference.devices import available_cpus

    arranged = arrange_workers(json.loads((export / "config.json").read_text()), available_cpus())
    info = open_export(export)
    admission = Admission(info, arranged.workers, arranged.threads)
    engine = Engine.open(admission)
    loaded = memory_bytes("self")
    del engine  # which holds the slots until here
    return {"loaded": loaded, "slots": admission.slots * slot_bytes(info, admission.slot_size)}


KINDS = {
    "engine": engine,
    "workers": workers,
    "texts": texts,
    "runtime": runtime,
    "ctranslate2": ctranslate2,
}
loaded: Callable  # in the process of an engine


def load(kind, *settings):
    global loaded
    loaded = KINDS[kind](*settings)
    loaded(["A dog runs."] * 4 if kind == "texts" else [[5, 6, 7, 2]] * 4)


def one_round(rows: Sequence) -> tuple[float, list]:
    """Return the seconds and the results of `rows`, which are token ids or texts."""
    start = time.perf_counter()
    results = loaded(rows)
    return time.perf_counter() - start, results


def offline(run, model: str, beams: int = 1) -> dict:
    """Return {dtype: {setting: speeds}} of `model`, without HTTP.

    "per_second" has the sentences per second. "same" is the share of rows with the same tokens as
    the runtime, `None` for texts. `run` has the captions and the number of rounds.
    """
    return {dtype: compare(run, model, dtype, beams) for dtype in DTYPES}


def token_ids(export: Path, texts: list[str]) -> list[list[int]]:
    from tokenizers import Tokenizer

    return [
        encoding.ids
        for encoding in Tokenizer.from_file(str(export / "tokenizer.json")).encode_batch(texts)
    ]


def compare(run, model: str, dtype: str, beams: int) -> dict:
    ids = token_ids(run.root / model / "int8", run.captions)
    engines = {
        (kind, *setting): ProcessPoolExecutor(
            1, CONTEXT, load, (kind, run.root / model, dtype, beams, *setting)
        )
        for kind, settings in SETTINGS.items()
        if kind != "ctranslate2"
        or (dtype in CTRANSLATE2 and importlib.util.find_spec("ctranslate2"))
        for setting in settings
    }
    seconds, tokens = {key: [] for key in engines}, {}
    rows = {kind: run.captions if kind == "texts" else ids for kind in KINDS}
    for key, process in engines.items():  # in its first round an engine touches its slots
        process.submit(one_round, rows[key[0]]).result()
    for repeat in range(run.repeats + 1):
        for key, process in list(engines.items()):
            took, tokens[key] = process.submit(one_round, rows[key[0]]).result()
            seconds[key].append(took)
        if repeat == 0:
            best = finalists(seconds)
            for key in set(engines) - best:
                engines.pop(key).shutdown()
    for process in engines.values():
        process.shutdown()
    expected = tokens[
        min(
            (key for key in seconds if key[0] == "runtime"), key=lambda key: np.median(seconds[key])
        )
    ]
    return {
        " ".join(map(str, key)): {
            "per_second": spread([len(ids) / took for took in rounds]),
            "same": None if key[0] == "texts" else same(tokens[key], expected),
        }
        for key, rounds in seconds.items()
    }


def finalists(seconds: dict) -> set:
    return {
        key
        for kind in KINDS
        for key in sorted((setting for setting in seconds if setting[0] == kind), key=seconds.get)[
            :FINALISTS
        ]
    }


def same(tokens, expected, padding=(0, 2)) -> float:
    return float(
        np.mean(
            [strip(row, padding) == strip(other, padding) for row, other in zip(tokens, expected)]
        )
    )


def strip(row, padding):
    return [token for token in row if token not in padding]
