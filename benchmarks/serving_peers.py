"""Servers to compare with, each in a process of its own, by the first argument: `ctranslate2` is
CTranslate2 behind our own front, `transformers` what is written first: FastAPI with a call of
`generate` for each request, `transformers-serve` the server of transformers, for our decoder."""

import argparse
import asyncio
import collections
import sys
import threading
from pathlib import Path

import numpy as np

ROWS = 64  # rows of all batches together


class CTranslate2Engine:
    """CTranslate2 in place of the engine of our server, with `workers` threads.

    Each thread translates all waiting rows as one batch as soon as it is free. CTranslate2 cannot
    add to a running batch. `info` is our export of the same model, and `model` the directory of
    CTranslate2's files. `threads` are CPU threads of each worker.
    """

    def __init__(self, info, model: Path, workers: int, threads: int):
        import ctranslate2

        from vanilla_transformer_export.inference.rows import SlotSize

        self.info, self.admission = info, self
        self.slots, self.slot_size = ROWS, SlotSize(ROWS, 512, 512)
        self.translator = ctranslate2.Translator(
            str(model), compute_type="int8", inter_threads=workers, intra_threads=threads
        )
        self.rows = ROWS // workers
        self.checked = {}
        self.queue = collections.deque()
        self.changed = threading.Condition()
        for _ in range(workers):
            threading.Thread(target=self.work, daemon=True).start()

    def admit(self, input_ids, options, prefix=(), top_logprobs=None, scores_prompt=False):
        from vanilla_transformer_export.engine.inputs import GenerationInput, generation_inputs

        key = tuple(options.items())
        if key not in self.checked:  # once for the same options, as our engine does
            ids = np.array([input_ids])
            [row] = generation_inputs(self.info, ids, np.ones_like(ids), None, options)
            self.checked[key] = row.options
        return GenerationInput(self.checked[key], [], [str(token) for token in input_ids])

    async def generate(self, inputs):
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in inputs]
        with self.changed:
            self.queue.extend(zip(inputs, futures))
            self.changed.notify()
        return await asyncio.gather(*futures)

    def start(self):
        return self

    def describe(self):
        return "CTranslate2"

    @property
    def waiting(self):
        return len(self.queue)

    running = 0  # CTranslate2 does not report it

    def close(self, seconds=0.0):
        return True

    def work(self):
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.queue)
                batch = [self.queue.popleft() for _ in range(min(self.rows, len(self.queue)))]
            translations = self.translate([request for request, _ in batch])
            futures = [future for _, future in batch]
            futures[0].get_loop().call_soon_threadsafe(deliver, futures, translations)

    def translate(self, inputs):
        from vanilla_transformer_export.engine.inputs import STOP, Generated

        max_new_tokens = max(row.options.max_new_tokens for row in inputs)
        rows = self.translator.translate_batch(
            [row.source for row in inputs], beam_size=1, max_decoding_length=max_new_tokens
        )
        return [[Generated([int(token) for token in row.hypotheses[0]], STOP)] for row in rows]


def serve_ctranslate2(options) -> None:
    """Run our own server with CTranslate2 as its engine; `options` are the command line."""
    from vanilla_transformer_export import TextRuntime
    from vanilla_transformer_export.engine.model import open_export
    from vanilla_transformer_export.serving import server, service
    from vanilla_transformer_export.serving.settings import Settings, sources

    async def generator(source, *_):
        info = open_export(source.directory)
        engine = CTranslate2Engine(info, options.model, options.workers, options.threads)
        return TextRuntime.around(engine), engine

    service.generator = generator
    settings = Settings(port=options.port, languages=((None, "en", "de"),), threads=1)
    server.serve(sources([str(options.export)], settings.languages), settings, None, print)


def deliver(futures, answers):
    for future, answer in zip(futures, answers):
        if not future.done():
            future.set_result(answer)


def transformers_app(checkpoint: Path, workers: int, threads: int):
    """Return a FastAPI app that translates with `checkpoint` and `generate` of transformers.

    It runs `workers` calls at a time, each with `threads` threads.
    """
    import anyio.to_thread
    import torch
    from fastapi import FastAPI
    from pydantic import BaseModel
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    torch.set_num_threads(threads)
    model, tokenizer = (
        AutoModelForSeq2SeqLM.from_pretrained(checkpoint).eval(),
        AutoTokenizer.from_pretrained(checkpoint),
    )
    app = FastAPI()

    class Body(BaseModel):
        q: str

    @app.get("/health/ready")
    async def ready():
        anyio.to_thread.current_default_thread_limiter().total_tokens = workers

    @app.post("/translate")
    def translate(body: Body):
        with torch.inference_mode():
            tokens = model.generate(**tokenizer([body.q], return_tensors="pt"))
        return {"translatedText": tokenizer.decode(tokens[0], skip_special_tokens=True)}

    return app


def serve_transformers(model: Path, port: int) -> None:
    """Run `transformers serve` on our checkpoint `model` at `port`.

    transformers looks for the class of a checkpoint in its own module, even if it is registered.
    """
    from vanilla_transformer import VanillaDecoderForCausalLM

    sys.modules["transformers"].VanillaDecoderForCausalLM = VanillaDecoderForCausalLM
    from transformers.cli import transformers as cli

    sys.argv = ["transformers", "serve", str(model), "--device", "cpu", "--port", str(port)]
    cli.main()


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["ctranslate2", "transformers", "transformers-serve"])
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--export",
        type=Path,
        help="our export of the same checkpoint, for its tokenizer and options",
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads per worker")
    parser.add_argument("--port", type=int, required=True)
    return parser.parse_args()


def main():
    options = parse()
    if options.kind == "ctranslate2":
        serve_ctranslate2(options)
        return
    if options.kind == "transformers-serve":
        serve_transformers(options.model, options.port)
        return
    import uvicorn

    app = transformers_app(options.model, options.workers, options.threads)
    uvicorn.run(app, port=options.port, log_level="warning", http="httptools", loop="uvloop")


if __name__ == "__main__":
    main()
