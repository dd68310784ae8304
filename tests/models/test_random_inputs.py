"""Whatever is asked of a runtime, the answer is that of transformers or an error of one line that
says what was expected."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import raises

from vanilla_transformer_export import Runtime
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.inference.inputs import check_contiguous, move_padding
from vanilla_transformer_export.inference.options import FIELDS

pytestmark = pytest.mark.filterwarnings("ignore:Unfeasible length")
few = settings(max_examples=settings.default.max_examples // 5)  # where torch generates too

VOCABULARY, EOS = 48, 2
GENERATORS = [
    (kind, target) for kind in ("seq2seq", "causal") for target in ("portable", "cpu", "cuda")
]


@pytest.fixture(scope="module")
def opened(exported_for):
    """A name of `targets.MODELS` and a target -> the model in torch and its runtime, on the CPU."""
    result = {}

    def load(kind, target):
        if (kind, target) not in result:
            model, directory = exported_for(kind, target)
            result[kind, target] = model, Runtime(directory, threads=1, device="cpu")
        return result[kind, target]

    return load


@st.composite
def batches(draw, rows=3, length=8):
    """Ids and a mask with holes anywhere, (B, S); each row has at least one token."""
    shape = draw(st.integers(1, rows)), draw(st.integers(1, length))
    ids = np.array(
        draw(
            st.lists(
                st.integers(4, VOCABULARY - 1),
                min_size=shape[0] * shape[1],
                max_size=shape[0] * shape[1],
            )
        )
    )
    masks = st.lists(st.integers(0, 1), min_size=shape[1], max_size=shape[1]).filter(any)
    return ids.reshape(shape), np.array(draw(st.lists(masks, min_size=shape[0], max_size=shape[0])))


def has_hole(mask):
    return any("0" in "".join(map(str, row)).strip("0") for row in mask.tolist())


@given(batches())
def test_holes_are_found_where_they_are(batch):
    _, mask = batch
    if has_hole(mask):
        with raises(ValueError, seen="mask") as caught:
            check_contiguous(mask, "mask")
        row, place = (
            int(word.strip(",")) for word in str(caught.value).split() if word.strip(",").isdigit()
        )
        assert mask[row, place] == 1 and mask[row, place - 1] == 0 and mask[row, : place - 1].any()
    else:
        check_contiguous(mask, "mask")


@given(batches(), st.sampled_from(["left", "right"]))
def test_padding_moves_and_rows_stay_as_they_are(batch, side):
    ids, mask = batch
    moved_ids, moved_mask = move_padding(ids, mask, side, 0)
    for row in range(len(ids)):
        first, last = np.flatnonzero(mask[row])[[0, -1]]
        inside = np.where(mask[row], ids[row], 0)[first : last + 1].tolist()
        rest = [0] * (mask.shape[1] - len(inside))
        assert moved_ids[row].tolist() == (rest + inside if side == "left" else inside + rest)
        assert (moved_mask[row] == (moved_ids[row] > 0)).all()


@pytest.mark.parametrize("target", ["portable", "cpu"])
@few
@given(batch=batches())
def test_an_encoder_gives_the_numbers_of_torch_for_any_mask(opened, target, batch):
    model, runtime = opened("encoder", target)
    ids, mask = batch
    with torch.no_grad():
        expected = model(torch.from_numpy(ids), torch.from_numpy(mask))
    actual = runtime.outputs(ids, mask)
    real = mask == 1
    np.testing.assert_allclose(
        actual["prediction_logits"][real],
        expected.prediction_logits.numpy()[real],
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("target", ["portable", "cpu", "cuda"])
@few
@given(batch=batches(), num_beams=st.integers(1, 3))
def test_any_mask_of_a_source_gives_the_tokens_of_transformers(opened, target, batch, num_beams):
    """But for padding on the left, which moves to the right before anything is counted."""
    model, runtime = opened("seq2seq", target)
    ids, mask = move_padding(*batch, "right", 5)
    options = dict(max_new_tokens=6, num_beams=num_beams, pad_token_id=3)
    with torch.no_grad():
        expected = model.generate(
            torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), **options
        ).numpy()
    assert runtime.generate(*batch, **options).tolist() == expected.tolist()


@pytest.mark.parametrize("target", ["portable", "cpu", "cuda"])
@few
@given(batch=batches(), num_beams=st.integers(1, 3))
def test_any_mask_of_a_prompt_gives_the_tokens_of_transformers_or_is_refused(
    opened, target, batch, num_beams
):
    model, runtime = opened("causal", target)
    ids, mask = batch
    options = dict(max_new_tokens=6, num_beams=num_beams, pad_token_id=3)
    if has_hole(mask):
        with raises(ValueError, seen="attention_mask"):
            runtime.generate(ids, mask, **options)
        return
    ids, mask = move_padding(ids, mask, "left", 3)
    with torch.no_grad():
        expected = model.generate(
            torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), **options
        ).numpy()
    assert runtime.generate(*batch, **options).tolist() == expected.tolist()


token = st.integers(4, VOCABULARY - 1)
tokens = st.lists(token, min_size=1, max_size=6)
VALID = dict(
    max_new_tokens=st.integers(1, 9),
    min_new_tokens=st.integers(0, 5),
    num_beams=st.integers(1, 4),
    length_penalty=st.floats(-2, 3, width=16),
    early_stopping=st.sampled_from([False, True, "never"]),
    repetition_penalty=st.floats(0.5, 2, width=16),
    no_repeat_ngram_size=st.integers(0, 3),
    bad_words_ids=st.lists(tokens, min_size=1, max_size=3),
    forced_bos_token_id=token,
    forced_eos_token_id=st.just(EOS),
    suppress_tokens=tokens,
    begin_suppress_tokens=tokens,
    renormalize_logits=st.booleans(),
    eos_token_id=st.lists(token, min_size=1, max_size=3).map(lambda ends: [EOS, *ends]),
)
as_numpy = st.sampled_from(
    [lambda value: value, np.array, lambda value: np.int8(value) if type(value) is int else value]
)


@pytest.mark.parametrize("kind, target", GENERATORS)
@few
@given(
    options=st.fixed_dictionaries({}, optional=VALID),
    kinds=st.lists(as_numpy, min_size=len(VALID), max_size=len(VALID)),
)
def test_any_settings_give_the_tokens_of_transformers(opened, kind, target, options, kinds):
    """Settings are numbers of Python and of NumPy."""
    model, runtime = opened(kind, target)
    ids, options = (
        np.array([[5, 9, 20, 7], [8, 30, 31, 6]]),
        {"max_new_tokens": 8, "pad_token_id": 3, **options},
    )
    try:
        with torch.no_grad():
            expected = model.generate(
                torch.from_numpy(ids), attention_mask=torch.ones(2, 4, dtype=int), **options
            ).numpy()
    except ValueError:  # what transformers refuses
        with pytest.raises(UsageError):
            runtime.generate(ids, **options)
        return
    ragged = ("bad_words_ids", "early_stopping")
    given_as = {
        name: value if name in ragged else kind(value)
        for (name, value), kind in zip(options.items(), kinds)
    }
    assert runtime.generate(ids, **options).tolist() == expected.tolist()
    assert runtime.generate(ids, **{**options, **given_as}).tolist() == expected.tolist()


# What no option should be, and what some may: absurd numbers, other types, numpy's.
values = st.sampled_from(
    [
        -(2**63),
        -(10**9),
        -1,
        0,
        1,
        2,
        3,
        10**9,
        2**62,
        2**63,
        10**30,
        10**400,
        1e300,
        -1e300,
        1e-300,
    ]
)
values |= (
    st.sampled_from([np.int32(2), np.float32(0.5), np.True_])
    | st.floats()
    | st.none()
    | st.booleans()
)
values |= st.text(max_size=3) | st.binary(max_size=2)
values = st.recursive(
    values,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
)
names = st.sampled_from([*FIELDS, "num_beam", "typical_p", ""])


@pytest.mark.parametrize("kind, target", GENERATORS)
@few
@given(options=st.dictionaries(names, values, max_size=3))
def test_any_options_are_taken_or_refused_in_one_line(opened, kind, target, options):
    _, runtime = opened(kind, target)
    ids = np.array([[5, 9, 20, 7]])
    try:
        if options.get("num_beams") in (None, 1):
            for new in itertools.islice(runtime.stream(ids, **options), 3):
                assert new.dtype == np.int64
        else:
            short = dict.fromkeys(("min_length", "max_length", "min_new_tokens")) | {
                "max_new_tokens": 3
            }
            assert runtime.generate(ids, **{**options, **short}).shape[1] <= 4 + 3
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
