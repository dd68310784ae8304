"""A conversion, decided and checked before anything is written."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import transformers
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import logging

import vanilla_transformer

from ..checkpoint import (
    CONFIG,
    CONFIGS,
    GENERATION_CONFIG,
    VOCABULARIES,
    check_depth,
    checkpoint_directory,
    learned_positions,
    limit_generation,
    load_tokenizer,
    made_config,
    read_json,
    read_raw_config,
    readers_errors,
    save_tokenizer,
)
from ..companions import Companions, companions, left_out
from ..files import VERSION_KEY, new_directory
from . import bart, bert, distilbert, electra, gpt2, marian, mbart, opt, roberta
from .fields import require
from .tensors import TensorFiles, write_safetensors

logger = logging.get_logger(__name__)

FAMILIES = {
    "bert": bert,
    "roberta": roberta,
    "distilbert": distilbert,
    "electra": electra,
    "gpt2": gpt2,
    "opt": opt,
    "bart": bart,
    "mbart": mbart,
    "marian": marian,
}
# What a config says about labels and tokens means the same everywhere.
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
COMMON = (*SPECIAL_TOKENS, "sep_token_id", "vocab_size", "tie_word_embeddings", "use_cache")
COMMON += ("id2label", "label2id", "problem_type", "task_specific_params")
COMMON += ("sentence_transformers", "sbert_ce_default_activation_function")  # of a cross-encoder: what its score passes


@dataclass(frozen=True)
class Step:
    """Tensors of the source, by name, that become tensors of the result; the names of equal ones are in `same`."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    function: Callable[..., tuple[torch.Tensor, ...]]
    note: str
    same: tuple[str, ...] = ()


@dataclass
class Plan:
    """What `write` will write: the checkpoint of `model`, whose parameters are on the meta device, without values.

    `left_out` are tensors of the source that belong to its family but not to its architecture, and files that change what
    comes of it and have no place here.
    """

    model: PreTrainedModel
    files: TensorFiles
    steps: list[Step]
    left_out: list[str]
    dtype: torch.dtype
    generation_config: GenerationConfig | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    companions: Companions | None = None

    def __post_init__(self):
        self.shapes = {}
        for step in self.steps:
            example = [
                torch.empty(self.files.shapes[name][0], dtype=self.files.shapes[name][1], device="meta") for name in step.reads
            ]
            made = self._made(step, example)
            dtypes = [tensor.dtype for tensor in made] if step.reads else [self.dtype] * len(made)
            for name, tensor, dtype in zip(step.writes, made, dtypes, strict=True):
                self.shapes[name] = (tuple(tensor.shape), dtype)
        self._check_shapes()

    def _made(self, step, example):
        try:
            with torch.device("meta"):
                made = step.function(*example)
        except (IndexError, RuntimeError):  # fewer axes than it has to have, or of other lengths
            made = ()
        if len(made) == len(step.writes):
            return made
        found = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in zip(step.reads, example))
        raise ValueError(f"{self.files.path} has {found}, which gives no {' and '.join(step.writes)} ({step.note})")

    def _check_shapes(self):
        tied = self.model.get_expanded_tied_weights_keys(all_submodels=True)
        expected = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items() if name not in tied}
        optional = self.model._keys_to_ignore_on_load_missing or ()  # Marian computes its sinusoids
        difference = sorted(expected.keys() ^ self.shapes.keys())
        if difference := [name for name in difference if not {name, f"model.{name}"} & set(optional)]:
            raise RuntimeError(f"the mapping of {type(self.model).__name__} is not complete: {difference}")
        for step in self.steps:
            for name in step.writes:
                if (found := self.shapes[name][0]) != expected[name]:
                    raise ValueError(
                        f"{', '.join(step.reads)} gives {name} the shape {found}, expected {expected[name]} by the config"
                    )

    def __str__(self):
        lines = [f"{type(self.model).__name__}, {len(self.shapes)} tensors"]
        for step in self.steps:
            shapes = ", ".join(f"{name} {list(self.shapes[name][0])}" for name in step.writes)
            lines.append(
                f"{' = '.join((*step.reads, *step.same)) or '(new)'} -> {shapes}" + f"  ({step.note})" * bool(step.note)
            )
        return "\n".join([*lines, *(f"{name} is left out" for name in self.left_out)])

    def write(self, out: str | os.PathLike, force: bool = False) -> dict:
        """Writes the checkpoint directory `out`, and returns what it is.

        Raises:
            FileExistsError: if `out` cannot be written, see `files.new_directory`.
            ValueError: as `save`.
        """
        with new_directory(out, force, [self.files.path]) as directory:
            self.save(directory)
        return self.facts(out)

    def save(self, directory: Path) -> None:
        """Writes the checkpoint's files, tensor by tensor. Raises ValueError if tensors that must be equal are not."""
        write_safetensors(directory / "model.safetensors", self.shapes, self.tensors())
        if self.model._auto_class is not None:
            custom_object_save(self.model, directory, config=self.model.config)
        self.model.config.save_pretrained(directory)
        if self.generation_config is not None:
            self.generation_config.save_pretrained(directory)
        if self.tokenizer is not None:
            rows = learned_positions(self.model.config)
            save_tokenizer(self.tokenizer, directory, rows and min(rows, self.tokenizer.model_max_length))
        self.companions.copy(directory)

    def facts(self, out: str | os.PathLike) -> dict:
        """What was written to `out`."""
        return {
            "out": str(out),
            "architecture": type(self.model).__name__,
            "tensors": len(self.shapes),
            "parameters": sum(torch.Size(shape).numel() for shape, _ in self.shapes.values()),
            "left_out": self.left_out,
            "tokenizer": type(self.tokenizer).__name__ if self.tokenizer is not None else None,
            "modules": [module.kind for module in self.companions.modules],
        }

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for step in self.steps:
            sources = [self.files.read(name) for name in step.reads]
            for name in step.same:
                if not torch.equal(self.files.read(name), sources[0]):
                    raise ValueError(f"{name} differs from {step.reads[0]}, expected one matrix: tie_word_embeddings is true")
            for name, tensor in zip(step.writes, step.function(*sources), strict=True):
                yield name, tensor.to(self.shapes[name][1])


# ---------------------------------------------------------------------------------------------------------------- forward


def plan_to_ours(source: str | os.PathLike) -> Plan:
    """Another project's checkpoint -> ours."""
    path, theirs = open_checkpoint(source)
    if theirs.model_type in CONFIGS:
        raise ValueError(f"{source} is a {theirs.model_type} checkpoint already, expected a family to convert it to")
    family = FAMILIES[theirs.model_type]
    architecture = architecture_of(theirs, family.ARCHITECTURES)
    files = TensorFiles(path)
    files.rename(lambda name: modern_name(name).removeprefix(family.PREFIX))
    model_class = getattr(vanilla_transformer, family.ARCHITECTURES[architecture])
    with readers_errors(path / CONFIG):
        config = model_class.config_class(**common_fields(theirs) | family.config(theirs, architecture, files.shapes))
    check_depth(config, files.shapes, path)
    if hasattr(family, "check_tensors"):
        family.check_tensors(files, theirs)

    model = empty_model(model_class, config, files, theirs)
    steps, left_out = forward_steps(model, family, theirs, architecture, files)
    plan = Plan(model, files, steps, left_out, config.dtype)
    return with_companions(plan, source, path)


def forward_steps(model, family: ModuleType, theirs, architecture, files) -> tuple[list[Step], list[str]]:
    base = not hasattr(model, "model")
    wanted = model.state_dict().keys()
    steps, used, missing = [], set(), []
    for entry in family.pairs(model.config, theirs, architecture):
        ours = tuple(name.removeprefix("model.") if base else name for name in entry.ours)
        if not wanted >= set(ours) or not ours:
            continue
        found = [name for name in (entry.theirs, *entry.also) if name in files.shapes]
        found = found or [name for name in entry.otherwise if name in files.shapes][:1]
        if not found:
            missing.append(entry.theirs)
            continue
        steps.append(Step((found[0],), ours, entry.op.to_ours, entry.op.name, tuple(found[1:])))
        used.update(found)
    if missing:
        raise ValueError(f"{files.path} lacks tensors that {architecture} needs: {', '.join(missing)}")
    known = {
        name
        for other in family.ARCHITECTURES
        for entry in family.pairs(model.config, theirs, other)
        for name in entry.all_theirs
    }
    unused = re.compile(getattr(family, "UNUSED", "$^"))
    rest = [name for name in files.shapes if name not in used and not unused.fullmatch(name) and "position_ids" not in name]
    if unknown := [name for name in rest if name not in known]:
        raise ValueError(f"{files.path} has tensors that {architecture} does not know: {', '.join(sorted(unknown))}")
    return steps, sorted(rest)


def modern_name(name):
    """Checkpoints that were converted from TensorFlow have other names for LayerNorm's parameters."""
    return re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))


# --------------------------------------------------------------------------------------------------------------- backward

BACK = {"bert": bert, "gpt2": gpt2, "opt": opt, "bart": bart, "mbart": mbart, "marian": marian}


def plan_to_theirs(source: str | os.PathLike, to: str) -> Plan:
    """Our checkpoint -> one of the families in `BACK`."""
    if to not in BACK:
        raise ValueError(f"checkpoints can be converted to {', '.join(BACK)}, got {to!r}")
    path, ours = open_checkpoint(source)
    if ours.model_type not in CONFIGS:
        raise ValueError(f"{source} is a {ours.model_type} checkpoint, expected one of {', '.join(CONFIGS)}")
    family = BACK[to]
    names = {our_name: name for name, our_name in family.ARCHITECTURES.items()}
    architecture = names[architecture_of(ours, names)]
    require(ours, head_dim=ours.hidden_size // ours.num_attention_heads, value_head_dim=ours.head_dim)
    config_class, model_class = (getattr(transformers, name) for name in (family.CONFIG, architecture))
    mark = {VERSION_KEY: vanilla_transformer.__version__}  # that we wrote it, and may replace it
    config = config_class(**common_fields(ours), **family.config_back(ours, architecture), **mark)
    files = TensorFiles(path)
    check_depth(ours, files.shapes, path)
    if not any(name.startswith("model.") for name in files.shapes):
        files.rename(lambda name: f"model.{name}")
    model = empty_model(model_class, config, files, ours)
    steps, left_out = backward_steps(model, family, ours, architecture, files)
    return with_companions(Plan(model, files, steps, left_out, config.dtype), source, path)


def backward_steps(model, family: ModuleType, ours, architecture, files) -> tuple[list[Step], list[str]]:
    wanted = model.state_dict().keys()
    steps, used, missing = [], set(), []
    for entry in family.pairs(ours, model.config, architecture):
        theirs = entry.theirs if entry.theirs in wanted else family.PREFIX + entry.theirs
        if theirs not in wanted:
            continue
        missing += [name for name in entry.ours if name not in files.shapes]
        to_theirs = entry.op.to_theirs
        steps.append(Step(entry.ours, (theirs,), lambda *parts, f=to_theirs: (f(*parts),), entry.op.name))
        used.update(entry.ours)
    if missing:
        raise ValueError(f"{files.path} lacks tensors that {architecture} needs: {', '.join(missing)}")
    known = {name for entry in family.pairs(ours, model.config, architecture) for name in entry.ours}
    rest = [name for name in files.shapes if name not in used]
    if unknown := [name for name in rest if name not in known]:
        raise ValueError(f"{files.path} has tensors that {architecture} has no place for: {', '.join(sorted(unknown))}")
    return steps, sorted(rest)


# ------------------------------------------------------------------------------------------------------------------ both


def open_checkpoint(source):
    """The directory, downloaded if `source` is a Hub id, and its config."""
    path = checkpoint_directory(source)
    if not Path(source).is_dir() and not list(path.glob("*.safetensors")):
        path = checkpoint_directory(source, ("pytorch_model*.bin",))  # pickles only if there is nothing else
    content, _ = read_raw_config(path)
    if (model_type := content["model_type"]) not in (*FAMILIES, *CONFIGS):
        raise ValueError(f"{source} is a {model_type} checkpoint, expected one of {', '.join(FAMILIES)}")
    return path, made_config(CONFIGS.get(model_type) or CONFIG_MAPPING[model_type], content, path)


def architecture_of(config, known):
    name = (config.architectures or ["none"])[0]
    if name not in known:
        raise ValueError(f"architectures={config.architectures!r} cannot be converted, expected one of {', '.join(known)}")
    return name


def common_fields(config):
    fields = {name: getattr(config, name, None) for name in COMMON}
    fields = {name: value for name, value in fields.items() if value is not None or name in SPECIAL_TOKENS}
    for name in fields.keys() & {*SPECIAL_TOKENS, "sep_token_id"}:
        tokens = fields[name] if isinstance(fields[name], list) else [fields[name]]
        if any(token is not None and not 0 <= token < config.vocab_size for token in tokens):
            logger.warning(f"{name}={fields[name]!r} is outside the vocabulary of {config.vocab_size}: set to None")
            fields[name] = None
    return fields


def empty_model(model_class, config, files, source_config):
    """On the meta device. Its dtype is that of the source's config, or of its tensors."""
    floats = [dtype for _, dtype in files.shapes.values() if dtype.is_floating_point]
    if not floats:
        raise ValueError(f"{files.path} has no tensors of floating point, found {sorted(files.shapes)[:5]}")
    config.dtype = source_config.dtype or floats[0]
    config.architectures = [model_class.__name__]
    with torch.device("meta"):
        return model_class(config)


def with_companions(plan, source, path):
    """The generation config, the tokenizer and the modules of the source. Old checkpoints have the first inside config.json."""
    plan.companions = companions(source)
    content, _ = read_raw_config(path)
    if content["model_type"] not in CONFIGS:  # the code beside our own weights is what is converted
        plan.left_out += left_out(source, content)
    if plan.model.can_generate():
        has_file = (path / GENERATION_CONFIG).is_file()
        where = {} if has_file else {"config_file_name": CONFIG, "_from_model_config": True}
        file = path / (GENERATION_CONFIG if has_file else CONFIG)
        read_json(file)
        with readers_errors(file):
            plan.generation_config = GenerationConfig.from_pretrained(path, **where)
        limit_generation(plan.generation_config, plan.model.config)
    if any((path / name).is_file() for name in VOCABULARIES):
        plan.tokenizer = load_tokenizer(path)
    return plan
