"""OpenAI's endpoints, asked by its own client."""

import asyncio
import base64
import contextlib
import dataclasses
import itertools
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest
import torch
import uvicorn
from checkpoints import EOS, PAD, START, VOCABULARY, copy_folder, list_file
from hypothesis import example, given
from hypothesis import strategies as st
from opened_engines import text_engine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from vanilla_transformer_export import TextRuntime
from vanilla_transformer_export.errors import RequestError
from vanilla_transformer_export.inference.decoder import GenerationRequest
from vanilla_transformer_export.inference.logits import Prompt, Sampler
from vanilla_transformer_export.inference.search import start_search
from vanilla_transformer_export.scheduler.admission import Admission
from vanilla_transformer_export.scheduler.refusals import overloaded
from vanilla_transformer_export.scheduler.request import (
    LENGTH,
    STOP,
    Event,
    Generated,
    TokenLogprobs,
)
from vanilla_transformer_export.serving import app as serving
from vanilla_transformer_export.serving.lifecycle import Lifecycle
from vanilla_transformer_export.serving.logs import Log
from vanilla_transformer_export.serving.metrics import Metrics
from vanilla_transformer_export.serving.middleware import Frame
from vanilla_transformer_export.serving.models import ServedModel, ServedModels
from vanilla_transformer_export.serving.protocols import openai_api
from vanilla_transformer_export.serving.protocols.completions import StopTexts
from vanilla_transformer_export.serving.reading import batched
from vanilla_transformer_export.serving.settings import Settings

# GPT-2's letters for bytes: those of é and 日
ALPHABET = [*"abcdefg", "Ġ", "Ġa", "Ġb", "ab", "cd", ".", *"ÃæĹ¥", "©"]


def tokenizer():
    """Of bytes: each token outside `ALPHABET` is a letter of its own."""
    specials = {PAD: "<pad>", START: "<s>", EOS: "</s>", 3: "<filler>"}
    rest = iter([*ALPHABET, *"hijklmnopqrstuvwxyzHIJKLMNOPQRSTUVWXYZ"])
    vocabulary = {specials.get(id) or next(rest): id for id in range(VOCABULARY)}
    made = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("c", "d"), ("Ġ", "a"), ("Ġ", "b")]))
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", START)]
    )
    made.add_special_tokens(list(specials.values()))
    return made


def ended(row):
    """The tokens without padding, and why there are no more."""
    return (row[: row.index(EOS) + 1], STOP) if EOS in row else (row, LENGTH)


class OneByOne:
    """An engine that runs jobs alone, from the whole text again at each step; it counts, and fails
    when it is told to."""

    def __init__(self, runtime):
        self.runtime = runtime
        most = runtime.config["max_position_embeddings"]
        self.admission = Admission(runtime.info, slots=8, max_length=most)
        self.reset()

    def reset(self):
        self.steps, self.closed, self.pause, self.fails_after, self.error = 0, 0, 0, None, None

    def logits(self, ids):
        self.steps += 1
        if self.fails_after is not None and self.steps > self.fails_after:
            raise self.error
        ids = np.array([ids])
        request = self.runtime.request(
            ids, np.ones_like(ids), None, {"max_new_tokens": 1, "num_beams": 1, "do_sample": False}
        )
        with contextlib.closing(self.runtime.model.decoders.start(request)) as decoder:
            return decoder.prefill(request.input_ids, request.attention_mask)[:, -1].copy()

    def known(self, logits, token, count):
        """By a formula of its own, in float64."""
        exact = logits[0].astype(np.float64)
        exact -= np.log(np.exp(exact - exact.max()).sum()) + exact.max()
        best = np.argsort(-exact, kind="stable")[:count]
        return TokenLogprobs(
            token, float(exact[token]), [(int(each), float(exact[each])) for each in best]
        )

    def events(self, job):
        options = dataclasses.replace(job.options, num_return_sequences=1)
        for index in range(job.options.num_return_sequences):
            search = start_search(options, Prompt(np.array([job.prompt]), np.zeros(1, np.int64)))
            if options.do_sample:
                search.choose = Sampler(options, index)
            ids = list(job.prompt)
            while not search.finished:
                logits = self.logits(ids)
                [token] = search.advance(logits.copy())[0].tolist()
                known = (
                    None
                    if job.top_logprobs is None
                    else self.known(logits, token, job.top_logprobs)
                )
                ids.append(token)
                reason = STOP if token in options.eos_token_ids else LENGTH
                yield Event(index, token, reason if search.finished else None, known)

    async def generate(self, jobs):
        return [self.answer(job) for job in jobs]

    def answer(self, job):
        if job.options.num_beams > 1:
            prompt = np.array([job.prompt])
            rows, _ = self.runtime._generated(
                GenerationRequest(job.options, prompt, np.ones_like(prompt), None)
            )
            return [Generated(*ended(row[len(job.prompt) :])) for row in rows.tolist()]
        places = range(1, len(job.prompt)) if job.scores_prompt else ()
        read = [
            self.known(self.logits(job.prompt[:place]), job.prompt[place], job.top_logprobs)
            for place in places
        ]
        found = []
        for _, group in itertools.groupby(self.events(job), lambda event: event.index):
            events = list(group)
            known = None if job.top_logprobs is None else [event.logprobs for event in events]
            found.append(
                Generated(
                    [event.token for event in events],
                    events[-1].finish_reason,
                    None,
                    read or None,
                    known,
                )
            )
        return found

    async def stream(self, job):
        try:
            for event in self.events(job):
                yield event
                await asyncio.sleep(self.pause)
        finally:
            self.closed += 1


# ------------------------------------------------------------------------------------------ servers


def with_tokenizer(directory, parent):
    found = copy_folder(directory, parent)
    tokenizer().save(str(found / "tokenizer.json"))
    list_file(found, "tokenizer.json")
    return found


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


@contextlib.contextmanager
def serving_of(*served):
    """The address of a server of these models, in a thread."""
    settings, lifecycle, metrics = Settings(max_batch=6), Lifecycle(), Metrics()
    by_name = ServedModels({model.name: model for model in served})
    app = serving.create_app(by_name, (openai_api.PROTOCOL,), settings, lifecycle, metrics)
    framed = Frame(app, app.state.errors, settings, lifecycle, metrics, Log("error"))
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


@pytest.fixture(scope="module")
def url(decoder, encoder, engine):
    read = TextRuntime(encoder.runtime.info.directory, threads=1)
    reader = batched(read)
    with serving_of(
        ServedModel("decoder", decoder, engine), ServedModel("encoder", read, reader=reader)
    ) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def fresh(engine):
    engine.reset()


def greedy(client, prompt, **more):
    return client.completions.create(model="decoder", prompt=prompt, temperature=0, **more)


def post(url, path="/v1/completions", **body):
    return httpx.post(url + path, json=body)


# -------------------------------------------------------------------------------------- completions


def test_greedy_completions_are_the_texts_of_the_runtime(client, decoder):
    texts = ["ab cd", "é日 ab.", "g"]
    ids = [encoding.ids for encoding in decoder.encode(texts, special_tokens=True)]
    expected = decoder.generate(texts, max_new_tokens=16)
    for prompt, count in ((texts[0], 1), (texts, 3), (ids[0], 1), (ids, 3)):
        found = greedy(client, prompt)
        assert [choice.text for choice in found.choices] == expected[:count]
        assert [choice.index for choice in found.choices] == list(range(count))
        assert (
            found.object == "text_completion"
            and found.model == "decoder"
            and found.id.startswith("cmpl-")
        )
        assert abs(found.created - time.time()) < 60
        assert found.usage.prompt_tokens == sum(map(len, ids[:count]))
        assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
        assert all(choice.logprobs is None for choice in found.choices)


def new_tokens(decoder, text, **options):
    """Without padding, with the end token."""
    ids = np.array([decoder.encode([text], special_tokens=True)[0].ids])
    return ended(decoder.runtime.generate(ids, **options)[0, ids.shape[1] :].tolist())[0]


def test_why_an_answer_ended_and_how_many_tokens_it_has(client, decoder):
    reasons = set()
    for text in ("ab cd", "g", "a", "é", "cd b"):
        tokens = new_tokens(decoder, text, max_new_tokens=12)
        found = greedy(client, text, max_tokens=12)
        assert found.usage.completion_tokens == len(tokens)
        assert found.choices[0].finish_reason == ("stop" if tokens[-1] == EOS else "length")
        reasons.add(found.choices[0].finish_reason)
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize(
    "asked, meant",
    [
        (dict(), dict(top_k=0)),
        (dict(temperature=0.7, top_p=0.8), dict(temperature=0.7, top_p=0.8, top_k=0)),
        (dict(extra_body=dict(top_k=3)), dict(top_k=3)),
        (dict(extra_body=dict(min_p=0.3)), dict(top_k=0, min_p=0.3)),
        (dict(extra_body=dict(repetition_penalty=1.5)), dict(top_k=0, repetition_penalty=1.5)),
        (
            dict(extra_body=dict(suppress_tokens=[EOS, 5], min_new_tokens=3)),
            dict(top_k=0, suppress_tokens=[EOS, 5]),
        ),
        (dict(temperature=1e-6), dict(do_sample=False)),
    ],
)
def test_sampling_with_a_seed_is_that_of_the_runtime(client, decoder, asked, meant):
    options = dict(do_sample=True, seed=7, max_new_tokens=10) | meant
    found = client.completions.create(
        model="decoder", prompt="ab cd", max_tokens=10, seed=7, **asked
    )
    assert found.choices[0].text == decoder.generate(["ab cd"], **options)[0]


def test_without_a_seed_answers_differ(client):
    texts = {
        client.completions.create(model="decoder", prompt="ab", max_tokens=20).choices[0].text
        for _ in range(5)
    }
    assert len(texts) > 1


def test_several_answers_are_samples_of_their_own_or_beams(client, decoder):
    found = client.completions.create(
        model="decoder", prompt=["ab", "g"], n=3, seed=5, max_tokens=12
    )
    assert [choice.index for choice in found.choices] == list(range(6))
    texts = [choice.text for choice in found.choices]
    assert len(set(texts)) > 3
    for place, prompt in ((0, "ab"), (3, "g")):
        assert (
            texts[place]
            == decoder.generate([prompt], do_sample=True, top_k=0, seed=5, max_new_tokens=12)[0]
        )
    again = client.completions.create(
        model="decoder", prompt=["ab", "g"], n=3, seed=5, max_tokens=12
    )
    assert [choice.text for choice in again.choices] == texts
    beams = client.completions.create(
        model="decoder", prompt="ab", n=2, max_tokens=6, extra_body=dict(num_beams=4)
    )
    expected = decoder.generate(["ab"], num_beams=4, num_return_sequences=2, max_new_tokens=6)
    assert [choice.text for choice in beams.choices] == expected


def test_what_a_request_has_not_is_as_generation_config_says_and_then_as_openai_does():
    body = openai_api.CompletionRequest()
    expected = dict(
        num_beams=1,
        max_new_tokens=16,
        num_return_sequences=1,
        do_sample=True,
        temperature=1.0,
        top_k=0,
    )
    assert openai_api.parse_options(body, {"num_beams": 4, "max_length": 9}) == expected
    own = {"temperature": 0.5, "top_k": 7}
    assert openai_api.parse_options(body, own) == expected | own
    assert openai_api.parse_options(
        openai_api.CompletionRequest(temperature=2.0, top_k=0), own
    ) == expected | {"temperature": 2.0}
    nulls = openai_api.CompletionRequest(**dict.fromkeys(openai_api.CompletionRequest.model_fields))
    assert openai_api.parse_options(nulls, {}) == expected


def test_every_option_of_generate_is_a_field(url, decoder):
    values = dict(
        top_k=5, min_p=0.1, repetition_penalty=1.3, no_repeat_ngram_size=2, bad_words_ids=[[4, 5]],
        min_new_tokens=4, min_length=2, forced_bos_token_id=6, forced_eos_token_id=7,
        suppress_tokens=[8], begin_suppress_tokens=[9], renormalize_logits=True,
        eos_token_id=[EOS, 11], num_beams=1, length_penalty=0.5, early_stopping=True,
    )  # fmt: skip
    assert set(values) == set(openai_api.OPTIONS)
    for name, value in values.items():
        found = post(url, prompt="ab", seed=1, max_tokens=8, **{name: value}).json()["choices"][0][
            "text"
        ]
        options = dict(do_sample=True, seed=1, top_k=0, max_new_tokens=8) | {name: value}
        assert found == decoder.generate(["ab"], **options)[0], name


def test_the_prompt_may_be_echoed_and_may_be_all(client, decoder):
    found = greedy(client, ["ab cd", "é日"], echo=True, max_tokens=5)
    expected = decoder.generate(["ab cd", "é日"], max_new_tokens=5)
    assert [choice.text for choice in found.choices] == ["ab cd" + expected[0], "é日" + expected[1]]
    ids = [START, 4, 5, 3, 6]  # special tokens have no text
    found = greedy(client, ids, echo=True, max_tokens=0)
    assert (found.choices[0].text, found.choices[0].finish_reason) == ("abc", "length")
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (5, 0)


def test_without_a_prompt_the_model_begins(url, decoder):
    assert decoder.runtime.config["bos_token_id"] == START
    expected = decoder.decode([new_tokens(decoder, "", max_new_tokens=16)])[0]
    for body in (dict(), dict(prompt=None), dict(prompt=""), dict(prompt=[START])):
        found = post(url, temperature=0, **body).json()
        assert "choices" in found and found["choices"][0]["text"] == expected, (body, found)


# ------------------------------------------------------------------------------------ probabilities


def torch_logprobs(exported, ids):
    """Of each token but the first: that of all tokens in its place (T - 1, V)."""
    with torch.no_grad():
        return (
            exported("causal-learned")
            .model(torch.tensor([ids]))
            .logits[0, :-1]
            .double()
            .log_softmax(-1)
            .numpy()
        )


@pytest.mark.parametrize("count", [0, 1, 5])
def test_probabilities_are_those_of_the_model(client, decoder, exported, count):
    text = "ab é"
    read = decoder.encode([text], special_tokens=True)[0].ids
    new = new_tokens(decoder, text, max_new_tokens=6, suppress_tokens=[EOS])
    found = greedy(
        client,
        text,
        max_tokens=6,
        echo=True,
        logprobs=count,
        extra_body=dict(suppress_tokens=[EOS]),
    )
    known = found.choices[0].logprobs
    exact = torch_logprobs(exported, read + new)
    assert known.token_logprobs[0] is None and known.top_logprobs[0] is None
    names = [decoder.token_names(token) for token in range(VOCABULARY)]
    assert known.tokens == [names[token] for token in read + new] and known.tokens[:3] == [
        "<s>",
        "ab",
        " ",
    ]
    for place, token in enumerate((read + new)[1:]):
        row = exact[place]
        assert known.token_logprobs[place + 1] == pytest.approx(row[token], abs=1e-5)
        likeliest = np.argsort(-row)[:count].tolist()
        expected = {names[each]: row[each] for each in {*likeliest, token}}
        assert known.top_logprobs[place + 1] == pytest.approx(expected, abs=1e-5)
        assert list(known.top_logprobs[place + 1])[:count] == [names[each] for each in likeliest]
    whole = found.choices[0].text
    for name, offset in zip(known.tokens, known.text_offset):
        assert whole[offset:].startswith(name) or name not in ALPHABET[:8] + ["ab", "cd", "."]
    assert known.text_offset == sorted(known.text_offset)
    alone = (
        greedy(client, text, max_tokens=6, logprobs=count, extra_body=dict(suppress_tokens=[EOS]))
        .choices[0]
        .logprobs
    )
    for kind in ("tokens", "token_logprobs", "top_logprobs"):
        assert getattr(alone, kind) == getattr(known, kind)[len(read) :]
    assert [offset + len(text) for offset in alone.text_offset] == known.text_offset[len(read) :]


def test_the_prompt_alone_can_be_scored(client, decoder, exported):
    prompts = [[START, 4, 5, 6], [7, 8, 20, 21, 4]]
    found = greedy(client, prompts, max_tokens=0, echo=True, logprobs=1)
    for choice, ids in zip(found.choices, prompts):
        exact = torch_logprobs(exported, ids)
        expected = [exact[place, token] for place, token in enumerate(ids[1:])]
        assert choice.logprobs.token_logprobs == [
            None,
            *(pytest.approx(each, abs=1e-5) for each in expected),
        ]
        assert choice.finish_reason == "length"
    assert found.usage.completion_tokens == 0


def test_sampled_tokens_have_the_probabilities_of_the_model_whatever_the_sampling(
    client, decoder, exported
):
    options = dict(seed=3, max_tokens=6, logprobs=2, temperature=0.5, top_p=0.5)
    found = client.completions.create(model="decoder", prompt=[4, 5], n=2, **options)
    assert [choice.text for choice in found.choices] != [found.choices[0].text] * 2
    new = decoder.runtime.generate(
        np.array([[4, 5]]),
        do_sample=True,
        seed=3,
        top_k=0,
        temperature=0.5,
        top_p=0.5,
        max_new_tokens=6,
    )
    tokens = ended(new[0, 2:].tolist())[0]
    exact = torch_logprobs(exported, [4, 5, *tokens])[1:]
    expected = [exact[place, token] for place, token in enumerate(tokens)]
    assert found.choices[0].logprobs.token_logprobs == pytest.approx(expected, abs=1e-5)


# --------------------------------------------------------------------------------------- stop texts


@given(
    st.lists(st.text("abé", max_size=4), max_size=10),
    st.lists(st.text("abé", min_size=1, max_size=5), max_size=4),
)
@example(["a", "b", "a", "b", "a", "c"], ["abac"])
@example(["ab", "ab"], ["bab", "ba"])
def test_a_text_ends_before_the_first_stop_text(pieces, stops):
    text = "".join(pieces)
    places = [text.find(stop) for stop in stops if stop in text]
    filter = StopTexts(stops)
    found = ""
    for number, piece in enumerate(pieces):
        found += filter.add(piece)
        so_far = "".join(pieces[: number + 1])
        assert filter.is_stopped == any(stop in so_far for stop in stops)
        if filter.is_stopped:
            break
        rest = so_far[len(found) :]  # is held back while, and only while, it may begin one
        assert rest == filter.held and so_far.startswith(found)
        assert not rest or any(stop.startswith(rest) for stop in stops)
    if places:
        first = min(places)
        # of two that end in one piece the one that begins first; one that was complete before goes
        # first
        assert (
            text.startswith(found)
            and len(found) >= first
            and not any(stop in found for stop in stops)
        )
    else:
        assert found + filter.held == text


def stopped_at(text, stops):
    return text[: min(text.find(stop) for stop in stops if stop in text)]


def test_an_answer_ends_before_a_stop_text_and_the_engine_with_it(client, decoder, engine):
    whole = decoder.generate(["ab cd"], max_new_tokens=30, suppress_tokens=[EOS])[0]
    extra = dict(max_tokens=30, extra_body=dict(suppress_tokens=[EOS]))
    engine.reset()
    for stop in (
        whole[3:5],
        whole[6:7],
        [whole[9:12], whole[4:8]],
        whole[:1],
        ["zzz", whole[10:11]],
    ):
        found = greedy(client, "ab cd", stop=stop, **extra)
        expected = stopped_at(whole, [stop] if isinstance(stop, str) else stop)
        assert (found.choices[0].text, found.choices[0].finish_reason) == (expected, "stop")
        assert found.usage.completion_tokens < 30
        # nothing is computed behind it
        assert engine.steps == found.usage.completion_tokens and engine.closed == 1
        engine.reset()
    for stop in ("zzz", whole[-1:] + "z", [], None, whole + "z"):
        found = greedy(client, "ab cd", stop=stop, **extra)
        assert (found.choices[0].text, found.choices[0].finish_reason) == (whole, "length")


def test_a_stop_text_of_bytes_that_come_one_by_one(client, decoder):
    """é and 日 are of two and three tokens."""
    ids = {letter: decoder.tokenizer.token_to_id(letter) for letter in "ÃæĹ¥©abg"}
    forced = [ids[letter] for letter in "aÃ©bæĹ¥g"]

    class Forced(OneByOne):
        def logits(self, prompt):
            self.steps += 1
            found = np.zeros((1, VOCABULARY), np.float32)
            found[0, forced[len(prompt) - 1]] = 9
            return found

    engine = Forced(decoder.runtime)
    for stop, expected, tokens in (
        ("é", "a", 3),
        ("日", "aéb", 7),
        ("b日g", "aé", 8),
        ("éb", "a", 4),
        ("日x", "aéb日g", 8),
    ):
        body = openai_api.CompletionRequest(stop=stop, temperature=0, max_tokens=8)
        job = engine.admission.job([START], openai_api.parse_options(body, {}))
        asked = openai_api.Completion(decoder, job, 0, "", [stop], False)
        [choice] = json.loads(asyncio.run(openai_api.full_response(engine, [asked], {})))["choices"]
        assert (choice["text"], asked.tokens) == (expected, tokens)


def test_each_of_several_answers_has_its_own_stop(client, decoder):
    options = dict(model="decoder", prompt=["ab", "g"], n=3, seed=11, max_tokens=25)
    whole = client.completions.create(**options)
    stop = "b"
    found = client.completions.create(**options, stop=stop)
    for one, other in zip(whole.choices, found.choices):
        if stop in one.text:
            assert (other.text, other.finish_reason) == (stopped_at(one.text, [stop]), "stop")
        else:
            assert (other.text, other.finish_reason) == (one.text, one.finish_reason)
    assert 0 < sum(stop in choice.text for choice in whole.choices) < 6


def test_beams_are_cut_at_a_stop_text(client, decoder):
    [text] = decoder.generate(["ab cd"], num_beams=3, max_new_tokens=12)
    found = client.completions.create(
        model="decoder", prompt="ab cd", max_tokens=12, stop=text[2:4], extra_body=dict(num_beams=3)
    )
    assert (found.choices[0].text, found.choices[0].finish_reason) == (
        stopped_at(text, [text[2:4]]),
        "stop",
    )


# ------------------------------------------------------------------------------------------ streams


def collected(stream):
    """What the parts of a stream are together, and the usage at its end."""
    choices, usage = {}, None
    for part in stream:
        if part.usage is not None:
            assert part.choices == []
            usage = part.usage
        for choice in part.choices:
            own = choices.setdefault(
                choice.index, {"text": "", "finish_reason": None, "logprobs": None}
            )
            assert own["finish_reason"] is None
            own["text"] += choice.text
            own["finish_reason"] = choice.finish_reason
            if choice.logprobs is not None:
                columns = own["logprobs"] or {}
                own["logprobs"] = {
                    kind: columns.get(kind, []) + column
                    for kind, column in choice.logprobs.to_dict().items()
                }
    return [choices[index] for index in sorted(choices)], usage


STREAMED = [
    dict(),
    dict(prompt=["ab", "é", "g"], stop="b"),
    dict(n=3, stop=["cd", " "]),
    dict(logprobs=2),
    dict(logprobs=0, n=2, stop="a"),
    dict(echo=True),
    dict(echo=True, logprobs=1, prompt=["ab cd", "g"]),
    dict(echo=True, logprobs=1, n=3, prompt=["ab cd", "g"]),
    dict(echo=True, max_tokens=0),
    dict(echo=True, max_tokens=0, logprobs=1),
    dict(prompt=[4, 5, 22, 23], temperature=0),
    dict(temperature=0, extra_body=dict(num_beams=3)),
]


@pytest.mark.parametrize("asked", STREAMED, ids=str)
def test_a_stream_is_the_answer_in_parts(client, asked):
    options = dict(model="decoder", prompt="ab cd", seed=2, max_tokens=20) | asked
    whole = client.completions.create(**options)
    parts, usage = collected(
        client.completions.create(**options, stream=True, stream_options=dict(include_usage=True))
    )
    assert usage == whole.usage
    expected = [choice.to_dict() for choice in whole.choices]
    assert parts == [
        {key: choice[key] for key in ("text", "finish_reason", "logprobs")} for choice in expected
    ]
    _, usage = collected(client.completions.create(**options, stream=True))
    assert usage is None


def choices_of(client, asked):
    """Of each request, all of them at once: as a whole, and as a stream."""
    with ThreadPoolExecutor(2 * len(asked)) as pool:
        found = pool.map(lambda each: client.completions.create(**each), asked)
        streams = pool.map(
            lambda each: collected(client.completions.create(**each, stream=True))[0], asked
        )
        return [[choice.to_dict() for choice in whole.choices] for whole in found], list(streams)


def check_same(choices, expected):
    for choice, other in zip(choices, expected, strict=True):
        assert (choice["text"], choice["finish_reason"]) == (other["text"], other["finish_reason"])
        if other["logprobs"] is not None:
            known, others = choice["logprobs"], other["logprobs"]
            assert (
                known["tokens"] == others["tokens"]
                and known["text_offset"] == others["text_offset"]
            )
            for row, other_row in zip(known["top_logprobs"], others["top_logprobs"], strict=True):
                assert row == pytest.approx(other_row, abs=1e-5)


@pytest.mark.parametrize("batches", ["whole", pytest.param("continuous", marks=pytest.mark.slow)])
def test_the_engine_that_batches_gives_the_same(decoder, exported_for, tmp_path, batches):
    """What all these requests at once get is what each of them gets alone, from logits that are
    computed anew at each step."""
    directory = decoder.runtime.info.directory
    if batches == "continuous":
        directory = with_tokenizer(exported_for("causal", "cpu")[1], tmp_path)
    runtime, engine = text_engine(directory)
    assert ("whole batches" in engine.admission.describe()) == (batches == "whole")
    alone = TextRuntime(directory, threads=1)
    asked = [
        dict(model="decoder", prompt="ab cd", seed=2, max_tokens=20) | each for each in STREAMED
    ]
    with contextlib.ExitStack() as stack:
        found = []
        for served in (
            ServedModel("decoder", runtime, engine),
            ServedModel("decoder", alone, OneByOne(alone.runtime)),
        ):
            url = stack.enter_context(serving_of(served))
            client = stack.enter_context(
                openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            )
            found.append(choices_of(client, asked))
    engine.close()
    (whole, streams), (expected, _) = found
    for choices, parts, others in zip(whole, streams, expected, strict=True):
        check_same(choices, others)
        check_same(parts, others)


def test_the_events_of_a_stream(url, decoder):
    body = dict(prompt="ab cd", temperature=0, max_tokens=6, suppress_tokens=[EOS], stream=True)
    found = post(url, **body)
    assert found.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert found.headers["cache-control"] == "no-cache"
    *events, done, end = found.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    parts = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({part["id"] for part in parts}) == 1 and not any("usage" in part for part in parts)
    counted = post(url, **body, stream_options={"include_usage": True}).text.split("\n\n")[:-2]
    usages = [json.loads(event.removeprefix("data: "))["usage"] for event in counted]
    assert usages[:-1] == [None] * (len(usages) - 1) and usages[-1]["completion_tokens"] == 6


def test_text_is_sent_with_the_token_that_completes_it(decoder, engine):
    """Not when the next one comes."""
    job = engine.admission.job(
        [START, 4],
        {"max_new_tokens": 12, "num_beams": 1, "do_sample": False, "suppress_tokens": [EOS]},
    )

    async def heard():
        asked = openai_api.Completion(decoder, job, 0, "", [], False)
        async for chunk in asked.chunks(engine):
            yield engine.steps, chunk["text"]

    async def whole():
        return [each async for each in heard()]

    tokens = new_tokens(decoder, "a", max_new_tokens=12, suppress_tokens=[EOS])
    for steps, text in asyncio.run(whole())[:-1]:
        assert decoder.decode([tokens[:steps]])[0].rstrip("\ufffd").endswith(text)


def test_an_error_in_a_stream_is_an_event(client, url, engine):
    engine.fails_after, engine.error = 2, RequestError(503, "the server is shutting down")
    with pytest.raises(openai.APIError, match="shutting down"):
        collected(
            client.completions.create(model="decoder", prompt="ab", stream=True, temperature=0)
        )
    engine.reset()
    engine.fails_after, engine.error = 2, RequestError(503, "the server is shutting down")
    *_, event, done, _ = post(url, prompt="ab", stream=True, temperature=0).text.split("\n\n")
    expected = {
        "message": "the server is shutting down",
        "type": "server_error",
        "param": None,
        "code": None,
    }
    assert (
        json.loads(event.removeprefix("data: ")) == {"error": expected} and done == "data: [DONE]"
    )
    engine.reset()
    engine.fails_after, engine.error = 2, KeyError("secret")
    with pytest.raises(openai.APIError, match="internal server error"):
        collected(
            client.completions.create(model="decoder", prompt="ab", stream=True, temperature=0)
        )


@pytest.mark.parametrize("prompt", ["ab", ["ab", "g"]])
def test_an_error_before_the_first_token_has_a_status(client, engine, prompt):
    engine.fails_after, engine.error = 0, overloaded(9, 8)
    for more in (dict(), dict(stream=True), dict(stop="z")):
        with pytest.raises(openai.RateLimitError, match="9 rows are waiting") as caught:
            client.completions.create(model="decoder", prompt=prompt, **more)
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.code == "rate_limit_exceeded"
    engine.error = KeyError("secret")
    with pytest.raises(openai.InternalServerError, match="internal server error"):
        client.completions.create(model="decoder", prompt=prompt, stream=True)


@pytest.mark.parametrize("prompt", ["ab", ["ab", "g"]])
def test_a_client_that_goes_leaves_nothing_running(client, engine, prompt):
    slow = dict(
        model="decoder", prompt=prompt, max_tokens=30, extra_body=dict(suppress_tokens=[EOS])
    )
    engine.pause, streams = 0.1, 1 if prompt == "ab" else 2
    with client.completions.create(**slow, stream=True) as stream:
        next(iter(stream))
    deadline = time.monotonic() + 10
    while engine.closed < streams and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.closed == streams and engine.steps < 30 * streams


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "body, param, message",
    [
        (
            dict(prompt=5),
            "prompt",
            "prompt is 5, expected a text, a list of texts, a list of token ids",
        ),
        (dict(prompt=[]), "prompt", r"prompt is \[\], expected"),
        (dict(prompt={}), "prompt", "prompt is {}, expected"),
        (dict(prompt=["ab", 5]), "prompt", "prompt has 'ab', expected"),
        (dict(prompt=[5, "ab"]), "prompt", "prompt has 5, expected"),
        (dict(prompt=[5, True]), "prompt", "prompt has 5, expected"),
        (dict(prompt=[[]]), "prompt", r"prompt has \[\], expected"),
        (dict(prompt=[[5], [[6]]]), "prompt", r"prompt has \[\[6\]\], expected"),
        (dict(prompt=[5, 1.5]), "prompt", "prompt has 5, expected"),
        (
            dict(prompt=[5, 48]),
            "prompt",
            "prompt has the token id 48, expected ids from 0 to 47",
        ),
        (dict(prompt=[[5], [-1]]), "prompt", "prompt has the token id -1, expected"),
        (
            dict(prompt=[2**70]),
            "prompt",
            "prompt has the token id 1180591620717411303424, expected",
        ),
        (dict(prompt=["a"] * 7), "prompt", "prompt has 7 items, expected at most 6"),
        (
            dict(prompt=[4] * 41),
            None,
            "the input is too long: prompt has 41 tokens, expected at most 40",
        ),
        (
            dict(prompt=[4] * 30),
            None,
            "the input is too long: 30 tokens of the prompt and max_tokens=16, expected at most 41",
        ),
        (dict(max_tokens=2**31), None, "the input is too long: "),
        (
            dict(max_tokens=-1),
            "max_tokens",
            "max_tokens is -1, expected .*greater than or equal to 0",
        ),
        (
            dict(max_tokens=10**30),
            "max_tokens",
            "max_tokens is 1000000000000000000000000000000, expected",
        ),
        (dict(max_tokens="16"), "max_tokens", "max_tokens is '16', expected a valid integer"),
        (dict(max_tokens=1.5), "max_tokens", "max_tokens is 1.5, expected a valid integer"),
        (dict(max_tokens=True), "max_tokens", "max_tokens is True, expected a valid integer"),
        (
            dict(max_tokens=0),
            "max_tokens",
            "max_tokens is 0 without echo=true, expected at least 1",
        ),
        (
            dict(temperature=-1),
            "temperature",
            "temperature is -1, expected .*greater than or equal to 0",
        ),
        (
            dict(temperature=3),
            "temperature",
            "temperature is 3, expected .*less than or equal to 2",
        ),
        (dict(temperature="hot"), "temperature", "temperature is 'hot', expected a valid number"),
        (dict(top_p=1.1), "top_p", "top_p is 1.1, expected .*less than or equal to 1"),
        (dict(n=0), "n", "n is 0, expected .*greater than or equal to 1"),
        (dict(n=129), "n", "n is 129, expected .*less than or equal to 128"),
        (dict(n=9), None, "9 beams or sequences, expected at most 8"),
        (
            dict(n=2, temperature=0),
            "n",
            "n is 2 with temperature 0, expected 1",
        ),
        (
            dict(n=4, num_beams=3),
            "n",
            "n is 4 with temperature 0, expected at most num_beams, 3",
        ),
        (
            dict(num_beams=3, temperature=0.5),
            "temperature",
            "temperature is 0.5 with num_beams 3, expected 0",
        ),
        (dict(num_beams=3, logprobs=1), "logprobs", "logprobs do not go with num_beams=3"),
        (
            dict(num_beams="3"),
            "num_beams",
            "num_beams must be a whole number from 1 to .*, got '3'",
        ),
        (dict(num_beams=40), None, "40 beams or sequences, expected at most 8"),
        (dict(top_k=-1), "top_k", "top_k must be a whole number from 0 .*, got -1"),
        (dict(min_p=2), "min_p", "min_p must be a number from 0 to 1, got 2"),
        (
            dict(repetition_penalty=0),
            "repetition_penalty",
            "repetition_penalty must be a float32 number above 0, got 0",
        ),
        (
            dict(bad_words_ids=[[48]]),
            "bad_words_ids",
            r"bad_words_ids must be in \[0, 47\], the vocabulary, got 48",
        ),
        (dict(suppress_tokens=list(range(VOCABULARY))), None, "no token may follow"),
        (dict(seed=-1), "seed", "seed is -1, expected .*greater than or equal to 0"),
        (dict(seed=1.5), "seed", "seed is 1.5, expected a valid integer"),
        (dict(stop=5), "stop", "stop is 5, expected a text or a list"),
        (dict(stop=""), "stop", "stop is '', expected"),
        (dict(stop=["a", ""]), "stop", r"stop is \['a', ''\], expected"),
        (dict(stop=["a", 5]), "stop", r"stop is \['a', 5\], expected"),
        (
            dict(stop=list("abcde")),
            "stop",
            r"stop is \['a', 'b', 'c', 'd', 'e'\], expected a text or a list of up to 4",
        ),
        (dict(logprobs=6), "logprobs", "logprobs is 6, expected .*less than or equal to 5"),
        (dict(logprobs=True), "logprobs", "logprobs is True, expected a valid integer"),
        (dict(echo="yes"), "echo", "echo is 'yes', expected a valid boolean"),
        (dict(stream=1), "stream", "stream is 1, expected a valid boolean"),
        (
            dict(stream=None, stream_options={}),
            "stream_options",
            "stream_options is set without stream, expected stream=true",
        ),
        (
            dict(stream=True, stream_options={"usage": 1}),
            "stream_options",
            "stream_options.usage is 1, expected no field",
        ),
        (
            dict(suppress_tokens=[5] * 70_000),
            "suppress_tokens",
            "suppress_tokens has 70000 token ids, expected at most 65536",
        ),
        (
            dict(bad_words_ids=[[5, 6]] * 40_000),
            "bad_words_ids",
            "bad_words_ids has 80000 token ids, expected at most 65536",
        ),
        (dict(best_of=2), "best_of", "best_of is 2, expected null or 1"),
        (dict(suffix="a"), "suffix", "suffix is 'a', expected null or "),
        (dict(logit_bias={"5": 1}), "logit_bias", "logit_bias is {'5': 1.*}, expected null or {}"),
        (
            dict(presence_penalty=0.5),
            "presence_penalty",
            "presence_penalty is 0.5, expected null or 0",
        ),
        (
            dict(frequency_penalty=-1),
            "frequency_penalty",
            "frequency_penalty is -1.*, expected null or 0",
        ),
        (dict(max_new_tokens=5), None, "max_new_tokens is 5, expected no field"),
        (dict(topp=0.5), None, "topp is 0.5, expected no field"),
        (
            dict(model="encoder"),
            None,
            "the model encoder is a VanillaEncoderModel, which cannot complete texts",
        ),
        (dict(model=5), "model", "model is 5, expected a valid string"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_is_refused(url, body, param, message):
    for streams in (False, True):
        found = post(url, **{"prompt": "ab", "stream": streams, **body})
        assert found.status_code == 400, found.text
        error = found.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert error["code"] == ("context_length_exceeded" if "too long" in message else None)
        assert re.match(message, error["message"]), error["message"]


def test_an_empty_prompt_of_a_model_without_a_first_token_is_refused(url, decoder, monkeypatch):
    for config in (decoder.runtime.config, decoder.runtime.info.generation_config):
        monkeypatch.setitem(config, "bos_token_id", None)
    for body in (dict(prompt=["ab", ""]), dict(prompt=""), dict()):
        error = post(url, **body).json()["error"]
        assert re.match(
            "prompt [01] of [12] is '', which has no tokens, expected words", error["message"]
        )


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "ab", "temperature": NaN}',
        b'{"prompt": "ab", "top_p": Infinity}',
        b"{",
        b"[1]",
        b"",
    ],
)
def test_what_is_no_json_is_refused(url, body):
    for path in ("/v1/completions", "/v1/embeddings"):
        found = httpx.post(url + path, content=body, headers={"Content-Type": "application/json"})
        assert found.status_code == 400 and found.json()["error"]["type"] == "invalid_request_error"


def test_the_client_knows_its_errors(client):
    with pytest.raises(
        openai.NotFoundError, match="model is 'davinci', expected one of decoder, encoder"
    ) as caught:
        client.completions.create(model="davinci", prompt="ab")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="best_of is 3") as caught:
        client.completions.create(model="decoder", prompt="ab", best_of=3)
    assert (caught.value.param, caught.value.type) == ("best_of", "invalid_request_error")


def test_the_default_values_of_what_is_not_supported_are_no_matter(client):
    neutral = dict(
        best_of=1,
        suffix="",
        logit_bias={},
        presence_penalty=0,
        frequency_penalty=0.0,
        user="someone",
    )
    nulls = dict.fromkeys(
        (
            "best_of",
            "suffix",
            "logit_bias",
            "presence_penalty",
            "frequency_penalty",
            "stop",
            "logprobs",
        )
    )
    texts = [greedy(client, "ab", **more).choices[0].text for more in ({}, neutral, nulls)]
    assert texts == texts[:1] * 3


def test_a_long_text_is_cut_into_tokens_beside_the_event_loop(url, decoder, monkeypatch):
    assert (
        post(url, prompt="a" * 100_000)
        .json()["error"]["message"]
        .startswith("the input is too long: 100001 tokens of the prompt")
    )
    encode = decoder.encode
    monkeypatch.setattr(decoder, "encode", lambda *given: (time.sleep(0.5), encode(*given))[1])
    pending = threading.Thread(target=post, args=(url,), kwargs=dict(prompt="a" * 100_000))
    pending.start()
    time.sleep(0.1)
    began = time.monotonic()
    assert httpx.get(f"{url}/v1/models").status_code == 200 and time.monotonic() - began < 0.3
    pending.join()


# --------------------------------------------------------------------------------------- embeddings


def test_embeddings_are_those_of_the_runtime(client, encoder):
    texts = ["ab cd", "é日 ab.", "g"]
    expected = encoder.embed(texts)
    ids = [encoding.ids for encoding in encoder.encode(texts, special_tokens=True)]
    for asked, count in ((texts[0], 1), (texts, 3), (ids[0], 1), (ids, 3)):
        for more in (dict(), dict(encoding_format="float"), dict(encoding_format="base64")):
            found = client.embeddings.create(model="encoder", input=asked, **more)
            vectors = [each.embedding for each in found.data]
            if more.get("encoding_format") == "base64":
                vectors = [
                    np.frombuffer(base64.b64decode(vector), "<f4").tolist() for vector in vectors
                ]
            assert np.array(vectors, np.float32).tolist() == expected[:count].tolist()
            assert [each.index for each in found.data] == list(
                range(count)
            ) and found.object == "list"
            assert (
                found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids[:count]))
            )


@pytest.mark.parametrize(
    "body, message",
    [
        (dict(), "input is missing, expected it in the body"),
        (dict(input=None), "input is None, expected a text"),
        (dict(input=""), "input 0 of 1 is '', expected at least one character"),
        (dict(input=["a", ""]), "input 1 of 2 is '', expected at least one character"),
        (dict(input=[48]), "input has the token id 48, expected ids from 0 to"),
        (dict(input=["a"] * 7), "input has 7 items, expected at most 6"),
        (
            dict(input="a", dimensions=0),
            "dimensions is 0, expected a number greater than or equal to 1",
        ),
        (dict(input="a", dimensions=1000), "dimensions is 1000, expected at most "),
        (
            dict(input="a", encoding_format="int8"),
            "encoding_format is 'int8', expected 'float' or 'base64'",
        ),
        (
            dict(input="a", model="decoder"),
            "the model decoder is a VanillaDecoderForCausalLM, which cannot embed texts",
        ),
        (dict(input="a", truncate=True), "truncate is True, expected no field"),
    ],
    ids=str,
)
def test_what_is_not_embedded(url, body, message):
    found = post(url, "/v1/embeddings", **body)
    assert found.status_code == 400
    assert found.json()["error"]["message"].startswith(message), found.text


# ------------------------------------------------------------------------------------------- models


def test_the_models(client, url, decoder):
    assert [model.id for model in client.models.list()] == ["decoder", "encoder"]
    found = client.models.retrieve("decoder")
    assert (found.id, found.object, found.owned_by) == ("decoder", "model", "vanilla-transformer")
    assert abs(found.created - time.time()) < 86400
    with pytest.raises(openai.NotFoundError, match="model is 'x', expected"):
        client.models.retrieve("x")


def test_a_model_in_the_path(url, decoder):
    with openai.OpenAI(
        base_url=f"{url}/models/decoder/v1", api_key="none", max_retries=0
    ) as client:
        assert [model.id for model in client.models.list()] == ["decoder"]
        found = client.completions.create(model="encoder", prompt="ab", temperature=0, max_tokens=4)
        assert (found.model, found.choices[0].text) == (
            "decoder",
            decoder.generate(["ab"], max_new_tokens=4)[0],
        )
    assert post(url, "/models/encoder/v1/completions", prompt="ab").status_code == 400
    assert post(url, "/models/x/v1/completions", prompt="ab").status_code == 404
