"""Sessions and sizes of batches, to compare rows alone with rows of a batch."""

import onnxruntime

BATCH_SIZES = (1, 2, 3, 4, 5, 7, 8, 12, 13, 16, 24, 31, 32, 33, 48, 63, 64)
DTYPES = ("fp32", "int8", "int4")
COPIES = {"fp32": 1, "int8": 1, "int4": 2}  # copies of a row that runs alone


def open_session(graph, threads):
    """Return a session of a file, or of a serialized model."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
