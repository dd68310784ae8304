"""The rows of the cuda target. Its graphs use buffers on the device and are replayed as CUDA
graphs."""

from collections.abc import Callable

import numpy as np

from ...errors import UsageError
from ...inference.device_thread import in_device_thread
from ...inference.rows import next_input_name
from .buffers import Buffers, DeviceGraph


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not less than `number`."""
    return 1 << (number - 1).bit_length()


class CudaRows:
    """The `Rows` of one request, with buffers on the device.

    Caches are never reordered: `visible` (B, beams, slots) says which slots of the input's cache
    each beam reads. If there are fewer inputs than rows of the buffers, the first input fills the
    others, whose results are ignored.

    Args:
        buffers: the caches and graphs that it uses; `close` puts them back into their pool.
    """

    all_logits = False
    places = best_tokens = None
    shrinks = False  # captured graphs have a fixed number of rows

    def __init__(self, buffers: Buffers):
        self.buffers = buffers
        self.export = buffers.pool.export
        self.rows, self.slots = buffers.sizes["batch_size"], buffers.sizes["slots"]
        self.source: dict[str, np.ndarray] = {}

    def close(self) -> None:
        """Put the buffers back into the pool, for the next request of their sizes. A second call
        does nothing."""
        if hasattr(self, "buffers"):
            buffers = self.buffers
            del self.buffers  # another batch may use them now
            buffers.pool.give(buffers)

    def encode(self, ids: np.ndarray, mask: np.ndarray) -> None:
        """Compute the keys and values of sources `ids` (B, S) on the device.

        `mask` (B, S) is 0 where they have padding.
        """
        length = self.buffers.sizes["source_length"]
        # pad tokens, which positions derived from ids do not count
        fill = self.export.config.get("pad_token_id") or 0
        ids, mask = (pad(ids, self.rows, length, fill), pad(mask, self.rows, length))
        encoder = self.export.sessions["encoder"]
        binding = encoder.io_binding()
        for name, array in (("input_ids", ids), ("attention_mask", mask)):
            binding.bind_cpu_input(name, array)
        for tensor in self.export.specs["encoder"].outputs:
            state = self.buffers.states[next_input_name(tensor.name)]
            binding.bind_ortvalue_output(tensor.name, state)
        encoder.run_bound(binding)
        self.source = {"encoder_attention_mask": mask}

    @in_device_thread
    def prefill(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        """Feed the prompts (B, P) and return the logits (B, 1, V) after the last token of each.

        Padding, where `attention_mask` is 0, may stand on either side.
        """
        logits = self.read(input_ids, attention_mask).values["logits"].numpy()
        return logits[: len(input_ids), :1].copy()

    def read(self, ids: np.ndarray, mask: np.ndarray, beams: int = 1) -> DeviceGraph:
        """Feed the prompts `ids` (B, P) and return the graph, whose `logits` follow the last
        tokens.

        The logits are repeated for the number of `beams`. `mask` is 0 for padding. Prompts are
        padded on the right to a power of two, so that graphs run with few lengths. The next steps
        write over that padding.
        """
        self.count, length = ids.shape
        padded = power_of_two(length)
        ids, mask = (pad(array, self.rows, padded) for array in (ids, mask))
        self.visible = np.zeros((self.rows, 1, self.slots), bool)
        self.visible[:, 0, :padded] = mask
        self.used = length
        self.lengths = mask.sum(axis=1)
        earlier = np.arange(self.slots) <= np.arange(padded)[:, None]
        last = padded - 1 - mask[:, ::-1].argmax(axis=1)
        graph = self.buffers.prompt_graph(padded, beams)
        graph.put(
            input_ids=ids,
            position_ids=np.maximum(mask.cumsum(axis=1) - 1, 0),
            first_slot=0,
            count=length,
            visible=self.visible & earlier,
            logit_indices=last[:, None],
            **self.source,
        )
        graph.run()
        return graph

    @in_device_thread
    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Feed one token per beam, `tokens` (B * beams, 1), and return the logits (B * beams, 1,
        V). Raises UsageError if the caches are full."""
        beams = self.visible.shape[1]
        # the graph also writes the next tokens
        if (needed := self.used + 2 * beams) > self.slots:
            raise UsageError(f"{needed} cache slots, expected at most {self.slots} on this target")
        new = np.arange(beams)
        self.visible[:, new, self.used + new] = True
        graph = self.buffers.step_graph(beams)
        graph.put(
            input_ids=pad_batch(tokens.reshape(-1, beams), self.rows),
            position_ids=self.lengths[:, None],
            first_slot=self.used,
            visible=self.visible,
            **self.step_inputs(beams),
        )
        graph.run()
        self.used += beams
        self.lengths = self.lengths + 1
        logits = graph.values["logits"].numpy()
        return logits[: self.count].reshape(self.count * beams, 1, -1).copy()

    def select(self, parents: np.ndarray) -> None:
        """Let each row continue the row that `parents` (B * beams,) names, with more beams of each
        input or with its beams in another order. They share the cache of their input."""
        beams = len(parents) // self.count
        indices = (parents % self.visible.shape[1]).reshape(-1, beams, 1)
        self.visible = np.take_along_axis(self.visible, pad_batch(indices, self.rows), axis=1)

    @in_device_thread
    def source_inputs(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return copies of the keys and values and of the mask of the sources of `rows` (N,)."""
        inputs = rows // self.visible.shape[1]
        states = self.buffers.states
        names = [next_input_name(tensor.name) for tensor in self.export.specs["encoder"].outputs]
        arrays = {name: states[name].numpy() for name in names} | self.source
        return {name: array[inputs] for name, array in arrays.items()}

    def step_runner(self, beams: int) -> Callable[..., None]:
        """Return the function `run(waits=True)`, which runs a step whose inputs are on the device.

        The step before it, or the prompt, has written these inputs. With `waits=False` it may
        return before the step ends. `beams` is the number of beams of each input.
        """
        graph = self.buffers.step_graph(beams)
        graph.put(**self.step_inputs(beams))
        return graph.run

    def step_inputs(self, beams: int) -> dict[str, np.ndarray | int]:
        """Return `{input: value}` of the inputs that are equal in all steps with `beams`.

        `beams` is the number of beams of each input.
        """
        return {"count": beams, "logit_indices": np.arange(beams), **self.source}


def pad_batch(array: np.ndarray, rows: int) -> np.ndarray:
    """Return `array` with its first row appended until there are `rows` rows."""
    return np.concatenate([array, np.repeat(array[:1], rows - len(array), axis=0)])


def pad(array: np.ndarray, rows: int, length: int, fill: int = 0) -> np.ndarray:
    """Return `array` (B, T) with `rows` rows of `length`.

    Rows are filled with `fill` on the right, and the first row is repeated.
    """
    missing = length - array.shape[1]
    return pad_batch(np.pad(array, ((0, 0), (0, missing)), constant_values=fill), rows)
