"""Reading a checkpoint that anyone may have written: its files are checked before a model is built from them, what is wrong is
one line that names the file, and no code beside the weights is ever run."""

import contextlib
import inspect
import json
import os
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path

import huggingface_hub
import torch
import transformers
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    HFValidationError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    StrictDataclassError,
)
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    BaseImageProcessor,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
from transformers.utils import logging

import vanilla_transformer

from .class_names import find_model_type
from .configuration_vanilla_transformer import CONFIGS, VanillaTransformerConfig
from .files import CONFIG, IMAGE_PROCESSOR, TARGET_TOKENIZER, TOKENIZER_FILES, VOCABULARIES, WEIGHTS, check_no_pointer
from .generation_settings import drop_unused_settings, is_absent_token
from .variants import index_of, opened_variant, variant_hint

logger = logging.get_logger(__name__)
GENERATION_CONFIG = "generation_config.json"
# Of a Hub repository; the folders in it hold exports and the checkpoints of a training run.
FILES = ("*.json", "*.txt", "*.spm", "*.model", "*.jinja", "*.safetensors")
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
FLAGS = [False, True, None]
MAX_LABELS = 2**20
# Of a generation config.
COUNTS = ("max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "num_return_sequences")
COUNTS += ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "top_k")
NUMBERS = ("temperature", "top_p", "min_p", "typical_p", "length_penalty", "repetition_penalty")
SEVERAL = ("eos_token_id", "forced_eos_token_id")
# Of a tokenizer's config, what transformers notes of the place it was loaded from.
OF_THE_PLACE = ("is_local", "local_files_only")
TOKENIZER_OF_BYTES = "ByT5Tokenizer"
OF_THE_HUB = ("constraints", "dola_layers", "force_words_ids", "penalty_alpha")

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]  # of tensors by name


def load_checkpoint(source: str | os.PathLike, variant: str | None = None) -> PreTrainedModel:
    """Return the model of a checkpoint of ours, of the class its config names, in float32 and evaluation mode.

    Args:
        source: a directory or Hub id.
        variant: as in `from_pretrained`: "fp16" reads the weights in model.fp16.safetensors.

    Raises:
        FileNotFoundError: without a directory, config.json or safetensors weights.
        ValueError: for files that are damaged or do not fit each other, a checkpoint of another family, and weights that are
            missing, too many, of other shapes or not finite.
    """
    with opened_variant(checkpoint_directory(source), variant) as directory:
        return load_directory(source, directory)


def load_directory(source: str | os.PathLike, directory: Path) -> PreTrainedModel:
    """Return the model in `directory`, which users know as `source`. Raises: as `load_checkpoint`."""
    config, model_class = read_config(directory)
    check_generation(directory / GENERATION_CONFIG, getattr(config, "vocab_size", 0))
    shapes: Shapes = {}
    for file in weight_files(directory):
        shapes |= stored_shapes(file)
    check_depth(config, shapes, directory)
    check_shapes(model_class, config, shapes, directory)
    with readers_errors(directory):
        model = model_class.from_pretrained(directory, config=config, dtype=torch.float32, use_safetensors=True)
    for name, weight in model.named_parameters():
        if wrong := weight.numel() - int(weight.isfinite().sum()):
            raise ValueError(f"{name} of {source} has {wrong} of {weight.numel()} values that are NaN or infinite")
    for note in drop_unused_settings(model.generation_config) if model.can_generate() else ():
        logger.warning(note)
    return model.eval()


def load_tokenizer(source: str | os.PathLike) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint, a directory or Hub id. Where target text is cut otherwise, it does that for `text_target`.

    Raises:
        FileNotFoundError: without a directory, or files of a tokenizer.
        ValueError: for files that are damaged, and for a tokenizer that is code beside them.
    """
    directory = checkpoint_directory(source)
    check_tokenizer_files(directory)
    found = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]
    if not has_tokenizer(directory):
        raise FileNotFoundError(f"{directory} has no tokenizer, expected one of {', '.join(VOCABULARIES)}")
    contents = {file.name: read_json(file) for file in found if file.suffix == ".json"}
    code = contents.get("tokenizer_config.json", {}).get("auto_map")
    try:
        with readers_errors(directory):
            tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
            if not isinstance(longest := tokenizer.model_max_length, int | float):  # found only when it reads
                raise ValueError(f"model_max_length is {shown(longest)}, expected a number")
            if (target := directory / TARGET_TOKENIZER).is_file():
                give_target(tokenizer, Tokenizer.from_file(str(target)))
            return tokenizer
    except ValueError:
        if not code:
            raise
    raise ValueError(f"{directory} has a tokenizer of its own code, which is not run: expected one of transformers, got {code}")


def give_target(tokenizer: PreTrainedTokenizerBase, target: Tokenizer) -> None:
    """Has `tokenizer` cut `text_target` with `target`, as classes of transformers with two models do, and write both."""
    for mode, backend in {"input": tokenizer.backend_tokenizer, "target": target}.items():
        setattr(tokenizer, f"_switch_to_{mode}_mode", partial(setattr, tokenizer, "_tokenizer", backend))
    tokenizer.save_pretrained = partial(save_with_target, tokenizer, target)


def save_with_target(
    tokenizer: PreTrainedTokenizerBase, target: Tokenizer, directory: str | os.PathLike, **options: object
) -> tuple[str, ...]:
    files = type(tokenizer).save_pretrained(tokenizer, directory, **options)
    target.save(os.path.join(directory, TARGET_TOKENIZER))
    return files


def load_image_processor(source: str | os.PathLike) -> BaseImageProcessor:
    """The image processor of a checkpoint, a directory or Hub id: the one with Pillow, whatever else is installed.

    Raises:
        FileNotFoundError: without a directory, or preprocessor_config.json.
        ValueError: for a file that is damaged or names a class that is not one of transformers.
    """
    directory = checkpoint_directory(source)
    path = directory / IMAGE_PROCESSOR
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no {IMAGE_PROCESSOR}, expected one beside a model of images")
    read_json(path)
    with readers_errors(path):
        return AutoImageProcessor.from_pretrained(directory, backend="pil", trust_remote_code=False)


def check_tokenizer_files(directory: Path) -> None:
    """Check that the files of a tokenizer, if there are any, include its vocabulary.

    Without a vocabulary transformers makes a tokenizer that knows no word.

    Raises:
        FileNotFoundError: if the vocabulary is missing.
        ValueError: for an empty vocabulary, and for a git-lfs pointer.
    """
    for name in TOKENIZER_FILES:
        check_no_pointer(directory / name)
    if (directory / "tokenizer.json").is_file() or not has_tokenizer(directory):
        return
    tokenizer_class = find_tokenizer_class(directory)
    if names := {*getattr(tokenizer_class, "vocab_files_names", {}).values()} - {"tokenizer.json", "tokenizer_config.json"}:
        check_vocabulary(directory, tokenizer_class.__name__, sorted(names))


def check_vocabulary(directory: Path, tokenizer: str, names: list[str]) -> None:
    """Raise FileNotFoundError or ValueError unless `directory` has one of the files `names`, and merges.txt if that is one."""
    present = [name for name in names if (directory / name).is_file()]
    missing = [name for name in names if name not in present]
    if not present or missing == ["merges.txt"]:
        without = f"remove {' and '.join(present) or 'tokenizer_config.json'} to go without a tokenizer"
        expected = f"expected {' and '.join(missing)}, or tokenizer.json"
        raise FileNotFoundError(f"{directory} has a {tokenizer} without {missing[0]}: {expected}; {without}")
    if "vocab.txt" in present and not (path := directory / "vocab.txt").stat().st_size:
        raise ValueError(f"{path} is empty, expected the vocabulary of a {tokenizer}")


def find_tokenizer_class(directory: Path) -> type | None:
    """Return transformers' class of the tokenizer that the configs in `directory` name, or that of the family."""
    contents = [read_json(path) for name in ("tokenizer_config.json", CONFIG) if (path := directory / name).is_file()]
    names = [content.get("tokenizer_class") for content in contents]
    names += [TOKENIZER_MAPPING_NAMES.get(content.get("model_type")) for content in contents]
    return next((getattr(transformers, name, None) for name in names if isinstance(name, str)), None)


def has_tokenizer(directory: Path) -> bool:
    """Whether there are files of one, or its class is one that needs none."""
    if any((directory / name).is_file() for name in VOCABULARIES):
        return True
    path = directory / CONFIG
    return path.is_file() and read_json(path).get("tokenizer_class") == TOKENIZER_OF_BYTES


# ---------------------------------------------------------------------------------------------------------- what is written


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path, longest: int | None = None) -> None:
    """Writes the files of `tokenizer` for transformers 4 and 5, with `longest` as its `model_max_length` if it is given."""
    tokenizer.save_pretrained(directory)
    for_every_version(directory, {} if longest is None else {"model_max_length": longest})


def for_every_version(directory: Path, changes: dict | None = None) -> None:
    """Gives tokenizer_config.json, if there is one, the names that transformers 4 knows too, and `changes`: what 5 saves has
    its own for a tokenizer of `tokenizers`, and for tokens without a name of their own. What 5 takes for granted is written
    down: without it transformers 4, and Transformers.js, take spaces out of the texts that they decode."""
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return
    before = read_json(path)
    content = {name: value for name, value in before.items() if name not in OF_THE_PLACE} | (changes or {})
    content.setdefault("clean_up_tokenization_spaces", False)
    if content.get("tokenizer_class") == "TokenizersBackend":
        # Without names of inputs transformers 4 would add token types.
        content = {"model_input_names": PreTrainedTokenizerFast.model_input_names, **content}
        content["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(content.get("extra_special_tokens"), list):
        content["additional_special_tokens"] = content.pop("extra_special_tokens")
    if content != before:
        path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def learned_positions(config: PreTrainedConfig) -> int | None:
    """How many there are; `None` for a model that has others, which no text is too long for."""
    return config.max_position_embeddings if getattr(config, "has_learned_positions", False) else None


def limit_generation(generation: GenerationConfig, config: PreTrainedConfig) -> None:
    """Where positions are learned and no length is set, a text may fill their table: the defaults of pipelines go beyond a
    short one."""
    if generation.use_cache is None:
        generation.use_cache = True
    if generation.max_length is None and generation.max_new_tokens is None:
        generation.max_length = learned_positions(config)


# --------------------------------------------------------------------------------------------------------- where it lies


def checkpoint_directory(source: str | os.PathLike, files: tuple[str, ...] = FILES) -> Path:
    """The directory `source`, or that of the `files` of the Hub id `source`, downloaded if they are not in the cache.

    Raises:
        FileNotFoundError: if it is neither, and where the Hub cannot be reached and the cache may have a part of them only.
        NotADirectoryError: if it is a file.
    """
    path, name, expected = Path(source), os.fspath(source), "expected a checkpoint directory or a Hub id"
    if name and path.is_dir():
        return path
    if name and os.path.lexists(path):
        raise NotADirectoryError(f"{source} is not a directory, {expected}{parent_hint(path)}")
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise FileNotFoundError(f"{source or repr(name)} does not exist, {expected}") from None
    try:
        ignored = None if any("/" in file for file in files) else ["*/*"]
        directory = Path(huggingface_hub.snapshot_download(name, allow_patterns=list(files), ignore_patterns=ignored))
    except RepositoryNotFoundError:
        reason = "the Hub has none of this name, or not for this login"
    except IncompleteSnapshotError:
        reason = "the cache has only a part of it, and the Hub cannot be reached"
    except LocalEntryNotFoundError:
        reason = "it is not in the cache, and the Hub cannot be reached"
    except (OSError, ValueError) as error:  # what the Hub client raises is one or the other
        reason = one_line(error)
    else:
        if files == FILES:
            check_cached(name, directory)
        return directory
    raise FileNotFoundError(f"{source} is neither a checkpoint directory nor on the Hub: {reason}")


def parent_hint(file: Path) -> str:
    """Return the end of an error about a file in place of a directory: the directory that holds it, if it is a checkpoint."""
    return f", such as {file.parent}" if (file.parent / CONFIG).is_file() else ""


def check_cached(name: str, directory: Path) -> None:
    """`from_pretrained` puts only what it reads into the cache, and no list of what there is. Without the Hub, such a cache
    does not tell a repository without a tokenizer from one whose tokenizer was not asked for."""
    if has_tokenizer(directory):
        return
    try:
        huggingface_hub.get_cached_repo_tree(name, revision=directory.name)
    except CachedRepoTreeNotFoundError:
        remedy = f"run `hf download {name}` where the Hub can be reached, or give a directory"
        raise FileNotFoundError(
            f"the cache has no tokenizer of {name}, and cannot say whether the Hub has one: {remedy}"
        ) from None


# --------------------------------------------------------------------------------------------------------------- configs


def config_and_class(source: str | os.PathLike) -> tuple[VanillaTransformerConfig, type[PreTrainedModel]]:
    """Of a checkpoint of ours, a directory or Hub id. Raises: as `load_checkpoint`, but for weights."""
    return read_config(checkpoint_directory(source, (CONFIG,)))


def read_config(directory: Path) -> tuple[VanillaTransformerConfig, type[PreTrainedModel]]:
    content, name = read_raw_config(directory)
    if content["model_type"] is None:
        raise ValueError(f"{directory / CONFIG} has the model_type None, expected a name")
    if (model_type := content["model_type"]) not in CONFIGS:
        known = [name for config_class in CONFIGS.values() for name in config_class.auto_classes().values()]
        found = f"{directory} has model_type {model_type} and architecture {name}"
        raise ValueError(f"{found}, expected one of {', '.join(known)}: convert it first")
    config_class = CONFIGS[model_type]
    if name not in (known := config_class.auto_classes().values()):
        raise ValueError(f"{directory} has model_type {model_type} and architecture {name}, expected one of {', '.join(known)}")
    for flag, allowed in {"return_dict": [True], "output_hidden_states": FLAGS, "output_attentions": FLAGS}.items():
        if not any(content.get(flag, allowed[0]) is value for value in allowed):
            raise ValueError(f"{directory / CONFIG} has {flag} {shown(content[flag])}, expected {allowed[0]}")
    config = made_config(config_class, content, directory)
    config.auto_map = dict(config.default_auto_map)  # a file may name another's code; ours is what is saved with our models
    return config, getattr(vanilla_transformer, name)


def read_raw_config(directory: Path) -> tuple[dict, str]:
    """The content of config.json, and the architecture it names, or "none".

    Where there is no `model_type`, as in files of 2019, it is that of the architecture, or None.
    """
    path = directory / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no config.json: expected a checkpoint directory")
    content = read_json(path)
    if not isinstance(model_type := content.get("model_type"), str | None):
        raise ValueError(f"{path} has the model_type {shown(model_type)}, expected a name")
    if not isinstance(names := content.get("architectures") or ["none"], list) or not isinstance(names[0], str):
        raise ValueError(f"{path} has the architectures {shown(names)}, expected a list of names")
    return content | {"model_type": model_type or find_model_type(names[0])}, names[0]


def made_config(config_class: type[PreTrainedConfig], content: dict, directory: Path) -> PreTrainedConfig:
    """The config of a file's `content`, which may have names of its own, but none that would replace a method of the class."""
    path = directory / CONFIG
    if parts := sorted(content.keys() & {"decoder", "generator", "text_config", "text_encoder"}):
        raise ValueError(f"{path} has the configs {', '.join(parts)} within, expected one of a model that has no parts")
    settable = {
        "model_type",
        "is_decoder",
        "add_cross_attention",
        *(field.name for field in fields(config_class)),
        *config_class.attribute_map,
    }
    for name in content:
        attribute = inspect.getattr_static(config_class, name, None)
        if attribute is not None and name not in settable and not isinstance(attribute, property):
            raise ValueError(f"{path} has the key {name}, expected none of a class's own attributes")
    labels = content.get("num_labels")
    if labels is not None and (type(labels) is not int or not 0 <= labels <= MAX_LABELS):
        raise ValueError(f"{path} has num_labels {shown(labels)}, expected at most {MAX_LABELS}")
    for name in ("id2label", "label2id"):
        if not isinstance(content.get(name) or {}, dict):
            raise ValueError(f"{path} has {name} {shown(content[name])}, expected a JSON object")
    if not isinstance(attention := content.get("_attn_implementation"), str | None):
        raise ValueError(f"{path} has _attn_implementation {shown(attention)}, expected a name")
    if "quantization_config" in content:
        raise ValueError(f"{path} has a quantization_config, expected weights in floating point")
    of_machine = ("attn_implementation", "experts_implementation")  # which is not the one that wrote it
    with readers_errors(path):
        config = config_class.from_dict({name: value for name, value in content.items() if name not in of_machine})
    # Of others' pairs of stacks a half may be alone, as `BartForCausalLM` or `T5EncoderModel`: their converters look.
    is_half = config_class not in CONFIGS.values() and not config.is_encoder_decoder
    if config.is_encoder_decoder != config_class.is_encoder_decoder and not is_half:
        raise ValueError(f"{path} has is_encoder_decoder {config.is_encoder_decoder}, expected {not config.is_encoder_decoder}")
    return config


def check_generation(path: Path, vocab_size: int) -> None:
    """Of generation_config.json, if there is one: transformers finds most wrong types only while it generates."""
    content = read_json(path) if path.is_file() else {}
    for name, value in content.items():
        if value is not None and (fault := generation_fault(name, value, vocab_size)):
            raise ValueError(f"{path} has {name} {shown(value)}, {fault}")


def generation_fault(name: str, value: object, vocab_size: int = 2**31) -> str | None:
    """What is wrong with a field of a generation config, or `None`."""
    if name in OF_THE_HUB:
        return "which transformers runs with code of the Hub: expected none"
    if name in COUNTS and not (type(value) is int and 0 <= value < 2**31):
        return "expected a whole number of at least 0 and below 2**31"
    if name in NUMBERS and type(value) not in (int, float):
        return "expected a number"
    if (name.startswith("output_") or name in ("do_sample", "use_cache")) and type(value) is not bool:
        return "expected true or false"
    if name.endswith("_token_id") and not is_absent_token(name, value):
        tokens = value if isinstance(value, list) and name in SEVERAL else [value]
        size = 2**31 if name in ("bos_token_id", "eos_token_id") else vocab_size  # these two need never be generated
        if not all(type(token) is int and 0 <= token < size for token in tokens):
            return f"expected one of [0, {size - 1}]"
    return None


# --------------------------------------------------------------------------------------------------------------- weights


def weight_files(directory: Path, names: tuple[str, ...] = (WEIGHTS,)) -> list[Path]:
    """The first of `names` that is there, whole or as the shards its index names.

    Raises:
        FileNotFoundError: if there is none, or a shard is missing.
        ValueError: for an index that is none, and for a git-lfs pointer.
    """
    for name in names:
        if (directory / name).is_file():
            check_no_pointer(directory / name)
            return [directory / name]
        if (index := directory / index_of(name)).is_file():
            return shards(index, Path(name).suffix)
    found = ", ".join(sorted(os.listdir(directory))[:10]) or "nothing"
    raise FileNotFoundError(
        f"{directory} has no weights: expected {' or '.join(names)}, found {found}{variant_hint(directory, names)}"
    )


def shards(index: Path, suffix: str) -> list[Path]:
    content = read_json(index)
    places = content.get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        raise ValueError(f"{index} has the weight_map {shown(places)}, expected the file of each tensor")
    if not isinstance(content.get("metadata", {}), dict):
        raise ValueError(f"{index} has the metadata {shown(content['metadata'])}, expected a JSON object")
    names = sorted(set(places.values()))
    if wrong := [name for name in names if Path(name).name != name or Path(name).suffix != suffix]:
        raise ValueError(f"{index} names {shown(wrong)}, expected {suffix} files beside it")
    if missing := [name for name in names if not (index.parent / name).is_file()]:
        raise FileNotFoundError(f"{index.parent} lacks {', '.join(missing[:5])}, which {index.name} names")
    for name in names:
        check_no_pointer(index.parent / name)
    return [index.parent / name for name in names]


def stored_shapes(file: Path) -> Shapes:
    """Of the tensors of a safetensors file, by its header.

    Raises:
        ValueError: for a file that is not whole, and a type of tensors that has no place here.
    """
    found: Shapes = {}
    try:
        with safe_open(file, "pt") as tensors:  # reads the header and compares it with the size of the file
            for name in tensors.keys():  # noqa: SIM118, it is no dict
                part = tensors.get_slice(name)
                if part.get_dtype() not in TORCH_DTYPES:
                    raise ValueError(f"{file}: {name} is of type {part.get_dtype()}, expected one of {list(TORCH_DTYPES)}")
                found[name] = tuple(part.get_shape()), TORCH_DTYPES[part.get_dtype()]
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file ({file.stat().st_size} bytes): {error}") from None
    return found


def check_depth(config: VanillaTransformerConfig, shapes: Shapes, where: Path | str) -> None:
    """Before anything is built or counted by `config`: it can name any depth and width, files only those they hold."""
    layers = len({number for name in shapes for number in re.findall(r"(?<=\.)\d+(?=\.)", f".{name}")})
    widest = max((size for shape, _ in shapes.values() for size in shape), default=0)
    for field, most in {
        "encoder_layers": layers,
        "decoder_layers": layers,
        "num_hidden_layers": layers,
        "hidden_size": widest,
    }.items():
        if (found := getattr(config, field, 0)) > most:
            raise ValueError(f"{field} is {found} in the config of {where}, expected at most {most} by its tensors")


def check_shapes(model_class: type[PreTrainedModel], config: VanillaTransformerConfig, shapes: Shapes, where: Path) -> None:
    """The tensors must be those of the model, no more and no less; tied ones may be there or not."""
    with readers_errors(where), torch.device("meta"):
        model = model_class(config)
    tied = {bare(name) for name in model.get_expanded_tied_weights_keys(all_submodels=True)}
    expected = {bare(name): tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {bare(name): shape for name, (shape, _) in shapes.items()}
    other = {name: f"{found[name]} for {expected[name]}" for name in expected.keys() & found.keys()}
    problems = {
        "missing": expected.keys() - tied - found.keys(),
        "unexpected": found.keys() - expected.keys(),
        "of another shape": {f"{name} {other[name]}" for name in other if found[name] != expected[name]},
        "no floating point": {name for name, (_, dtype) in shapes.items() if not dtype.is_floating_point},
    }
    for problem, names in problems.items():
        if names:
            some = ", ".join(sorted(names)[:5])
            raise ValueError(f"the weights of {where} do not fit {model_class.__name__}: {len(names)} are {problem}: {some}")


def bare(name: str) -> str:
    """Without the prefix that the classes with a head have and the bodies have not: each loads the other's files."""
    return name.removeprefix("model.")


# ---------------------------------------------------------------------------------------------------------------- errors


def read_json(path: Path) -> dict:
    """The JSON object that the file `path` holds.

    Raises:
        ValueError: if it holds something else.
    """
    check_no_pointer(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {shown(content)}, expected a JSON object")
    return content


@contextlib.contextmanager
def readers_errors(path: Path) -> Iterator[None]:
    """Around what other libraries make of the file or directory `path`: for one that they cannot read they raise errors of
    every class, here a ValueError that names it."""
    try:
        yield
    except (OSError, ImportError):  # their messages name the file
        raise
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # of Rust, and no Exception
        if not (is_panic or isinstance(error, Exception)):
            raise
        raise ValueError(f"{path}: {one_line(error)}") from None


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError | StrictDataclassError) else f"{type(error).__name__}: {text}"


def shown(value: object) -> str:
    return f"{value!r:.100}"
