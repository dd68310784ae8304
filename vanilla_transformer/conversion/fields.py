"""Conversion of config fields that families share."""

from typing import Any

from transformers import PreTrainedConfig

Fields = dict[str, Any]


def require(config: PreTrainedConfig, **expected: Any) -> None:
    """Raise ValueError unless each field of `config` has its expected value.

    A tuple stands for several values that are allowed. The error names the field, its value and the
    values expected.
    """
    for name, values in expected.items():
        values = values if isinstance(values, tuple) else (values,)
        actual = getattr(config, name, None)
        if actual not in values:
            expected_values = " or ".join(repr(value) for value in values)
            raise ValueError(f"{name}={actual!r} cannot be converted, expected {expected_values}")


def require_padding(config: PreTrainedConfig) -> int:
    """Return the `pad_token_id` of `config`. Raises ValueError if there is none.

    Families whose positions count the ids that are not padding start them after this id.
    """
    if config.pad_token_id is None or config.pad_token_id < 0:
        raise ValueError(
            f"pad_token_id={config.pad_token_id} cannot be converted, expected a token: positions "
            "start after it"
        )
    return config.pad_token_id
