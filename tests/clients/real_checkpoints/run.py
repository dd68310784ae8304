"""python run.py EXPORT CALL INPUTS OUTPUTS: one call of the runtime, between two pickles, without
torch and transformers."""

import pickle
import sys
from pathlib import Path

from vanilla_transformer_export import Runtime, TextRuntime

CALLS = {
    "outputs": lambda export, arrays: Runtime(export, device="cpu").outputs(**arrays),
    "embed": lambda export, texts: TextRuntime(export, device="cpu").embed(texts),
    "classify": lambda export, texts: TextRuntime(export, device="cpu").classify(texts),
    "rows": lambda export, texts: TextRuntime(export, device="cpu").rows(texts),
}

export, call, inputs, outputs = sys.argv[1:]
Path(outputs).write_bytes(
    pickle.dumps(CALLS[call](export, pickle.loads(Path(inputs).read_bytes())))
)
assert not {"torch", "transformers"} & set(sys.modules), (
    "the runtime imported torch or transformers"
)
