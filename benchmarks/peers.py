"""Engines to compare with that are optional: OpenVINO, and llama.cpp through its C interface.
Neither needs torch to run. What they load is made by peer_files.py."""

import ctypes
import json
import queue
from pathlib import Path

import numpy as np

# where `npm install --prefix benchmarks` puts llama.cpp
LLAMA_CPP = Path(__file__).parent / "node_modules/@node-llama-cpp/linux-x64/bins/linux-x64"


def read_config(root: Path) -> dict:
    return json.loads((root / "transformers/config.json").read_text())


class OpenVINO:
    """OpenVINO, for greedy search and encoders.

    Weights of 8 and 4 bits run in its own choice of types, fp32 in float32 throughout.
    """

    packages = ("openvino", "nncf")

    @staticmethod
    def modules(kind):
        return ("openvino",)

    def __init__(self, engine, kind, root, arrangement, device):
        import openvino

        self.kind, self.start = kind, read_config(root).get("decoder_start_token_id")
        settings = {
            "INFERENCE_NUM_THREADS": arrangement.workers * arrangement.threads,
            "NUM_STREAMS": arrangement.workers,
        }
        # on CPUs that support them, OpenVINO would use bfloat16 and 8-bit caches
        if engine == "openvino-fp32":
            settings |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        # otherwise the first two threads that create one hang
        openvino.Tensor(np.zeros(1, np.float32)).data.sum()
        core = openvino.Core()
        graphs = {
            path.stem: core.compile_model(path, "CPU", settings)
            for path in (root / engine).glob("*.xml")
        }
        self.idle = queue.SimpleQueue()
        for _ in range(arrangement.workers):
            self.idle.put({name: graph.create_infer_request() for name, graph in graphs.items()})

    def prepare(self, ids):
        return ids, np.ones_like(ids)

    def run(self, inputs, new_tokens, beams):
        requests = self.idle.get()
        try:
            return (
                self.generate(requests, *inputs, new_tokens)
                if new_tokens
                else encode(requests["encoder"], *inputs).copy()
            )
        finally:
            self.idle.put(requests)

    def generate(self, requests, ids, mask, new_tokens):
        """Return the new tokens (B, new_tokens) of greedy search after `ids` (B, S).

        `requests` are the inference requests of the graphs, {"decoder": …}.
        """
        decoder, rows = requests["decoder"], np.arange(len(ids), dtype=np.int32)
        decoder.reset_state()
        if "encoder" in requests:
            encode(requests["encoder"], ids, mask)
            for output in requests["encoder"].model_outputs:
                decoder.set_tensor(output.any_name, requests["encoder"].get_tensor(output))
            ids = np.full((len(ids), 1), self.start)
        tokens, past = [], 0
        while len(tokens) < new_tokens:
            used = past + ids.shape[1]
            feeds = {
                "input_ids": ids,
                "position_ids": np.arange(past, used)[None].repeat(len(ids), axis=0),
                "beam_idx": rows,
            }
            if "encoder" not in requests:
                feeds["attention_mask"] = np.ones((len(ids), used), np.int64)
            elif not past:
                feeds["attention_mask"] = mask
            decoder.infer(feeds, share_outputs=True)
            ids = decoder.get_tensor("logits").data[:, -1].argmax(axis=-1)[:, None]
            tokens.append(ids)
            past = used
        return np.concatenate(tokens, axis=1)

    def output(self, result, new_tokens):
        return result


def encode(request, ids, mask):
    request.infer({"input_ids": ids, "attention_mask": mask}, share_outputs=True)
    return request.get_output_tensor(0).data


# ---------------------------------------------------------------------------------------- llama.cpp


class ModelParams(ctypes.Structure):
    """`llama_model_params`, of which the defaults are taken: room enough for it."""

    _fields_ = [("all", ctypes.c_uint64 * 64)]


class ContextParams(ctypes.Structure):
    """`llama_context_params`: the first fields, which have stood there in all versions, and room
    enough for the others."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max")),
        ("others", ctypes.c_uint64 * 64),
    ]


class Batch(ctypes.Structure):
    """`llama_batch`: N tokens, each at a position of a sequence, and whether its logits are
    wanted."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        *(
            (name, ctypes.c_void_p)
            for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")
        ),
    ]


# they show that the struct has the expected layout
DEFAULTS = {"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1}
PLACES = 256  # a sequence's context length is a multiple of this


class LlamaCpp:
    """llama.cpp, for greedy search of GPT-2."""

    packages = ("gguf",)
    folder = LLAMA_CPP

    @staticmethod
    def modules(kind):
        return ("ctypes",)

    def __init__(self, engine, kind, root, arrangement, device):
        self.library, self.threads, self.contexts = load_llama_cpp(), arrangement.threads, {}
        self.vocabulary = read_config(root)["vocab_size"]
        path = str(root / engine / "model.gguf").encode()
        self.model = self.library.llama_model_load_from_file(
            path, self.library.llama_model_default_params()
        )
        if not self.model:
            raise OSError(f"llama.cpp cannot load {path.decode()}")

    def prepare(self, ids):
        return ids

    def context(self, rows, length, num_positions):
        """Return a context of llama.cpp for `rows` of `num_positions` tokens, `length` of which are
        read at once.

        The positions are rounded up to blocks of `PLACES`. Contexts are kept for later calls.

        Raises:
            OSError: if llama.cpp has other defaults than expected, or no memory.
        """
        num_positions = -(-num_positions // PLACES) * PLACES
        if (rows, num_positions) not in self.contexts:
            params = self.library.llama_context_default_params()
            values = {name: getattr(params, name) for name in DEFAULTS}
            if values != DEFAULTS:
                raise OSError(
                    f"llama.cpp's defaults are {values}, expected {DEFAULTS}: the version differs"
                )
            params.n_ctx, params.n_seq_max = rows * num_positions, rows
            params.n_batch = max(params.n_batch, rows * length)
            context = self.library.llama_init_from_model(self.model, params)
            if not context:
                raise OSError(
                    f"llama.cpp cannot create a context of {rows} rows of {num_positions} tokens"
                )
            self.library.llama_set_n_threads(context, self.threads, self.threads)
            self.contexts[rows, num_positions] = context
        return self.contexts[rows, num_positions]

    def run(self, ids, new_tokens, beams):
        """Return the new tokens (B, new_tokens) of greedy search after `ids` (B, S).

        `beams` is not used.
        """
        rows, length = ids.shape
        context = self.context(rows, length, length + new_tokens)
        self.library.llama_memory_clear(self.library.llama_get_memory(context), True)
        tokens, past = [], 0
        while len(tokens) < new_tokens:
            ids = self.logits(context, ids, past).argmax(axis=-1)[:, None]
            past = length + len(tokens)
            tokens.append(ids)
        return np.concatenate(tokens, axis=1)

    def logits(self, context, ids, past):
        """Feed `ids` (B, T) and return the logits (B, V) after the last token of each row.

        `past` tokens of each row are in the context already.
        """
        rows, length = ids.shape
        columns = {
            "token": ids.astype(np.int32),
            "pos": np.tile(np.arange(past, past + length, dtype=np.int32), rows),
            "n_seq_id": np.ones(ids.size, np.int32),
            "logits": np.tile(np.arange(length) == length - 1, rows).astype(np.int8),
        }
        sequences = np.arange(rows, dtype=np.int32).repeat(length)
        columns["seq_id"] = sequences.ctypes.data + sequences.itemsize * np.arange(
            ids.size, dtype=np.uint64
        )
        batch = Batch(ids.size, **{name: column.ctypes.data for name, column in columns.items()})
        if code := self.library.llama_decode(context, batch):
            raise OSError(f"llama_decode returned {code}, expected 0")
        return np.ctypeslib.as_array(
            self.library.llama_get_logits(context), (rows, self.vocabulary)
        )

    def output(self, result, new_tokens):
        return result


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def ignore(level, text, data):
    """Discard the log messages of llama.cpp."""


def load_llama_cpp():
    """Return the loaded library of llama.cpp, with its kernels for this CPU."""
    pointer = ctypes.c_void_p
    ggml, library = (
        ctypes.CDLL(str(next(LLAMA_CPP.glob(f"lib{name}.*so")))) for name in ("ggml", "llama")
    )
    library.llama_log_set(ignore, None)
    ggml.ggml_backend_load_all_from_path(str(LLAMA_CPP).encode())
    signatures = {
        "llama_model_default_params": (ModelParams, []),
        "llama_context_default_params": (ContextParams, []),
        "llama_model_load_from_file": (pointer, [ctypes.c_char_p, ModelParams]),
        "llama_init_from_model": (pointer, [pointer, ContextParams]),
        "llama_set_n_threads": (None, [pointer, ctypes.c_int32, ctypes.c_int32]),
        "llama_get_memory": (pointer, [pointer]),
        "llama_memory_clear": (None, [pointer, ctypes.c_bool]),
        "llama_decode": (ctypes.c_int32, [pointer, Batch]),
        "llama_get_logits": (ctypes.POINTER(ctypes.c_float), [pointer]),
    }
    for name, (result, arguments) in signatures.items():
        getattr(library, name).restype, getattr(library, name).argtypes = result, arguments
    return library
