"""The engines that are compared, each in its own process and driven over a pipe.

Large packages are imported only in the process of their engine.
"""

import functools
import importlib
import importlib.util
import multiprocessing
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from peers import LlamaCpp, OpenVINO
from plan import OF_OTHERS
from workload import ENCODERS, FAMILY, MODELS, OURS

CONTEXT = multiprocessing.get_context("spawn")
PATIENCE = 300  # seconds for one answer
NO_TIME = "no time was left"  # a resumed run measures this again
LAST_SECONDS = 30  # for a process to end
MIXED_ROWS = 32  # of mixed length, in one batch of transformers


def ids_and_mask(ids):
    """Return `ids` with 0 for padding, which is negative, and their mask, both (B, S)."""
    mask = ids >= 0
    return np.where(mask, ids, 0), mask.astype(np.int64)


class Transformers:
    """transformers: its `generate` and `forward` with PyTorch's scaled dot-product attention.

    It computes in float32 on the CPU, on a GPU in float16, or in bfloat16 for the shapes of others.
    Token ids come from the host and go back there. Negative ids are padding.
    """

    packages = ("torch", "transformers")
    checkpoint = "transformers"
    options = {}

    @staticmethod
    def modules(kind):
        return "torch", f"transformers.models.{FAMILY[kind]}.modeling_{FAMILY[kind]}"

    def model_class(self, kind):
        return getattr(importlib.import_module("transformers"), MODELS[kind][0])

    def __init__(self, engine, kind, root, arrangement, device):
        import torch

        torch.set_num_threads(arrangement.threads)
        torch.set_grad_enabled(False)
        self.kind, self.device = kind, device
        half = torch.bfloat16 if kind in OF_OTHERS else torch.float16
        dtype = torch.float32 if device == "cpu" else half
        model = self.model_class(kind).from_pretrained(
            root / self.checkpoint, attn_implementation="sdpa", dtype=dtype
        )
        self.model = model.eval().to(device)

    def prepare(self, ids):
        import torch

        return tuple(map(torch.from_numpy, ids_and_mask(ids)))

    def run(self, inputs, new_tokens, beams):
        if self.kind in ENCODERS:
            return self.encode(*inputs)
        ids, mask = (tensor.to(self.device) for tensor in inputs)
        return self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            num_beams=beams,
            do_sample=False,
            **self.options,
        ).cpu()

    def encode(self, ids, mask):
        """Return the states (B, S, D). Those of padding have no meaning.

        Rows of mixed length are read longest first, `MIXED_ROWS` at a time, as
        sentence-transformers does.
        """
        import torch

        lengths = mask.sum(dim=1)
        rows = len(ids) if mask.all() else MIXED_ROWS
        states = None
        for part in lengths.argsort(descending=True).split(rows):
            longest = lengths[part].max()
            inputs = (tensor[part, :longest].to(self.device) for tensor in (ids, mask))
            names = ("input_ids", "attention_mask")
            output = self.model(**dict(zip(names, inputs))).last_hidden_state.cpu()
            if rows == len(ids):
                return output[part.argsort()]
            states = torch.zeros(*ids.shape, output.shape[-1]) if states is None else states
            states[part, :longest] = output.float()
        return states

    def output(self, result, new_tokens):
        return result.float().numpy() if self.kind in ENCODERS else result[:, -new_tokens:].numpy()


class Compiled(Transformers):
    """transformers with torch.compile and, to generate, with a static cache."""

    def __init__(self, *args):
        super().__init__(*args)
        import torch

        self.options = {"cache_implementation": "static"}
        if self.device == "cpu":
            self.model.forward = torch.compile(self.model.forward)
        elif self.kind in ENCODERS:
            # on a GPU, with a static cache, `generate` compiles the steps by itself, in this mode
            self.model.forward = torch.compile(self.model.forward, mode="reduce-overhead")


class Vanilla(Transformers):
    """Our models in torch, run as those of transformers are."""

    checkpoint = "vanilla"

    @staticmethod
    def modules(kind):
        return "torch", "vanilla_transformer"

    def model_class(self, kind):
        return getattr(importlib.import_module("vanilla_transformer"), OURS[kind])


class TorchGraph(Vanilla):
    """The lower bound of a decode step of our model: a `torch_graph.GraphDecoder` for each shape.

    It supports greedy search only.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.factory = {}

    def run(self, inputs, new_tokens, beams):
        from torch_graph import GraphDecoder

        ids, _ = inputs
        key = (*ids.shape, new_tokens)
        if key not in self.factory:
            self.factory[key] = GraphDecoder(self.model, *key)
        return self.factory[key].generate(ids)


class CTranslate2:
    packages = ("ctranslate2",)

    @staticmethod
    def modules(kind):
        # It imports torch and transformers, for its converters, where it finds them. Who only runs
        # it has neither.
        sys.modules["torch"] = sys.modules["transformers"] = None
        return ("ctranslate2",)

    def __init__(self, engine, kind, root, arrangement, device):
        import ctranslate2

        self.kind = kind
        classes = {
            "seq2seq": ctranslate2.Translator,
            "gpt2": ctranslate2.Generator,
            "bert": ctranslate2.Encoder,
        }
        dtype = engine.removeprefix("ctranslate2-")
        workers, threads = arrangement.workers, arrangement.threads
        self.model = classes[kind](
            str(root / engine), compute_type=dtype, inter_threads=workers, intra_threads=threads
        )

    def prepare(self, ids):
        return (
            ids.tolist()
            if self.kind in ENCODERS
            else [[str(token) for token in row] for row in ids]
        )

    def run(self, inputs, new_tokens, beams):
        if self.kind in ENCODERS:
            return np.array(self.model.forward_batch(inputs).last_hidden_state)
        if self.kind == "gpt2":
            return self.model.generate_batch(
                inputs,
                beam_size=beams,
                min_length=new_tokens,
                max_length=new_tokens,
                include_prompt_in_result=False,
            )
        return self.model.translate_batch(
            inputs,
            beam_size=beams,
            min_decoding_length=new_tokens,
            max_decoding_length=new_tokens,
            max_input_length=0,
        )

    def output(self, result, new_tokens):
        if self.kind in ENCODERS:
            return result
        rows = [row.sequences[0] if self.kind == "gpt2" else row.hypotheses[0] for row in result]
        return np.array([[int(token) for token in row] for row in rows])


class Onnx:
    """One of our exports in onnxruntime."""

    packages = ("onnxruntime",)

    @staticmethod
    def modules(kind):
        return "onnxruntime", "vanilla_transformer_export.runtime"

    def __init__(self, engine, kind, root, arrangement, device):
        from vanilla_transformer_export import Runtime

        self.kind, self.model = (
            kind,
            Runtime(root / engine, threads=arrangement.threads, device=device),
        )

    def prepare(self, ids):
        return ids_and_mask(ids)

    def run(self, inputs, new_tokens, beams):
        if self.kind in ENCODERS:
            return self.model.encode(*inputs)
        return self.model.generate(*inputs, max_new_tokens=new_tokens, num_beams=beams)

    def output(self, result, new_tokens):
        return result if self.kind in ENCODERS else result[:, -new_tokens:]


class Parts:
    """An engine whose workers share the rows of a batch: each has a part of them, in a thread of
    its own."""

    def __init__(self, model, workers):
        self.model, self.workers, self.threads = model, workers, ThreadPoolExecutor(workers)

    def prepare(self, ids):
        return [self.model.prepare(part) for part in np.array_split(ids, self.workers)]

    def run(self, inputs, new_tokens, beams):
        return list(self.threads.map(lambda part: self.model.run(part, new_tokens, beams), inputs))

    def output(self, results, new_tokens):
        return np.concatenate([self.model.output(result, new_tokens) for result in results])


ENGINES = {
    "transformers": Transformers,
    "transformers-compile": Compiled,
    "ctranslate2-float32": CTranslate2,
    "ctranslate2-int8": CTranslate2,
    **dict.fromkeys(("openvino-fp32", "openvino-int8", "openvino-ptq", "openvino-int4"), OpenVINO),
    **dict.fromkeys(("llamacpp-f32", "llamacpp-q8", "llamacpp-q4"), LlamaCpp),
    "vanilla": Vanilla,
    "portable-fp32": Onnx,
    "cpu-fp32": Onnx,
    "cpu-int8": Onnx,
    "cpu-calibrated": Onnx,
    "cpu-int4": Onnx,
    "cuda-fp32": Onnx,
    "cuda-fp16": Onnx,
    "cuda-bf16": Onnx,
    "torch-graph": TorchGraph,
}


def is_installed(engine: str) -> bool:
    """Return True if the packages of `engine`, and its folder if it needs one, exist."""
    specs = [importlib.util.find_spec(package) for package in ENGINES[engine].packages]
    return all(specs) and getattr(ENGINES[engine], "folder", Path("/")).exists()


class Worker:
    """An engine in a process of its own, which is driven over a pipe.

    An answer is a dict, with "error" if it failed or took longer than `PATIENCE` or until
    `deadline`, a time of `time.monotonic`. The other arguments are those of `serve`.
    """

    def __init__(self, engine, kind, root, arrangement, device="cpu", deadline=None):
        self.arrangement, self.deadline = arrangement, deadline
        self.connection, far_end = CONTEXT.Pipe()
        self.process = CONTEXT.Process(
            target=serve, args=(far_end, engine, kind, root, arrangement, device), daemon=True
        )
        self.process.start()
        far_end.close()

    @functools.cached_property
    def started(self) -> dict:
        """The first answer, which comes after loading: import_seconds, load_seconds and
        import_memory.

        It is waited for on first use, so that several workers can load at a time.
        """
        return self.answer()

    def run(self, ids, new_tokens, beams) -> dict:
        return self.ask("timed", ids, new_tokens, beams)

    def profile(self, ids, new_tokens, beams) -> dict:
        return self.ask("profiled", ids, new_tokens, beams)

    def ask(self, *request):
        try:
            self.connection.send(request)
        except BrokenPipeError:
            return {"error": "the process is not running"}
        return self.answer()

    def answer(self):
        patience = (
            PATIENCE
            if self.deadline is None
            else min(PATIENCE, max(1.0, self.deadline - time.monotonic()))
        )
        if not self.connection.poll(patience):
            self.process.kill()
            is_late = self.deadline is not None and time.monotonic() >= self.deadline
            return {"error": NO_TIME if is_late else f"no answer within {patience:.0f} s"}
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return {"error": f"the process ended with code {self.process.exitcode}"}

    def close(self):
        self.connection.close()
        self.process.join(LAST_SECONDS)
        self.process.kill()  # OpenVINO's has been seen to hang at its end
        self.process.join()


def serve(connection, engine, kind, root, arrangement, device):
    """Run `engine` in this process: import, load, then answer requests until the pipe closes.

    A request is (name of `ANSWERS`, ids, new_tokens, beams).

    Args:
        connection: the end of the pipe.
        engine: a name of `ENGINES`.
        kind: the kind of model, such as "seq2seq".
        root: the directory with the files of all engines for this kind.
        arrangement: the numbers of workers and of their threads.
        device: "cpu" or "cuda".
    """
    try:
        start = time.perf_counter()
        for module in ENGINES[engine].modules(kind):
            importlib.import_module(module)
        imported = time.perf_counter()
        baseline = memory("VmRSS")
        model = ENGINES[engine](engine, kind, root, arrangement, device)
        if arrangement.workers > 1:
            model = Parts(model, arrangement.workers)
        seconds = {
            "import_seconds": imported - start,
            "load_seconds": time.perf_counter() - imported,
        }
        connection.send({**seconds, "import_memory": baseline})
    except Exception as error:
        connection.send({"error": one_line(error)})
        return
    while True:
        try:
            request, ids, *settings = connection.recv()
        except EOFError:
            return
        try:
            connection.send(ANSWERS[request](model, model.prepare(ids), *settings))
        except Exception as error:
            connection.send({"error": one_line(error)})


def timed(model, inputs, new_tokens, beams):
    start = time.perf_counter()
    result = model.run(inputs, new_tokens, beams)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "output": model.output(result, new_tokens),
        "peak_memory": memory("VmHWM"),
    }


def profiled(model, inputs, new_tokens, beams):
    from gpu import device_seconds

    model.run(inputs, new_tokens, beams)  # the earlier capture for this shape may be gone
    return device_seconds(lambda: model.run(inputs, new_tokens, beams))


ANSWERS = {"timed": timed, "profiled": profiled}


def memory(field):
    """Return bytes of this process by `field`: "VmRSS" is the present memory, "VmHWM" the peak."""
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(field))


def one_line(error):
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}"
