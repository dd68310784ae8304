"""Checkpoint -> an export directory: graphs, configs, tokenizer, and a manifest."""

import contextlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vanilla_transformer import HAS_TORCH
from vanilla_transformer.checkpoint_config import read_config
from vanilla_transformer.checkpoint_files import (
    GENERATION_CONFIG,
    check_tokenizer_files,
    checkpoint_directory,
    for_every_version,
    has_tokenizer,
)
from vanilla_transformer.companions import companions
from vanilla_transformer.converted import converted
from vanilla_transformer.errors import torch_missing
from vanilla_transformer.files import CONFIG, new_directory
from vanilla_transformer.generation_settings import read_generation_settings

from ..errors import UsageError
from ..graphs.config import Config
from ..graphs.expected_weights import check_weights
from ..graphs.input_scales import Calibration
from ..heads import HEADS, READS_IMAGES
from ..inference.export_info import CARD, TOKENIZER_FILES, write_manifest
from ..one_graph import ROLE
from ..specs.graph_spec import GraphSpec
from ..specs.sequences import IMAGE_SIZES
from ..targets.registry import default_target, get_target, known_targets, targets
from ..targets.target import Target
from .graphs import GraphFormat, GraphSource, write_graphs
from .languages import languages_of
from .repository_files import (
    base_name,
    client_config,
    give_first_token,
    give_token_types,
    write_card,
    write_genai_config,
    write_generator_card,
    write_json,
)
from .shortlist import shortlist_from_text, with_special_tokens
from .triton import write_triton_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from vanilla_transformer.conversion.tokenizers import FoundTokenizer

NO_TORCH = (
    "torch is not installed: `vanilla-transformer verify` compares an export with its checkpoint "
    "where it is"
)
# whose versions the manifest has
PACKAGES = ("vanilla-transformer", "torch", "transformers", "onnx")


def export(
    checkpoint: str | os.PathLike,
    out: str | os.PathLike,
    force: bool = False,
    cases: int = 12,
    target: str | None = None,
    dtype: str | Sequence[str] | None = None,
    shortlist: Iterable[int] | str | os.PathLike | None = None,
    opset: int | None = None,
    keep: str | os.PathLike | None = None,
    image_size: str | None = None,
    triton: str | os.PathLike | None = None,
    calibrate: str | os.PathLike | None = None,
    generate: str | None = None,
    config: Mapping[str, Any] | None = None,
    leave_out: Iterable[str] = (),
    variant: str | None = None,
) -> dict[str, Any]:
    """Writes the graphs of `checkpoint` to the directory `out`, after comparing them with torch on
    `cases` random inputs, and returns the manifest. A checkpoint of a family in
    `conversion.FAMILIES` is converted on the way.

    Where torch is not installed, nothing is converted or compared: the manifest says why, and a
    warning does.

    Args:
        target: `"portable"` (standard operators, the default), `"cpu"` or `"cuda"` (onnxruntime's
            own ones, see `targets`).
        dtype: of the weights: `"fp32"`; `"int8"`, one scale for each column; for the cpu target
            also `"int4"`, one for each block of 32 in a column. Quantized products are computed in
            int8. For the cuda target `"fp32"`, `"fp16"` and `"bf16"`, in which all but norms,
            positions and logits is computed too; or `"int8"` and `"int4"`, one scale for each block
            of 32 in a column, which are computed in half precision. By default `"fp32"`; for cuda
            `"fp16"`, or `"bf16"` where the model has numbers that float16 cannot hold. For the
            portable target also several, which stand in one directory, the first of them by
            default.
        shortlist: the only tokens that can be generated, beside the special ones; all by default.
            The projection to the vocabulary computes no others. A path is that of a text, whose
            tokens they are.
        opset: of the graphs, where the target has a choice: 18 (the default) to 23 for the portable
            one.
        keep: directory for the converted checkpoint, which is temporary by default.
        image_size: of a model of images: `"trained"` for graphs that read images of
            `config.image_size` only, `"free"` for any size, with interpolated positions; by default
            as `config.interpolate_pos_encoding` says.
        triton: directory for the graph as a model of Triton Inference Server, see `triton`; of a
            model that only reads whole sequences or images, or with `generate`.
        calibrate: a text, a line each, on which the ranges are found of what int8 products of the
            cpu target read: faster than a scale for each row, see `calibration`.
        generate: `"greedy"`, `"sample"` or `"beam"` for one graph, of a model that generates, that
            takes ids and returns sequences by that search, see `generation`, in place of the graphs
            that a runtime drives.
        config: fields that replace those in the config.json of a checkpoint of another family, see
            `conversion.convert`.
        leave_out: patterns of names of tensors of such a checkpoint that are not converted, see
            `conversion.convert`.
        variant: as in transformers' `from_pretrained`: "fp16" reads the weights in
            model.fp16.safetensors.

    Raises:
        FileExistsError: if `out` or `triton` cannot be written, see `files.new_directory`.
        ImportError: where torch is not installed, for a checkpoint of another family, for
            `calibrate`, and for a tokenizer without tokenizer.json.
        UsageError: for a target, dtype, opset or image size that is unknown, for several dtypes
            where there can be one, for `keep`, `config` or `leave_out` where nothing is converted,
            for an image size where there are no images, for `calibrate` where there are no such
            products, for a way to `generate` that there is not, and if one of `out` and `triton` is
            inside the other.
        FileNotFoundError, OSError, ValueError: as `load_checkpoint` and `calibration.calibrate`;
            ValueError for a target or dtype that cannot hold the model, and if the graphs do not
            give what torch gives. Half precision is compared where there is a GPU.
    """
    to = checked_target(default_target() if target is None else target)
    dtypes = checked_dtypes(to, dtype)
    opset = checked_opset(to, opset)
    if image_size not in (None, *IMAGE_SIZES):
        raise UsageError(f"no image size {image_size!r}, expected one of {', '.join(IMAGE_SIZES)}")
    check_calibrated(calibrate, to, dtypes)
    if generate is not None:
        from .one_graph import check_mode, check_model

        check_mode(generate, to, image_size)
    texts = [text for text in (shortlist, calibrate) if isinstance(text, str | os.PathLike)]
    check_apart(out, triton)
    with contextlib.ExitStack() as outputs:
        inputs = [checkpoint, *texts]
        directory = outputs.enter_context(new_directory(out, force, inputs))
        model_directory = (
            None if triton is None else outputs.enter_context(new_directory(triton, force, inputs))
        )
        ours = outputs.enter_context(converted(checkpoint, keep, config, leave_out, variant))
        source = Source.load(checkpoint, ours, shortlist, image_size, calibrate)
        if model_directory is not None and generate is None:
            check_whole_sequences(source)
        if generate is not None:
            check_model(checkpoint, source.architecture, generate, source.generation, source.config)
        made = Graphs.plan(source, to, dtypes, opset)
        if generate is not None:
            return save_generator(source, made, (directory, model_directory), generate, cases)
        made.write(source, directory)
        if model_directory is not None:
            made.save_for_triton(directory, model_directory)
        facts = write_companions(source, made, directory)
        return check_parity(source, made, directory, facts, cases)


def save_generator(
    source: "Source", made: "Graphs", directories: tuple[Path, Path | None], mode: str, cases: int
) -> dict[str, Any]:
    """Writes the one graph of `mode` that the graphs of an export make, which are compared with
    torch first. The `directories` are that of the export, and that of the model of Triton, if there
    is to be one."""
    from .one_graph import write_generator

    directory, model_directory = directories
    with tempfile.TemporaryDirectory() as parts:
        made.write(source, Path(parts))
        facts = write_companions(source, made, Path(parts))
        check_parity(source, made, Path(parts), facts, cases)
        card = checkpoint_directory(source.checkpoint, (CONFIG,)) / CARD
        write_generator_card(
            directory, base_name(source.checkpoint), card, made.target, made.dtypes, mode
        )
        manifest, spec = write_generator(Path(parts), directory, made.target, mode, cases)
    if model_directory is not None:
        write_triton_model(
            spec, directory, model_directory, made.target.devices((ROLE,), made.dtypes[0])
        )
    return manifest


def check_apart(out: str | os.PathLike, triton: str | os.PathLike | None) -> None:
    """Raises UsageError if one of the two outputs is inside the other."""
    if triton is None:
        return
    places = [Path(os.path.realpath(path)) for path in (out, triton)]
    if os.path.commonpath(places) in map(str, places):
        raise UsageError(
            f"the output {out} and the model of Triton {triton} hold each other, expected "
            f"two places"
        )


def check_calibrated(
    text: str | os.PathLike | None, target: Target, dtypes: list[str | None]
) -> None:
    """Raise UsageError if there is a `text` and no matrix multiplications in integers, and
    ImportError without torch."""
    if text is None:
        return
    if len(dtypes) == 1 and dtypes[0] in target.integer_dtypes:
        if not HAS_TORCH:
            raise torch_missing("calibrate runs the model, which")
        return
    found = (
        f"calibrate is {os.fspath(text)!r} for the target {target.name!r} with dtype {dtypes[0]!r}"
    )
    fits = [
        f"{known.name!r} with {dtype!r}" for known in targets() for dtype in known.integer_dtypes
    ]
    raise UsageError(f"{found}, expected {', '.join(fits)}")


def check_whole_sequences(source: "Source") -> None:
    """Raises ValueError for a model whose graphs continue sequences, in steps that Triton does not
    take by itself."""
    if source.generates:
        found = f"{source.checkpoint} is a {source.architecture}"
        raise ValueError(
            f"{found}, expected for Triton a model that does not generate, or the option generate"
        )


def checked_target(name: str) -> Target:
    try:
        return get_target(name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def checked_dtypes(target: Target, dtype: str | Sequence[str] | None) -> list[str | None]:
    """Those that are asked for, `None` for the default; UsageError for what `target` has not."""
    dtypes: list[str | None] = [dtype] if dtype is None or isinstance(dtype, str) else list(dtype)
    for each in dtypes or [""]:
        if ("fp32" if each is None else each) not in target.dtypes:
            raise UsageError(
                f"no target {target.name!r} with dtype {each!r}, expected one of: {known_targets()}"
            )
    if len(dtypes) > 1 and not target.is_standard:
        raise UsageError(
            f"several dtypes, {dtypes}, are for the target {default_target()!r}, expected one for "
            f"{target.name!r}"
        )
    if len(set(dtypes)) < len(dtypes):
        raise UsageError(f"dtypes are {dtypes}, expected each once")
    return dtypes


def checked_opset(target: Target, opset: int | None) -> int:
    if opset is None:
        return target.opsets[0]
    if opset not in target.opsets:
        expected = " to ".join(dict.fromkeys(map(str, (target.opsets[0], target.opsets[-1]))))
        raise UsageError(f"no opset {opset} for the target {target.name!r}, expected {expected}")
    return opset


def check_exportable(checkpoint: str | os.PathLike, config: Any, architecture: str) -> None:
    """Raise ValueError for a model that no graph here can hold."""
    if architecture not in HEADS:
        raise ValueError(f"{checkpoint} is a {architecture}, expected one of {', '.join(HEADS)}")
    if getattr(config, "add_cross_attention", False):
        raise ValueError(
            f"{checkpoint} has add_cross_attention=True, which no graph here can hold: "
            f"expected False"
        )


@dataclass(frozen=True)
class Source:
    """A checkpoint that is to be exported, as the user named it: its directory as one of ours, and
    what its files say.

    Args:
        generation: the content of generation_config.json; nothing for a model that does not
            generate.
        model: in torch, to compare with; `None` where torch is not installed.
        shortlist: the only tokens that are generated; all if `None`.
        tokenizer: the tokenizer, if the checkpoint has no tokenizer.json.
        calibration: what the matrix multiplications read.
    """

    checkpoint: str | os.PathLike
    directory: Path
    model_config: Config
    generation: dict[str, Any]
    model: "PreTrainedModel | None" = None
    shortlist: list[int] | None = None
    tokenizer: "FoundTokenizer | None" = None
    calibration: Calibration | None = None

    @classmethod
    def load(
        cls,
        checkpoint: str | os.PathLike,
        ours: Path,
        shortlist: Iterable[int] | str | os.PathLike | None,
        image_size: str | None,
        text: str | os.PathLike | None,
    ) -> "Source":
        """`text` is that of `calibrate`."""
        tokenizer = tokenizer_to_write(ours)
        if isinstance(shortlist, str | os.PathLike):
            shortlist = shortlist_from_text(shortlist, ours)
        found, architecture = read_config(ours)
        check_exportable(checkpoint, found, architecture)
        config = Config(found, architecture)
        model = load_model(ours) if HAS_TORCH else None
        if model is None:
            check_weights(ours, config)
        generation = generation_settings(ours, config, model)
        if image_size is not None:
            if HEADS[architecture].reads != READS_IMAGES:
                raise UsageError(
                    f"image size {image_size!r} is for models of images, and {checkpoint} has a "
                    f"{architecture}"
                )
            found.interpolate_pos_encoding = image_size == "free"
        tokens = None if shortlist is None else with_special_tokens(shortlist, config, generation)
        calibration = (
            None if text is None or model is None else calibrated(model, tokens, ours, text)
        )
        return cls(checkpoint, ours, config, generation, model, tokens, tokenizer, calibration)

    @property
    def architecture(self) -> str:
        return self.model_config.architecture

    @property
    def generates(self) -> bool:
        return HEADS[self.architecture].generates

    @property
    def config(self) -> dict[str, Any]:
        """The config.json of an export: there is no code beside it, and where its checkpoint is
        means nothing elsewhere."""
        left_out = ("auto_map", "custom_pipelines", "_name_or_path")
        content = self.model_config.to_dict() | {"dtype": "float32"}
        return {name: value for name, value in content.items() if name not in left_out}


def load_model(ours: Path) -> "PreTrainedModel":
    from vanilla_transformer.checkpoint import load_checkpoint

    return load_checkpoint(ours)


def tokenizer_to_write(ours: Path) -> "FoundTokenizer | None":
    """Return the tokenizer if a tokenizer.json has to be made from it."""
    if (ours / "tokenizer.json").is_file():
        return None
    check_tokenizer_files(ours)
    if not has_tokenizer(ours):
        return None
    if not HAS_TORCH:
        raise torch_missing(f"{ours} has no tokenizer.json, and making it of the other files")
    from vanilla_transformer.conversion.tokenizers import find_tokenizer

    return find_tokenizer(ours)


def generation_settings(
    ours: Path, config: Config, model: "PreTrainedModel | None"
) -> dict[str, Any]:
    """Return the content of generation_config.json without settings that have no effect."""
    if not HEADS[config.architecture].generates:
        return {}
    if model is not None:  # its settings were checked when it was loaded
        return json.loads(model.generation_config.to_json_string())
    settings, notes = read_generation_settings(ours, config.to_dict())
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return settings


def calibrated(
    model: "PreTrainedModel", tokens: list[int] | None, ours: Path, text: str | os.PathLike
) -> Calibration:
    from vanilla_transformer.checkpoint import load_tokenizer

    from .calibration import calibrate
    from .shortlist_head import with_shortlist

    with with_shortlist(model, tokens):
        return calibrate(model, load_tokenizer(ours), text)


@dataclass(frozen=True)
class Graphs:
    """The graphs of an export for `target`, in each of `dtypes`: the specs by role."""

    target: Target
    dtypes: list[str]
    activations: str
    opset: int
    specs: dict[str, dict[str, GraphSpec]]

    @classmethod
    def plan(cls, source: Source, target: Target, dtypes: list[str | None], opset: int) -> "Graphs":
        """Raises ValueError for a model that `target` cannot hold."""
        if uses_target(source.model_config):
            check_fields(source.model_config, target)
        activations = target.activations(source.model, dtypes[0])
        known = [dtype or activations for dtype in dtypes]
        specs = {
            dtype: target.graph_specs(source.config, source.architecture, dtype, activations)
            for dtype in known
        }
        return cls(target, known, activations, opset, specs)

    def write(self, source: Source, directory: Path) -> None:
        """Write the graphs and their weights to `directory`."""
        model = GraphSource.read(
            source.directory, source.model_config, source.shortlist, source.calibration
        )
        for dtype, specs in self.specs.items():
            write_graphs(
                model,
                GraphFormat(self.target, dtype, self.activations, self.opset),
                specs,
                directory,
            )

    def save_for_triton(self, export: Path, directory: Path) -> None:
        """The one graph of the first dtype, which was saved to `export`."""
        specs = self.specs[self.dtypes[0]]
        [spec] = specs.values()
        write_triton_model(spec, export, directory, self.target.devices(specs, self.dtypes[0]))

    @property
    def files(self) -> dict[str, str]:
        """Of the first dtype, by role."""
        return {role: spec.file for role, spec in self.specs[self.dtypes[0]].items()}

    def facts(self, parity: dict[str, dict | None]) -> dict[str, Any]:
        """Return what the manifest says of the graphs, by the dtype of their weights."""
        variants = {
            dtype: {
                "graphs": {role: spec.file for role, spec in self.specs[dtype].items()},
                **({"parity": parity[dtype]} if dtype in parity else {}),
            }
            for dtype in self.dtypes
        }
        return {"default_dtype": self.dtypes[0], "variants": variants}


def uses_target(config: Config) -> bool:
    """Whether the graphs of a model have the attention of its target: those of models with a
    decoder that only read whole sequences have standard operators on every target."""
    return HEADS[config.architecture].generates or config.model_type in (
        "vanilla-encoder",
        "vanilla-vision",
    )


def check_fields(config: Config, target: Target) -> None:
    for name, expected in target.unsupported_fields(config).items():
        found = f"{name}={getattr(config, name)!r} does not fit the {target.name} target"
        raise ValueError(f"{found}, expected {expected}: use --target {default_target()}")


def write_companions(source: Source, made: Graphs, directory: Path) -> dict[str, Any]:
    """What stands beside the graphs: configs, tokenizer, sentence modules, and what other programs
    need. Returns what the manifest says of them and of the source."""
    if source.generates:
        # as transformers writes it
        content = json.dumps(source.generation, indent=2, sort_keys=True)
        (directory / GENERATION_CONFIG).write_text(f"{content}\n", encoding="utf-8")
    write_tokenizer(source, directory)
    modules = companions(source.directory)
    modules.copy_without_pickles(directory)
    clients = write_for_clients(source, made, directory)
    card = checkpoint_directory(source.checkpoint, (CONFIG,)) / CARD
    write_card(
        directory, base_name(source.checkpoint), card, source.architecture, made.target, made.dtypes
    )
    return {
        "model_type": source.config["model_type"],
        "architecture": source.architecture,
        "target": made.target.name,
        "activations": made.activations,
        "shortlist": source.shortlist,
        "opset": made.opset,
        "sentence_modules": modules.facts(),
        **({} if source.calibration is None else {"calibration": source.calibration.facts()}),
        **(
            {"step": step}
            if (step := made.target.step_role(source.config, source.architecture))
            else {}
        ),
        **language_facts(source, directory),
        **clients,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the version of each of `PACKAGES` that is installed."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def write_tokenizer(source: Source, directory: Path) -> None:
    """Its files, of which one is made where the checkpoint has only others."""
    with tempfile.TemporaryDirectory() as made:
        if source.tokenizer is not None:
            source.tokenizer.save(Path(made))
        found = source.directory if source.tokenizer is None else Path(made)
        for name in TOKENIZER_FILES:
            if (found / name).is_file():
                shutil.copyfile(found / name, directory / name)
    for_every_version(directory)


def language_facts(source: Source, directory: Path) -> dict[str, Any]:
    """Of a model that generates text in languages that can be chosen."""
    if not source.generates:
        return {}
    languages = languages_of(directory, source.generation.get("decoder_start_token_id"))
    return {} if languages is None else {"languages": languages}


def write_for_clients(source: Source, made: Graphs, directory: Path) -> dict[str, Any]:
    """config.json, and what other programs need beside it, see `clients`; returns what the manifest
    says of that."""
    external = sorted(path.name.removesuffix("_data") for path in directory.glob("onnx/*_data"))
    loaded = made.dtypes if made.target.is_standard else ()
    write_json(
        directory / "config.json", client_config(source.config, made.files, loaded, external)
    )
    tokenizer_config = directory / "tokenizer_config.json"
    is_decoder = made.files.keys() - {"lookup"} == {"decoder"}
    if source.config.get("type_vocab_size") and tokenizer_config.is_file():
        give_token_types(tokenizer_config)
    if is_decoder and (directory / "tokenizer.json").is_file() and tokenizer_config.is_file():
        give_first_token(directory)
    if not made.target.is_standard or not is_decoder:
        return {}
    return {
        "genai": write_genai_config(
            directory, source.config, source.generation, made.files["decoder"]
        )
    }


def check_parity(
    source: Source, made: Graphs, directory: Path, facts: dict[str, Any], cases: int
) -> dict[str, Any]:
    """Compare the graphs with torch and return the manifest that records it.

    Where no device can run the graphs, `parity` is `None` and `parity_reason` says why.

    Raises:
        ValueError: if the graphs do not give what torch gives.
    """
    if source.model is None:
        warnings.warn(f"parity is not checked, {NO_TORCH}", stacklevel=2)
        return without_parity(made, directory, facts, NO_TORCH)
    try:
        device = made.target.parity_device(made.activations)
    except OSError as error:
        return without_parity(made, directory, facts, str(error))
    from .parity import verify

    write_manifest(directory, **facts, **made.facts({}))  # which reading the graphs needs
    parity: dict[str, dict | None] = {}
    for dtype in made.dtypes:
        report = verify(directory, source.model, cases, device=device, dtype=dtype)
        if report.failures:
            raise ValueError(
                f"the export of {source.checkpoint} does not give what torch gives: "
                f"{report.failures[0]}"
            )
        parity[dtype] = report.summary()
    return write_manifest(directory, **facts, **made.facts(parity))


def without_parity(
    made: Graphs, directory: Path, facts: dict[str, Any], reason: str
) -> dict[str, Any]:
    """Write the manifest of graphs that were not compared, and return it."""
    return write_manifest(
        directory, **facts, **made.facts(dict.fromkeys(made.dtypes)), parity_reason=reason
    )
