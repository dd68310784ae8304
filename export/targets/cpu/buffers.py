"""Memory of the cpu target, and graphs that are bound to it."""

import math
import threading
from collections.abc import Iterable

import numpy as np
import onnxruntime

from ...inference.rows import next_input_name
from ...inference.session import Session
from ...specs.graph_spec import GraphSpec, TensorSpec, concrete_shape

# maximum bytes that a thread keeps for its next rows
MAX_KEPT_BYTES = 1 << 28


class FreeMemory(threading.local):
    """Memory of closed rows, which the next rows of the same thread use again.

    The system fills each page of new memory with zeros at the first write. For batches that follow
    each other, that takes a tenth of the time of beam search.
    """

    def __init__(self) -> None:
        self.free: list[np.ndarray] = []  # of bytes

    def take(self, shape: list[int], dtype: str) -> np.ndarray:
        """Return an array of any finite values, from the smallest free memory that holds it, or
        else from new memory."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        fitting = [place for place, memory in enumerate(self.free) if len(memory) >= size]
        if fitting:
            memory = self.free.pop(min(fitting, key=lambda place: len(self.free[place])))
        else:
            memory = np.zeros(size, np.uint8)
        return memory[:size].view(dtype).reshape(shape)

    def give_back(self, arrays: Iterable[np.ndarray]) -> None:
        """Keep the memory of `arrays` from `take`, or of parts of them, up to `MAX_KEPT_BYTES`."""
        kept = sum(map(len, self.free))
        for array in arrays:
            assert array.base is not None
            kept += len(array.base)
            if kept <= MAX_KEPT_BYTES:
                self.free.append(array.base)


def ortvalues(arrays: dict[str, np.ndarray]) -> dict[str, onnxruntime.OrtValue]:
    """Return values, by name, that use the memory of `arrays`, which must be contiguous."""
    return {name: ortvalue(array) for name, array in arrays.items()}


def ortvalue(array: np.ndarray) -> onnxruntime.OrtValue:
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def by_name(tensors: Iterable[TensorSpec], arrays: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """Return {name: array} of `tensors`, whose `arrays` may be parts of one."""
    return {tensor.name: array for tensor, array in zip(tensors, arrays)}


class BoundGraph:
    """A graph whose inputs and outputs are bound once, so that a run allocates no memory.

    Args:
        session: the session of the graph.
        spec: its inputs and outputs.
        values: what the inputs read, by name. The missing ones read new `arrays` of zeros.
        written: what outputs write, by name. Without one, an output is written to the input that
            reads it in the next step, or else to a new array.
        sizes: the size of each named axis of new arrays.
    """

    def __init__(
        self,
        session: Session,
        spec: GraphSpec,
        values: dict[str, onnxruntime.OrtValue],
        written: dict[str, onnxruntime.OrtValue],
        sizes: dict[str, int],
    ):
        self.session = session
        self.binding = session.io_binding()
        self.arrays: dict[str, np.ndarray] = {}
        self.values = dict(values)  # which keeps their memory
        for tensor in spec.inputs:
            if tensor.name not in values:
                self.arrays[tensor.name] = zeros(tensor, sizes)
                self.values[tensor.name] = ortvalue(self.arrays[tensor.name])
            self.binding.bind_ortvalue_input(tensor.name, self.values[tensor.name])
        for tensor in spec.outputs:
            value = written.get(tensor.name) or self.values.get(next_input_name(tensor.name))
            if value is None:
                self.arrays[tensor.name] = zeros(tensor, sizes)
                value = ortvalue(self.arrays[tensor.name])
            self.binding.bind_ortvalue_output(tensor.name, value)

    def run(self, **values: np.ndarray | int) -> None:
        """Copy `values` to the new arrays of these inputs, and run the graph.

        Inputs that are not passed keep their values.
        """
        for name, array in values.items():
            self.arrays[name][...] = array
        self.session.run_bound(self.binding)


def zeros(tensor: TensorSpec, sizes: dict[str, int]) -> np.ndarray:
    return np.zeros(concrete_shape(tensor, sizes), tensor.dtype)
