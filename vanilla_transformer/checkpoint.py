"""Loading of untrusted checkpoints.

Files are checked before a model is built from them. An error is one line that names the file. Code
beside the weights is never run.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    BaseImageProcessor,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
from transformers.utils import logging

import vanilla_transformer

from .checkpoint_config import check_depth
from .checkpoint_files import (
    GENERATION_CONFIG,
    bare,
    check_generation,
    check_tensors,
    check_tokenizer_files,
    checkpoint_directory,
    for_every_version,
    has_tokenizer,
    read_json,
    readers_errors,
    shorten,
    stored_tensors,
    weight_files,
)
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .files import CONFIG, IMAGE_PROCESSOR, TARGET_TOKENIZER, TOKENIZER_FILES, VOCABULARIES
from .generation_settings import drop_unused_settings
from .source import Source
from .variants import opened_variant

logger = logging.get_logger(__name__)
TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of tensors by name


def load_checkpoint(source: str | os.PathLike, variant: str | None = None) -> PreTrainedModel:
    """Return the model of a Vanilla Transformer checkpoint, in float32 and evaluation mode.

    Its class is the one that the config names.

    Args:
        source: a directory or Hub id.
        variant: as in `from_pretrained`: "fp16" reads the weights in model.fp16.safetensors.

    Raises:
        FileNotFoundError: without a directory, config.json or safetensors weights.
        ValueError: for files that are damaged or do not fit each other, and a checkpoint of another
            family. Also for weights that are missing, too many, of other shapes or not finite.
    """
    opened = Source.open(source)
    with opened_variant(opened.download(), variant) as directory:
        return load_model(opened.at(directory))


def load_model(source: Source) -> PreTrainedModel:
    """Return the model in the directory of `source`, in float32 and evaluation mode.

    Raises:
        FileNotFoundError: without safetensors weights.
        ValueError: for files that are damaged or do not fit each other, for a checkpoint of another
            family, and for values that are not finite.
    """
    directory, (config, model_class) = source.directory, config_and_class(source)
    check_generation(directory / GENERATION_CONFIG, getattr(config, "vocab_size", 0))
    stored = {
        name: facts
        for file in weight_files(directory)
        for name, facts in stored_tensors(file).items()
    }
    check_depth(config, stored, directory)
    check_shapes(model_class, config, stored, directory)
    with readers_errors(directory), without_progress_bar():
        model = model_class.from_pretrained(
            directory, config=config, dtype=torch.float32, use_safetensors=True
        )
    for name, weight in model.named_parameters():
        if wrong := weight.numel() - int(weight.isfinite().sum()):
            raise ValueError(
                f"{name} of {source} has {wrong} of {weight.numel()} values that are NaN or "
                f"infinite"
            )
    for note in drop_unused_settings(model.generation_config) if model.can_generate() else ():
        logger.warning(note)
    return model.eval()


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """Let transformers show no progress bar in the block."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def load_tokenizer(source: str | os.PathLike) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint, a directory or Hub id.

    Its `text_target` uses the tokenization of target texts, if the checkpoint has one.

    Raises:
        FileNotFoundError: for a missing directory, and without tokenizer files.
        ValueError: for damaged files, and for a tokenizer with custom code.
    """
    directory = checkpoint_directory(source)
    check_tokenizer(directory)
    files = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]
    if not has_tokenizer(directory):
        raise FileNotFoundError(
            f"{directory} has no tokenizer, expected one of {', '.join(VOCABULARIES)}"
        )
    contents = {file.name: read_json(file) for file in files if file.suffix == ".json"}
    code = contents.get("tokenizer_config.json", {}).get("auto_map")
    try:
        with readers_errors(directory):
            tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
            # transformers would notice only while it encodes
            longest = tokenizer.model_max_length
            if not isinstance(longest, int | float):
                raise ValueError(f"model_max_length is {shorten(longest)}, expected a number")
            target = directory / TARGET_TOKENIZER
            if target.is_file():
                give_target(tokenizer, Tokenizer.from_file(str(target)))
            return tokenizer
    except ValueError:
        if not code:
            raise
    raise ValueError(
        f"{directory} has a tokenizer with custom code, {code}, which is not run: expected a "
        "tokenizer of transformers"
    )


def give_target(tokenizer: PreTrainedTokenizerBase, target: Tokenizer) -> None:
    """Make `tokenizer` encode `text_target` with the tokenizer `target`.

    `save_pretrained` then saves both. Classes of transformers with two SentencePiece models do the
    same.
    """
    for mode, backend in {"input": tokenizer.backend_tokenizer, "target": target}.items():
        setattr(
            tokenizer, f"_switch_to_{mode}_mode", partial(setattr, tokenizer, "_tokenizer", backend)
        )
    tokenizer.save_pretrained = partial(save_with_target, tokenizer, target)


def save_with_target(
    tokenizer: PreTrainedTokenizerBase,
    target: Tokenizer,
    directory: str | os.PathLike,
    **options: object,
) -> tuple[str, ...]:
    files = type(tokenizer).save_pretrained(tokenizer, directory, **options)
    target.save(os.path.join(directory, TARGET_TOKENIZER))
    return files


def load_image_processor(source: str | os.PathLike) -> BaseImageProcessor:
    """Load the image processor of a checkpoint, a directory or Hub id, always the one based on
    Pillow.

    Raises:
        FileNotFoundError: without a directory, or preprocessor_config.json.
        ValueError: for a file that is damaged or names a class that is not one of transformers.
    """
    directory = checkpoint_directory(source)
    path = directory / IMAGE_PROCESSOR
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory} has no {IMAGE_PROCESSOR}, expected one for a vision model"
        )
    read_json(path)
    with readers_errors(path):
        return AutoImageProcessor.from_pretrained(directory, backend="pil", trust_remote_code=False)


def check_tokenizer(directory: Path) -> None:
    """Check that the files of a tokenizer, if there are any, include its vocabulary.

    Without a vocabulary transformers makes a tokenizer that knows no word.

    Raises:
        FileNotFoundError: if the vocabulary is missing.
        ValueError: for an empty vocabulary, and for a git-lfs pointer.
    """
    check_tokenizer_files(directory)
    if (directory / "tokenizer.json").is_file() or not has_tokenizer(directory):
        return
    tokenizer_class = find_tokenizer_class(directory)
    if names := vocabulary_files(tokenizer_class):
        check_vocabulary(directory, tokenizer_class.__name__, names)


def vocabulary_files(tokenizer_class: type | None) -> list[str]:
    """Return the names of the vocabulary files of a tokenizer class, such as vocab.txt.
    tokenizer.json does not count: all classes may have it."""
    names = {*getattr(tokenizer_class, "vocab_files_names", {}).values()}
    return sorted(names - {"tokenizer.json", "tokenizer_config.json"})


def check_vocabulary(directory: Path, tokenizer: str, names: list[str]) -> None:
    """Raise FileNotFoundError unless `directory` has a vocabulary, one of the files `names`.

    If merges.txt is among the names, it is needed too. An empty vocab.txt raises ValueError.
    `tokenizer` is the class name for the message.
    """
    present = [name for name in names if (directory / name).is_file()]
    missing = [name for name in names if name not in present]
    if not present or missing == ["merges.txt"]:
        without = (
            f"remove {' and '.join(present) or 'tokenizer_config.json'} to go without a tokenizer"
        )
        expected = f"expected {' and '.join(missing)}, or tokenizer.json"
        raise FileNotFoundError(
            f"{directory} has the tokenizer {tokenizer} without {missing[0]}: {expected}; {without}"
        )
    path = directory / "vocab.txt"
    if "vocab.txt" in present and not path.stat().st_size:
        raise ValueError(f"{path} is empty, expected the vocabulary of a {tokenizer}")


def find_tokenizer_class(directory: Path) -> type | None:
    """Return transformers' tokenizer class that the configs in `directory` name, or that of the
    model's family. It is None if transformers has no such class."""
    paths = [directory / "tokenizer_config.json", directory / CONFIG]
    contents = [read_json(path) for path in paths if path.is_file()]
    names = [content.get("tokenizer_class") for content in contents]
    names += [TOKENIZER_MAPPING_NAMES.get(content.get("model_type")) for content in contents]
    return next(
        (getattr(transformers, name, None) for name in names if isinstance(name, str)), None
    )


# ---------------------------------------------------------------------------------- what is written


def save_tokenizer(
    tokenizer: PreTrainedTokenizerBase, directory: Path, longest: int | None = None
) -> None:
    """Write the files of `tokenizer` for transformers 4 and 5.

    `longest`, if not `None`, becomes the `model_max_length`.
    """
    tokenizer.save_pretrained(directory)
    for_every_version(directory, {} if longest is None else {"model_max_length": longest})


def learned_positions(config: PreTrainedConfig) -> int | None:
    """Return the number of learned positions, or `None` without them: the length has no limit."""
    return (
        config.max_position_embeddings if getattr(config, "has_learned_positions", False) else None
    )


def limit_generation(generation: GenerationConfig, config: PreTrainedConfig) -> None:
    """Change `generation` to fit the model: at most its learned positions, if no length is set, and
    with a key-value cache, unless that is set.

    The default length of pipelines exceeds a short table of positions.
    """
    if generation.use_cache is None:
        generation.use_cache = True
    if generation.max_length is None and generation.max_new_tokens is None:
        generation.max_length = learned_positions(config)


def config_and_class(
    source: str | os.PathLike,
) -> tuple[VanillaTransformerConfig, type[PreTrainedModel]]:
    """Return the config and the model class of a Vanilla Transformer checkpoint.

    `source` is a directory, a Hub id or an open checkpoint. Weights are not read.

    Raises:
        FileNotFoundError: without a directory or config.json.
        ValueError: for a damaged config, and a checkpoint of another family.
    """
    opened = Source.open(source)
    return opened.config(), getattr(vanilla_transformer, opened.architecture)


# ------------------------------------------------------------------------------------------ weights


def stored_shapes(file: Path) -> Shapes:
    """Return {name: (shape, torch dtype)} of the tensors in a safetensors `file`, without reading
    them."""
    return {
        name: (shape, TORCH_DTYPES[dtype]) for name, (shape, dtype) in stored_tensors(file).items()
    }


def check_shapes(
    model_class: type[PreTrainedModel], config: VanillaTransformerConfig, stored: dict, where: Path
) -> None:
    """Raise ValueError unless the tensors in files are exactly those of the model, in floating
    point; tied ones may be absent.

    `stored` is {name: (shape, dtype)} of the files. Errors call the checkpoint `where`.
    """
    with readers_errors(where), torch.device("meta"):
        model = model_class(config)
    tied = {bare(name) for name in model.get_expanded_tied_weights_keys(all_submodels=True)}
    expected = {bare(name): tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    check_tensors(model_class.__name__, expected, tied, stored, where)
