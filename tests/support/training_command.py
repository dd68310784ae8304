"""Arguments of the command that trains."""

import json


def training(corpus, *settings):
    """Return the arguments of `train` for the text `corpus`, with `settings` over the recipe's."""
    files = {"data.train": corpus[:2], "data.validation": corpus[2:]}
    files = [f"{name}={json.dumps([str(path) for path in paths])}" for name, paths in files.items()]
    return [
        "train",
        "translation",
        *(word for setting in [*files, *settings] for word in ("--set", setting)),
    ]
