"""Tests of stop texts: where they cut an answer, and that generation ends there."""

import asyncio
import json

import numpy as np
from checkpoints import EOS, START, VOCABULARY
from hypothesis import example, given
from hypothesis import strategies as st
from openai_server import OneByOne, greedy

from vanilla_transformer_export.serving.protocols import openai_api, openai_requests
from vanilla_transformer_export.serving.protocols.completions import StopTexts


@given(
    st.lists(st.text("abé", max_size=4), max_size=10),
    st.lists(st.text("abé", min_size=1, max_size=5), max_size=4),
)
@example(["a", "b", "a", "b", "a", "c"], ["abac"])
@example(["ab", "ab"], ["bab", "ba"])
def test_text_is_cut_before_first_stop_text(pieces, stops):
    text = "".join(pieces)
    places = [text.find(stop) for stop in stops if stop in text]
    filter = StopTexts(stops)
    result = ""
    for number, piece in enumerate(pieces):
        result += filter.add(piece)
        so_far = "".join(pieces[: number + 1])
        assert filter.is_stopped == any(stop in so_far for stop in stops)
        if filter.is_stopped:
            break
        rest = so_far[len(result) :]  # is held back exactly while it may begin a stop text
        assert rest == filter.held and so_far.startswith(result)
        assert not rest or any(stop.startswith(rest) for stop in stops)
    if places:
        first = min(places)
        # If several stop texts end in the same piece, the first to begin cuts the text. A stop text
        # that ends in an earlier piece takes precedence.
        assert (
            text.startswith(result)
            and len(result) >= first
            and not any(stop in result for stop in stops)
        )
    else:
        assert result + filter.held == text


def cut_at_first_stop(text, stops):
    return text[: min(text.find(stop) for stop in stops if stop in text)]


def test_stop_text_cuts_answer_and_ends_generation(client, decoder, engine):
    uncut = decoder.generate(["ab cd"], max_new_tokens=30, suppress_tokens=[EOS])[0]
    extra = dict(max_tokens=30, extra_body=dict(suppress_tokens=[EOS]))
    engine.reset()
    for stop in (
        uncut[3:5],
        uncut[6:7],
        [uncut[9:12], uncut[4:8]],
        uncut[:1],
        ["zzz", uncut[10:11]],
    ):
        actual = greedy(client, "ab cd", stop=stop, **extra)
        expected = cut_at_first_stop(uncut, [stop] if isinstance(stop, str) else stop)
        assert (actual.choices[0].text, actual.choices[0].finish_reason) == (expected, "stop")
        assert actual.usage.completion_tokens < 30
        # nothing is computed after the stop text
        assert engine.steps == actual.usage.completion_tokens and engine.closed == 1
        engine.reset()
    for stop in ("zzz", uncut[-1:] + "z", [], None, uncut + "z"):
        actual = greedy(client, "ab cd", stop=stop, **extra)
        assert (actual.choices[0].text, actual.choices[0].finish_reason) == (uncut, "length")


def test_stop_text_with_multibyte_characters_split_into_tokens(client, decoder):
    """é and 日 have two and three tokens, one for each byte."""
    ids = {letter: decoder.tokenizer.token_to_id(letter) for letter in "ÃæĹ¥©abg"}
    forced = [ids[letter] for letter in "aÃ©bæĹ¥g"]

    class Forced(OneByOne):
        def logits(self, prompt):
            self.steps += 1
            actual = np.zeros((1, VOCABULARY), np.float32)
            actual[0, forced[len(prompt) - 1]] = 9
            return actual

    engine = Forced(decoder.runtime)
    for stop, expected, tokens in (
        ("é", "a", 3),
        ("日", "aéb", 7),
        ("b日g", "aé", 8),
        ("éb", "a", 4),
        ("日x", "aéb日g", 8),
    ):
        body = openai_requests.CompletionRequest(stop=stop, temperature=0, max_tokens=8)
        job = engine.admission.admit([START], openai_requests.parse_options(body, {}))
        completion = openai_api.Completion(decoder, job, 0, "", [stop], False)
        [choice] = json.loads(asyncio.run(openai_api.full_response(engine, [completion], {})))[
            "choices"
        ]
        assert (choice["text"], completion.tokens) == (expected, tokens)


def test_multiple_choices_stop_independently(client, decoder):
    options = dict(model="decoder", prompt=["ab", "g"], n=3, seed=11, max_tokens=25)
    uncut = client.completions.create(**options)
    stop = "b"
    result = client.completions.create(**options, stop=stop)
    for full_choice, cut_choice in zip(uncut.choices, result.choices):
        if stop in full_choice.text:
            assert (cut_choice.text, cut_choice.finish_reason) == (
                cut_at_first_stop(full_choice.text, [stop]),
                "stop",
            )
        else:
            assert (cut_choice.text, cut_choice.finish_reason) == (
                full_choice.text,
                full_choice.finish_reason,
            )
    assert 0 < sum(stop in choice.text for choice in uncut.choices) < 6


def test_beam_search_result_is_cut_at_stop_text(client, decoder):
    [text] = decoder.generate(["ab cd"], num_beams=3, max_new_tokens=12)
    result = client.completions.create(
        model="decoder", prompt="ab cd", max_tokens=12, stop=text[2:4], extra_body=dict(num_beams=3)
    )
    assert (result.choices[0].text, result.choices[0].finish_reason) == (
        cut_at_first_stop(text, [text[2:4]]),
        "stop",
    )
