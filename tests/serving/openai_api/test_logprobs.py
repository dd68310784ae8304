"""Tests of the log probabilities of completions, against torch."""

import numpy as np
import pytest
import torch
from checkpoints import EOS, START, VOCABULARY
from openai_server import ALPHABET, ended, greedy, new_tokens


def torch_logprobs(exported, ids):
    """Return (T - 1, V): the log probabilities at the positions of all tokens but the first."""
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
def test_logprobs_match_torch(client, decoder, exported, count):
    text = "ab é"
    prompt = decoder.encode([text], special_tokens=True)[0].ids
    new = new_tokens(decoder, text, max_new_tokens=6, suppress_tokens=[EOS])
    actual = greedy(
        client,
        text,
        max_tokens=6,
        echo=True,
        logprobs=count,
        extra_body=dict(suppress_tokens=[EOS]),
    )
    known = actual.choices[0].logprobs
    exact = torch_logprobs(exported, prompt + new)
    assert known.token_logprobs[0] is None and known.top_logprobs[0] is None
    names = [decoder.token_names(token) for token in range(VOCABULARY)]
    assert known.tokens == [names[token] for token in prompt + new] and known.tokens[:3] == [
        "<s>",
        "ab",
        " ",
    ]
    for place, token in enumerate((prompt + new)[1:]):
        row = exact[place]
        assert known.token_logprobs[place + 1] == pytest.approx(row[token], abs=1e-5)
        top_ids = np.argsort(-row)[:count].tolist()
        expected = {names[each]: row[each] for each in {*top_ids, token}}
        assert known.top_logprobs[place + 1] == pytest.approx(expected, abs=1e-5)
        assert list(known.top_logprobs[place + 1])[:count] == [names[each] for each in top_ids]
    full_text = actual.choices[0].text
    for name, offset in zip(known.tokens, known.text_offset):
        assert full_text[offset:].startswith(name) or name not in ALPHABET[:8] + ["ab", "cd", "."]
    assert known.text_offset == sorted(known.text_offset)
    alone = (
        greedy(client, text, max_tokens=6, logprobs=count, extra_body=dict(suppress_tokens=[EOS]))
        .choices[0]
        .logprobs
    )
    for kind in ("tokens", "token_logprobs", "top_logprobs"):
        assert getattr(alone, kind) == getattr(known, kind)[len(prompt) :]
    assert [offset + len(text) for offset in alone.text_offset] == known.text_offset[len(prompt) :]


def test_prompt_is_scored_without_new_tokens(client, decoder, exported):
    prompts = [[START, 4, 5, 6], [7, 8, 20, 21, 4]]
    actual = greedy(client, prompts, max_tokens=0, echo=True, logprobs=1)
    for choice, ids in zip(actual.choices, prompts):
        exact = torch_logprobs(exported, ids)
        expected = [exact[place, token] for place, token in enumerate(ids[1:])]
        assert choice.logprobs.token_logprobs == [
            None,
            *(pytest.approx(each, abs=1e-5) for each in expected),
        ]
        assert choice.finish_reason == "length"
    assert actual.usage.completion_tokens == 0


def test_logprobs_are_independent_of_temperature_and_top_p(client, decoder, exported):
    options = dict(seed=3, max_tokens=6, logprobs=2, temperature=0.5, top_p=0.5)
    actual = client.completions.create(model="decoder", prompt=[4, 5], n=2, **options)
    assert [choice.text for choice in actual.choices] != [actual.choices[0].text] * 2
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
    assert actual.choices[0].logprobs.token_logprobs == pytest.approx(expected, abs=1e-5)
