"""Checkpoint -> graphs: the modeling code, traced. It stays the only definition of the model."""

import inspect
import json
import logging
import os
import shutil
import warnings
from importlib.metadata import version
from pathlib import Path

import onnx
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, PreTrainedModel

import vanilla_transformer
from vanilla_transformer.files import new_directory, refuse_existing

from . import cpu, optimize, portable
from .artifact import TOKENIZER_FILES, write_manifest
from .graphs import TARGETS, GraphSpec, example_inputs, graph_specs
from .verify import verify

logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision is not installed
OPSET = {"portable": 18, "cpu": 21}
DTYPES = {"portable": ("fp32",), "cpu": ("fp32", "int8", "int4")}
# The model types whose graphs have the same inputs and outputs, and whose config has our field names or `BART_NAMES`.
STAND_INS = {"vanilla-encoder": "bert", "vanilla-decoder": "opt", "vanilla-seq2seq": "bart"}
BART_NAMES = {
    "d_model": "hidden_size",
    "encoder_attention_heads": "num_attention_heads",
    "decoder_attention_heads": "num_attention_heads",
}
EXPORTABLE = (
    "VanillaEncoderModel",
    "VanillaEncoderForMaskedLM",
    "VanillaEncoderForPreTraining",
    "VanillaEncoderForNextSentencePrediction",
    "VanillaEncoderForSequenceClassification",
    "VanillaEncoderForTokenClassification",
    "VanillaEncoderForQuestionAnswering",
    "VanillaDecoderForCausalLM",
    "VanillaSeq2SeqForConditionalGeneration",
)


def export(
    checkpoint: str | os.PathLike,
    out: str | os.PathLike,
    force: bool = False,
    cases: int = 12,
    target: str = "portable",
    dtype: str = "fp32",
) -> dict:
    """Writes the graphs of `checkpoint` to the directory `out`, after comparing them with torch on `cases` random inputs, and
    returns the manifest.

    Args:
        target: `"portable"` (standard operators) or `"cpu"` (onnxruntime's own ones, see `cpu`).
        dtype: of the weights: `"fp32"`, or for the cpu target `"int8"` or `"int4"`, quantized by blocks, with int8 compute.

    Raises:
        FileExistsError: if `out` exists and `force` is not given.
        FileNotFoundError, ValueError: as `load_checkpoint`; ValueError for a target or dtype that is unknown or that cannot
            hold the model, and if the graphs do not give what torch gives.
    """
    refuse_existing(out, force)
    if target not in TARGETS or dtype not in DTYPES[target]:
        known = "; ".join(f"{name} with {', '.join(dtypes)}" for name, dtypes in DTYPES.items())
        raise ValueError(f"no target {target!r} with dtype {dtype!r}, expected one of: {known}")
    model = load_checkpoint(checkpoint)
    if target == "cpu":
        cpu.refuse(model.config)
    with new_directory(out, force) as directory:
        config = write_configs(model, Path(checkpoint), directory)
        specs = graph_specs(config, type(model).__name__, target)
        steps = {}
        for role, spec in specs.items():
            (directory / spec.file).parent.mkdir(exist_ok=True)
            module = (cpu if target == "cpu" else portable).graph_module(model, role)
            graph = trace(module, spec, config["vocab_size"], OPSET[target])
            steps[role] = optimize.optimize(graph, target, dtype)
            onnx.checker.check_model(graph)
            onnx.save(graph, directory / spec.file)
        model.set_attn_implementation("sdpa")  # what is compared with
        facts = {
            "model_type": config["model_type"],
            "architecture": type(model).__name__,
            "target": target,
            "dtype": dtype,
            "opset": OPSET[target],
            "graphs": {role: spec.file for role, spec in specs.items()},
            "optimized": steps,
            "versions": {name: version(name) for name in ("vanilla-transformer", "torch", "transformers", "onnx")},
        }
        write_manifest(directory, **facts)
        report = verify(directory, model, cases)
        if report.failures:
            raise ValueError(f"the export of {checkpoint} does not give what torch gives: {report.failures[0]}")
        return write_manifest(directory, **facts, parity=report.summary())


def load_checkpoint(checkpoint: str | os.PathLike) -> PreTrainedModel:
    """The model of a checkpoint directory or Hub id, of the class its config names, in float32 and evaluation mode.

    Raises:
        FileNotFoundError: for a directory without config.json or without safetensors weights.
        ValueError: for weights that are truncated, missing or of other shapes, and for a config of another model.
    """
    path = Path(checkpoint)
    if path.is_dir():
        check_checkpoint_files(path)
    elif len(path.parts) > 2 or path.is_absolute():
        raise FileNotFoundError(f"{checkpoint} does not exist, expected a checkpoint directory or a Hub id")
    try:
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
    except OSError as error:
        raise FileNotFoundError(f"{checkpoint} is neither a checkpoint directory nor on the Hub: {error}") from None
    name = (config.architectures or ["none"])[0]
    if name not in EXPORTABLE:
        raise ValueError(
            f"{checkpoint} is a {config.model_type} checkpoint of architecture {name}, expected one of {', '.join(EXPORTABLE)}"
        )
    if getattr(config, "add_cross_attention", False):
        raise ValueError(f"{checkpoint} has add_cross_attention=True, which no graph here can hold: expected False")
    model_class = getattr(vanilla_transformer, name)
    # Mismatched sizes are ignored here so that they can be named below.
    model, info = model_class.from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
    )
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if info[problem]:
            raise ValueError(f"the weights of {checkpoint} do not fit {name}: {problem} {sorted(info[problem])[:5]}")
    return model.eval()


def check_checkpoint_files(path):
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} has no config.json: expected a checkpoint directory")
    weights = sorted(path.glob("model*.safetensors"))
    if not weights:
        raise FileNotFoundError(f"{path} has no weights: expected model.safetensors, found {sorted(os.listdir(path))}")
    for file in weights:
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{file} is not a whole safetensors file ({file.stat().st_size} bytes): {error}") from None


def write_configs(model, checkpoint, directory):
    """config.json for clients, generation_config.json and the tokenizer; returns the checkpoint's config."""
    config = model.config.to_dict()
    config.pop("auto_map")  # there is no code beside an export
    (directory / "config.json").write_text(json.dumps(client_config(config), indent=2, default=str) + "\n")
    if model.can_generate():
        model.generation_config.save_pretrained(directory)
    for name in TOKENIZER_FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, directory / name)
    return config


def client_config(config: dict) -> dict:
    """Transformers.js throws for a model type it does not know, so config.json names one with the same graphs; the manifest
    has the true one. It sizes empty caches as hidden_size / heads: models of other head widths keep their own type."""
    heads, width = config["num_attention_heads"], config["hidden_size"]
    if not heads * config["head_dim"] == heads * config["value_head_dim"] == width:
        return config
    names = {name: config[ours] for name, ours in BART_NAMES.items()} if config["is_encoder_decoder"] else {}
    return {**config, **names, "model_type": STAND_INS[config["model_type"]]}


def trace(module: nn.Module, spec: GraphSpec, vocab_size: int, opset: int) -> onnx.ModelProto:
    """`module` as an ONNX model with the names and axes of `spec`."""
    inputs = {name: torch.from_numpy(array) for name, array in example_inputs(spec, vocab_size).items()}
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
    model = program.model_proto
    for value, tensor in zip([*model.graph.input, *model.graph.output], [*spec.inputs, *spec.outputs], strict=True):
        for index, axis in tensor.axes.items():
            value.type.tensor_type.shape.dim[index].dim_param = axis
    return model
