"""What the targets with operators of their own generate is what transformers generates; the cuda target on the CPU here."""

import numpy as np
import pytest
import torch
from checkpoints import EOS, PAD
from targets import MODELS, generators, prompts

from vanilla_transformer_export.runtime import Runtime
from vanilla_transformer_export.verify import verify

targets = pytest.mark.parametrize("target", ["cpu", "cuda"])


@targets
@pytest.mark.parametrize("name", MODELS)
def test_40_cases_agree_with_torch(exported_for, name, target):
    model, directory = exported_for(name, target)
    report = verify(directory, model, cases=40, seed=1, device="cpu")
    assert report.failures == [] and report.values > 10_000
    assert report.agreeing == report.tokens


@targets
@pytest.mark.parametrize("beams", [1, 2, 5])
@generators
def test_generated_tokens_are_those_of_transformers(exported_for, name, beams, target):
    model, directory = exported_for(name, target)
    runtime = Runtime(directory, device="cpu")
    for seed in range(3):
        ids, mask = prompts(name, seed)
        settings = dict(max_new_tokens=14, num_beams=beams)
        with torch.no_grad():
            given = dict(attention_mask=torch.from_numpy(mask), do_sample=False)
            expected = model.generate(torch.from_numpy(ids), **given, **settings).numpy()
        found = runtime.generate(ids, mask, **settings)
        start = 1 if name == "seq2seq" else 7
        for got, wanted in zip(found[:, start:].tolist(), expected[:, start:].tolist(), strict=True):
            end = wanted.index(EOS) + 1 if EOS in wanted else len(wanted)
            assert got[:end] == wanted[:end]


@targets
@pytest.mark.parametrize("name", ["causal", "causal-window"])
def test_padding_may_stand_on_either_side_and_changes_nothing(exported_for, name, target):
    runtime = Runtime(exported_for(name, target)[1], device="cpu")
    ids, mask = prompts(name)
    rows = [row[real == 1] for row, real in zip(ids, mask)]
    right = np.array([[*row, *[PAD] * (7 - len(row))] for row in rows])
    found = [runtime.generate(given, max_new_tokens=6)[:, 7:].tolist() for given in (ids, right)]
    assert found[0] == found[1]
    for row, got in zip(rows, found[0]):
        alone = runtime.generate(row[None], max_new_tokens=6)[0, len(row) :].tolist()
        assert got[: len(alone)] == alone
