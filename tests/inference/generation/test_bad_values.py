"""Tests of generation settings with invalid types and values."""

import numpy as np
import pytest
from checkpoints import copy_folder, edit_json, seal
from generation_pairs import prompts
from messages import raises

from vanilla_transformer_export import Runtime
from vanilla_transformer_export.errors import UsageError

pytestmark = pytest.mark.filterwarnings(
    "ignore:Unfeasible length", "ignore:Using the model-agnostic default"
)


@pytest.mark.parametrize(
    "options, seen, expected",
    [
        (dict(max_length=7), ("max_length", 7), 7),
        (dict(max_length=2.5), ("max_length", 2.5), 1),
        (dict(min_length=-1), ("min_length", -1), 0),
        (dict(min_new_tokens=-1), ("min_new_tokens", -1), 0),
        (dict(num_beams=2.5), ("num_beams", 2.5), 1),
        (dict(num_beams=True), ("num_beams", True), 1),
        (dict(num_return_sequences=2), ("num_return_sequences", 2), (1, "do_sample")),
        (dict(num_beams=3, num_return_sequences=4), ("num_return_sequences", 4), ("num_beams", 3)),
        (dict(do_sample=True, num_beams=2), ("do_sample", True, "num_beams", 2), ("num_beams", 1)),
        (dict(do_sample="yes"), ("do_sample", "yes"), (True, False)),
        (dict(do_sample=True, temperature=0.0), "0.0", ("temperature", "float32", 0)),
        (dict(do_sample=True, temperature=float("nan")), "nan", ("temperature", "float32", 0)),
        (dict(do_sample=True, top_k=-1), ("top_k", -1), 0),
        (dict(do_sample=True, top_p=1.5), ("top_p", 1.5), (0, 1)),
        (dict(do_sample=True, min_p=-0.1), ("min_p", -0.1), (0, 1)),
        (dict(seed=-1), -1, ("seed", 0)),
        (dict(repetition_penalty=-1.0), ("repetition_penalty", "-1.0"), ("float32", 0)),
        (dict(repetition_penalty="2"), ("repetition_penalty", 2), ("float32", 0)),
        (dict(no_repeat_ngram_size=-2), ("no_repeat_ngram_size", -2), 0),
        (dict(length_penalty="long"), ("length_penalty", "long"), "float32"),
        (dict(early_stopping="always"), ("early_stopping", "always"), (True, False, "never")),
        (dict(bad_words_ids=[5]), ("bad_words_ids", 5), ()),
        (dict(bad_words_ids=[]), ("bad_words_ids", "[]"), ()),
        (dict(bad_words_ids=[[5], []]), ("bad_words_ids", 5), ()),
        (dict(bad_words_ids=[[5, 48]]), ("bad_words_ids", 48), (0, 47)),
        (dict(forced_bos_token_id=-1), ("forced_bos_token_id", -1), (0, 47)),
        (dict(forced_eos_token_id=[2, 50]), ("forced_eos_token_id", 50), (0, 47)),
        (dict(forced_bos_token_id="de"), ("forced_bos_token_id", "de"), ()),
        (dict(suppress_tokens=4), ("suppress_tokens", 4), ()),
        (dict(pad_token_id=48), ("pad_token_id", 48), (0, 47)),
        (dict(eos_token_id="x"), ("eos_token_id", "x"), ()),
        (dict(eta_cutoff=0.1), "eta_cutoff", ()),
        (dict(forced_bos_token_id=9, suppress_tokens=[8, 9]), ("forced_bos_token_id", 9), ()),
        (
            dict(forced_eos_token_id=[2, 5], suppress_tokens=[5, 2]),
            "forced_eos_token_id",
            "suppress_tokens",
        ),
        (dict(eos_token_id=10**30), "eos_token_id", ()),
        (dict(eos_token_id=[2, 10**30]), ("eos_token_id", 2), ()),
        (dict(pad_token_id=10**30), ("pad_token_id", 1), (0, "2**63", 1)),
        (dict(suppress_tokens=[10**30]), "suppress_tokens", ()),
        (dict(max_new_tokens=10**30), ("max_new_tokens", 1), (1, "2**63")),
        (dict(temperature=1e-300), "1e-300", ("temperature", "float32", 0)),
        (dict(length_penalty=10**400), "length_penalty", "float32"),
        (
            dict(num_beams=2, max_new_tokens=20, length_penalty=1000),
            ("length_penalty", 1000),
            (-4.612, 29.62, "max_new_tokens", 20),
        ),
        (
            dict(num_beams=2, max_new_tokens=20, length_penalty=-4.62),
            ("length_penalty", -4.62),
            (-4.612, 29.62),
        ),
        (dict(early_stopping=1), ("early_stopping", 1), (True, False, "never")),
        (dict(do_sample=1), ("do_sample", 1), (True, False)),
        (dict(num_beams=np.array([2, 3])), ("num_beams", 2, 3), 1),
        (dict(num_beams=np.bool_(True)), ("num_beams", True), 1),
        (dict(do_sample=True, num_return_sequences=10**9), (4, 1000000000, "GB"), ()),
    ],
    ids=lambda value: str(value)[:60],
)
def test_invalid_setting_error_names_seen_and_expected_value(pairs, options, seen, expected):
    with raises(UsageError, seen=seen, expected=expected):
        pairs("causal-cpu").runtime.generate(*prompts("causal-cpu"), **options)


@pytest.mark.parametrize("field, value", [("typical_p", 0.9), ("eta_cutoff", 0.1), ("top_h", 0.5)])
def test_unsupported_sampling_filter_is_rejected_only_when_sampling(pairs, tmp_path, field, value):
    directory = copy_folder(pairs("causal-cpu").directory, tmp_path)
    edit_json(
        directory / "generation_config.json",
        **{field: value},
        output_scores=True,
        cache_implementation="static",
    )
    seal(directory)
    runtime = Runtime(directory)
    runtime.generate(*prompts("causal-cpu"), max_new_tokens=1)
    with raises(ValueError, seen=("generation_config.json", field, value)):
        runtime.generate(*prompts("causal-cpu"), max_new_tokens=1, do_sample=True)
