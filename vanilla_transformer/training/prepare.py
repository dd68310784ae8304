"""From a recipe to what is trained: the tokenizer, the model, and the examples of each split."""

from functools import partial
from pathlib import Path
from random import Random

from accelerate import PartialState
from datasets import Dataset, IterableDataset
from sacrebleu.metrics import BLEU
from transformers import GenerationConfig, PreTrainedModel

from ..checkpoint import checkpoint_directory, config_and_class, limit_generation, load_tokenizer
from ..errors import UsageError
from .batches import SIDES
from .checks import told
from .draws import Augmented, BpeDropout, Draw
from .origins import check_held_out, check_teachers, naming
from .recipe import AUGMENTATION, Recipe
from .tasks import TASKS
from .tokenizer import train_tokenizer
from .values import SPLITS

TOKENS = ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids")


def check_complete(recipe: Recipe) -> None:
    """What a run needs that a recipe may leave open, and the checkpoints it starts from, before any text is read.

    Raises:
        UsageError: for a key that is missing, or one that is not that of the checkpoints.
        FileNotFoundError, ValueError: for checkpoints that are not there, or cannot be what the recipe says.
    """
    data, tokenizer, path = recipe.data, recipe.tokenizer, recipe.model.get("path")
    if not data.keys() & {"train", "dataset"}:
        raise UsageError(f"the recipe has no training text: its [data] is {data}, expected `train`")
    if recipe.task == "causal-lm" and "block_size" not in data:
        raise UsageError("the recipe has no data.block_size, expected the number of tokens in an example")
    if not (path or "path" in tokenizer or tokenizer.get("vocab_size") or tokenizer.get("kind") == "character"):
        raise UsageError("the recipe has no tokenizer.vocab_size, expected it for a new tokenizer, or tokenizer.path")
    check_evaluated(recipe)
    asked = [name for name in AUGMENTATION if recipe.training.get(name)]
    if asked and "teachers" not in recipe.training:
        seen = f"training.{asked[0]} is {recipe.training[asked[0]]}"
        raise UsageError(f"{seen}, expected training.teachers too: labels say nothing of other text")
    if path:
        check_start(recipe, path)
    check_teachers(recipe)


def check_evaluated(recipe):
    """Of what else only the first evaluation would find."""
    strategy = recipe.training.get("eval_strategy", "no")
    if strategy != "no" and not recipe.data.keys() & {"validation", "validation_fraction", "folds", "dataset"}:
        raise UsageError(f'training.eval_strategy is {strategy!r}, expected "no", or data.validation too')
    if name := recipe.evaluation.get("bleu_tokenize"):
        try:
            BLEU(tokenize=name)
        except (ImportError, RuntimeError) as error:  # what cuts Japanese or Korean is a package of its own
            raise UsageError(f"evaluation.bleu_tokenize is {name!r}, which cannot be had here: {error}") from None


def check_start(recipe, path):
    """A checkpoint to go on from has a config that can have the fields of [model]."""
    task, (config, _) = TASKS[recipe.task], naming("model.path", config_and_class, path)
    if not isinstance(config, task.CONFIG):
        expected = f"one of {task.CONFIG.model_type}"
        raise ValueError(f"model.path is {path!r}, a checkpoint of {config.model_type}, expected {expected}")
    names = {name: task.CONFIG.attribute_map.get(name, name) for name in recipe.model if name not in ("path", "preset")}
    told("model", task.CONFIG.from_dict, config.to_dict() | {to: recipe.model[name] for name, to in names.items()})
    check_held_out("model.path", path, recipe.data)


def prepare(recipe: Recipe, checkpoint: Path | None = None) -> tuple:
    """The tokenizer, that of `checkpoint` if there is one, a new model, and the examples of each split.

    Raises:
        UsageError, FileNotFoundError, ValueError: as `check_complete`; ValueError for text that is not as it should be.
    """
    check_complete(recipe)
    task, tokenizer = TASKS[recipe.task], given_tokenizer(recipe, checkpoint)
    text = {split: found for split in SPLITS if (found := task.read(recipe.data, split)) is not None}
    if "train" not in text:
        raise ValueError(f"the recipe has no training text: its [data] is {recipe.data}, expected `train`")
    if tokenizer is None:
        tokenizer = new_tokenizer(recipe, task, text)
    model = make_model(recipe, task, tokenizer, text)
    rows = {split: examples(task, split, found, tokenizer, model.config, recipe) for split, found in text.items()}
    return tokenizer, model, rows


def new_tokenizer(recipe, task, text):
    """For the model that the recipe says: of its variant, with token types if it has several."""
    settings = {name: value for name, value in recipe.tokenizer.items() if name != "dropout"}
    types = {**task.config_fields(text, recipe.data), **recipe.model}.get("type_vocab_size", 0)
    variant = task.CONFIG.model_type.removeprefix("vanilla-")
    return train_tokenizer(task.texts(text["train"]), variant=variant, token_types=types > 1, **settings)


def given_tokenizer(recipe, checkpoint):
    """`None` where a new one is to be trained."""
    if checkpoint:
        return load_tokenizer(checkpoint)
    for table in ("tokenizer", "model"):
        if path := getattr(recipe, table).get("path"):
            return naming(f"{table}.path", load_tokenizer, path)
    return None


def make_model(recipe, task, tokenizer, text) -> PreTrainedModel:
    """A new model as the recipe says, or one that starts from the checkpoint `path`, with the vocabulary of `tokenizer`."""
    settings = {**task.config_fields(text, recipe.data), **recipe.model}
    path, preset = settings.pop("path", None), settings.pop("preset", None)
    if path:
        model = pretrained(task.MODEL, path, settings)
    else:
        settings = {"vocab_size": len(tokenizer), **settings}
        model = task.MODEL(task.CONFIG.preset(preset, **settings) if preset else task.CONFIG(**settings))
    if model.config.vocab_size != len(tokenizer):
        raise ValueError(f"the tokenizer has {len(tokenizer)} entries, expected vocab_size={model.config.vocab_size}")
    set_generation(model, recipe)
    return model


def pretrained(model_class, path, settings):
    try:
        model = model_class.from_pretrained(checkpoint_directory(path), **settings)
    except RuntimeError as error:  # weights of other shapes
        raise ValueError(f"model.path is {path!r}, expected a checkpoint of the shape in [model]: {error}") from None
    model.config.auto_map = dict(model.config.default_auto_map)  # a file may name another's code
    return model


def set_generation(model, recipe) -> None:
    """As the result is to have it: training switches the cache off, and `generate` fills every field with a default."""
    model.config.use_cache = True
    if model.can_generate():
        model.generation_config = generation_config(recipe, model.config)


def generation_config(recipe, config) -> GenerationConfig:
    for name, value in recipe.generation.items():
        if name in TOKENS and (unknown := [token for token in tokens_in(value) if not 0 <= token < config.vocab_size]):
            raise UsageError(f"generation.{name} has {unknown[0]}, expected tokens from 0 to {config.vocab_size - 1}")
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    tokens = {name: getattr(config, name) for name in names if hasattr(config, name)}
    found = GenerationConfig(**tokens, **recipe.generation)
    limit_generation(found, config)
    return found


def tokens_in(value) -> list[int]:
    """Those of a token, a list, or a list of lists."""
    return [token for item in value for token in tokens_in(item)] if isinstance(value, list) else [value]


def examples(task, split, text, tokenizer, config, recipe):
    """What the model sees of one split's text, without what is longer than a table of learned positions, which is counted.

    Raises:
        ValueError: if none is left, and for learned positions and a stream, whose rows cannot be counted beforehand.
    """
    settings = {"tokenizer": tokenizer, "data": recipe.data}
    is_drawn = split == "train" and recipe.tokenizer.get("dropout")  # from the text, again and again
    unused = [] if is_drawn else text.column_names
    rows = text.map(task.encode, batched=True, remove_columns=unused, fn_kwargs=settings)
    rows = task.examples(rows, recipe.data, split)
    if task.draw and split != "train":
        rows = rows.map(lambda row, place: task.draw(row, Random(place), tokenizer), with_indices=True)  # once and for all
    if config.position_embedding_type != "learned":
        return rows
    if isinstance(rows, IterableDataset):
        raise ValueError("position_embedding_type is 'learned', expected one without a longest sequence for data.streaming")
    if not isinstance(rows, Dataset):
        return rows
    limit, longest = config.max_position_embeddings, [max(sides) for sides in lengths(rows)]
    kept = [index for index, length in enumerate(longest) if length <= limit]
    if len(kept) < len(rows):
        found = f"{len(rows) - len(kept)} of {len(rows)} {split} rows have more than {limit} tokens, up to {max(longest)}"
        if not kept:
            raise ValueError(f"{found}, expected at most max_position_embeddings")
        if PartialState().is_main_process:
            print(f"{found}: they are left out, as max_position_embeddings says")
    return rows.select(kept)


def lengths(rows) -> list[tuple[int, ...]]:
    """Tokens of each side of each row."""
    sides = [rows[name] for name in SIDES if name in rows.column_names]
    return [tuple(map(len, row)) for row in zip(*sides, strict=True)]


def draw_of(recipe, tokenizer, rows) -> Draw | None:
    """What is drawn of the training rows `rows`; `None` where the model sees them as they are, once."""
    draw, r_drop = one_draw(recipe, tokenizer, rows), recipe.training.get("r_drop")
    if draw is None:
        return (lambda row, random: (row, row)) if r_drop else None
    if not r_drop:
        return lambda row, random: (draw(row, random),)
    # Wang et al. 2021: one pass of R-Drop over whole words, one over pieces, where a row has one label, whatever its pieces.
    if recipe.task == "sequence-classification":
        return lambda row, random: (row, draw(row, random))
    return lambda row, random: (draw(row, random),) * 2


def one_draw(recipe, tokenizer, rows):
    """(row, random) -> another row; `None` where nothing is drawn."""
    task, dropout = TASKS[recipe.task], recipe.tokenizer.get("dropout")
    shares = [recipe.training.get(name, 0) for name in AUGMENTATION]
    if not dropout and not any(shares):
        return task.draw and partial(task.draw, tokenizer=tokenizer)
    pieces = BpeDropout(tokenizer, dropout) if dropout else lambda texts, random: tokenizer(texts)
    augmented = Augmented(*shares, rows["text"]) if any(shares) else None
    return partial(draw_text, augmented=augmented, pieces=pieces, task=task, data=recipe.data)


def draw_text(row, random, augmented, pieces, task, data):
    if augmented:
        row = row | {"text": augmented(row["text"], random)}
    columns = {name: [value] for name, value in row.items()}
    encoded = task.encode(columns, partial(pieces, random=random), data)
    return {name: value for name, [value] in encoded.items()}
