"""Tests of errors: generation settings of wrong types and out of range."""

import numpy as np
import pytest
from checkpoints import copy_of, edit_json, seal
from generation_pairs import prompts

from vanilla_transformer_export import Runtime
from vanilla_transformer_export.errors import UsageError

pytestmark = pytest.mark.filterwarnings(
    "ignore:Unfeasible length", "ignore:Using the model-agnostic default"
)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(max_length=7), "max_length must be more than the 7 tokens of the prompt, got 7"),
        (dict(max_length=2.5), "max_length must be a whole number from 1 to .*, got 2.5"),
        (dict(min_length=-1), "min_length must be a whole number from 0 to .*, got -1"),
        (dict(min_new_tokens=-1), "min_new_tokens must be a whole number from 0 to .*, got -1"),
        (dict(num_beams=2.5), "num_beams must be a whole number from 1 to .*, got 2.5"),
        (dict(num_beams=True), "num_beams must be a whole number from 1 to .*, got True"),
        (
            dict(num_return_sequences=2),
            "num_return_sequences must be at most 1 without do_sample, got 2",
        ),
        (
            dict(num_beams=3, num_return_sequences=4),
            "num_return_sequences must be at most num_beams, 3, .* got 4",
        ),
        (
            dict(do_sample=True, num_beams=2),
            "do_sample=True does not go with num_beams=2, expected num_beams=1",
        ),
        (dict(do_sample="yes"), "do_sample must be True or False, got 'yes'"),
        (
            dict(do_sample=True, temperature=0.0),
            "temperature must be a float32 number above 0, got 0.0",
        ),
        (
            dict(do_sample=True, temperature=float("nan")),
            "temperature must be a float32 number above 0, got nan",
        ),
        (dict(do_sample=True, top_k=-1), "top_k must be a whole number from 0 to .*, got -1"),
        (dict(do_sample=True, top_p=1.5), "top_p must be a number from 0 to 1, got 1.5"),
        (dict(do_sample=True, min_p=-0.1), "min_p must be a number from 0 to 1, got -0.1"),
        (dict(seed=-1), "seed must be a whole number of at least 0, got -1"),
        (
            dict(repetition_penalty=-1.0),
            "repetition_penalty must be a float32 number above 0, got -1.0",
        ),
        (
            dict(repetition_penalty="2"),
            "repetition_penalty must be a float32 number above 0, got '2'",
        ),
        (
            dict(no_repeat_ngram_size=-2),
            "no_repeat_ngram_size must be a whole number from 0 to .*, got -2",
        ),
        (dict(length_penalty="long"), "length_penalty must be a float32 number, got 'long'"),
        (
            dict(early_stopping="always"),
            "early_stopping must be True, False or 'never', got 'always'",
        ),
        (
            dict(bad_words_ids=[5]),
            r"bad_words_ids must be a list of lists of token ids, none empty, got \[5\]",
        ),
        (dict(bad_words_ids=[]), r"bad_words_ids must be .*, got \[\]"),
        (dict(bad_words_ids=[[5], []]), r"bad_words_ids must be .*, got \[\[5\], \[\]\]"),
        (
            dict(bad_words_ids=[[5, 48]]),
            r"bad_words_ids must be in \[0, 47\], the vocabulary, got 48",
        ),
        (
            dict(forced_bos_token_id=-1),
            r"forced_bos_token_id must be in \[0, 47\], the vocabulary, got -1",
        ),
        (
            dict(forced_eos_token_id=[2, 50]),
            r"forced_eos_token_id must be in \[0, 47\], the vocabulary, got 50",
        ),
        (dict(forced_bos_token_id="de"), "forced_bos_token_id must be a token id, got 'de'"),
        (dict(suppress_tokens=4), "suppress_tokens must be a list of token ids, got 4"),
        (dict(pad_token_id=48), r"pad_token_id must be in \[0, 47\], the vocabulary, got 48"),
        (dict(eos_token_id="x"), "eos_token_id must be a token id or a list of them, got 'x'"),
        (dict(eta_cutoff=0.1), r"unknown generation options \['eta_cutoff'\]"),
        (
            dict(forced_bos_token_id=9, suppress_tokens=[8, 9]),
            r"forced_bos_token_id must have a token that .* not, got \[9\]",
        ),
        (
            dict(forced_eos_token_id=[2, 5], suppress_tokens=[5, 2]),
            "forced_eos_token_id must have a token that suppress_tokens",
        ),
        (
            dict(eos_token_id=10**30),
            "eos_token_id must be a token id or a list of them, got 10{30}",
        ),
        (
            dict(eos_token_id=[2, 10**30]),
            r"eos_token_id must be a token id or a list of them, got \[2, 10{30}\]",
        ),
        (
            dict(pad_token_id=10**30),
            r"pad_token_id must be a whole number from 0 to 2\*\*63 - 1, got 10{30}",
        ),
        (
            dict(suppress_tokens=[10**30]),
            r"suppress_tokens must be a list of token ids, got \[10{30}\]",
        ),
        (
            dict(max_new_tokens=10**30),
            r"max_new_tokens must be a whole number from 1 to 2\*\*63 - 1, got 10{30}",
        ),
        (dict(temperature=1e-300), "temperature must be a float32 number above 0, got 1e-300"),
        (
            dict(length_penalty=10**400),
            "length_penalty must be a float32 number, got 10{17}[.]{3}0{19}",
        ),
        (
            dict(num_beams=2, max_new_tokens=20, length_penalty=1000),
            "length_penalty must be from -4.612 to 29.62 with max_new_tokens=20, got 1000",
        ),
        (
            dict(num_beams=2, max_new_tokens=20, length_penalty=-4.62),
            "length_penalty must be from -4.612 to 29.62 .*, got -4.62",
        ),
        (dict(early_stopping=1), "early_stopping must be True, False or 'never', got 1"),
        (dict(do_sample=1), "do_sample must be True or False, got 1"),
        (
            dict(num_beams=np.array([2, 3])),
            r"num_beams must be a whole number from 1 to .*, got \[2, 3\]",
        ),
        (dict(num_beams=np.bool_(True)), "num_beams must be a whole number from 1 to .*, got True"),
        (
            dict(do_sample=True, num_return_sequences=10**9),
            "4 inputs, 1000000000 sequences or beams of each .* take [0-9]+ GB",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_values_are_refused_with_the_value_and_what_was_expected(pairs, options, message):
    with pytest.raises(UsageError, match=message):
        pairs("causal-cpu").runtime.generate(*prompts("causal-cpu"), **options)


@pytest.mark.parametrize("field, value", [("typical_p", 0.9), ("eta_cutoff", 0.1), ("top_h", 0.5)])
def test_a_sampling_filter_that_is_not_applied_is_refused_only_where_it_would_matter(
    pairs, tmp_path, field, value
):
    directory = copy_of(pairs("causal-cpu").directory, tmp_path)
    edit_json(
        directory / "generation_config.json",
        **{field: value},
        output_scores=True,
        cache_implementation="static",
    )
    seal(directory)
    runtime = Runtime(directory)
    runtime.generate(*prompts("causal-cpu"), max_new_tokens=1)
    with pytest.raises(
        ValueError,
        match=f"generation_config.json sets {field} to {value}, which this runtime does not apply",
    ):
        runtime.generate(*prompts("causal-cpu"), max_new_tokens=1, do_sample=True)
