"""The table of heads: what each class of model returns, what it is used for, and how it is scored.

A new head is a line of `HEADS`, a function of `graphs/sequences.py` that writes its graph, and a
function of `text/tasks/` with its `PIPELINES` if no task here fits. The command line, `evaluate`,
model cards and all protocols of the server read this table.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from .errors import UsageError

TEXT, PAIR, CHOICES = ("text",), ("text", "text_pair"), ("text", "choices")
QUESTION, IMAGE, RANKED = ("question", "context"), ("image",), ("query", "texts")
# inputs of a head's graph
READS_TOKENS = "tokens"
READS_CHOICES = "choices"  # several sequences of tokens per row, for multiple choice
READS_TARGETS = "targets"  # tokens of the source and of the target, of seq2seq models
READS_IMAGES = "images"
MAX_CHARACTERS = 250_000  # of a text from a request or a file: its tokens take much more memory


@dataclass(frozen=True)
class Task:
    """A use of a head: a function that takes a runtime, inputs and options.

    Args:
        name: its name on the command line.
        function: `module:function` or `module:Class.method`, from this package on. Its keyword
            arguments are the options of the task.
        forms: the keys that an input may have as a JSON object. An input that is no object is the
            value of the only key of the first form.
        pipelines: names of the task in URLs `/predict/NAME`: those of transformers' pipelines.
        takes_blank: true if a blank text has a result, as in transformers' pipeline.
    """

    name: str
    function: str
    forms: tuple[tuple[str, ...], ...] = (TEXT,)
    pipelines: tuple[str, ...] = ()
    takes_blank: bool = False

    @property
    def method(self) -> str:
        """Name of the function without its module and class."""
        return self.function.replace(":", ".").rpartition(".")[2]


GENERATE = Task("generate", "text_runtime:TextRuntime.generate", pipelines=("text-generation",))
GENERATE_TARGETS = replace(GENERATE, pipelines=("summarization", "text2text-generation"))
TRANSLATE = Task("translate", "text.tasks.translation:translate", pipelines=("translation",))
CLASSIFY = Task(
    "classify",
    "text.tasks.classification:classify",
    (TEXT, PAIR),
    ("text-classification",),
    takes_blank=True,
)
CLASSIFY_IMAGES = Task(
    "classify", "image_runtime:ImageRuntime.classify", (IMAGE,), ("image-classification",)
)
ZERO_SHOT = Task(
    "zero-shot", "text.tasks.classification:zero_shot", pipelines=("zero-shot-classification",)
)
RERANK = Task("rerank", "text.tasks.reranking:rerank", (RANKED,), pipelines=("text-ranking",))
TAG = Task("tag", "text.tasks.tagging:tag", pipelines=("token-classification",), takes_blank=True)
ANSWER = Task(
    "answer", "text.tasks.question_answering:answer", (QUESTION,), ("question-answering",)
)
FILL_MASK = Task("fill-mask", "text.tasks.masks:fill_mask", pipelines=("fill-mask",))
NEXT_SENTENCE = Task(
    "next-sentence", "text.tasks.classification:next_sentence", (PAIR,), ("next-sentence",)
)
CHOOSE = Task("choose", "text.tasks.classification:choose", (CHOICES,), ("multiple-choice",))
EMBED = Task(
    "embed",
    "text.tasks.embedding:embed",
    pipelines=("feature-extraction", "sentence-similarity"),
    takes_blank=True,
)
EMBED_SPARSE = Task("embed-sparse", "text.tasks.embedding:embed_sparse", takes_blank=True)
EMBED_MULTI_VECTOR = Task(
    "embed-multi-vector",
    "text.tasks.embedding:embed_multi_vector",
    pipelines=("multi-vector",),
    takes_blank=True,
)
EMBED_IMAGES = Task(
    "embed", "image_runtime:ImageRuntime.embed", (IMAGE,), ("image-feature-extraction",)
)


class Output(NamedTuple):
    """An output of a graph. `axes` follow the batch: numbers, sizes that
    `specs.sequences.SIZES` finds in the config, or names of axes. Without the config field
    `needs` there is no such output."""

    name: str
    axes: tuple[int | str, ...]
    needs: str | None = None


STATES = Output("last_hidden_state", ("source_length", "hidden_size"))
DECODER_STATES = Output("last_hidden_state", ("source_length", "decoder_size"))
TARGET_STATES = Output("last_hidden_state", ("target_length", "decoder_size"))
SOURCE_STATES = Output("encoder_last_hidden_state", ("source_length", "hidden_size"))
IMAGE_STATES = Output("last_hidden_state", ("image_length", "hidden_size"))
POOLED = Output("pooler_output", ("hidden_size",), needs="pooler_act")
TOKEN_SCORES = Output("logits", ("source_length", "vocab_size"))
# A masked language model whose graph pools its logits by SpladePooling: `config.splade` has the
# fields of the module.
SPARSE_EMBEDDING = "VanillaEncoderForSparseEmbedding"
MASKED_LM = "VanillaEncoderForMaskedLM"
# An encoder with the heads of BGE-M3, which the runtime applies to the states of the graph.
M3_EMBEDDING = "VanillaEncoderM3Model"
ENCODER = "VanillaEncoderModel"


@dataclass(frozen=True)
class Head:
    """The head of a class of models.

    Args:
        outputs: what the graph of whole sequences returns; none for a model that generates.
        tasks: what it is used for; the first one by default.
        hub_task: the Hub's name of the task, if a pipeline reads these outputs.
        metric: the score of `evaluate`, see `exporting.evaluation`.
        reads: one of `READS_TOKENS`, `READS_CHOICES`, `READS_TARGETS` and `READS_IMAGES`.
        needs_end_token: true if it reads the state at an end token, so every row must have one.
    """

    outputs: tuple[Output, ...] = ()
    tasks: tuple[Task, ...] = ()
    hub_task: str | None = None
    metric: str | None = None
    reads: str = READS_TOKENS
    needs_end_token: bool = False

    @property
    def generates(self) -> bool:
        return not self.outputs


FEATURES = Head((STATES, POOLED), (EMBED,), "feature-extraction")
LABELS = Head(
    (Output("logits", ("num_labels",)),),
    (CLASSIFY, ZERO_SHOT, RERANK),
    "text-classification",
    "accuracy",
)
TOKEN_LABELS = Head(
    (Output("logits", ("source_length", "num_labels")),),
    (TAG,),
    "token-classification",
)
ANSWERS = Head(
    (Output("start_logits", ("source_length",)), Output("end_logits", ("source_length",))),
    (ANSWER,),
    "question-answering",
)

# By architecture, the name of the class of models.
HEADS: dict[str, Head] = {
    ENCODER: FEATURES,
    M3_EMBEDDING: replace(FEATURES, tasks=(EMBED, EMBED_SPARSE, EMBED_MULTI_VECTOR)),
    MASKED_LM: Head((TOKEN_SCORES,), (FILL_MASK,), "fill-mask", "pseudo_perplexity"),
    SPARSE_EMBEDDING: Head((Output("sentence_embedding", ("vocab_size",)),), (EMBED_SPARSE,)),
    "VanillaEncoderForPreTraining": Head(
        (
            Output("prediction_logits", ("source_length", "vocab_size")),
            Output("seq_relationship_logits", (2,)),
        ),
        (FILL_MASK, NEXT_SENTENCE),
        metric="pseudo_perplexity",
    ),
    "VanillaEncoderForNextSentencePrediction": Head((Output("logits", (2,)),), (NEXT_SENTENCE,)),
    "VanillaEncoderForSequenceClassification": LABELS,
    "VanillaEncoderForTokenClassification": TOKEN_LABELS,
    "VanillaEncoderForQuestionAnswering": ANSWERS,
    "VanillaEncoderForMultipleChoice": Head(
        (Output("logits", ("num_choices",)),),
        (CHOOSE,),
        reads=READS_CHOICES,
    ),
    "VanillaDecoderModel": replace(FEATURES, outputs=(DECODER_STATES,)),
    "VanillaDecoderForSequenceClassification": LABELS,
    "VanillaDecoderForTokenClassification": TOKEN_LABELS,
    "VanillaDecoderForQuestionAnswering": ANSWERS,
    "VanillaSeq2SeqModel": Head((TARGET_STATES, SOURCE_STATES), reads=READS_TARGETS),
    "VanillaSeq2SeqForSequenceClassification": replace(LABELS, needs_end_token=True),
    "VanillaSeq2SeqForQuestionAnswering": ANSWERS,
    "VanillaVisionModel": Head(
        (IMAGE_STATES, POOLED),
        (EMBED_IMAGES,),
        "image-feature-extraction",
        reads=READS_IMAGES,
    ),
    "VanillaVisionForImageClassification": Head(
        LABELS.outputs, (CLASSIFY_IMAGES,), "image-classification", reads=READS_IMAGES
    ),
    "VanillaDecoderForCausalLM": Head((), (GENERATE,), "text-generation", "perplexity"),
    "VanillaSeq2SeqForConditionalGeneration": Head(
        (), (GENERATE_TARGETS, TRANSLATE), "text2text-generation", "bleu"
    ),
}
GENERATORS = tuple(name for name, head in HEADS.items() if head.generates)
PIPELINES = {
    name: task for head in HEADS.values() for task in head.tasks for name in task.pipelines
}


def model_class(architecture: str) -> str:
    """Return the name of the torch class of `architecture`, a key of `HEADS`."""
    return {SPARSE_EMBEDDING: MASKED_LM, M3_EMBEDDING: ENCODER}.get(architecture, architecture)


def has_task(architecture: str, task: Task) -> bool:
    return architecture in HEADS and task in HEADS[architecture].tasks


def find_task(architecture: str, name: str | None) -> Task:
    """Return the task `name` of the class `architecture`, a key of `HEADS`; None is its first task.

    Raises:
        UsageError: for a task that the architecture does not have.
        ValueError: for an architecture without tasks.
    """
    tasks = {task.name: task for task in HEADS[architecture].tasks}
    if not tasks:
        raise ValueError(f"a {architecture} has no task, expected a model with one: use Runtime")
    if name is not None and name not in tasks:
        raise UsageError(
            f"{name} is not a task of a {architecture}, expected one of {', '.join(tasks)}"
        )
    return tasks[name] if name is not None else next(iter(tasks.values()))
