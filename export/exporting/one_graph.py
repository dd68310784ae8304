"""An export, compared with torch already -> a directory with one graph that generates."""

import shutil
from pathlib import Path

import onnx
import onnx_ir as ir

from ..engine.model import find_target
from ..graphs.saving import save_graph
from ..heads import GENERATORS
from ..inference.export_info import ExportInfo, read_export_info, write_manifest
from ..one_graph import ROLE
from ..one_graph.generation_config import Rules
from ..one_graph.loop import SEARCHES, one_graph
from ..proof.one_graph import compare
from ..specs.graph_spec import GraphSpec
from .checkpoint import Checkpoint
from .repository_files import GENAI_CONFIG

OMITTED_FACTS = ("step", "genai")  # facts of the manifest


def check_model(checkpoint: Checkpoint, mode: str) -> None:
    """Raise ValueError for a model that does not generate, and for settings that a graph of `mode`
    cannot hold.

    `mode` is "greedy", "sample" or "beam".
    """
    if not checkpoint.generates:
        problem = f"{checkpoint.source} is a {checkpoint.architecture}"
        raise ValueError(f"{problem}, expected a {' or a '.join(GENERATORS)} for --generate")
    rules = Rules.of(mode, checkpoint.generation, checkpoint.config_json)
    if checkpoint.config.is_seq2seq and rules.options.decoder_start_token_id is None:
        raise ValueError(
            f"{checkpoint.source} has decoder_start_token_id None, expected the id of the first "
            "decoder token"
        )


def write_generator(parts: Path, directory: Path, mode: str, cases: int) -> tuple[dict, GraphSpec]:
    """Write the export `parts` to `directory`, with one graph of `mode` per dtype in place of its
    graphs.

    Returns the manifest, and the spec of the first dtype's graph. On `cases` random batches, the
    sequences of each graph are compared with those of the runtime.

    Raises:
        ValueError: if they differ, in float32, in more rows than near ties explain.
    """
    info = read_export_info(parts)
    for name in info.manifest["files"]:
        if not name.startswith("onnx/") and Path(name).name != GENAI_CONFIG:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(parts / name, directory / name)
    specs, variants = {}, {}
    for dtype, facts in info.manifest["variants"].items():
        spec = specs[dtype] = write_graph(info, directory, mode, dtype)
        sequences = compare(parts, directory / spec.file, mode, dtype, cases)
        variants[dtype] = {
            "graphs": {ROLE: spec.file},
            "parity": {**(facts["parity"] or {}), "sequences": sequences},
        }
    left_out = {"schema_version", "files", *OMITTED_FACTS}
    kept = {name: value for name, value in info.manifest.items() if name not in left_out}
    manifest = write_manifest(directory, **kept | {"generate": mode, "variants": variants})
    return manifest, specs[info.dtypes[0]]


def write_graph(info: ExportInfo, directory: Path, mode: str, dtype: str) -> GraphSpec:
    """Write the one graph of `dtype`, made from the graphs in the export `info`, and return its
    spec.

    It generates in `mode`, "greedy", "sample" or "beam". The file in `directory` is named after the
    dtype.
    """
    config, target = info.config, find_target(info)
    files = info.manifest["variants"][dtype]["graphs"]
    graphs = {
        role: ir.external_data.load_to_model(ir.load(info.directory / files[role]))
        for role in ("encoder", "decoder")
        if role in files
    }
    search = SEARCHES[mode](Rules.of(mode, info.generation_config, config))
    file = f"onnx/{ROLE}{'' if dtype == 'fp32' else f'_{dtype}'}.onnx"
    assert target.generation_step is not None  # see `options.check_generate`
    opsets = {
        domain: version
        for graph in graphs.values()
        for domain, version in graph.opset_imports.items()
    }
    graph, spec = one_graph(target.generation_step(graphs), search, file, config, opsets)
    save_graph(graph, directory / file)
    if target.is_standard:
        onnx.checker.check_model(str(directory / file))
    return spec
