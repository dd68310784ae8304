"""Property tests of runtimes: results match transformers, or a one-line error is raised."""

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
from vanilla_transformer_export.shared.generation_options import FIELDS

pytestmark = pytest.mark.filterwarnings("ignore:Unfeasible length")
# for tests that also run torch
few_examples = settings(max_examples=settings.default.max_examples // 5)

VOCABULARY, EOS = 48, 2
GENERATORS = [
    (kind, target) for kind in ("seq2seq", "causal") for target in ("portable", "cpu", "cuda")
]


@pytest.fixture(scope="module")
def open_model(exported_for):
    """Return a function from a name of `targets.MODELS` and a target to model and runtime.

    Both the torch model and the runtime run on the CPU.
    """
    result = {}

    def load(kind, target):
        if (kind, target) not in result:
            model, directory = exported_for(kind, target)
            result[kind, target] = model, Runtime(directory, threads=1, device="cpu")
        return result[kind, target]

    return load


@st.composite
def batches(draw, rows=3, length=8):
    """Draw ids and a mask with holes, both (B, S). Each row has at least one token."""
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
def test_check_contiguous_reports_row_and_position_of_hole(batch):
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
def test_move_padding_keeps_row_contents(batch, side):
    ids, mask = (np.vstack([array, 0 * array[:1]]) for array in batch)  # and a row of padding
    moved_ids, moved_mask = move_padding(ids, mask, side, 0)
    for row in range(len(ids)):
        inside = np.trim_zeros(np.where(mask[row], ids[row], 0)).tolist()
        rest = [0] * (mask.shape[1] - len(inside))
        assert moved_ids[row].tolist() == (rest + inside if side == "left" else inside + rest)
        assert (moved_mask[row] == (moved_ids[row] > 0)).all()


@pytest.mark.parametrize("target", ["portable", "cpu"])
@few_examples
@given(batch=batches())
def test_encoder_outputs_match_torch_for_any_mask(open_model, target, batch):
    model, runtime = open_model("encoder", target)
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
@few_examples
@given(batch=batches(), num_beams=st.integers(1, 3))
def test_seq2seq_tokens_match_transformers_for_any_source_mask(
    open_model, target, batch, num_beams
):
    """transformers gets left padding moved to the right, as the runtime moves it."""
    model, runtime = open_model("seq2seq", target)
    ids, mask = move_padding(*batch, "right", 5)
    options = dict(max_new_tokens=6, num_beams=num_beams, pad_token_id=3)
    with torch.no_grad():
        expected = model.generate(
            torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), **options
        ).numpy()
    assert runtime.generate(*batch, **options).tolist() == expected.tolist()


@pytest.mark.parametrize("target", ["portable", "cpu", "cuda"])
@few_examples
@given(batch=batches(), num_beams=st.integers(1, 3))
def test_decoder_tokens_match_transformers_and_mask_with_hole_raises(
    open_model, target, batch, num_beams
):
    model, runtime = open_model("causal", target)
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
@few_examples
@given(
    options=st.fixed_dictionaries({}, optional=VALID),
    kinds=st.lists(as_numpy, min_size=len(VALID), max_size=len(VALID)),
)
def test_tokens_match_transformers_for_any_valid_options(open_model, kind, target, options, kinds):
    """Option values are Python and NumPy numbers."""
    model, runtime = open_model(kind, target)
    ids, options = (
        np.array([[5, 9, 20, 7], [8, 30, 31, 6]]),
        {"max_new_tokens": 8, "pad_token_id": 3, **options},
    )
    try:
        with torch.no_grad():
            expected = model.generate(
                torch.from_numpy(ids), attention_mask=torch.ones(2, 4, dtype=int), **options
            ).numpy()
    except ValueError:  # transformers rejects these options
        with pytest.raises(UsageError):
            runtime.generate(ids, **options)
        return
    ragged = ("bad_words_ids", "early_stopping")
    converted_options = {
        name: value if name in ragged else kind(value)
        for (name, value), kind in zip(options.items(), kinds)
    }
    assert runtime.generate(ids, **options).tolist() == expected.tolist()
    assert runtime.generate(ids, **{**options, **converted_options}).tolist() == expected.tolist()


# Values that are valid for few or no options: absurd numbers, other types, NumPy scalars.
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
@few_examples
@given(options=st.dictionaries(names, values, max_size=3))
def test_arbitrary_options_are_accepted_or_raise_one_line_error(open_model, kind, target, options):
    _, runtime = open_model(kind, target)
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
