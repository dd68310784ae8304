"""Config fields, theirs and ours."""

from typing import Any

from transformers import PreTrainedConfig

Fields = dict[str, Any]


def require(config: PreTrainedConfig, **expected: Any) -> None:
    """Each field of `config` must have the value of the argument of its name, or one of a tuple of values.

    Raises:
        ValueError: that names the field, its value and the values expected.
    """
    for name, values in expected.items():
        values = values if isinstance(values, tuple) else (values,)
        if (found := getattr(config, name, None)) not in values:
            wanted = " or ".join(repr(value) for value in values)
            raise ValueError(f"{name}={found!r} cannot be converted, expected {wanted}")
