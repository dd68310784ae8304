"""The commands that read the weights of a checkpoint."""


def verbs(checkpoint, out):
    """Return the arguments of every command that reads weights, by command."""
    return {
        "average": ["average", checkpoint, checkpoint, "--output", out],
        "attention": ["attention", checkpoint, "the dog", "--output", f"{out}.png"],
        "export": ["export", checkpoint, out],
        "evaluate": ["evaluate", checkpoint, "--source", "a.en", "--references", "a.de"],
        "convert": ["convert", checkpoint, out, "--to", "marian"],
    }


VERBS = list(verbs("", ""))
