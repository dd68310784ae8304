"""Config fields, theirs and ours."""

from transformers import PreTrainedConfig


def require(config: PreTrainedConfig, **expected) -> None:
    """Each field must have the value named, or one of a tuple of values.

    Raises:
        ValueError: naming the field, its value, and what would do.
    """
    for name, values in expected.items():
        values = values if isinstance(values, tuple) else (values,)
        if (found := getattr(config, name, None)) not in values:
            wanted = " or ".join(repr(value) for value in values)
            raise ValueError(f"{name}={found!r} cannot be converted, expected {wanted}")
