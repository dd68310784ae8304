"""Rerankers that are language models, such as Qwen3-Reranker.

A prompt asks whether a text answers a query. The logit of one token, "yes", is the score, or its
difference to the logit of another, "no". They become classifiers with one label: the weight of the
score is the difference of two rows of the projection to the vocabulary, so its sigmoid equals the
softmax of the two logits. The prompt becomes the field `reranker` of the config, a dict with the
keys template, a format string with the fields instruction, query and document, and instruction, the
default of the first.
"""

import json
from pathlib import Path
from string import Formatter
from typing import Any

import jinja2
import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ..checkpoint import load_tokenizer
from ..checkpoint_files import read_json
from ..companions import MODULE_CONFIG, Companions, read_modules
from ..files import MODULES, write_json
from .tensors import Op

MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral")  # their modules read `score_tokens`
LOGIT_SCORE = "LogitScore"  # module of sentence-transformers with the ids of the answers
TRANSFORMER_CONFIG = "sentence_bert_config.json"
CLASSIFIER = {"transformer_task": "sequence-classification", "module_output_name": "scores"}
# characters of the Unicode area for private use, in place of the parts of a prompt
PARTS = {"instruction": "\ue000", "query": "\ue001", "document": "\ue002"}
PAIR_ROLES = {"query": "query", "document": "document"}
# The prompt of the model card of Qwen3-Reranker, for repositories without a template for pairs.
CARD = {
    "template": (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ),
    "instruction": "Given a web search query, retrieve relevant passages that answer the query",
}


def read_reranker(theirs: PreTrainedConfig, path: Path) -> list[str]:
    """Make `theirs` the config of a classifier if the checkpoint in `path` is a reranker with the
    head of a language model. Return notes for users.

    It is one if modules.json has a LogitScore, or if the config has the field
    `classifier_from_token`, as in vLLM: the answers `["no", "yes"]`. `theirs.score_tokens` becomes
    the pair of ids (no, yes), or (None, yes).

    Raises:
        ValueError: for answers that are not tokens, a modules.json that is damaged, a checkpoint
            without a prompt, and a family whose rerankers cannot be converted.
    """
    tokens = answer_tokens(theirs, path)
    if tokens is None:
        if prompt := getattr(theirs, "reranker", None):
            check_prompt(prompt)
        return []
    if theirs.model_type not in MODEL_TYPES:
        raise ValueError(
            f"{path} is a reranker of model_type {theirs.model_type}, expected one of "
            f"{', '.join(MODEL_TYPES)}"
        )
    theirs.score_tokens = tokens
    theirs.reranker = read_prompt(theirs, path)
    theirs.num_labels = 1
    names = theirs.architectures or []
    theirs.architectures = [
        name.replace("ForCausalLM", "ForSequenceClassification") for name in names
    ]
    return [f"the logits of the tokens {tokens} become the score of a classifier"]


def answer_tokens(theirs: PreTrainedConfig, path: Path) -> tuple[int | None, int] | None:
    """Return the ids (no, yes) of the answers of a reranker, or (None, yes). Return None for other
    checkpoints."""
    modules = [module for module in read_modules(path / MODULES) if module.kind == LOGIT_SCORE]
    if modules:
        config = read_json(path / modules[0].folder / MODULE_CONFIG)
        tokens = (config.get("false_token_id"), config.get("true_token_id"))
    elif words := getattr(theirs, "classifier_from_token", None):
        tokens = word_tokens(words, load_tokenizer(path))
    else:
        return None
    no, yes = tokens
    known = range(theirs.vocab_size)
    if yes not in known or (no is not None and no not in known):
        raise ValueError(
            f"{path} has the answers {tokens}, expected ids of tokens below {theirs.vocab_size}"
        )
    return no, yes


def word_tokens(words: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, int]:
    """Return the ids (no, yes) of `words`, `["no", "yes"]` or `["yes"]`. Without "no" it is None.

    Raises ValueError for another value, and for a word that is not one token.
    """
    is_list = isinstance(words, list) and all(isinstance(word, str) for word in words)
    vocabulary = tokenizer.get_vocab()
    if not is_list or len(words) not in (1, 2) or not vocabulary.keys() >= set(words):
        raise ValueError(
            f'classifier_from_token is {words!r:.80}, expected ["no", "yes"], each one token of '
            "the tokenizer"
        )
    return (None, *(vocabulary[word] for word in words))[-2:]


def row_difference(tokens: tuple[int | None, int]) -> Op:
    """Return the operation from a matrix (V, D) to one row (1, D): that of the second of `tokens`
    minus that of the first, if there is one."""
    no, yes = tokens

    def score(matrix: torch.Tensor) -> tuple[torch.Tensor]:
        # at least in float32: half precision rounds a difference
        dtype = torch.promote_types(matrix.dtype, torch.float32)
        row = matrix[yes : yes + 1].to(dtype)
        return (row if no is None else row - matrix[no : no + 1].to(dtype),)

    return Op(f"row {yes}" if no is None else f"row {yes} minus row {no}", score)


# -------------------------------------------------------------------------------------- the prompt


def read_prompt(theirs: PreTrainedConfig, path: Path) -> dict[str, str]:
    """Return the template of the prompt and the default instruction.

    They come from the field `reranker` of the config, from the chat template with the roles query
    and document, or for Qwen3 from its model card. Raises ValueError without any.
    """
    prompt = getattr(theirs, "reranker", None) or render_prompt(load_tokenizer(path))
    if prompt is None and theirs.model_type == "qwen3":
        prompt = CARD
    if prompt is None:
        raise ValueError(
            f"{path} has no chat template with the roles query and document, expected one, or the "
            "prompt in the field reranker: "
            '--set \'reranker={"template": "{query} {document}"}\''
        )
    check_prompt(prompt)
    return prompt


def check_prompt(prompt: Any) -> None:
    """Raise ValueError unless `prompt` has a template with the fields query and document."""
    template = prompt.get("template") if isinstance(prompt, dict) else None
    if not isinstance(template, str):
        raise ValueError(f"reranker is {prompt!r:.80}, expected an object with a template")
    names = [name for _, name, *_ in Formatter().parse(template) if name is not None]
    if sorted(names) not in ([*sorted(PARTS)], ["document", "query"]):
        raise ValueError(
            f"the template of reranker has the fields {names}, expected query and document, and "
            "optionally instruction"
        )


def render_prompt(tokenizer: PreTrainedTokenizerBase) -> dict[str, str] | None:
    """Return the template and the default instruction of the chat template of `tokenizer`. Return
    None unless it has places for a query and a document."""
    without = render(tokenizer, PAIR_ROLES)
    if without is None:
        return None
    with_instruction = render(tokenizer, {"system": "instruction"} | PAIR_ROLES) or ""
    before, mark, after = with_instruction.partition(PARTS["instruction"])
    fits = mark and without.startswith(before) and without.endswith(after)
    text = with_instruction if fits else without
    instruction = without[len(before) : len(without) - len(after)] if fits else ""
    template = text.replace("{", "{{").replace("}", "}}")
    for name, part in PARTS.items():
        template = template.replace(part, f"{{{name}}}")
    return {"template": template, "instruction": instruction}


def render(tokenizer: PreTrainedTokenizerBase, roles: dict[str, str]) -> str | None:
    """Return the chat template of `tokenizer` for a message of each of `roles`, with marks as
    contents. Return None if the query or the document is not in it once."""
    for is_flat in (True, False):
        messages = [
            {
                "role": role,
                "content": PARTS[name] if is_flat else [{"type": "text", "text": PARTS[name]}],
            }
            for role, name in roles.items()
        ]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False)
        except (
            jinja2.TemplateError,
            ValueError,
            TypeError,
        ):  # no template, or none for these roles
            continue
        if all(text.count(PARTS[name]) == 1 for name in ("query", "document")):
            return text
    return None


# ------------------------------------------------------------------------------------- other files


def classifier_files(companions: Companions, directory: Path) -> Companions:
    """Return `companions` as those of a classifier, with changed files in `directory`.

    modules.json loses its LogitScore, and the Transformer of sentence-transformers classifies.
    """
    scores = [module.folder for module in companions.modules if module.kind == LOGIT_SCORE]
    files = {
        name: file
        for name, file in companions.files.items()
        if name.partition("/")[0] not in scores or "/" not in name
    }
    if MODULES in files:
        entries = json.loads(files[MODULES].read_text(encoding="utf-8"))
        kept = [entry for entry in entries if entry["path"] not in scores]
        files[MODULES] = write_json(directory / MODULES, kept)
    if TRANSFORMER_CONFIG in files:
        config = read_json(files[TRANSFORMER_CONFIG]) | CLASSIFIER
        files[TRANSFORMER_CONFIG] = write_json(directory / TRANSFORMER_CONFIG, config)
    modules = tuple(module for module in companions.modules if module.kind != LOGIT_SCORE)
    return Companions(modules, files)
