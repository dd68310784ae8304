"""What an export's head is for, called for lines: a text each, or a JSON object; and a line of JSON
for each."""

import inspect
import json
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import UsageError, did_you_mean
from ..inference.config import VISION
from ..inference.export_info import MANIFEST, json_object
from ..inference.inputs import batches
from ..text_runtime import TextRuntime
from .text_lines import WINDOW, errors_in, facts_of, seed_of

TEXT, PAIR, CHOICES = ("text",), ("text", "text_pair"), ("text", "choices")
QUESTION, IMAGE = ("question", "context"), ("image",)
GENERATORS = ("DecoderForCausalLM", "Seq2SeqForConditionalGeneration")
LABELLED, IMAGES_LABELLED = "ForSequenceClassification", "ForImageClassification"


class Task(NamedTuple):
    """A `method` of a runtime, for architectures that end with one of `heads`. `forms` are the keys
    that an example may have as a JSON object; a line that is none is what belongs to the only key
    of the first form."""

    method: str
    heads: tuple[str, ...]
    forms: tuple[tuple[str, ...], ...]


# By the names that the command has. The first that fits an architecture is what it is for.
TASKS = {
    "generate": [Task("generate", GENERATORS, (TEXT,))],
    "translate": [Task("translate", GENERATORS[1:], (TEXT,))],
    "classify": [
        Task("classify", (LABELLED,), (TEXT, PAIR)),
        Task("classify", (IMAGES_LABELLED,), (IMAGE,)),
    ],
    "zero-shot": [Task("zero_shot", (LABELLED,), (TEXT,))],
    "tag": [Task("tag", ("ForTokenClassification",), (TEXT,))],
    "answer": [Task("answer", ("ForQuestionAnswering",), (QUESTION,))],
    "fill-mask": [Task("fill_mask", ("ForMaskedLM", "ForPreTraining"), (TEXT,))],
    "next-sentence": [
        Task("next_sentence", ("ForNextSentencePrediction", "ForPreTraining"), (PAIR,))
    ],
    "choose": [Task("choose", ("ForMultipleChoice",), (CHOICES,))],
    "embed": [
        Task("embed", ("EncoderModel", "DecoderModel"), (TEXT,)),
        Task("embed", ("VisionModel",), (IMAGE,)),
    ],
}


def open_runtime(directory: str | os.PathLike, threads: int | None = None, **options: Any) -> Any:
    """A `TextRuntime`, or an `ImageRuntime` for a model that reads images; `options` as theirs."""
    path = Path(directory) / MANIFEST
    if path.is_file() and json_object(path, path.read_bytes()).get("model_type") == VISION:
        from ..image_runtime import ImageRuntime

        return ImageRuntime(directory, threads, **options)
    return TextRuntime(directory, threads, **options)


def task_of(architecture: str, name: str | None) -> tuple[str, Task]:
    """The task `name` for `architecture`, by default the first that fits it, with its name.

    Raises:
        UsageError: for a task that does not fit.
        ValueError: for an architecture that none fits.
    """
    fitting = {
        name: task
        for name, tasks in TASKS.items()
        for task in tasks
        if architecture.endswith(task.heads)
    }
    if not fitting:
        raise ValueError(f"this export is a {architecture}, which no task is for: use Runtime")
    chosen = next(iter(fitting)) if name is None else name
    if chosen not in fitting:
        raise UsageError(
            f"{chosen} is not what a {architecture} is for, expected one of {', '.join(fitting)}"
        )
    return chosen, fitting[chosen]


@dataclass(frozen=True)
class Predictions:
    """What `runtime` gives for lines, as JSON. `options` are those of the method that `task` names,
    by default what the export's head is for.

    A line that begins with `{` is a JSON object with the task's keys, any other is a text, or an
    image's path. A line without words gives `null`. With a `seed` each batch draws from one of its
    own, which follows from `seed` and a line of it. Errors call what is numbered a `unit`.

    Raises:
        UsageError: for a task that the architecture is not for, an option that its method has not,
            and one that it needs.
        ValueError: for an architecture that no task is for.
    """

    runtime: Any
    task: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 32
    unit: str = "line"

    def __post_init__(self) -> None:
        self.check_options()

    @property
    def kind(self) -> Task:
        return task_of(self.runtime.info.architecture, self.task)[1]

    @property
    def method(self) -> Callable[..., Any]:
        return getattr(self.runtime, self.kind.method)

    def check_options(self) -> None:
        parameters = inspect.signature(self.method).parameters.values()
        known = {
            each.name: each.default
            for each in parameters
            if each.kind is each.POSITIONAL_OR_KEYWORD
        }
        # which checks names itself
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            for name in self.options.keys() - known.keys():
                expected = f"expected some of {', '.join(known)}" if known else "it has none"
                raise UsageError(
                    f"{self.kind.method} has no option {name!r:.60}, "
                    f"{expected}{did_you_mean(name, known)}"
                )
        for name, default in known.items():
            if default is inspect.Parameter.empty and name not in self.options:
                raise UsageError(f"{self.kind.method} needs {name}, expected --set {name}=VALUE")

    def windows(
        self,
        lines: Iterable[str],
        prefixes: Iterable[str] | None = None,
        first: int = 0,
        told: Callable[[int], object] | None = None,
    ) -> Iterator[list[str]]:
        """As `lines.Batches.windows`, a line of JSON for each; there are no `prefixes`."""
        remaining = iter(lines)
        while window := list(islice(remaining, WINDOW * self.batch_size)):
            yield [
                json.dumps(result, ensure_ascii=False)
                for result in self.results(first, window, told or (lambda count: None))
            ]
            first += len(window)

    def results(self, first: int, lines: list[str], told: Callable[[int], object]) -> list[Any]:
        """Of each line; `None` of one without words."""
        results: list[Any] = [None] * len(lines)
        places = [place for place, line in enumerate(lines) if line.strip()]
        told(len(lines) - len(places))
        for of_batch in batches([lines[place] for place in places], self.batch_size):
            chosen = [places[index] for index in of_batch]
            examples = []
            for place in chosen:
                with errors_in(first, [place], self.unit):
                    examples.append(self.example(lines[place]))
            with errors_in(first, chosen, self.unit):
                found = self.call(examples, first + chosen[0])
            for place, result in zip(chosen, found, strict=True):
                results[place] = result
            told(len(chosen))
        return results

    def call(self, examples: list[dict[str, Any]], number: int) -> list[Any]:
        """What the task gives for each of `examples`, ready for JSON; a `seed` becomes one that
        `number` is part of."""
        options = dict(self.options)
        if isinstance(options.get("seed"), int):
            options["seed"] = seed_of(options["seed"], number)
        found = self.method(*self.arguments(examples), **options)
        if len(found) != len(examples):  # num_return_sequences of each, in order
            found = np.reshape(np.array(found, object), (len(examples), -1))
        return [result.tolist() if isinstance(result, np.ndarray) else result for result in found]

    def example(self, line: str) -> dict[str, Any]:
        """What the line has for each key of the task."""
        forms = self.kind.forms
        if not line.lstrip().startswith("{"):
            if len(forms[0]) > 1:
                raise ValueError(
                    f"{line!r:.60} is no JSON object, expected one with {' and '.join(forms[0])}"
                )
            return {forms[0][0]: line}
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{line!r:.60} begins with {{ and is no JSON object: {error}"
            ) from None
        if set(found) not in [set(form) for form in forms]:
            expected = ", or ".join(" and ".join(form) for form in forms)
            raise ValueError(
                f"the JSON object has the keys {reprlib.repr(list(found))}, expected {expected}"
            )
        return found

    def arguments(self, examples: list[dict[str, Any]]) -> list[list[Any]]:
        """Of the task's method, for examples of its forms."""
        forms = self.kind.forms
        if PAIR in forms:
            return [[example if len(example) > 1 else example["text"] for example in examples]]
        return [[example[key] for example in examples] for key in forms[0]]

    def facts(self) -> dict:
        """What the result depends on, beside the lines."""
        return {
            **facts_of(self.runtime.runtime),
            "batch_size": self.batch_size,
            "task": self.kind.method,
            **self.options,
        }
