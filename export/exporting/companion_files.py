"""The files beside the graphs of an export: configs, tokenizer, sentence modules, the card, and the
files that other programs read."""

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vanilla_transformer.checkpoint_files import GENERATION_CONFIG, for_every_version
from vanilla_transformer.files import CHAT_TEMPLATE
from vanilla_transformer.linked_copies import errors_name

from ..inference.export_info import TOKENIZER_FILES
from ..proof.outcome import head_vectors
from ..shared.options import without_none
from .checkpoint import Checkpoint
from .graphs import Graphs
from .languages import read_languages
from .repository_files import (
    adapt_tokenizer,
    client_config,
    write_card,
    write_genai_config,
    write_json,
)


@dataclass(frozen=True)
class WrittenFiles:
    """The files in `directory`, an export without a manifest."""

    directory: Path

    def read(self, name: str) -> bytes | None:
        path = self.directory / name
        return path.read_bytes() if path.is_file() else None


def write_companions(checkpoint: Checkpoint, graphs: Graphs, directory: Path) -> dict[str, Any]:
    """Write the files beside the graphs to `directory`, and return their fields of the manifest.

    The fields are sentence_modules, languages (if the model generates and the tokenizer has any)
    and genai (for portable decoders). Call this after the graphs are written.

    Raises ValueError for sentence modules and heads that the runtime cannot follow.
    """
    if checkpoint.generates:
        # as transformers writes it
        content = json.dumps(checkpoint.generation, indent=2, sort_keys=True)
        (directory / GENERATION_CONFIG).write_text(f"{content}\n", encoding="utf-8")
    write_tokenizer(checkpoint, directory)
    checkpoint.companions.copy_without_pickles(directory)
    clients = write_for_clients(checkpoint, graphs, directory)
    write_card(directory, checkpoint, graphs)
    facts: dict[str, Any] = {"sentence_modules": checkpoint.companions.facts()}
    heads = facts | {"architecture": checkpoint.architecture}
    with errors_name(checkpoint.source.directory, directory):
        head_vectors(WrittenFiles(directory), heads, checkpoint.config.hidden_size)
    if checkpoint.generates:
        start = checkpoint.generation.get("decoder_start_token_id")
        facts |= without_none({"languages": read_languages(directory, start)})
    return facts | clients


def write_tokenizer(checkpoint: Checkpoint, directory: Path) -> None:
    """Write the tokenizer's files to `directory`. tokenizer.json is made if the checkpoint has only
    others."""
    with tempfile.TemporaryDirectory() as temporary:
        source = checkpoint.source.directory
        if checkpoint.tokenizer is not None:
            source = Path(temporary)
            checkpoint.tokenizer.save(source)
        for name in (*TOKENIZER_FILES, CHAT_TEMPLATE):
            if (source / name).is_file():
                shutil.copyfile(source / name, directory / name)
    for_every_version(directory)


def write_for_clients(checkpoint: Checkpoint, graphs: Graphs, directory: Path) -> dict[str, Any]:
    """Write config.json and other files that client programs need to `directory`, which has the
    graphs and the tokenizer. tokenizer_config.json is adapted to these programs.

    Returns {"genai": ...} for the manifest if there is a file for onnxruntime-genai, else {}.
    `graphs` are those that the export gets.
    """
    config = checkpoint.config_json
    external = sorted(path.name.removesuffix("_data") for path in directory.glob("onnx/*_data"))
    loaded = graphs.dtypes if graphs.target.is_standard else ()
    write_json(directory / "config.json", client_config(config, graphs.files, loaded, external))
    is_decoder = graphs.files.keys() == {"decoder"}
    adapt_tokenizer(directory, bool(config.get("type_vocab_size")), is_decoder)
    if not graphs.target.is_standard or not is_decoder:
        return {}
    genai = write_genai_config(directory, config, checkpoint.generation, graphs.files["decoder"])
    return {"genai": genai}
