"""Property tests of recipes: any content is accepted, or raises a one-line UsageError."""

import os
from unittest import mock

from hypothesis import example, given
from hypothesis import strategies as st

from vanilla_transformer.errors import UsageError
from vanilla_transformer.training.recipe import Recipe, key_types, read_recipe
from vanilla_transformer.training.tasks import TASKS
from vanilla_transformer.training.trainer import training_arguments

KEYS = {
    task: {table: sorted(types) for table, types in key_types(module).items()}
    for task, module in TASKS.items()
}
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda values: (
        st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=4), values, max_size=2)
    ),
)
# Values near the edges of ranges, where most mistakes are.
NUMBERS = st.sampled_from(
    [-1, 0, 1, 2, 0.5, 1.0, 1.5, -0.0, 2**31, 2**63, 10**400, float("inf"), float("nan"), True]
)
WORDS = st.sampled_from(
    [
        "no",
        "epoch",
        "steps",
        "best",
        "linear",
        "cosine",
        "bpe",
        "word",
        "relu",
        "none",
        "13a",
        "never",
        "loss",
    ]
)


@st.composite
def tables(draw):
    """Draw a task, and some keys of its tables with any value."""
    task = draw(st.sampled_from(sorted(TASKS)))
    selected_keys = draw(
        st.lists(
            st.sampled_from([(table, key) for table, keys in KEYS[task].items() for key in keys]),
            max_size=3,
        )
    )
    recipe_tables = {"task": task}
    for table, key in selected_keys:
        recipe_tables.setdefault(table, {})[key] = draw(NUMBERS | WORDS | VALUES)
    return recipe_tables


def names_key_in_one_line(error, tables):
    names = [*tables, *(key for keys in tables.values() for key in keys)]
    return "\n" not in str(error) and any(name in str(error) for name in names)


def check(recipe_tables, state):
    try:
        recipe = Recipe(**recipe_tables)
        with mock.patch.dict(os.environ):  # some Trainer arguments set variables
            training_arguments(recipe, state)
    except UsageError as error:
        assert names_key_in_one_line(
            error, {table: keys for table, keys in recipe_tables.items() if table != "task"}
        ), error


@given(tables())
@example({"task": "translation", "training": {"learning_rate": 10**400}})
@example({"task": "translation", "training": {"logging_steps": float("inf")}})
@example({"task": "translation", "training": {"accelerator_config": "no"}})
@example({"task": "translation", "model": {"dtype": "no"}})
@example({"task": "translation", "model": {"id2label": {"a": "b"}}})
def test_recipe_is_accepted_or_error_names_key(tmp_path_factory, recipe_tables):
    check(recipe_tables, tmp_path_factory.getbasetemp() / "state")


@given(
    st.dictionaries(
        st.text(max_size=12)
        | st.sampled_from(["data", "training", "task", "model.path", "data.train"]),
        VALUES,
        max_size=3,
    )
)
def test_changes_are_accepted_or_raise_usage_error(changes):
    try:
        read_recipe("translation", changes)
    except UsageError as error:
        assert "\n" not in str(error)
