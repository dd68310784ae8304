"""Lines of text in files, their translations, and runs over them that stop early."""

import numpy as np

from vanilla_transformer_export.files import run
from vanilla_transformer_export.files.predictions import Predictions
from vanilla_transformer_export.files.run import Runner

OPTIONS = {"max_new_tokens": 8}
SAMPLING = {**OPTIONS, "do_sample": True, "top_k": 20, "seed": 11}
BEAMS = {**OPTIONS, "num_beams": 3}


def some_lines(count, seed=0):
    """Return `count` random lines of up to nine words; one in eight has none."""
    rng = np.random.default_rng(seed)
    lines = [
        " ".join(f"w{token}" for token in rng.integers(4, 48, rng.integers(1, 10)))
        for _ in range(count)
    ]
    return ["" if rng.random() < 1 / 8 else line for line in lines]


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def translated(runtime, lines, blank=""):
    """Return the translation of each line by itself, `blank` for one without words."""
    return [runtime.translate([line], **OPTIONS)[0] if line.strip() else blank for line in lines]


def runner(runtime, options=BEAMS, shard_lines=8, skips=True, field=None, prefix=None, **settings):
    """Return a `Runner` of `generate`, in shards of `shard_lines` lines."""
    predictions = Predictions(runtime, "generate", options, **settings)
    return Runner(predictions, field, None, prefix, shard_lines, skips)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Stopped(Exception):
    """The error that stops a run."""


def stop_after(monkeypatch, count, error=Stopped):
    """Let runs raise `error` after `count` shards. Return the list of the shards they began."""
    compute, done = run.compute, []

    def stopping(*arguments):
        done.append(arguments[2])
        if len(done) > count:
            raise error
        return compute(*arguments)

    monkeypatch.setattr(run, "compute", stopping)
    return done
