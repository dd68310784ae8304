"""Tasks as JSON: inputs become rows, options are checked by name, results become JSON.

The command `predict` and all protocols of the server call tasks in this way. A module of a task has
`PIPELINES`, the calls of the pipelines of transformers by name.
"""

import inspect
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

import numpy as np

from ... import heads
from ...errors import UsageError, did_you_mean
from ...heads import PAIR, Task

JsonObject = dict[str, Any]


def to_json(result: Any, row: Any, options: dict[str, Any]) -> Any:
    """Return `result` as JSON: an array as nested lists, all else unchanged. It is the default of
    `TaskCall.answer`, so `row` and `options` have no effect."""
    return result.tolist() if isinstance(result, np.ndarray) else result


@dataclass(frozen=True)
class TaskCall:
    """A call of a task with JSON.

    Args:
        function: takes a runtime, a list for each of the `keys`, and options by name.
        keys: keys of an input that is an object. An input of one key is its value. A pair may also
            be a list of two texts.
        answer: returns the JSON of an input, from its result, its row and the options.
        parse: returns the value of a row for the function.
        defaults: options with another default than in the function, and its limits, which are
            keyword-only and no options.
        is_always_list: true if the answer to one input is a list too.
    """

    function: Callable[..., Any]
    keys: tuple[str, ...]
    answer: Callable[[Any, Any, dict[str, Any]], Any] = to_json
    parse: Callable[[Any], Any] = lambda row: row
    defaults: dict[str, Any] = field(default_factory=dict)
    is_always_list: bool = False

    def check_options(self, name: str, options: dict[str, Any], place: str) -> None:
        """Raise UsageError for an unknown or a missing option. The function checks their values.

        `name` is that of the task, and `place` says where an option is set, with {} for its name.
        """
        known, takes_others = option_defaults(self.function)
        for option in options if not takes_others else ():
            if option in known:
                continue
            expected = f"expected some of {', '.join(known)}" if known else "it has none"
            raise UsageError(
                f"{name} has no option {option!r:.60}, {expected}{did_you_mean(option, known)}"
            )
        for option, default in known.items():
            if default is inspect.Parameter.empty and option not in options:
                raise UsageError(f"{name} needs {option}, expected {place.format(option)}")

    def __call__(self, runtime: Any, rows: list[Any], options: dict[str, Any]) -> list[Any]:
        """Return the answer to each of `rows`, as JSON. Raises ValueError if the function rejects
        a row or an option."""
        rows = [self.parse(row) for row in rows]
        columns = [rows]
        if are_objects(self.keys):
            columns = [[row[key] for row in rows] for key in self.keys]
        results = self.function(runtime, *columns, **{**self.defaults, **options})
        return [self.answer(result, row, options) for result, row in zip(results, rows)]


def are_objects(keys: tuple[str, ...]) -> bool:
    """Return True if inputs with these `keys` are objects, not values or pairs."""
    return len(keys) > 1 and keys != PAIR


def read_inputs(value: Any, keys: tuple[str, ...]) -> tuple[list[Any], bool]:
    """Return the rows of `value`, one input with these `keys` or a list of inputs, and True for a
    list. The function of the task checks the rows.

    Raises UsageError for no inputs, and for an input that is no object with the keys.
    """
    is_list = isinstance(value, list)
    if is_list and keys == PAIR and value and isinstance(value[0], str):
        is_list = False
    rows = value if is_list else [value]
    if not rows:
        raise UsageError("inputs is empty, expected at least one input")
    for row in rows if are_objects(keys) else ():
        if not isinstance(row, dict) or set(row) != set(keys):
            raise UsageError(
                f"inputs is {reprlib.repr(row)}, expected an object with {' and '.join(keys)}"
            )
    return rows, is_list


def option_defaults(function: Callable[..., Any]) -> tuple[dict[str, Any], bool]:
    """Return the defaults of the options of `function` by name, and True if it takes others, whose
    names it checks itself."""
    parameters = inspect.signature(function).parameters.values()
    known = {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
    return known, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def task_function(task: Task) -> Callable[..., Any]:
    """Return the function that runs `task`. The function takes the runtime, the inputs, and options
    as keyword arguments."""
    return resolve_name(f"{heads.__package__}.{task.function}")


def pipeline_call(name: str) -> TaskCall:
    """Return the call of the pipeline `name` of transformers, which does not generate."""
    module = heads.PIPELINES[name].function.partition(":")[0]
    return resolve_name(f"{heads.__package__}.{module}").PIPELINES[name]
