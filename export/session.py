"""A graph as onnxruntime runs it. What onnxruntime raises, of classes that have only `Exception` in common, is a ValueError of
one line here, and its log, which says the same, is silent."""

import onnxruntime

FATAL = 4  # among onnxruntime's levels of a log


class Session:
    """The graph `graph`, a path or its content, in an `onnxruntime.InferenceSession`, which is `inner`.

    Args:
        path: the file of the graph, for errors.

    Raises:
        ValueError: if onnxruntime cannot load it.
    """

    def __init__(self, graph: str | bytes, options: onnxruntime.SessionOptions, providers: list, path):
        self.path, options.log_severity_level = path, FATAL
        try:  # a provider that fails is an error, and not replaced by another one
            self.inner = onnxruntime.InferenceSession(graph, options, providers=providers, enable_fallback=0)
        except Exception as error:
            raise self.explained(error, "load") from None

    def run(self, names: list[str], feeds: dict) -> list:
        """The outputs `names`. Raises ValueError if onnxruntime fails, as where an input takes more memory than there is."""
        try:
            return self.inner.run(names, feeds)
        except Exception as error:
            shapes = {name: feeds[name].shape for name in feeds if name.endswith("input_ids")}
            raise self.explained(error, "run", f" with {shapes}") from None

    def run_bound(self, binding, options=None) -> None:
        """As `run`, with inputs and outputs as `io_binding` has them."""
        try:
            self.inner.run_with_iobinding(binding, options)
        except Exception as error:
            raise self.explained(error, "run") from None

    def io_binding(self):
        return self.inner.io_binding()

    def explained(self, error: Exception, what: str, given: str = "") -> ValueError:
        reason = " ".join(str(error).split())
        return ValueError(f"onnxruntime {onnxruntime.__version__} cannot {what} {self.path}{given}: {reason}")
