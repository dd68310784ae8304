"""Checkpoint -> graphs: the modeling code, traced. It stays the only definition of the model."""

import hashlib
import inspect
import logging
import os
import shutil
import warnings
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from torch import nn
from transformers import PreTrainedModel

from vanilla_transformer import checkpoint as checkpoints
from vanilla_transformer.checkpoint import checkpoint_directory, config_and_class, for_every_version
from vanilla_transformer.companions import companions
from vanilla_transformer.files import new_directory

from . import cpu, cuda, optimize, portable
from .artifact import CARD, TOKENIZER_FILES, write_manifest
from .clients import base_name, client_config, give_first_token, give_token_types, write_card, write_genai_config, write_json
from .doctor import require
from .errors import UsageError
from .graphs import DTYPES, KNOWN_DTYPES, GraphSpec, example_inputs, graph_specs
from .shortlist import checked, limited
from .verify import verify

logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision is not installed
OPSET = {"portable": 18, "cpu": 21, "cuda": 24}
PORTABLE_OPSETS = range(18, 24)
# The last without an operator for attention, as which onnxruntime refuses cross-attention here. 23 adds operators and types to
# this one and changes no meaning, so that what is traced for 22 is valid in 23.
PORTABLE_TRACED = 22
OPERATORS = {"portable": portable, "cpu": cpu, "cuda": cuda}
DTYPE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}  # of activations
PROTOBUF_LIMIT = 1_900_000_000  # bytes of weights: a message can hold 2 GB, so what is above goes into a file of its own
WEIGHTS = "model.onnx_data"
SMALL = 1024  # bytes: weights that stay in the graph, where onnxruntime can fold them into others
PAGE = 4096  # bytes, what a file is mapped in
EXPORTABLE = (
    "VanillaEncoderModel",
    "VanillaEncoderForMaskedLM",
    "VanillaEncoderForPreTraining",
    "VanillaEncoderForNextSentencePrediction",
    "VanillaEncoderForSequenceClassification",
    "VanillaEncoderForTokenClassification",
    "VanillaEncoderForQuestionAnswering",
    "VanillaEncoderForMultipleChoice",
    "VanillaDecoderModel",
    "VanillaDecoderForSequenceClassification",
    "VanillaDecoderForTokenClassification",
    "VanillaDecoderForQuestionAnswering",
    "VanillaDecoderForCausalLM",
    "VanillaSeq2SeqModel",
    "VanillaSeq2SeqForSequenceClassification",
    "VanillaSeq2SeqForQuestionAnswering",
    "VanillaSeq2SeqForConditionalGeneration",
)


def export(
    checkpoint: str | os.PathLike,
    out: str | os.PathLike,
    force: bool = False,
    cases: int = 12,
    target: str = "portable",
    dtype: str | Sequence[str] | None = None,
    shortlist: Iterable[int] | None = None,
    opset: int | None = None,
) -> dict:
    """Writes the graphs of `checkpoint` to the directory `out`, after comparing them with torch on `cases` random inputs, and
    returns the manifest.

    Args:
        target: `"portable"` (standard operators), or `"cpu"` or `"cuda"` (onnxruntime's own ones, see these modules).
        dtype: of the weights: `"fp32"`; `"int8"`, one scale for each column; for the cpu target also `"int4"`, one for each
            block of 32 in a column. Quantized products are computed in int8. For the cuda target `"fp32"`, `"fp16"` and
            `"bf16"`, in which all but norms, positions and logits is computed too; or `"int8"` and `"int4"`, one scale for
            each block of 32 in a column, which are computed in half precision. By default `"fp32"`; for cuda `"fp16"`, or
            `"bf16"` where the model has numbers that float16 cannot hold. For the portable target also several, which stand
            in one directory, the first of them by default.
        shortlist: the only tokens that can be generated, beside the special ones; all by default. The projection to the
            vocabulary computes no others.
        opset: of the portable target's graphs, 18 (the default) to 23.

    Raises:
        FileExistsError: if `out` cannot be written, see `files.new_directory`.
        UsageError: for a target or dtype that is unknown, several dtypes or an opset where there can be none, and an opset
            that is not among those.
        FileNotFoundError, ValueError: as `load_checkpoint`; ValueError for a target or dtype that cannot hold the model, and
            if the graphs do not give what torch gives. Half precision is compared where there is a GPU.
    """
    dtypes, opset = checked_dtypes(target, dtype), checked_opset(target, opset)
    with new_directory(out, force, [checkpoint]) as directory:
        model = load_checkpoint(checkpoint)
        activations = activations_of(model, target, dtypes[0])
        dtypes = [dtype or activations for dtype in dtypes]
        operators = OPERATORS[target] if has_own_operators(model) else portable
        if operators is not portable:
            for name, expected in operators.misfits(model.config).items():
                found = f"{name}={getattr(model.config, name)!r} does not fit the {target} target"
                raise ValueError(f"{found}, expected {expected}: use --target portable")
        tokens = None if shortlist is None else checked(model, shortlist)
        source = checkpoint_directory(checkpoint)
        config = write_configs(model, source, directory)
        found = companions(checkpoint)
        found.copy(directory)
        traced = cuda.prepared(model, DTYPE[activations]) if target == "cuda" else model
        made = {}
        for dtype in dtypes:
            specs = graph_specs(config, type(model).__name__, target, dtype, activations)
            graphs, steps = {}, {}
            for role, spec in specs.items():
                with limited(traced, tokens):
                    traced_opset = min(opset, PORTABLE_TRACED) if target == "portable" else opset
                    graph = trace(operators.graph_module(traced, role), spec, config["vocab_size"], traced_opset)
                graph.opset_imports[""] = opset
                steps[role] = optimize.optimize(graph, target, dtype)
                graphs[directory / spec.file] = graph
            save(graphs, target)
            made[dtype] = {"graphs": {role: spec.file for role, spec in specs.items()}, "optimized": steps}
        clients = write_for_clients(directory, model, config, made[dtypes[0]]["graphs"], target, dtypes)
        write_card(directory, base_name(checkpoint), source / CARD, type(model).__name__, target, dtypes)
        model.set_attn_implementation("sdpa")  # what is compared with
        facts = {
            "model_type": config["model_type"],
            "architecture": type(model).__name__,
            "target": target,
            "dtype": dtypes[0],
            "activations": activations,
            "shortlist": tokens,
            "opset": opset,
            "sentence_modules": found.facts(),
            **clients,
            "versions": {name: version(name) for name in ("vanilla-transformer", "torch", "transformers", "onnx")},
        }
        write_manifest(directory, **with_dtypes(facts, made))  # which reading the graphs needs
        device = device_for(target, activations)
        for dtype in dtypes:
            made[dtype]["parity"] = None
            if device is not None:
                report = verify(directory, model, cases, device=device, dtype=dtype)
                if report.failures:
                    raise ValueError(f"the export of {checkpoint} does not give what torch gives: {report.failures[0]}")
                made[dtype]["parity"] = report.summary()
        return write_manifest(directory, **with_dtypes(facts, made))


def checked_dtypes(target: str, dtype: str | Sequence[str] | None) -> list[str | None]:
    """Those that are asked for, `None` for the default; UsageError for what `target` has not."""
    dtypes = [dtype] if dtype is None or isinstance(dtype, str) else list(dtype)
    for each in dtypes or [""]:
        if ("fp32" if each is None else each) not in DTYPES.get(target, ()):
            raise UsageError(f"no target {target!r} with dtype {each!r}, expected one of: {KNOWN_DTYPES}")
    if len(dtypes) > 1 and target != "portable":
        raise UsageError(f"several dtypes, {dtypes}, are for the target 'portable', expected one for {target!r}")
    if len(set(dtypes)) < len(dtypes):
        raise UsageError(f"dtypes are {dtypes}, expected each once")
    return dtypes


def checked_opset(target: str, opset: int | None) -> int:
    if opset is not None and target != "portable":
        raise UsageError(f"an opset, {opset}, is for the target 'portable': that of {target!r} is {OPSET[target]}")
    if opset is not None and opset not in PORTABLE_OPSETS:
        raise UsageError(f"no opset {opset}, expected {PORTABLE_OPSETS[0]} to {PORTABLE_OPSETS[-1]}")
    return OPSET[target] if opset is None else opset


def with_dtypes(facts: dict, made: dict[str, dict]) -> dict:
    """`facts` of the manifest with what was `made` for each dtype: the first in their midst, others by name."""
    (_, first), *others = made.items()
    return {**facts, **first, **({"other_dtypes": dict(others)} if others else {})}


def activations_of(model: PreTrainedModel, target: str, dtype: str | None) -> str:
    """What is computed in where the weights are of `dtype`: that of the weights, or for integers and by default float16, or
    bfloat16 where float16 cannot hold what the model makes.

    Raises:
        ValueError: for float16 if it cannot.
    """
    if target != "cuda":
        return "fp32"
    if dtype in ("fp32", "bf16"):
        return dtype
    problem = cuda.overflow(model)
    if problem and dtype == "fp16":
        raise ValueError(f"{problem}, and float16 holds {cuda.FLOAT16_MAX:.0f}: use --dtype bf16")
    return "bf16" if problem else "fp16"


def device_for(target: str, activations: str) -> str | None:
    """Where an export is compared with torch; `None` if nowhere here: the CPU has no attention in half precision."""
    if target != "cuda":
        return "cpu"
    try:
        require("cuda")
    except OSError:
        return "cpu" if activations == "fp32" else None
    return "cuda"


def has_own_operators(model: PreTrainedModel) -> bool:
    """Models with a decoder that only read whole sequences have standard operators on every target."""
    return model.can_generate() or model.config.model_type == "vanilla-encoder"


def save(graphs: dict[Path, ir.Model], target: str) -> None:
    """The weights of the cpu target go to one file beside the graphs, each once: onnxruntime maps it into memory. Others stay
    in their graph, or go to `<path>_data` where they are more than `PROTOBUF_LIMIT`."""
    for path, graph in graphs.items():
        path.parent.mkdir(exist_ok=True)
        if target != "cpu" and sum(value.const_value.nbytes for value in graph.graph.initializers.values()) > PROTOBUF_LIMIT:
            move_weights([graph], path.with_name(f"{path.name}_data"))
    if target == "cpu":
        move_weights(graphs.values(), next(iter(graphs)).with_name(WEIGHTS))
    for path, graph in graphs.items():
        ir.save(graph, path)
        if target == "portable":  # it knows standard operators only
            onnx.checker.check_model(str(path))


def move_weights(graphs: Iterable[ir.Model], path: Path) -> None:
    """Writes the weights of `graphs` to `path`, at multiples of the page size, and has the graphs refer to it."""
    places = {}
    with open(path, "wb") as file:
        for value in [value for graph in graphs for value in graph.graph.initializers.values()]:
            tensor = value.const_value
            if tensor.nbytes < SMALL:
                continue
            content = tensor.tobytes()
            key = hashlib.sha256(content).digest()
            if key not in places:
                file.write(bytes(-file.tell() % PAGE))
                places[key] = file.tell()
                file.write(content)
            value.const_value = ir.ExternalTensor(
                path.name, places[key], len(content), tensor.dtype, shape=tensor.shape, name=value.name, base_dir=path.parent
            )


def load_checkpoint(checkpoint: str | os.PathLike) -> PreTrainedModel:
    """The model of a checkpoint directory or Hub id, of the class its config names, in float32 and evaluation mode.

    Raises:
        FileNotFoundError, ValueError: as `vanilla_transformer.checkpoint.load_checkpoint`; ValueError for a model that no
            graph here can hold.
    """
    config, model_class = config_and_class(checkpoint)
    if (name := model_class.__name__) not in EXPORTABLE:
        raise ValueError(f"{checkpoint} is a {name}, expected one of {', '.join(EXPORTABLE)}")
    if getattr(config, "add_cross_attention", False):
        raise ValueError(f"{checkpoint} has add_cross_attention=True, which no graph here can hold: expected False")
    return checkpoints.load_checkpoint(checkpoint)


def write_configs(model, checkpoint, directory):
    """generation_config.json and the tokenizer; returns the checkpoint's config."""
    config = model.config.to_dict()
    # There is no code beside an export, and where it came from is of one machine.
    config = {name: value for name, value in config.items() if name not in ("auto_map", "custom_pipelines", "_name_or_path")}
    if model.can_generate():
        model.generation_config.save_pretrained(directory)
    for name in TOKENIZER_FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, directory / name)
    for_every_version(directory)
    return config


def write_for_clients(directory, model, config, files, target, dtypes):
    """config.json, and what other programs need beside it, see `clients`; returns what the manifest says of that. `files` are
    the graphs by role, of the first of `dtypes`."""
    external = sorted(path.name.removesuffix("_data") for path in directory.glob("onnx/*_data"))
    loaded = dtypes if target == "portable" else ()
    write_json(directory / "config.json", client_config(config, files, loaded, external))
    tokenizer_config = directory / "tokenizer_config.json"
    if config.get("type_vocab_size") and tokenizer_config.is_file():
        give_token_types(tokenizer_config)
    if files.keys() == {"decoder"} and (directory / "tokenizer.json").is_file() and tokenizer_config.is_file():
        give_first_token(directory)
    if target != "portable" or files.keys() != {"decoder"}:
        return {}
    return {"genai": write_genai_config(directory, config, model.generation_config.to_dict(), files["decoder"])}


def trace(module: nn.Module, spec: GraphSpec, vocab_size: int, opset: int) -> ir.Model:
    """`module` as an ONNX model with the names and axes of `spec`."""
    types = {tensor.name: getattr(torch, tensor.dtype) for tensor in spec.inputs}
    inputs = {name: torch.from_numpy(array).to(types[name]) for name, array in example_inputs(spec, vocab_size).items()}
    # A name torch accepts for each axis; the sums get their real name afterwards.
    dims = {axis: torch.export.Dim(axis.replace(" + ", "_plus_")) for tensor in spec.inputs for axis in tensor.axes.values()}
    shapes = [{index: dims[axis] for index, axis in tensor.axes.items()} for tensor in spec.inputs]
    parameters = inspect.signature(module.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        named = len(parameters) - 1
        shapes = [*shapes[:named], tuple(shapes[named:])]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that an axis is named twice, which is what shared axes are
        program = torch.onnx.export(
            module,
            tuple(inputs.values()),
            dynamo=True,
            opset_version=opset,
            input_names=[tensor.name for tensor in spec.inputs],
            output_names=[tensor.name for tensor in spec.outputs],
            dynamic_shapes=tuple(shapes),
            verbose=False,
        )
    graph = program.model.graph
    for index, (value, tensor) in enumerate(zip(graph.outputs, spec.outputs, strict=True)):
        if tensor.dtype == "float32" and value.dtype != ir.DataType.FLOAT:
            graph.outputs[index] = cast(graph, value)
    for value, tensor in zip([*graph.inputs, *graph.outputs], [*spec.inputs, *spec.outputs], strict=True):
        value.shape = ir.Shape(tensor.shape)
    return program.model


def cast(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """`value` in float32, under its name."""
    node = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
    graph.append(node)
    [found] = node.outputs
    found.type, found.name, value.name = ir.TensorType(ir.DataType.FLOAT), value.name, f"{value.name}.half"
    return found
