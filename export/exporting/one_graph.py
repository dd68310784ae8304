"""An export, compared with torch already -> a directory with one graph that generates."""

import shutil
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from ..errors import UsageError
from ..graphs.saving import save_graph
from ..inference.export_info import ExportInfo, read_export_info, write_manifest
from ..one_graph import MODES, ROLE
from ..one_graph.generation_config import Rules
from ..one_graph.loop import SEARCHES, one_graph, one_graph_spec
from ..specs.graph_spec import GraphSpec
from ..targets.target import Target
from .one_graph_comparison import compare

GENERATES = ("VanillaSeq2SeqForConditionalGeneration", "VanillaDecoderForCausalLM")
OF_OTHER_GRAPHS = ("step", "genai")  # facts of the manifest


def check_mode(mode: str, target: Target, image_size: str | None) -> None:
    """Raises UsageError for a mode that there is not, and for a target whose decoder does not go
    into a loop."""
    if mode not in MODES:
        raise UsageError(f"no mode {mode!r} of generate, expected one of {', '.join(MODES)}")
    if target.generation_step is None:
        raise UsageError(
            f"generate is {mode!r} for the target {target.name!r}, which has no graph that "
            "generates by itself"
        )
    if image_size is not None:
        raise UsageError(
            f"generate is {mode!r} with image size {image_size!r}, expected no image size: images "
            "are not generated"
        )


def check_model(
    checkpoint: object,
    architecture: str,
    mode: str,
    generation: dict[str, Any],
    config: dict[str, Any],
) -> None:
    """Raises ValueError for a model that does not generate, and as `Rules.of`."""
    if architecture not in GENERATES:
        found = f"{checkpoint} is a {architecture}"
        raise ValueError(f"{found}, expected for --generate a {' or a '.join(GENERATES)}")
    rules = Rules.of(mode, generation, config)
    if config["model_type"] != "vanilla-decoder" and rules.options.decoder_start_token_id is None:
        raise ValueError(
            f"{checkpoint} has decoder_start_token_id None, expected the token id generation "
            f"starts from"
        )


def write_generator(
    parts: Path, directory: Path, target: Target, mode: str, cases: int
) -> tuple[dict, GraphSpec]:
    """Writes to `directory` what the export `parts` of `target` has, with one graph of `mode` in
    place of its graphs, of each dtype, and returns the manifest and what the first graph takes and
    returns. The sequences are compared with those of the runtime, on `cases` random inputs.

    Raises:
        ValueError: if they differ, in float32, in more rows than near ties explain.
    """
    info = read_export_info(parts)
    for name in info.manifest["files"]:
        if not name.startswith("onnx/") and Path(name).name != "genai_config.json":
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(parts / name, directory / name)
    specs, parity = {}, {}
    for dtype in info.dtypes:
        spec = specs[dtype] = write_graph(info, directory, target, mode, dtype)
        parity[dtype] = {
            **facts_of(info, dtype),
            "sequences": compare(parts, directory / spec.file, mode, dtype, cases),
        }
    first, *others = [
        {"graphs": {ROLE: spec.file}, "parity": parity[dtype]} for dtype, spec in specs.items()
    ]
    left_out = {"schema_version", "files", "other_dtypes", *OF_OTHER_GRAPHS}
    facts = {name: value for name, value in info.manifest.items() if name not in left_out}
    more = {"other_dtypes": dict(zip(info.dtypes[1:], others))} if others else {}
    manifest = write_manifest(directory, **facts | {"generate": mode, **first, **more})
    return manifest, specs[info.dtypes[0]]


def facts_of(info: ExportInfo, dtype: str) -> dict[str, Any]:
    """How the graphs of `dtype` differ from torch."""
    manifest = info.manifest
    facts = manifest if dtype == info.dtypes[0] else manifest["other_dtypes"][dtype]
    return facts["parity"] or {}


def whole(path: Path) -> ir.Model:
    """The graph of the file `path`, with its weights in memory."""
    return ir.external_data.load_to_model(ir.load(path))


def write_graph(
    info: ExportInfo, directory: Path, target: Target, mode: str, dtype: str
) -> GraphSpec:
    """Of the graphs of `dtype` in the export `info`, the one graph, in a file that is named
    after the precision."""
    manifest, config = info.manifest, info.config
    files = (manifest if dtype == info.dtypes[0] else manifest["other_dtypes"][dtype])["graphs"]
    graphs = {
        role: whole(info.directory / files[role])
        for role in ("encoder", "decoder")
        if role in files
    }
    rules = Rules.of(mode, info.generation_config, config)
    search = SEARCHES[mode](rules)
    spec = one_graph_spec(
        f"onnx/{ROLE}{'' if dtype == 'fp32' else f'_{dtype}'}.onnx", search, config
    )
    assert target.generation_step is not None  # see `check_mode`
    opsets = {
        domain: version
        for graph in graphs.values()
        for domain, version in graph.opset_imports.items()
    }
    graph = one_graph(target.generation_step(graphs), search, spec, rules, config, opsets)
    save_graph(graph, directory / spec.file)
    if target.is_standard:
        onnx.checker.check_model(str(directory / spec.file))
    return spec
