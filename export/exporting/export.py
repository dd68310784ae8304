"""The export of a checkpoint to a directory: graphs, configs, tokenizer and manifest."""

import contextlib
import dataclasses
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vanilla_transformer.outputs import new_directory
from vanilla_transformer.source import converted

from ..engine.model import open_export
from ..errors import UsageError
from ..inference.export_info import ExportInfo, write_manifest
from ..one_graph import ROLE
from ..proof.compare import RECORDED, Report
from ..proof.outcome import head_vectors
from ..proof.reference import TORCH, Reference
from ..runtime import Runtime
from ..specs.graph_spec import GraphSpec
from ..text_runtime import TextRuntime
from .alignment_heads import all_heads, choose_heads, read_pairs
from .checkpoint import Checkpoint
from .companion_files import write_companions
from .graphs import Graphs, write_graphs
from .options import ExportOptions
from .plan import plan_graphs
from .repository_files import write_generator_card
from .triton import instance_kind, write_triton_model

NO_TORCH = (
    "torch is not installed: run `vanilla-transformer verify` with torch to compare the export "
    "with its checkpoint"
)
# dtypes to try after an automatic one that differs from torch
WIDER = {"fp16": ("bf16", "fp32"), "bf16": ("fp32",)}
# whose versions the manifest has
PACKAGES = ("vanilla-transformer", "torch", "transformers", "onnx")


class DiffersFromTorch(ValueError):
    """An error for graphs whose results differ from those of torch."""


def export(checkpoint: str | os.PathLike, out: str | os.PathLike, **options: Any) -> dict[str, Any]:
    """Write the graphs of `checkpoint` to the directory `out`, after comparing them with torch, and
    return the manifest. A checkpoint of a family in `conversion.FAMILIES` is converted on the way.

    Where torch is not installed, nothing is compared. A warning and the manifest say so.

    `options` are the fields of `ExportOptions`, which are the flags of `vanilla-transformer
    export`. A text is the path of a file. `shortlist` may also be token ids; `config` is a mapping
    and `leave_out` a list.

    Args:
        target: portable (standard operators), cpu (onnxruntime's own operators for CPUs), cuda
            (onnxruntime's own operators for NVIDIA GPUs) ('portable')
        dtype: dtype of the weights: portable with fp32, int8; cpu with fp32, int8, int4; cuda with
            fp32, fp16, bf16, int8, int4; default: fp32, on GPUs fp16, or bf16 or fp32 if float16
            overflows or differs from torch; portable: also several in one directory, as fp32,int8
            (None)
        opset: opset of the graphs: portable 18 to 23; default: the lowest (None)
        image_size: images of a vision model: trained (only the size of the config) or free (any
            size); default: by the model's config (None)
        shortlist: text in the output language; only its tokens and special tokens are generated
            (None)
        calibrate: text file to calibrate int8 on the cpu target: one activation scale for all rows
            instead of one per row; faster (None)
        alignments: write the graph of word alignments, which cpu always has; with FILE, parallel
            text of at least 100 lines with a source, a tab and its translation in each, choose the
            heads that align words on it (False)
        generate: write one graph with the whole generation loop, from token ids to sequences:
            greedy, sample or beam (None)
        keep: directory for the converted CHECKPOINT of another family; default: temporary (None)
        config: field of config.json for a CHECKPOINT of another family: architectures=BertModel
            ...; VALUE is JSON or text; may be repeated; KEY is a value of the recipe for train, a
            field of config.json for convert and export, an option for generate, an argument of the
            task for predict (None)
        leave_out: names of tensors to leave out, with shell wildcards: 'cls.chain.*'; may be
            repeated (())
        variant: variant of the weights, as in from_pretrained: fp16 reads model.fp16.safetensors;
            default: model.safetensors (None)
        triton: directory for a Triton model, a folder of a model repository; for models that do not
            generate, or with --generate (None)
        force: replace OUTPUT if vanilla-transformer wrote it (False)
        cases: number of random inputs on which the graphs are compared with torch (12)

    Raises:
        FileExistsError: if `out` or `triton` exists and may not be replaced.
        ImportError: where torch is not installed, for a checkpoint of another family, for
            `calibrate`, and for a tokenizer without tokenizer.json.
        UsageError: for an option that is unknown or has a wrong value, for several dtypes where the
            target takes one, for `keep`, `config` or `leave_out` if nothing is converted, for an
            image size of a text model, for `calibrate` without integer matmuls, and if `out` or
            `triton` is inside the other.
        FileNotFoundError, OSError, ValueError: for a checkpoint or a text that is missing, damaged
            or of an unknown family. ValueError also for a target or dtype that does not support the
            model, and if the graphs differ from torch. Half precision is only compared on a GPU.
    """
    parsed = ExportOptions.of(options)
    check_apart(out, parsed.triton)
    with contextlib.ExitStack() as outputs:
        directories = [
            outputs.enter_context(
                new_directory(directory, parsed.force, [checkpoint, *parsed.texts])
            )
            for directory in (out, parsed.triton)
            if directory is not None
        ]
        ours = outputs.enter_context(
            converted(checkpoint, parsed.keep, parsed.config, parsed.leave_out, parsed.variant)
        )
        opened = Checkpoint.open(ours, parsed.image_size)
        return write_export(opened, parsed, *directories)


def write_export(
    checkpoint: Checkpoint, options: ExportOptions, directory: Path, triton: Path | None = None
) -> dict[str, Any]:
    """Write an export of `checkpoint` by `options` to `directory`, and return its manifest.

    If `triton` is not None, a model of Triton is written to that directory too.
    """
    if options.generate is not None:
        graphs, manifest, spec = write_one_graph(checkpoint, options, directory)
        specs = {ROLE: spec}
    else:
        if triton is not None:
            check_whole_sequences(checkpoint)
        graphs, manifest = write_compared(checkpoint, options, directory)
        specs = graphs.specs[graphs.dtypes[0]]
    if triton is not None:
        [spec] = specs.values()
        kind = instance_kind(graphs.target, specs, graphs.dtypes[0])
        write_triton_model(spec, directory, triton, kind)
    return manifest


def write_compared(
    checkpoint: Checkpoint, options: ExportOptions, directory: Path
) -> tuple[Graphs, dict[str, Any]]:
    """Write an export to `directory`, and return its graphs and its manifest. An automatic dtype
    that differs from torch is replaced by a wider one, with a warning."""
    graphs = choose_graphs(checkpoint, options)
    wider = wider_dtypes(graphs, options)
    while True:
        write_graphs(graphs, directory)
        try:
            return graphs, complete_export(checkpoint, graphs, directory, options)
        except DiffersFromTorch as error:
            before, dtype = graphs.dtypes[0], next(wider, None)
            if dtype is None:
                raise
            warnings.warn(f"{error}: the dtype is {dtype} instead of {before}", stacklevel=2)
            graphs = choose_graphs(checkpoint, dataclasses.replace(options, dtype=dtype))
            for entry in directory.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def choose_graphs(checkpoint: Checkpoint, options: ExportOptions) -> Graphs:
    """Return the graphs to write. If `options.alignments` is a text, the heads of the alignment
    graph are chosen on it, by an export with all heads to a temporary directory."""
    text = options.alignments
    if text and not (checkpoint.generates and checkpoint.config.is_seq2seq):
        raise ValueError(
            f"{checkpoint.source} is a {checkpoint.architecture}, expected an encoder-decoder "
            f"model that generates for alignments={text!r}"
        )
    pairs = [] if isinstance(text, bool) else read_pairs(text)
    graphs = plan_graphs(checkpoint, options)
    if text and not graphs.alignment:
        raise ValueError(
            f"{checkpoint.source} computes in {graphs.activations} on the target "
            f"{graphs.target.name}, expected fp32 or fp16 for alignments={text!r}"
        )
    if not pairs:
        return graphs
    device = graphs.target.parity_device(graphs.activations)
    every = dataclasses.replace(graphs, alignment=all_heads(checkpoint.config_json))
    with tempfile.TemporaryDirectory() as temporary:
        write_graphs(every, Path(temporary))
        facts = manifest_facts(checkpoint, every)
        facts |= write_companions(checkpoint, every, Path(temporary))
        write_manifest(Path(temporary), **facts, **every.facts({}))
        with TextRuntime(temporary, device=device) as runtime:
            heads, f1 = choose_heads(runtime, pairs)
    return dataclasses.replace(graphs, alignment=heads, alignment_facts=f1)


def wider_dtypes(graphs: Graphs, options: ExportOptions) -> Iterator[str]:
    """Return the dtypes to try if `graphs` differ from torch: none if the user chose the dtype, and
    only those that this machine can compare with torch, which is looked up when they are read."""

    def can_compare(dtype: str) -> bool:
        with contextlib.suppress(OSError):
            graphs.target.parity_device(dtype)
            return True
        return False

    is_automatic = options.dtypes[0] is None
    return filter(can_compare, WIDER.get(graphs.activations, ()) if is_automatic else ())


def write_one_graph(
    checkpoint: Checkpoint, options: ExportOptions, directory: Path
) -> tuple[Graphs, dict[str, Any], GraphSpec]:
    """Write an export with the one graph that generates, `options.generate`, to `directory`.

    Return the graphs that it is made from, in an export that is compared with torch first, the
    manifest, and the spec of the first dtype's graph.
    """
    from .one_graph import check_model, write_generator

    mode = str(options.generate)
    check_model(checkpoint, mode)
    graphs = plan_graphs(checkpoint, options)
    with tempfile.TemporaryDirectory() as parts:
        write_graphs(graphs, Path(parts))
        complete_export(checkpoint, graphs, Path(parts), options)
        write_generator_card(directory, checkpoint, graphs, mode)
        return graphs, *write_generator(Path(parts), directory, mode, options.cases)


def check_apart(out: str | os.PathLike, triton: str | os.PathLike | None) -> None:
    """Raise UsageError if one of the directories `out` and `triton` is inside the other, or both
    are the same."""
    if triton is None:
        return
    outputs = [Path(os.path.realpath(path)) for path in (out, triton)]
    if os.path.commonpath(outputs) in map(str, outputs):
        raise UsageError(
            f"the output {out} and the Triton model {triton} contain each other, expected two "
            "separate directories"
        )


def check_whole_sequences(checkpoint: Checkpoint) -> None:
    """Raise ValueError for a model whose graphs continue sequences in steps, which Triton does not
    run by itself."""
    if checkpoint.generates:
        problem = f"{checkpoint.source} is a {checkpoint.architecture}"
        raise ValueError(
            f"{problem}, expected a model that does not generate for triton, or the option generate"
        )


# ------------------------------------------------------------------------------------ the manifest


def complete_export(
    checkpoint: Checkpoint, graphs: Graphs, directory: Path, options: ExportOptions
) -> dict[str, Any]:
    """Write the other files beside the graphs in `directory`, also the manifest, and return it. The
    graphs are compared with torch.

    `options.cases` is the number of random inputs. Graphs that become one graph, with
    `options.generate`, get no reference. Where no device can run the graphs, `parity` in the
    manifest is None and `parity_reason` says why.

    Raises:
        DiffersFromTorch: if the graphs do not give what torch gives.
    """
    facts = manifest_facts(checkpoint, graphs) | write_companions(checkpoint, graphs, directory)
    facts |= {"versions": versions()}
    if checkpoint.model is None:
        warnings.warn(f"parity is not checked, {NO_TORCH}", stacklevel=2)
        return write_manifest(directory, **facts, **graphs.facts({}), parity_reason=NO_TORCH)
    from ..proof.torch import TorchFiles, make_reference, torch_model

    write_manifest(directory, **facts, **graphs.facts({}))  # needed to read the graphs
    reports = {}
    model, info = checkpoint.model, open_export(directory)
    with torch_model(model, graphs.shortlist):
        reference = make_reference(model, info) if options.generate is None else None
        if reference is not None:
            files = TorchFiles(checkpoint.source.root)
            vectors = head_vectors(files, facts, checkpoint.config.hidden_size)
            reference.results[TORCH] |= vectors
        try:
            device = graphs.target.parity_device(graphs.activations)
        except OSError as error:
            facts["parity_reason"] = str(error)
        else:
            reports = compare_with_torch(checkpoint, info, reference, options.cases, device)
    facts |= graphs.facts(reports)
    if reference is not None:
        reference.write(directory, facts)
    return write_manifest(directory, **facts)


def compare_with_torch(
    checkpoint: Checkpoint, info: ExportInfo, reference: Reference | None, cases: int, device: str
) -> dict[str, Report]:
    """Compare the graphs of all dtypes with torch on `cases` random inputs and on the `reference`.

    Return the reports by dtype. The graphs run on `device`. For dtypes in `RECORDED`, the results
    of the export itself are added to the reference.

    Raises:
        DiffersFromTorch: if the graphs differ from torch by more than the tolerance.
    """
    from ..proof import verify
    from ..proof.outcome import record

    assert checkpoint.model is not None
    reports = {}
    for dtype in info.dtypes:
        runtime = Runtime(info.directory, device=device, dtype=dtype)
        report = reports[dtype] = verify.prove(runtime, checkpoint.model, reference, cases)
        if report.failures:
            problem = f"the export of {checkpoint.source} differs from torch: {report.failures[0]}"
            raise DiffersFromTorch(problem)
        if reference is not None and dtype in RECORDED:
            reference.results[dtype] = record(runtime.model, reference)
    return reports


def manifest_facts(checkpoint: Checkpoint, graphs: Graphs) -> dict[str, Any]:
    """Return the fields of the manifest about the checkpoint and all graphs.

    They are model_type, architecture, target, activations, shortlist and opset, and pipeline,
    calibration, alignment and step if there are any.
    """
    config, architecture = checkpoint.config_json, checkpoint.architecture
    facts = {
        "model_type": config["model_type"],
        "architecture": architecture,
        "target": graphs.target.name,
        "activations": graphs.activations,
        "shortlist": graphs.shortlist,
        "opset": graphs.opset,
    }
    if checkpoint.pipeline is not None:
        facts["pipeline"] = checkpoint.pipeline
    if graphs.calibration is not None:
        facts["calibration"] = graphs.calibration.facts()
    if graphs.alignment:
        heads = [list(head) for head in graphs.alignment]
        facts["alignment"] = {"heads": heads, **graphs.alignment_facts}
    if step := graphs.target.step_role(config, architecture):
        facts["step"] = step
    return facts


def versions() -> dict[str, str]:
    """Return {package: version} of those of `PACKAGES` that are installed."""
    installed = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed
