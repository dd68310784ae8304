"""The parts of transformers that config classes need, for exports where transformers is not
installed."""

import logging
import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, Literal


@dataclass
class PreTrainedConfig:
    """A replacement for `transformers.PreTrainedConfig` with its default fields and keyword
    arguments."""

    transformers_version: str | None = None
    architectures: list[str] | None = None
    output_hidden_states: bool | None = False
    return_dict: bool | None = True
    dtype: str | None = None
    chunk_size_feed_forward: int = 0
    is_encoder_decoder: bool = False
    id2label: dict[int, str] | dict[str, str] | None = None
    label2id: dict[str, int] | dict[str, str] | None = None
    problem_type: (
        Literal["regression", "single_label_classification", "multi_label_classification"] | None
    ) = None

    def __init_subclass__(cls) -> None:
        dataclass(repr=False, kw_only=True)(cls)
        cls.__init__ = set_fields  # type: ignore[assignment]

    def __post_init__(
        self,
        num_labels: int | None = None,
        torch_dtype: str | None = None,
        output_attentions: bool | None = False,
        name_or_path: str = "",
        **others: Any,
    ) -> None:
        self.dtype = self.dtype or torch_dtype
        if self.id2label is None:
            self.id2label = {
                number: f"LABEL_{number}"
                for number in range(2 if num_labels is None else num_labels)
            }
            self.label2id = {label: number for number, label in self.id2label.items()}
        self.id2label = {int(number): label for number, label in self.id2label.items()}
        if hasattr(self, "rope_parameters"):
            others = self.convert_rope_params_to_dict(**others)
        for name, value in {**others, "output_attentions": output_attentions}.items():
            setattr(self, name, value)

    def convert_rope_params_to_dict(self, **others: Any) -> dict[str, Any]:
        """Fill in the type and base in `rope_parameters`, of each layer type if it has several, and
        return the other keywords."""
        parameters = others.pop("rope_scaling", None) or self.rope_parameters or {}
        self.rope_parameters, base = parameters, others.pop("rope_theta", 10000.0)
        types = [parameters[name] for name in self._rope_type_labels if name in parameters]
        for entry in types or [parameters]:
            entry.setdefault("rope_theta", base)
            entry.setdefault("rope_type", entry.get("type", "default"))
        return others

    def validate_architecture(self) -> None:
        """Check nothing: subclasses check their own fields."""

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "PreTrainedConfig":
        return cls(**content)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "model_type": type(self).model_type}  # type: ignore[attr-defined]


def set_fields(config: PreTrainedConfig, **values: Any) -> None:
    """Set each field of `config` to its keyword or default. Keywords that are no fields go to
    `__post_init__`."""
    for field in fields(config):
        setattr(config, field.name, values.pop(field.name, field.default))
    config.__post_init__(**values)


class AnyName(Container):
    """A container of every name; graphs have their own table of supported activations."""

    def __contains__(self, name: object) -> bool:
        return True


@contextmanager
def standins() -> Iterator[None]:
    """Let imports in the block get these stand-ins in place of transformers."""
    modules: dict[str, Any] = {
        "transformers": SimpleNamespace(__version__="5.23", PreTrainedConfig=PreTrainedConfig),
        "transformers.activations": SimpleNamespace(ACT2FN=AnyName()),
        "transformers.utils": SimpleNamespace(
            cached_file=None, logging=SimpleNamespace(get_logger=logging.getLogger)
        ),
    }
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)
