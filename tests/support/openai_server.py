"""A server of OpenAI's API, its engine, and the texts that tests compare."""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import threading
import time

import httpx
import numpy as np
import uvicorn
from checkpoints import EOS, PAD, START, VOCABULARY, copy_folder, list_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from vanilla_transformer_export import Options
from vanilla_transformer_export.engine.inputs import LENGTH, STOP, Event, Generated, TokenLogprobs
from vanilla_transformer_export.engine.limits import Admission
from vanilla_transformer_export.engine.search import StepLogits, TokenSearch
from vanilla_transformer_export.inference.logits import LogitsProcessors, Prompt, row_uniforms
from vanilla_transformer_export.inference.rows import GenerationRequest
from vanilla_transformer_export.serving import app as serving
from vanilla_transformer_export.serving.middleware import Frame
from vanilla_transformer_export.serving.models import ServedModels
from vanilla_transformer_export.serving.observability import Log
from vanilla_transformer_export.serving.protocols import openai_api
from vanilla_transformer_export.serving.settings import Settings

# GPT-2's letters for bytes: those of é and 日
ALPHABET = [*"abcdefg", "Ġ", "Ġa", "Ġb", "ab", "cd", ".", *"ÃæĹ¥", "©"]


def tokenizer():
    """Return a byte-level tokenizer, in which each token outside `ALPHABET` is a single letter."""
    specials = {PAD: "<pad>", START: "<s>", EOS: "</s>", 3: "<filler>"}
    rest = iter([*ALPHABET, *"hijklmnopqrstuvwxyzHIJKLMNOPQRSTUVWXYZ"])
    vocabulary = {specials.get(id) or next(rest): id for id in range(VOCABULARY)}
    result = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("c", "d"), ("Ġ", "a"), ("Ġ", "b")]))
    result.pre_tokenizer, result.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    result.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", START)]
    )
    result.add_special_tokens(list(specials.values()))
    return result


def ended(row):
    """Return (tokens of `row` up to the end token, the reason why there are no more)."""
    return (row[: row.index(EOS) + 1], STOP) if EOS in row else (row, LENGTH)


class OneByOne:
    """An engine that runs jobs alone, from the whole text again at each step.

    It counts its `steps`, and raises `error` after `fails_after` steps, if that is set.
    """

    def __init__(self, runtime):
        self.runtime = runtime
        max_length = runtime.config["max_position_embeddings"]
        self.admission = Admission(runtime.info, slots=8, max_length=max_length)
        self.reset()

    def reset(self):
        self.steps, self.closed, self.pause, self.fails_after, self.error = 0, 0, 0, None, None

    def logits(self, ids):
        self.steps += 1
        if self.fails_after is not None and self.steps > self.fails_after:
            raise self.error
        ids = np.array([ids])
        options = Options(max_new_tokens=1)
        request = GenerationRequest(options, ids, np.ones_like(ids))
        with contextlib.closing(self.runtime.model.factory.open(request)) as decoder:
            return decoder.prefill(request.input_ids, request.attention_mask)[:, -1].copy()

    def known(self, logits, token, count):
        """Return the log probabilities of `token` and of the best `count` tokens, in float64.

        `logits` are (1, V).
        """
        exact = logits[0].astype(np.float64)
        exact -= np.log(np.exp(exact - exact.max()).sum()) + exact.max()
        best = np.argsort(-exact, kind="stable")[:count]
        return TokenLogprobs(
            token, float(exact[token]), [(int(other), float(exact[other])) for other in best]
        )

    def events(self, job):
        options = dataclasses.replace(job.options, num_return_sequences=1)
        for index in range(job.options.num_return_sequences):
            prompt = Prompt(np.array([job.prompt]), np.zeros(1, np.int64))
            uniforms = [row_uniforms(job.seed, index)] if options.do_sample else None
            limits = np.array([options.max_new_tokens])
            processors = LogitsProcessors(options, prompt) or None
            search = TokenSearch(options, limits, processors, uniforms)
            ids = list(job.prompt)
            while not search.is_finished[0]:
                logits = self.logits(ids)
                [token] = search.advance(StepLogits(logits.copy()), slice(1))[0].tolist()
                if search.is_invalid[0]:
                    raise ValueError(search.problem)
                known = (
                    None
                    if job.top_logprobs is None
                    else self.known(logits, token, job.top_logprobs)
                )
                ids.append(token)
                reason = STOP if token in options.eos_token_ids else LENGTH
                yield Event(index, token, reason if search.is_finished[0] else None, known)

    async def generate(self, jobs):
        return [self.answer(job) for job in jobs]

    def answer(self, job):
        if job.options.num_beams > 1:
            [sequences] = self.runtime.sequences([job])
            return [Generated(sequence.tokens, sequence.finish_reason) for sequence in sequences]
        places = range(1, len(job.prompt)) if job.scores_prompt else ()
        read = [
            self.known(self.logits(job.prompt[:place]), job.prompt[place], job.top_logprobs)
            for place in places
        ]
        result = []
        for _, group in itertools.groupby(self.events(job), lambda event: event.index):
            events = list(group)
            known = None if job.top_logprobs is None else [event.logprobs for event in events]
            result.append(
                Generated(
                    [event.token for event in events],
                    events[-1].finish_reason,
                    None,
                    read or None,
                    known,
                )
            )
        return result

    async def stream(self, job):
        try:
            for event in self.events(job):
                yield event
                await asyncio.sleep(self.pause)
        finally:
            self.closed += 1


def with_tokenizer(directory, parent):
    result = copy_folder(directory, parent)
    tokenizer().save(str(result / "tokenizer.json"))
    list_file(result, "tokenizer.json")
    return result


@contextlib.contextmanager
def serve_engine(*served):
    """Yield the address of a server of the models `served`, which runs in a thread."""
    by_name = ServedModels({model.name: model for model in served})
    app = serving.create_app(by_name, (openai_api.PROTOCOL,), Settings(max_batch=6))
    log = Log("error", os.open(os.devnull, os.O_WRONLY))  # tests do not read it
    framed = Frame(app, log)
    server = uvicorn.Server(uvicorn.Config(framed, port=0, log_config=None, lifespan="off"))

    async def serve():
        sweeping = asyncio.create_task(sweep())
        await server.serve()
        sweeping.cancel()

    async def sweep():
        while True:
            framed.sweep()
            await asyncio.sleep(0.05)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def greedy(client, prompt, **more):
    return client.completions.create(model="decoder", prompt=prompt, temperature=0, **more)


def post(url, path="/v1/completions", **body):
    return httpx.post(url + path, json=body)


def new_tokens(decoder, text, **options):
    """Return the new tokens after `text`, without padding, with the end token.

    `decoder` is a `TextRuntime`, and `options` are generation options.
    """
    ids = np.array([decoder.encode([text], special_tokens=True)[0].ids])
    return ended(decoder.runtime.generate(ids, **options)[0, ids.shape[1] :].tolist())[0]
