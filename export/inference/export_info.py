"""The export directory: ONNX files, the checkpoint's configs and tokenizer, and a manifest of the
files."""

import hashlib
import io
import json
import os
import reprlib
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..shared.files import check_no_pointer, file_stamp, json_object, sha256
from ..shared.generation_options import FIELDS
from ..specs.alignment import ROLE as ALIGNMENT
from ..specs.graph_spec import GraphSpec
from .options import check
from .sentence_settings import SETTINGS_FILES, SentenceSettings, parse_settings

MANIFEST = "manifest.json"
CARD = "README.md"  # not in the manifest, because users edit it
SCHEMA_VERSION = 2
HASHING_THREADS = 2
CONFIGS = ("config.json", "generation_config.json")
IMAGE_PROCESSOR = "preprocessor_config.json"
# tokenizer of target text, if it differs from that of source text
TARGET_TOKENIZER = "target_tokenizer.json"
TOKENIZERS = ("tokenizer.json", TARGET_TOKENIZER)
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = (*TOKENIZERS, TOKENIZER_CONFIG)
# patterns of files that say how a model works, in a checkpoint or a folder of a module
CONTENT: tuple[str, ...] = ("*.json", "*.safetensors", "*.bin", "*.pt")
CONTENT += ("*/*.json", "*/*.safetensors", "*/*.bin")
CONTENT += ("vocab.txt", "merges.txt", "*.model", "*.spm", "*.jinja")  # of tokenizers
# Required and optional fields of the manifest.
REQUIRED = {
    "architecture": str,
    "files": dict,
    "model_type": str,
    "target": str,
    "default_dtype": str,
    "variants": dict,
    "activations": str,
}
OPTIONAL = {"languages": dict, "step": str, "alignment": dict}


@dataclass(frozen=True)
class ExportInfo:
    """A complete export directory: its `manifest`, and its JSON files that are read when it is
    opened. `tokenizer_config` is empty without the file.

    `model.open_export` adds the `dtype` and the `specs` of the graphs, by role. No graph is open.
    `stamps` identify the directory and its files, and change if one is replaced or modified.
    `hashing` are the files whose hashes are checked in threads, see `open_export_info`.
    """

    directory: Path
    manifest: dict
    config: dict
    generation_config: dict
    stamps: dict[str, tuple]
    hashing: dict[str, Future]
    tokenizer_config: dict = field(default_factory=dict)
    sentence_settings: SentenceSettings = field(default_factory=SentenceSettings)
    dtype: str = ""
    specs: dict[str, GraphSpec] = field(default_factory=dict)

    @cached_property
    def architecture(self) -> str:
        """The name of the checkpoint's model class."""
        return self.manifest["architecture"]

    @property
    def pipeline(self) -> str | None:
        """The only pipeline that the model was trained for, or None if it is not known."""
        return self.manifest.get("pipeline")

    @property
    def step(self) -> str | None:
        """Role of the step graph for continuous batching, or None if the export has none."""
        role = self.manifest.get("step")
        return role if role in self.specs else None

    @cached_property
    def generates(self) -> bool:
        """True if the model generates tokens."""
        return "decoder" in self.specs

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The generation options that generation_config.json sets, only those that are supported.

        An invalid value raises ValueError.
        """
        return default_options(self.generation_config, self.directory)

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the weights, the default first."""
        default = self.manifest["default_dtype"]
        return [default, *(dtype for dtype in self.manifest["variants"] if dtype != default)]

    @cached_property
    def changed_files(self) -> list[str]:
        """Names of files that other libraries have saved again since the export. They are read at
        the first use, to compute their hashes."""
        files = self.manifest["files"].items()
        return [
            name
            for name, facts in files
            if is_rewritable(name) and differs(self.directory / name, facts)
        ]

    @property
    def unlisted_files(self) -> list[str]:
        """Names of files that a checkpoint may have and manifest.json does not list, so they have
        no effect."""
        paths = [path for pattern in CONTENT for path in self.directory.glob(pattern)]
        names = {path.relative_to(self.directory).as_posix() for path in paths}
        unlisted = names - self.manifest["files"].keys() - {MANIFEST}
        return sorted(name for name in unlisted if not name.startswith("."))

    def read(self, name: str) -> bytes | None:
        """Return the content of the file `name`, or `None` if the export does not have it.

        Raises:
            FileNotFoundError: if the manifest lists the file, and it is missing.
            ValueError: if it exists and the manifest does not list it, if it differs from the
                manifest, and if it was saved again since the export was opened.
        """
        path = self.directory / name
        if name in self.manifest["files"]:
            stamp, content = read_file(path, checked_facts(self.manifest, name))
            if is_rewritable(name) and stamp != self.stamps[name]:
                raise ValueError(changed_while_opened(path))
            return content
        if path.exists():
            raise ValueError(f"{self.directory / MANIFEST} does not list {name}: export again")
        return None

    def check_listed(self) -> None:
        """Raise ValueError for an unlisted file beside the graphs: onnxruntime opens any
        file that a graph names there.

        onnxruntime itself rejects graphs that name a file outside of their folder.
        """
        files = self.manifest["files"]
        for folder in {(self.directory / name).parent for name in files if name.endswith(".onnx")}:
            for path in sorted(folder.rglob("*")):
                name = path.relative_to(self.directory).as_posix()
                if not path.is_dir() and name not in files:
                    raise ValueError(
                        f"{self.directory} has {name!r:.200}, which {MANIFEST} does not list: "
                        f"remove it"
                    )

    def check_hashes(self, ending: str = "") -> None:
        """Wait until the hashes of files whose names end with `ending` are checked.

        Raises:
            ValueError: if a file differs from the manifest.
        """
        for name, comparing in self.hashing.items():
            if name.endswith(ending):
                comparing.result()

    def check_alignment(self) -> None:
        """Raise ValueError for an export of another model than an encoder-decoder that generates,
        and for one without an alignment graph."""
        if not (self.generates and "encoder" in self.specs):
            raise ValueError(
                f"the export {self.directory.name!r} is a {self.architecture}, expected an "
                "encoder-decoder model that generates for alignments"
            )
        if ALIGNMENT not in self.specs:
            raise ValueError(
                f"the export {self.directory.name!r} has no alignment graph, expected one: export "
                "again with --target cpu, or with --alignments"
            )

    def check_unchanged(self) -> None:
        """Wait until all hashes are checked, and check that no file was replaced or changed since
        the export was opened.

        So graphs and data that onnxruntime opened by name are those of the manifest.

        Raises:
            FileNotFoundError, ValueError: if a file is missing or differs from the manifest, or
                the export was replaced or changed.
        """
        wait(self.hashing.values())
        for name, stamp in self.stamps.items():
            if file_stamp((self.directory / name).stat()) != stamp:
                raise ValueError(changed_while_opened(self.directory / name))
        self.check_hashes()


def default_options(generation_config: dict, directory: Path) -> dict[str, Any]:
    """Return the supported options in `generation_config`, the content of generation_config.json in
    `directory`. Raise ValueError for an invalid value."""
    options = {name: generation_config[name] for name in generation_config if name in FIELDS}
    try:
        return check(options)
    except UsageError as error:
        raise ValueError(f"{directory / 'generation_config.json'}: {error}") from None


def changed_while_opened(path: Path) -> str:
    return f"{path} was replaced or changed while the export was opened: open it again"


def is_rewritable(name: str) -> bool:
    """Return True if other libraries may save the file `name` again beside the graphs.

    transformers saves tokenizers and processors, sentence-transformers its modules. Graphs, their
    weights and both configs must stay as they were exported.
    """
    return name not in CONFIGS and ".onnx" not in name


def checked_facts(manifest: dict, name: str) -> dict | None:
    """Return {"bytes": size, "sha256": hash} that the file `name` must have by the `manifest`, or
    None if it may be saved again."""
    return None if is_rewritable(name) else manifest["files"][name]


def write_manifest(directory: Path, **facts: Any) -> dict[str, Any]:
    """Write manifest.json to `directory`, and return its content.

    It has the fields `facts`, and in `files` the size and SHA-256 of each file except itself and
    the model card.
    """
    unlisted = (directory / MANIFEST, directory / CARD)
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path not in unlisted)
    manifest = {"schema_version": SCHEMA_VERSION, **facts}
    manifest["files"] = {path.relative_to(directory).as_posix(): file_facts(path) for path in files}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


def file_facts(path: Path) -> dict[str, Any]:
    """Return what a manifest says of the file `path`: {"bytes": size, "sha256": hash}."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def differs(path: Path, facts: dict) -> bool:
    """Return True if the file `path` is missing or differs from its `facts` in a manifest."""
    return not path.is_file() or file_facts(path) != facts


def read_export_info(directory: str | os.PathLike) -> ExportInfo:
    """Check graphs and configs against the manifest and return the export.

    Other files must exist, but may have been saved again.

    Raises:
        FileNotFoundError: if the directory, its manifest or a listed file is missing.
        NotADirectoryError: if `directory` is a file.
        ValueError: if the manifest has another schema version, lacks a field, has a field of a
            wrong type, or lists a file outside the directory; if a graph or config has changed, or
            a config is not JSON.
    """
    info = open_export_info(directory)
    info.check_hashes()
    return info


def check_has_manifest(directory: Path) -> None:
    """Raise FileNotFoundError unless `directory` has a manifest, or NotADirectoryError if it is a
    file.

    For a file inside an export the message names the export.
    """
    if (directory / MANIFEST).is_file():
        return
    expected = "expected a directory `vanilla-transformer export` wrote"
    if not directory.is_file():
        problem = f"has no {MANIFEST}" if directory.is_dir() else "does not exist"
        raise FileNotFoundError(f"{directory} {problem}: {expected}")
    exports = [str(parent) for parent in directory.parents[:2] if (parent / MANIFEST).is_file()]
    raise NotADirectoryError(
        f"{directory} is a file, {expected}" + "".join(f", such as {export}" for export in exports)
    )


def open_export_info(directory: str | os.PathLike, hashes: bool = True) -> ExportInfo:
    """Return the export in `directory` while threads still check the hashes of graphs and their
    weights.

    Callers that open files must call `check_unchanged` before they use the results. Without
    `hashes`, only the sizes of graphs and weights are checked, for callers that open none.

    Raises:
        FileNotFoundError: if the directory, its manifest or a listed file is missing.
        NotADirectoryError: if `directory` is a file.
        ValueError: for a manifest or settings of sentence-transformers that are not valid, a config
            that was changed or is not JSON, and a graph or weights of another size than in the
            manifest.
    """
    # resolved, so that a link that changes meanwhile has no effect
    directory = Path(directory).resolve()
    check_has_manifest(directory)
    path = directory / MANIFEST
    stamps = {".": file_stamp(directory.stat())}
    with open(path, "rb") as file:
        stamps[MANIFEST] = file_stamp(os.fstat(file.fileno()))
        content = file.read()
    manifest = json_object(path, content)
    check_manifest(path, manifest)
    contents: dict[str, dict] = {name: {} for name in (*CONFIGS, TOKENIZER_CONFIG)}
    hashing = {}
    pool = ThreadPoolExecutor(HASHING_THREADS)
    try:
        for name, facts in manifest["files"].items():
            # Links are followed, as in the Hub's cache. Their targets must have the right hash.
            if name in contents or name in SETTINGS_FILES:
                stamps[name], content = read_file(directory / name, checked_facts(manifest, name))
                contents[name] = json_object(directory / name, content)
            elif is_rewritable(name):
                stamps[name], file = open_file(directory / name, None)
                file.close()
            else:
                stamps[name], file = open_file(directory / name, facts)
                if hashes:
                    hashing[name] = pool.submit(check_hash, file, facts, directory / name)
                else:
                    file.close()
    finally:
        pool.shutdown(wait=False)  # submitted checks continue
    config, generation_config, tokenizer_config, *_ = contents.values()
    # config.json has a model type that clients know, the manifest the one of this package.
    config |= {"model_type": manifest["model_type"]}
    settings = parse_settings(directory, contents)
    return ExportInfo(
        directory, manifest, config, generation_config, stamps, hashing, tokenizer_config, settings
    )


def check_manifest(path: Path, manifest: dict) -> None:
    """Check the content of the manifest at `path`.

    Raises:
        ValueError: for another schema version, a field that is missing or has a wrong type, and a
            file outside the directory.
    """
    schema_version = manifest.get("schema_version")
    if schema_version != SCHEMA_VERSION:
        is_newer = isinstance(schema_version, int) and schema_version > SCHEMA_VERSION
        remedy = (
            "a newer vanilla-transformer wrote it, update this one" if is_newer else "export again"
        )
        seen = reprlib.repr(schema_version)
        raise ValueError(f"{path} has schema version {seen}, expected {SCHEMA_VERSION}: {remedy}")
    if missing := REQUIRED.keys() - manifest.keys():
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}: export again")
    for name, kind in {**REQUIRED, **OPTIONAL}.items():
        check_field(path, name, manifest.get(name, kind()), kind)
    default, variants = manifest["default_dtype"], manifest["variants"]
    if default not in variants:
        raise ValueError(
            f"{path} has default_dtype {reprlib.repr(default)}, expected one of its variants, "
            f"{reprlib.repr([*variants])}: export again"
        )
    for dtype, variant in variants.items():
        check_field(path, f"the variant {dtype:.200}", variant, dict)
    for name, facts in manifest["files"].items():
        check_listed_file(path, name, facts)


def check_field(path: Path, name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise ValueError(
            f"{path} has {name} {reprlib.repr(value)}, expected a {kind.__name__}: export again"
        )


def check_listed_file(path: Path, name: str, facts: Any) -> None:
    """Raise ValueError unless `name` is inside the directory of the manifest at `path`, and `facts`
    has its bytes and sha256."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(
            f"{path} lists {name!r:.200}, which is outside the directory: export again"
        )
    if not isinstance(facts, dict) or (
        type(facts.get("bytes")),
        type(facts.get("sha256")),
    ) != (int, str):
        raise ValueError(
            f"{path} has {reprlib.repr(facts)} for {name:.200}, expected its bytes and "
            "sha256: export again"
        )


def read_file(path: Path, facts: dict | None) -> tuple[tuple, bytes]:
    """Return the stamp and the content of a file. The stamp changes if the file is replaced or
    modified.

    Size and hash are checked against its `facts` in the manifest. Without `facts`, only a git-lfs
    pointer is rejected.

    Raises:
        FileNotFoundError: if it is missing.
        ValueError: if its size or hash differs, and for a git-lfs pointer.
    """
    stamp, file = open_file(path, facts)
    with file:
        content = file.read()
    if facts is None:
        check_no_pointer(path)
    else:
        check_hash(io.BytesIO(content), facts, path)
    return stamp, content


def open_file(path: Path, facts: dict | None) -> tuple[tuple, io.BufferedReader]:
    """Return the stamp of a file, and the file, open for the caller to close. The stamp changes if
    the file is replaced or modified.

    Raises FileNotFoundError if it is missing, and ValueError if its size differs from `facts` of
    the manifest.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: the export is incomplete, export again")
    file = open(path, "rb")  # noqa: SIM115 - the caller closes it
    status = os.fstat(file.fileno())
    if facts is not None and status.st_size != facts["bytes"]:
        file.close()
        check_no_pointer(path)
        raise ValueError(
            f"{path} has {status.st_size} bytes, expected {facts['bytes']}: export again"
        )
    return file_stamp(status), file


def check_hash(file: io.BufferedReader | io.BytesIO, facts: dict, path: Path) -> None:
    """Read and close `file`. Raise ValueError if its hash differs from its `facts` in the
    manifest."""
    with file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != facts["sha256"]:
        raise ValueError(f"{path} has SHA-256 {digest}, expected {facts['sha256']}: export again")
