"""The weights of a checkpoint, and the tensors that graphs make of them."""

import copy
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from vanilla_transformer.checkpoint_config import check_depth
from vanilla_transformer.checkpoint_files import (
    bare,
    check_tensors,
    stored_tensors,
    weight_files,
)
from vanilla_transformer.files import safetensors_header
from vanilla_transformer.standins import weight_shapes

from ..heads import model_class
from .config import Config
from .saving import MIN_EXTERNAL, write_external

DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
STRIP = 64  # columns of a transposed matrix that are copied at a time


class CheckpointWeights:
    """The tensors in the safetensors files of a checkpoint. `weights[name]` maps one into memory,
    as float32.

    Names may lack the prefix of the model without its head, or have it, as `from_pretrained` takes
    both. `rows` has the rows to keep of some tensors, see `with_rows`.
    """

    def __init__(self, checkpoint: Path, config: Config):
        self.rows: dict[str, list[int]] = {}
        self.tied = tied_names(config)
        # the file, the byte where its data begin, and the dtype, shape and data_offsets
        self.entries: dict[str, tuple[Path, int, dict]] = {}
        for path in weight_files(checkpoint):
            with open(path, "rb") as file:
                start, header = safetensors_header(file)
            self.entries |= {bare(name): (path, start, facts) for name, facts in header.items()}

    def with_rows(self, rows: dict[str, list[int]]) -> "CheckpointWeights":
        """Return the same weights, with only some rows of some tensors: `rows` is {name: row
        numbers}."""
        weights = copy.copy(self)
        weights.rows = rows
        return weights

    def __contains__(self, name: str) -> bool:
        return self.owner(name) in self.entries

    def __getitem__(self, name: str) -> np.ndarray:
        path, start, facts = self.entries[self.owner(name)]
        offset = start + facts["data_offsets"][0]
        array = np.asarray(
            np.memmap(path, DTYPES[facts["dtype"]], "r", offset, tuple(facts["shape"]))
        )
        return (array[self.rows[name]] if name in self.rows else array).astype(
            np.float32, copy=False
        )

    def shape(self, name: str) -> tuple[int, ...]:
        rows, *others = self.entries[self.owner(name)][2]["shape"]
        return len(self.rows.get(name, range(rows))), *others

    def is_tied(self, name: str) -> bool:
        """Return True if `name` shares its matrix with other names, and all its rows are kept."""
        return bare(name) in self.tied and name not in self.rows

    def owner(self, name: str) -> str:
        """Return the name without "model." under which the files have the weights `name`: tied
        weights are stored only once. For missing weights, it is `name` without "model."."""
        name = bare(name)
        others = self.tied if name in self.tied else ()
        return next((other for other in (name, *others) if other in self.entries), name)

    def key(self, name: str) -> str:
        """Return a name that is the same for all names of the same values, such as those of tied
        weights."""
        return name if name in self.rows else self.owner(name)


def load_checked_weights(checkpoint: Path, config: Config) -> CheckpointWeights:
    """Return the weights in `checkpoint`, after a check of its files that needs no torch.

    Raises:
        FileNotFoundError: without safetensors weights.
        ValueError: for files that are damaged, and for weights that are missing, too many, of other
            shapes or not finite.
    """
    files = weight_files(checkpoint)
    stored = {name: facts for file in files for name, facts in stored_tensors(file).items()}
    check_depth(config, stored, checkpoint)
    shapes = weight_shapes(model_class(config.architecture), config.values)
    expected = {bare(name): shape for name, shape in shapes.items()}
    check_tensors(config.architecture, expected, tied_names(config), stored, checkpoint)
    weights = CheckpointWeights(checkpoint, config)
    for name in stored:
        check_finite(name, weights[name], checkpoint)
    return weights


def check_finite(name: str, values: np.ndarray, where: Path) -> None:
    """Raise ValueError if `values`, the weights `name` of the checkpoint `where`, are not all
    finite."""
    with np.errstate(all="ignore"):
        is_finite = np.isfinite(values.sum())  # also false for finite values whose sum is too large
    wrong = 0 if is_finite else values.size - int(np.isfinite(values).sum())
    if wrong:
        raise ValueError(
            f"{name} of {where} has {wrong} of {values.size} values that are NaN or infinite"
        )


def tied_names(config: Config) -> Collection[str]:
    """Return the names, without "model.", that share one matrix for embedding tokens and for
    logits; empty if nothing is tied."""
    if config.model_type == "vanilla-vision" or not config.tie_word_embeddings:
        return ()
    stacks = [""]
    if config.is_seq2seq:
        stacks = (
            ["encoder.", "decoder."] if config.share_encoder_decoder_embeddings else ["decoder."]
        )
    return ("lm_head.weight", *(f"{stack}embeddings.embed_tokens.weight" for stack in stacks))


class WeightStore:
    """Tensors computed from weights, once for all graphs of an export.

    A tensor is written to the file `path` at once, so that only the matrices of one matmul are in
    memory at a time.
    """

    def __init__(self, weights: CheckpointWeights, dtype: np.dtype, path: Path):
        self.weights = weights
        self.dtype = dtype
        self.path = path
        self.tensors: dict[Any, list[ir.TensorProtocol]] = {}
        path.write_bytes(b"")

    def transform_weights(
        self, names: Sequence[str], transform: Callable, *arguments: Any
    ) -> list[ir.TensorProtocol]:
        """Return the arrays `transform(*weights, *arguments)` of the weights `names` as tensors.

        `transform` gets the weights in the dtype of the store and returns a tuple. Equal calls
        return the same tensors.
        """
        keys = tuple(self.weights.key(name) for name in names)
        key = (keys, transform, arguments)
        if key not in self.tensors:
            arrays = transform(
                *(self.weights[name].astype(self.dtype, copy=False) for name in names), *arguments
            )
            name = f"{keys[0]}{'.packed' * (len(keys) > 1)}.{transform.__name__}".removesuffix(
                f".{unchanged.__name__}"
            )
            self.tensors[key] = [
                self.keep(f"{name}.{i}" if i else name, array) for i, array in enumerate(arrays)
            ]
        return self.tensors[key]

    def keep(self, name: str, array: np.ndarray) -> ir.TensorProtocol:
        """Return `array` as a tensor `name`, whose values are written to the file at once if it is
        large."""
        tensor = ir.Tensor(c_ordered(array), name=name)
        if array.nbytes < MIN_EXTERNAL:
            return tensor
        with open(self.path, "ab") as file:
            return write_external(file, self.path, name, tensor)


def unchanged(array: np.ndarray) -> tuple[np.ndarray]:
    return (array,)


def c_ordered(array: np.ndarray) -> np.ndarray:
    """Return `array` in C order, as a copy if needed.

    A transposed matrix is copied in strips, six times as fast as numpy's own copy.
    """
    if array.ndim != 2 or array.flags.c_contiguous:
        return np.asarray(array, order="C")
    copy = np.empty_like(array, order="C")
    for start in range(0, array.shape[1], STRIP):
        copy[:, start : start + STRIP] = array[:, start : start + STRIP]
    return copy
