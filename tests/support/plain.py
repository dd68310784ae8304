"""Arrays and tensors as lists, to compare results of pipelines."""


def plain(result):
    """Return `result` with lists and Python's numbers in place of arrays and tensors."""
    if isinstance(result, dict):
        return {name: plain(value) for name, value in result.items()}
    if isinstance(result, list | tuple):
        return [plain(value) for value in result]
    return result.tolist() if hasattr(result, "tolist") else result
