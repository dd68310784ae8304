"""The tasks of an export's head, called for examples: texts, pairs, questions and images."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError
from ..heads import HEADS, MAX_CHARACTERS, Task, find_task
from ..inference.logits import row_seed
from ..shared.generation_options import FIELDS
from ..text.checks import check_choice
from ..text.tasks.alignment import ALIGNMENTS
from ..text.tasks.embedding import PRECISIONS
from ..text.tasks.segments import keep_pattern
from ..text.tasks.task import TaskCall, option_defaults, task_function

GENERATING = ("generate", "translate")  # methods of TextRuntime that give a text for a text


@dataclass(frozen=True)
class Predictions:
    """A task of an export's head with its options. The default is the first task of the head.

    Args:
        runtime: a `TextRuntime` or an `ImageRuntime`.
        task: the name of the task, or None for the default.
        options: arguments of the task's function by name. With a `seed` each line is sampled with
            its own seed, derived from `seed` and the line number.
        batch_size: number of examples in a batch; `translate` makes batches of sentences itself.
        n_best: for `generate`, the number of texts of each example, which then come in a list with
            their scores, best first. None for one text.
        scores: for `generate`, add the score of each text.
        alignments: for `generate`, add the alignment of the words of each text: "moses" or "json",
            see `ALIGNMENTS`. None adds nothing.
        max_characters: maximum length of a text, checked before it is tokenized.

    Raises:
        UsageError: for a task that the architecture is not for, an unknown or a missing option of
            its function, and options that do not fit the model. Also for `n_best`, `scores` and
            `alignments` with a task other than `generate`.
        ValueError: for an architecture that no task is for, and for `alignments` of an export
            without an alignment graph.
    """

    runtime: Any
    task: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 32
    n_best: int | None = None
    scores: bool = False
    alignments: str | None = None
    max_characters: int = MAX_CHARACTERS

    def __post_init__(self) -> None:
        self.check_task()
        self.task_call.check_options(self.kind.method, self.options, "--set {}=VALUE")
        results = ("scores", self.scores), ("alignments", self.alignments), ("n_best", self.n_best)
        name = next((name for name, value in results if value), None)
        if name is not None and self.kind.method != "generate":
            raise UsageError(
                f"{name} is not supported by the task {self.kind.method}, expected the task "
                "generate"
            )
        if self.alignments and self.is_scored:
            raise UsageError("alignments cannot be combined with scores or n_best, expected one")
        if self.options.get("keep") not in (None, False) and (name is not None):
            raise UsageError(f"keep cannot be combined with {name}, expected one")
        if self.generates:
            self.check_generation()
        if self.alignments is not None:
            check_choice("alignments", self.alignments, ALIGNMENTS)
            self.runtime.info.check_alignment()

    @property
    def kind(self) -> Task:
        return find_task(self.runtime.info.architecture, self.task)

    @property
    def task_call(self) -> TaskCall:
        return TaskCall(task_function(self.kind), self.kind.forms[0])

    @property
    def generates(self) -> bool:
        """True if the task generates or translates texts."""
        return self.kind.method in GENERATING

    @property
    def is_scored(self) -> bool:
        """True if each text comes with its score, because `scores` or `n_best` is set."""
        return self.scores or self.n_best is not None

    @property
    def field(self) -> str:
        """Default name of the results' field in JSON objects and tables: "translation" for texts of
        an encoder-decoder, "embedding" for vectors, else "prediction"."""
        if self.generates and "encoder" in self.runtime.runtime.specs:
            return "translation"
        return "prediction" if self.vector_type is None else "embedding"

    @property
    def vector_type(self) -> str | None:
        """Type of the numbers of an embedding, such as "float32"; None for other tasks."""
        if self.kind.method != "embed":
            return None
        precision = self.options.get("precision", "float32")
        check_choice("precision", precision, PRECISIONS)
        return PRECISIONS[precision]

    def check_task(self) -> None:
        """Raise UsageError for an option that only another task of the head has."""
        for name in self.options.keys() - task_options(self.kind) - FIELDS.keys():
            for task in HEADS[self.runtime.info.architecture].tasks:
                if name in task_options(task):
                    raise UsageError(
                        f"{name} is an option of the task {task.name}, expected --task "
                        f"{task.name}, got {self.kind.name}",
                        name,
                    )

    def check_generation(self) -> None:
        """Raise UsageError or ValueError for options of generation that are unknown or do not fit
        the model, its languages included."""
        source, target = (self.options.get(name) for name in ("src_lang", "tgt_lang"))
        self.runtime.runtime.check_options(self.generation_options)
        if source is not None:
            self.runtime.languages.ids("src_lang", source, 1)
        self.runtime.languages.target_options(target, 1, self.generation_options)
        keep_pattern(self.runtime, [], self.options.get("keep"))

    @property
    def generation_options(self) -> dict[str, Any]:
        """Options that `Runtime.generate` takes, with num_return_sequences for `n_best`."""
        names = self.options.keys() - task_options(self.kind)
        options = {name: self.options[name] for name in names}
        return options if self.n_best is None else options | {"num_return_sequences": self.n_best}

    def length_fault(self, example: dict[str, Any]) -> str | None:
        """Return what is wrong with a text of `example` that has more than `max_characters`, else
        None."""
        for name, value in example.items():
            if (length := len(str(value))) > self.max_characters:
                return (
                    f"its {name} has {length:,} characters, expected at most "
                    f"{self.max_characters:,}: see --max-characters"
                )
        return None

    def call(self, examples: list[dict[str, Any]], numbers: list[int]) -> list[Any]:
        """Return the result of each example in the same order, ready for JSON.

        An example has the values that the task reads by field, such as {"text": ...}. `numbers` are
        the line numbers, from which the seeds of sampling are derived. Raises ValueError if the
        task rejects an example.
        """
        if self.generates:
            return self.generate(examples, numbers)
        rows = [
            example if len(example) > 1 else next(iter(example.values())) for example in examples
        ]
        return self.task_call(self.runtime, rows, self.options)

    def generate(self, examples: list[dict[str, Any]], numbers: list[int]) -> list[Any]:
        """Return the result of each example, a dict with `text` and, optionally, `target_prefix`.

        `numbers` are the line numbers, from which the seeds of sampling are derived. A result is a
        text; with `scores` a dict of `text` and `score`; with `alignments` a dict of `text` and
        `alignments`, what a function of `ALIGNMENTS` returned; with `n_best` a list of `n_best`
        dicts of `text` and `score`, best first."""
        options = dict(self.options)
        seed = options.pop("seed", None)
        if seed is not None:
            options["seeds"] = [row_seed(seed, number) for number in numbers]
        texts = [example["text"] for example in examples]
        if self.kind.method == "translate":
            return self.runtime.translate(texts, **options)
        count = self.n_best or 1
        options["target_prefix"] = [example.get("target_prefix", "") for example in examples]
        options["num_return_sequences"] = count
        if self.alignments is not None:
            written = ALIGNMENTS[self.alignments]
            aligned = self.runtime.generate(texts, return_alignments=True, **options)
            return [
                {"text": result.text, "alignments": written(source, result)}
                for source, result in zip(texts, aligned, strict=True)
            ]
        if not self.is_scored:
            return self.runtime.generate(texts, **options)
        outputs, scores = self.runtime.generate_with_scores(texts, **options)
        pairs = [{"text": text, "score": score} for text, score in zip(outputs, scores.tolist())]
        if self.n_best is None:
            return pairs
        rows = [pairs[start : start + count] for start in range(0, len(pairs), count)]
        return [sorted(row, key=lambda pair: -pair["score"]) for row in rows]  # as samples are not

    def facts(self) -> dict:
        """Return the settings and versions that the results depend on, by name, and a hash of the
        export's manifest as "export". The input lines are not included."""
        import onnxruntime

        runtime = self.runtime.runtime
        manifest = json.dumps(runtime.info.manifest, sort_keys=True).encode()
        return {
            "export": hashlib.sha256(manifest).hexdigest(),
            "dtype": runtime.dtype,
            "device": runtime.device,
            "threads": runtime.threads,
            "workers": runtime.workers,
            "onnxruntime": onnxruntime.__version__,
            "batch_size": self.batch_size,
            "n_best": self.n_best,
            "scores": self.scores,
            "alignments": self.alignments,
            "max_characters": self.max_characters,
            "task": self.kind.method,
            **self.options,
        }


def task_options(task: Task) -> set[str]:
    """Return the names of the options of `task`, without those of generation. `alignments` of
    `Predictions` replaces `return_alignments`."""
    return option_defaults(task_function(task))[0].keys() - {"return_alignments"}
