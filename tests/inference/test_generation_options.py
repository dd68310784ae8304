"""Every generation setting gives the tokens of `transformers.generate`, on two targets; sampling
and streaming."""

import functools
import itertools

import numpy as np
import pytest
import torch
import transformers
from checkpoints import copy_folder, edit_json, list_file, perturbed, seal
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.generation import logits_process

import vanilla_transformer
from vanilla_transformer_export import Options, Runtime, TextRuntime, export
from vanilla_transformer_export.cli import main as cli
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.inference import decoder as decoder_module
from vanilla_transformer_export.inference import search
from vanilla_transformer_export.inference.decoder import position_bytes
from vanilla_transformer_export.inference.logits import Prompt, Sampler, log_sum_exp, top
from vanilla_transformer_export.inference.search import Processors
from vanilla_transformer_export.targets.cpu import decoder as cpu_decoder
from vanilla_transformer_export.targets.registry import get_target

VOCABULARY, EOS, PAD = 48, 2, 3
# For the cpu target; the others, for the portable one, are those of `checkpoints` that have another
# pad token than 0.
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=40,
    num_attention_heads=4,
    pad_token_id=PAD,
)
CPU_MODELS = {
    "seq2seq-cpu": (
        "VanillaSeq2SeqForConditionalGeneration",
        dict(encoder_layers=1, decoder_layers=1),
    ),
    "causal-cpu": (
        "VanillaDecoderForCausalLM",
        dict(num_hidden_layers=1, max_position_embeddings=25),
    ),
}
MODELS = ("seq2seq-untied", "causal-learned", *CPU_MODELS)
pytestmark = pytest.mark.filterwarnings(
    "ignore:Unfeasible length", "ignore:Using the model-agnostic default"
)
each_model = pytest.mark.parametrize("name", MODELS)


def build(name):
    architecture, fields = CPU_MODELS[name]
    model = perturbed(architecture, {**SIZES, **fields}, scale=0.25)
    model.lm_head.bias.data[EOS] += 1.5  # so that rows end at different times
    return model


class Pair:
    """A model in torch, the directory of its export, and that loaded."""

    def __init__(self, model, directory):
        self.model, self.directory, self.runtime = model, directory, Runtime(directory)

    @torch.no_grad()
    def in_torch(self, ids, mask, **options):
        return self.model.generate(
            torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), **options
        ).numpy()

    def check(self, ids, mask, **options):
        expected = self.in_torch(ids, mask, **options)
        assert self.runtime.generate(ids, mask, **options).tolist() == expected.tolist(), options


@pytest.fixture(scope="module")
def pairs(exported, tmp_path_factory):
    """A name of `MODELS` -> its `Pair`."""
    root = tmp_path_factory.mktemp("options")

    @functools.cache
    def make(name):
        if name not in CPU_MODELS:
            return Pair(exported(name).model, exported(name).directory)
        build(name).save_pretrained(root / name)
        export(root / name, root / "export" / name, cases=1, target="cpu")
        return Pair(build(name), root / "export" / name)

    return make


@pytest.fixture
def pair(pairs, name):
    return pairs(name)


def prompts(name, seed=0, lengths=(7, 1, 4, 6)):
    """Rows of several lengths: right-padded sources, left-padded prompts."""
    rng, longest = np.random.default_rng(seed), max(lengths)
    ids, mask = np.full((len(lengths), longest), PAD), np.zeros((len(lengths), longest), np.int64)
    for row, length in enumerate(lengths):
        real = slice(0, length) if name.startswith("seq2seq") else slice(longest - length, longest)
        ids[row, real], mask[row, real] = rng.integers(4, VOCABULARY, length), 1
    return ids, mask


# ----------------------------------------------------------------------------- against transformers

FIELDS = [
    dict(max_length=14),
    dict(max_length=14, max_new_tokens=3),
    dict(max_length=10, max_new_tokens=None),
    dict(max_new_tokens=10, min_length=11),
    dict(max_new_tokens=10, min_length=1),
    dict(max_new_tokens=10, min_new_tokens=7),
    dict(max_new_tokens=10, min_new_tokens=2, min_length=16),
    dict(max_new_tokens=5, min_new_tokens=9),
    dict(max_new_tokens=10, repetition_penalty=1.7),
    dict(max_new_tokens=10, repetition_penalty=0.6),
    dict(max_new_tokens=12, no_repeat_ngram_size=1),
    dict(max_new_tokens=12, no_repeat_ngram_size=2),
    dict(max_new_tokens=12, no_repeat_ngram_size=3),
    dict(max_new_tokens=10, bad_words_ids=[[token] for token in range(4, 30)]),
    dict(max_new_tokens=10, bad_words_ids=[[EOS], [token for token in range(4, 20)], [5, 6, 7]]),
    dict(
        max_new_tokens=10,
        bad_words_ids=[[a, b] for a, b in itertools.product(range(4, 48), range(20, 48))],
    ),
    dict(max_new_tokens=10, forced_bos_token_id=9),
    dict(max_new_tokens=10, forced_eos_token_id=EOS),
    dict(max_new_tokens=10, forced_eos_token_id=[EOS, 17]),
    dict(max_new_tokens=1, forced_eos_token_id=EOS, forced_bos_token_id=9),
    dict(max_new_tokens=10, suppress_tokens=[EOS, *range(10, 30), 99]),
    dict(max_new_tokens=10, begin_suppress_tokens=[EOS, *range(10, 40)]),
    dict(max_new_tokens=10, begin_suppress_tokens=[*range(10, 40)], forced_bos_token_id=9),
    dict(
        max_new_tokens=10,
        bad_words_ids=[[token] for token in range(4, 44)],
        renormalize_logits=True,
    ),
    dict(
        max_new_tokens=10, forced_eos_token_id=EOS, forced_bos_token_id=9, renormalize_logits=True
    ),
    dict(max_new_tokens=10, eos_token_id=[EOS, *range(5, 25, 3)]),
    dict(max_new_tokens=10, eos_token_id=[EOS, *range(5, 25, 3)], min_new_tokens=4),
    dict(max_new_tokens=10, pad_token_id=6, repetition_penalty=1.3, no_repeat_ngram_size=2),
]


@pytest.mark.parametrize("options", FIELDS, ids=lambda options: str(options)[5:60])
@each_model
def test_each_setting_gives_the_tokens_of_transformers(pair, name, options):
    ids, mask = prompts(name)
    if "pad_token_id" in options:
        ids = np.where(mask == 1, ids, options["pad_token_id"])
    for num_beams in (1, 3):
        pair.check(ids, mask, **options, num_beams=num_beams)


def test_a_search_without_such_settings_has_no_logits_processors():
    """A device can choose its tokens then, and in beam search log p is computed of the best
    only."""
    prompt = Prompt(np.ones((2, 1), np.int64), padding=np.zeros(2, np.int64))
    for options in (
        Options(eos_token_id=(EOS,)),
        Options(min_new_tokens=3),
        Options(eos_token_id=(EOS,), num_beams=4),
    ):
        assert not Processors(options, prompt)
    assert Processors(Options(eos_token_id=(EOS,), min_new_tokens=3), prompt)


@pytest.mark.parametrize("name", CPU_MODELS)
def test_each_setting_changes_the_tokens(pair, name):
    """Nearly all of them, or the test above would show nothing."""
    ids, mask = prompts(name)
    plain = pair.in_torch(ids, mask, max_new_tokens=10)[:, -10:].tolist()
    idle = 0
    for options in FIELDS:
        idle += (
            pair.in_torch(ids, mask, **{"max_new_tokens": 10, **options})[:, -10:].tolist() == plain
        )
    assert idle <= len(FIELDS) // 3


def some_options(rng):
    """Several settings at once."""
    draws = dict(
        min_new_tokens=lambda: int(rng.integers(0, 8)),
        min_length=lambda: int(rng.integers(0, 12)),
        repetition_penalty=lambda: float(rng.uniform(0.7, 2)),
        no_repeat_ngram_size=lambda: int(rng.integers(1, 4)),
        bad_words_ids=lambda: [rng.integers(4, 48, rng.integers(1, 3)).tolist() for _ in range(20)],
        forced_bos_token_id=lambda: int(rng.integers(4, 48)),
        forced_eos_token_id=lambda: EOS,
        suppress_tokens=lambda: rng.integers(4, 48, 8).tolist(),
        begin_suppress_tokens=lambda: rng.integers(0, 48, 12).tolist(),
        eos_token_id=lambda: [EOS, *rng.integers(4, 48, 2).tolist()],
    )
    options = {name: draw() for name, draw in draws.items() if rng.random() < 0.4}
    options |= dict(
        max_new_tokens=int(rng.integers(1, 13)), num_beams=int(rng.choice([1, 1, 2, 4]))
    )
    if options["num_beams"] > 1:
        options |= dict(
            length_penalty=float(rng.uniform(-1, 2)),
            early_stopping=[False, True, "never"][rng.integers(3)],
            num_return_sequences=int(rng.integers(1, options["num_beams"] + 1)),
        )
    return options


@pytest.mark.parametrize("seed", range(16))
@each_model
def test_random_settings_together_give_the_tokens_of_transformers(pair, name, seed):
    rng = np.random.default_rng(seed)
    ids, mask = prompts(name, seed, lengths=tuple(rng.integers(1, 8, rng.integers(1, 5))))
    pair.check(ids, mask, **some_options(rng))


@each_model
@pytest.mark.parametrize("num_beams, returned", [(2, 2), (4, 1), (4, 3)])
def test_beams_return_the_best_of_each_input(pair, name, num_beams, returned):
    ids, mask = prompts(name)
    options = dict(num_beams=num_beams, num_return_sequences=returned, max_new_tokens=9)
    pair.check(ids, mask, **options)
    assert len(pair.runtime.generate(ids, mask, **options)) == returned * len(ids)


@each_model
def test_by_default_20_tokens_are_generated_up_to_the_positions_of_the_model(pair, name):
    for length in (3, 16):
        pair.check(*prompts(name, lengths=(length, 2)), suppress_tokens=[EOS])


@each_model
def test_generation_config_gives_way_to_the_call_as_in_transformers(pair, tmp_path, name):
    directory = copy_folder(pair.directory, tmp_path)
    saved = dict(
        max_new_tokens=6,
        max_length=30,
        min_length=2,
        num_beams=2,
        repetition_penalty=1.4,
        suppress_tokens=[7],
    )
    edit_json(directory / "generation_config.json", **saved)
    seal(directory)
    runtime, reference = Runtime(directory), pair.model
    ids, mask = prompts(name)
    before, reference.generation_config = (
        reference.generation_config,
        transformers.GenerationConfig.from_pretrained(directory),
    )
    try:
        calls = [
            {},
            dict(max_length=12),
            dict(max_length=12, max_new_tokens=None),
            dict(num_beams=1, repetition_penalty=1.0),
        ]
        for options in (*calls, dict(min_new_tokens=5, suppress_tokens=None)):
            expected = pair.in_torch(ids, mask, **options)
            assert runtime.generate(ids, mask, **options).tolist() == expected.tolist(), options
    finally:
        reference.generation_config = before


# ---------------------------------------------------------------------------------- numpy's numbers

NUMPY = [
    dict(num_beams=np.int32(2), max_new_tokens=np.int8(7)),
    dict(
        num_beams=np.uint8(3),
        num_return_sequences=np.uint8(2),
        max_new_tokens=np.uint8(9),
        length_penalty=np.float32(0.5),
    ),
    dict(
        num_beams=np.int16(3),
        early_stopping=np.True_,
        max_new_tokens=np.array(6),
        eos_token_id=np.array([EOS, 9, 11]),
    ),
    dict(
        max_length=np.uint8(16),
        min_length=np.uint8(9),
        pad_token_id=np.int8(PAD),
        repetition_penalty=np.float64(1.3),
    ),
    dict(
        max_new_tokens=8,
        suppress_tokens=np.arange(10, 20, dtype=np.uint8),
        bad_words_ids=[np.array([5, 6]), (7,)],
    ),
    dict(
        max_new_tokens=8,
        do_sample=np.False_,
        no_repeat_ngram_size=np.uint8(2),
        forced_bos_token_id=np.uint8(9),
    ),
    dict(
        max_new_tokens=np.uint8(8),
        do_sample=np.True_,
        top_k=np.uint8(5),
        top_p=np.float32(0.5),
        seed=np.uint8(3),
    ),
]


@pytest.fixture(scope="module")
def on_each_target(exported_for):
    """A kind of `targets.MODELS` -> its runtimes for the portable, cpu and cuda target, on the
    CPU."""

    @functools.cache
    def load(kind):
        return [
            Runtime(exported_for(kind, target)[1], device="cpu")
            for target in ("portable", "cpu", "cuda")
        ]

    return load


@pytest.mark.parametrize("options", NUMPY, ids=lambda options: " ".join(options))
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["seq2seq", "causal"])
def test_numpy_s_numbers_are_as_good_as_python_s(on_each_target, kind, options):
    """On every target: numpy's small integers would overflow in indices of slots and rows."""
    own = {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in options.items()
    }
    if "bad_words_ids" in own:
        own["bad_words_ids"] = [[5, 6], [7]]
    ids, mask = prompts(kind, lengths=(7, 2, 4, 6, 5))
    for runtime in on_each_target(kind):
        expected = runtime.generate(ids, mask, **own)
        assert runtime.generate(ids, mask, **options).tolist() == expected.tolist(), runtime.target


# ----------------------------------------------------------------------------------- absurd numbers

ENDS = [EOS, *range(6, VOCABULARY)]  # so that every row ends soon
LONGEST = (
    dict(max_new_tokens=10**9),
    dict(max_length=2**62),
    dict(max_new_tokens=2**63 - 1, min_new_tokens=3),
)


@pytest.mark.parametrize("options", LONGEST, ids=str)
@pytest.mark.parametrize("name", ["seq2seq-untied", *CPU_MODELS])
def test_memory_is_taken_for_what_is_generated_not_for_what_might_be(pair, name, options):
    ids, mask = prompts(name)
    for more in (
        {},
        dict(num_beams=3, early_stopping=True),
        dict(do_sample=True, seed=0, repetition_penalty=1.2),
    ):
        few = {"max_new_tokens": 200, "min_new_tokens": options.get("min_new_tokens", 0)}
        expected = pair.runtime.generate(ids, mask, eos_token_id=ENDS, **few, **more)
        found = pair.runtime.generate(ids, mask, eos_token_id=ENDS, **options, **more)
        assert found.tolist() == expected.tolist() and found.shape[1] < 100


@each_model
@pytest.mark.parametrize("room", [1, 3])
def test_room_for_tokens_grows_and_nothing_changes(pair, name, room, monkeypatch):
    """Caches of the cpu target, the hypotheses of beam search and what processors see, all doubled
    as tokens come."""
    ids, mask = prompts(name)
    calls = [
        dict(num_beams=beams, no_repeat_ngram_size=2, suppress_tokens=[EOS]) for beams in (1, 3)
    ]
    calls += [
        dict(num_beams=4, num_return_sequences=3, eos_token_id=[EOS, 9, 17]),
        dict(repetition_penalty=1.4),
    ]
    expected = [
        pair.runtime.generate(ids, mask, max_new_tokens=20, **options).tolist() for options in calls
    ]
    for module in (search, decoder_module, cpu_decoder):
        monkeypatch.setattr(module, "INITIAL_ROOM", room)
    for options, tokens in zip(calls, expected, strict=True):
        assert pair.runtime.generate(ids, mask, max_new_tokens=20, **options).tolist() == tokens
    drawn = dict(do_sample=True, seed=1, num_return_sequences=2, max_new_tokens=20)
    assert pair.runtime.generate(ids, mask, **drawn).shape[0] == 2 * len(ids)
    pair.check(ids, mask, max_new_tokens=17, num_beams=2)


def test_what_positions_or_a_fixed_cache_cannot_hold_is_refused_with_the_limit(
    pairs, on_each_target
):
    ids, mask = prompts("causal-learned")
    with pytest.raises(
        ValueError, match="1000000006 tokens, .* more than the 40 learned positions"
    ):
        pairs("causal-learned").runtime.generate(ids, mask, max_new_tokens=10**9)
    on_cuda = on_each_target("seq2seq")[2]
    for options, rows in ((dict(), 1), (dict(num_beams=3), 3)):
        with pytest.raises(
            UsageError,
            match=f"4 inputs, {rows} sequences or beams of each and max_new_tokens=1000000000 take",
        ):
            on_cuda.generate(*prompts("seq2seq"), max_new_tokens=10**9, **options)


@pytest.mark.parametrize(
    "architecture, layers",
    [
        ("VanillaDecoderForCausalLM", dict(num_hidden_layers=2)),
        ("VanillaSeq2SeqForConditionalGeneration", dict(encoder_layers=1, decoder_layers=2)),
    ],
)
def test_a_token_takes_a_key_and_a_value_of_each_head_of_each_layer_of_the_decoder(
    architecture, layers
):
    model_class = getattr(vanilla_transformer, architecture)
    config = model_class.config_class(
        **{**SIZES, **layers, "head_dim": 8, "value_head_dim": 8}
    ).to_dict()
    for target, activations, size in (
        ("portable", "fp32", 4),
        ("cpu", "fp32", 4),
        ("cuda", "fp32", 4),
        ("cuda", "bf16", 2),
    ):
        spec = get_target(target).graph_specs(config, architecture, activations, activations)[
            "decoder"
        ]
        assert position_bytes(spec) == 2 * 4 * (8 + 8) * size


def test_a_cache_that_cannot_be_made_is_refused_by_its_size(on_each_target, monkeypatch):
    """As where a device has less memory than the machine."""
    on_cuda = on_each_target("seq2seq")[2]

    def fails(sizes):
        raise MemoryError("no more")

    monkeypatch.setattr(on_cuda.model.decoders.pool, "make", fails)
    with pytest.raises(
        UsageError, match="caches of 192 slots, which hold max_new_tokens, cannot be made: no more"
    ):
        on_cuda.generate(*prompts("seq2seq"), max_new_tokens=150)


@each_model
def test_the_largest_length_penalties_give_the_tokens_of_transformers(pair, name):
    ids, mask = prompts(name)
    for length_penalty in (29.6, 12, -4.6):
        pair.check(ids, mask, num_beams=3, max_new_tokens=20, length_penalty=length_penalty)


def test_a_length_penalty_has_no_effect_without_beams(pairs):
    ids, mask = prompts("causal-cpu")
    runtime = pairs("causal-cpu").runtime
    assert (
        runtime.generate(ids, mask, length_penalty=1000).tolist()
        == runtime.generate(ids, mask).tolist()
    )


def test_an_end_token_outside_the_vocabulary_is_never_reached_as_in_transformers(pairs):
    pairs("causal-cpu").check(*prompts("causal-cpu"), eos_token_id=[10**9], max_new_tokens=5)


@pytest.mark.parametrize("threads", [0, -1, 1025, 100_000, 2.5, "4", True])
def test_a_number_of_threads_that_cannot_be_is_refused_with_the_range(pairs, threads):
    with pytest.raises(
        UsageError, match=f"threads must be a whole number from 1 to 1024, got {threads!r}"
    ):
        Runtime(pairs("causal-cpu").directory, threads=threads)


def test_numpy_s_threads_are_taken(pairs):
    assert Runtime(pairs("causal-cpu").directory, threads=np.int64(1)).threads == 1


# --------------------------------------------------------------------------------------- bad values


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
    with pytest.raises(
        ValueError,
        match=f"generation_config.json sets {field} to {value}, which this runtime does not apply",
    ):
        runtime.generate(*prompts("causal-cpu"), max_new_tokens=1, do_sample=True)


# ----------------------------------------------------------------------------------------- sampling

WARPERS = [
    dict(top_k=0),
    dict(top_k=0, temperature=0.7),
    dict(top_k=5),
    dict(top_k=1),
    dict(top_k=100_000),
    dict(top_k=0, top_p=0.6),
    dict(top_k=0, top_p=0.0),
    dict(top_k=0, top_p=0.97, temperature=1.5),
    dict(top_k=0, min_p=0.1),
    dict(top_k=20, top_p=0.8, temperature=0.8, min_p=0.02),
    dict(top_k=200, top_p=0.9),
]


def warped(logits, temperature=1.0, top_k=50, top_p=1.0, min_p=0.0):
    """The scores of transformers' warpers, -inf where a token may not be drawn."""
    scores = torch.from_numpy(logits.copy())
    warpers = [logits_process.TemperatureLogitsWarper(temperature)]
    warpers += [logits_process.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [logits_process.TopPLogitsWarper(top_p), logits_process.MinPLogitsWarper(min_p)]
    for warper in warpers:
        scores = warper(None, scores)
    return scores.numpy()


@pytest.mark.parametrize("warpers", WARPERS, ids=str)
@pytest.mark.parametrize("vocabulary", [48, 40_001])
def test_the_tokens_that_may_be_drawn_are_those_of_transformers(vocabulary, warpers):
    logits = 3 * np.random.default_rng(0).standard_normal((4, vocabulary), dtype=np.float32)
    logits[:, ::3] = -np.inf
    expected = warped(logits, **warpers)
    weights, tokens = Sampler(Options(do_sample=True, **warpers)).weights(logits.copy())
    for row, scores in enumerate(expected):
        allowed = weights[row] > 0
        found = np.flatnonzero(allowed) if tokens is None else tokens[row, allowed]
        exact = np.exp(scores - scores.max(), dtype=np.float64)
        assert sorted(found) == np.flatnonzero(exact).tolist()
        np.testing.assert_allclose(
            weights[row, allowed] / weights[row].sum(), (exact / exact.sum())[found], rtol=2e-5
        )


def test_tokens_that_tie_with_the_last_of_the_best_k_may_be_drawn():
    logits = np.repeat(np.array([[3, 2, 1, 1, 0]], np.float32), [1, 1, 700, 700, 300], axis=1)
    weights, tokens = Sampler(Options(do_sample=True, top_k=5)).weights(logits.copy())
    assert (
        sorted(tokens[0, weights[0] > 0])
        == np.flatnonzero(warped(logits, top_k=5)[0] > -np.inf).tolist()
    )


@pytest.mark.parametrize(
    "vocabulary, warpers", [*((48, warpers) for warpers in WARPERS[:10]), (1100, dict(top_k=0))]
)
def test_tokens_are_drawn_as_often_as_they_are_likely(vocabulary, warpers):
    rows = 40_000 if vocabulary == 48 else 20_000
    logits = 2 * np.random.default_rng(1).standard_normal((1, vocabulary), dtype=np.float32)
    scores = warped(logits, **warpers)[0].astype(np.float64)
    probabilities = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    drawn = Sampler(Options(do_sample=True, seed=0, **warpers))(np.repeat(logits, rows, axis=0))
    counts, expected = np.bincount(drawn, minlength=vocabulary), rows * probabilities
    assert not counts[probabilities == 0].any()
    possible = probabilities > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert chi_square <= freedom + 4 * np.sqrt(2 * freedom) + 4


@each_model
def test_the_same_seed_draws_the_same_tokens(pair, name):
    ids, mask = prompts(name)
    draw = functools.partial(pair.runtime.generate, ids, mask, do_sample=True, max_new_tokens=8)
    assert draw(seed=1).tolist() == draw(seed=1).tolist() != draw(seed=2).tolist()
    assert draw(top_k=1).tolist() == pair.runtime.generate(ids, mask, max_new_tokens=8).tolist()


@each_model
def test_each_input_is_sampled_as_often_as_asked_for(pair, name):
    ids, mask = prompts(name)
    options = dict(max_new_tokens=6, do_sample=True, num_return_sequences=3)
    found = pair.runtime.generate(ids, mask, seed=0, temperature=3.0, **options)
    assert found.shape[0] == 12 and len({tuple(row) for row in found}) == 12
    certain = pair.runtime.generate(ids, mask, top_k=1, repetition_penalty=1.5, **options)
    assert (
        certain.tolist()
        == pair.in_torch(ids, mask, top_k=1, repetition_penalty=1.5, **options).tolist()
    )


def test_a_row_of_which_no_token_may_follow_is_an_error(pairs):
    everything = list(range(VOCABULARY))
    for filters in ({}, dict(top_k=0), dict(top_k=0, top_p=0.5)):
        with pytest.raises(ValueError, match="no token may follow"):
            pairs("causal-cpu").runtime.generate(
                *prompts("causal-cpu"), do_sample=True, suppress_tokens=everything, **filters
            )


# ---------------------------------------------------------------------------------------- streaming


@each_model
@pytest.mark.parametrize(
    "options",
    [{}, dict(do_sample=True, seed=3, num_return_sequences=2), dict(no_repeat_ngram_size=2)],
)
def test_a_stream_gives_the_tokens_of_generate_as_they_come(pair, name, options):
    ids, mask = prompts(name)
    options = dict(max_new_tokens=9, **options)
    steps = list(pair.runtime.stream(ids, mask, **options))
    whole = pair.runtime.generate(ids, mask, **options)
    assert np.stack(steps, axis=1).tolist() == whole[:, -len(steps) :].tolist()


class Counting:
    """A decoder of two rows that says which tokens it was fed; after each token comes the next one.
    Its own factory."""

    all_logits = False
    max_step_tokens = 1

    def __init__(self):
        self.steps = []
        self.is_closed = False

    def start(self, request):
        return self

    def generate(self, request):
        return None

    def prefill(self, input_ids, attention_mask):
        return np.eye(VOCABULARY, dtype=np.float32)[:2, None]

    def step(self, tokens, beam_idx=None):
        self.steps.append(tokens)
        return np.eye(VOCABULARY, dtype=np.float32)[tokens + 1]

    def close(self):
        self.is_closed = True


def test_a_token_is_given_before_the_next_is_computed_and_an_abandoned_stream_closes_its_decoder(
    pairs, monkeypatch
):
    runtime, decoder = pairs("causal-cpu").runtime, Counting()
    monkeypatch.setattr(runtime.model, "decoders", decoder)
    prompt = np.full((2, 3), 7)
    tokens = runtime.stream(prompt, max_new_tokens=3, eos_token_id=2, pad_token_id=3)
    assert [next(tokens).tolist(), len(decoder.steps)] == [[0, 1], 0]
    assert [next(tokens).tolist(), len(decoder.steps)] == [[1, 2], 1]
    assert [next(tokens).tolist(), len(decoder.steps)] == [[2, 3], 2]
    assert list(tokens) == [] and len(decoder.steps) == 2 and decoder.is_closed
    decoder.is_closed = False
    abandoned = runtime.stream(prompt, max_new_tokens=3)
    next(abandoned)
    assert not decoder.is_closed
    abandoned.close()
    assert decoder.is_closed


def test_what_cannot_stream_is_refused_before_the_first_token(pairs):
    ids, mask = prompts("causal-cpu")
    with pytest.raises(
        ValueError, match="num_beams is 2, which cannot stream: expected num_beams=1"
    ):
        pairs("causal-cpu").runtime.stream(ids, mask, num_beams=2)
    with pytest.raises(ValueError, match=r"\[0, 47\]"):
        pairs("causal-cpu").runtime.stream(ids + 48, mask)


@pytest.fixture(scope="module")
def with_words(pairs):
    """The exports with a tokenizer of 48 words, which the checkpoint has none of."""
    words = ["<pad0>", "<s>", "</s>", "<pad>", *(f"w{number}" for number in range(4, VOCABULARY))]
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad0>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(words[:4])
    for name in CPU_MODELS:
        tokenizer.save(str(pairs(name).directory / "tokenizer.json"))
        list_file(pairs(name).directory, "tokenizer.json")
    return lambda name: pairs(name).directory


@pytest.mark.parametrize("name", CPU_MODELS)
def test_the_pieces_of_streamed_text_are_the_generated_text(with_words, name):
    runtime = TextRuntime(with_words(name))
    for sampling in ({}, dict(do_sample=True, seed=1)):
        options = dict(max_new_tokens=8, suppress_tokens=[0, 1, EOS, PAD], **sampling)
        pieces = list(runtime.stream("w5 w6 w9", **options))
        assert len(pieces) == 8 and "".join(pieces) == runtime.generate(["w5 w6 w9"], **options)[0]
    for options, message in (
        (dict(num_return_sequences=2), "num_return_sequences must be 1"),
        (dict(num_beams=2), "num_beams"),
    ):
        with pytest.raises(ValueError, match=message):
            runtime.stream("w5", **options)


def test_the_command_streams_and_takes_any_setting(with_words, capsys):
    start = ["generate", str(with_words("causal-cpu")), "w5 w6", "w7", "--max-new-tokens", "6"]
    command = [*start, "--set", "do_sample=true", "--set", "seed=4", "--set", "suppress_tokens=[2]"]
    cli.main([*command, "--stream"])
    streamed = capsys.readouterr().out.splitlines()
    runtime = TextRuntime(with_words("causal-cpu"))
    settings = dict(max_new_tokens=6, do_sample=True, seed=4, suppress_tokens=[2])
    assert streamed == [runtime.generate([text], **settings)[0] for text in ("w5 w6", "w7")]
    for same in (command, [*start, "--do-sample", "--seed", "4", "--suppress-tokens", "[2]"]):
        cli.main(same)
        assert capsys.readouterr().out.splitlines() == runtime.generate(["w5 w6", "w7"], **settings)
    for change, message in (
        ("top_p=2", "top_p must be a number from 0 to 1, got 2"),
        ("input_ids=1", "unknown generation options ['input_ids'], expected some of"),
        ("attention_mask=1", "unknown generation options ['attention_mask']"),
        ("texts=1", "unknown generation options ['texts']"),
        ("text=1", "unknown generation options ['text']"),
        ("self=1", "unknown generation options ['self']"),
    ):
        for more in ([], ["--stream"]):
            with pytest.raises(SystemExit) as caught:
                cli.main([*command, "--set", change, *more])
            assert caught.value.code == 2
            found = capsys.readouterr().err
            assert found.startswith(f"vanilla-transformer: {message}") and found.count("\n") == 1


# ---------------------------------------------------------------------------- the work of each step


@pytest.mark.parametrize("width", [48, 1000, 3000, 40_000, 40_001])
@pytest.mark.parametrize("count", [1, 8, 48])
def test_the_best_tokens_are_those_of_a_full_sort_ties_by_index(width, count):
    rng = np.random.default_rng(0)
    for scores in (
        rng.standard_normal((3, width)),
        rng.integers(0, 40, (3, width)),
        np.zeros((3, width)),
    ):
        scores = scores.astype(np.float32)
        scores[1, 5:] = -np.inf
        values, indices = top(scores, count)
        expected = np.argsort(-scores, axis=1, kind="stable")[:, :count]
        assert indices.tolist() == expected.tolist()
        assert values.tolist() == np.take_along_axis(scores, expected, axis=1).tolist()


def test_log_softmax_is_that_of_torch():
    logits = 20 * np.random.default_rng(0).standard_normal((70, 9000), dtype=np.float32)
    maximum, log_sum = log_sum_exp(logits)
    expected = torch.from_numpy(logits).double().log_softmax(dim=-1).numpy()
    np.testing.assert_allclose(logits - maximum - log_sum, expected, atol=1e-5)


def test_logits_that_are_not_numbers_are_an_error():
    with pytest.raises(ValueError, match="some logits are NaN"):
        top(np.full((2, 9), np.nan, np.float32), 2)
