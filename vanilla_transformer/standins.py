"""Stand-ins for torch and transformers where they are not installed: config classes know their
fields, and model classes the shapes of their weights."""

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import ModuleType
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

    @property
    def num_labels(self) -> int:
        return len(self.id2label or ())

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


# ------------------------------------------------------------------------------------------ modules


class AnyName(type):
    """The metaclass of `Module`, for names of torch and transformers that a class body mentions."""

    def __getattr__(cls, name: str) -> Any:
        return find_standin(name)

    def __getitem__(cls, item: object) -> Any:
        return cls

    def __setitem__(cls, item: object, value: object) -> None:
        """Keep nothing: a registry of transformers."""


class Module(metaclass=AnyName):
    """A replacement for `torch.nn.Module` that knows the shapes of its weights only.

    It also stands for every other class, function and value of torch and transformers.
    """

    def __init__(self, *arguments: Any, **keywords: Any):
        """Keep nothing."""

    def __call__(self, function: Any) -> Any:
        return function  # a decorator

    def post_init(self) -> None:
        """Initialize nothing."""

    def shapes(self, prefix: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name, after `prefix`, and the shape of each weight."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield from value.shapes(f"{prefix}{name}.")
            elif isinstance(value, Parameter):
                yield prefix + name, tuple(value)


class Parameter(tuple):
    """The shape of a weight."""


class Linear(Module):
    def __init__(self, in_size: int, out_size: int, bias: bool = True):
        self.weight = Parameter((out_size, in_size))
        self.bias = Parameter((out_size,)) if bias else None


class Embedding(Module):
    def __init__(self, rows: int, size: int):
        self.weight = Parameter((rows, size))


class RMSNorm(Module):
    def __init__(self, size: int, epsilon: float):
        self.weight = Parameter((size,))


class LayerNorm(Module):
    def __init__(self, size: int, epsilon: float):
        self.weight, self.bias = Parameter((size,)), Parameter((size,))


class ModuleList(Module):
    def __init__(self, modules: Iterable[Module]):
        vars(self).update({str(number): module for number, module in enumerate(modules)})


class Sequential(ModuleList):
    def __init__(self, *modules: Module):
        super().__init__(modules)


class PReLU(Module):
    def __init__(self) -> None:
        self.weight = Parameter((1,))


class XIELU(Module):
    def __init__(self) -> None:
        self.alpha_p, self.alpha_n = Parameter((1,)), Parameter((1,))
        self.beta, self.eps = Parameter(()), Parameter(())


class Activations:
    """A replacement for `ACT2FN`, which has every name; graphs have their own table of supported
    activations."""

    def __contains__(self, name: object) -> bool:
        return True

    def __getitem__(self, name: str) -> Module:
        return {"prelu": PReLU, "xielu": XIELU}.get(name, Module)()


STANDINS: dict[str, Any] = {
    "__version__": "5.23",
    "PreTrainedConfig": PreTrainedConfig,
    "ACT2FN": Activations(),
    "get_logger": logging.getLogger,
    "empty": lambda *shape: shape,
    "Parameter": Parameter,
    **{kind.__name__: kind for kind in (Linear, Embedding, LayerNorm, RMSNorm)},
    **{kind.__name__: kind for kind in (ModuleList, Sequential)},
}


def find_standin(name: str) -> Any:
    """Return the replacement for `name`, in whatever module of torch or transformers it is."""
    if name.startswith("__") and name not in STANDINS:
        raise AttributeError(name)
    return STANDINS.get(name, Module)


class Finder:
    """Finds stand-ins in place of all modules of torch and transformers."""

    @classmethod
    def find_spec(cls, name: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, cls(), is_package=True) if is_replaced(name) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = find_standin  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""


def is_replaced(name: str) -> bool:
    return name.partition(".")[0] in ("torch", "transformers")


@contextmanager
def standins(*reloaded: str) -> Iterator[None]:
    """Let imports in the block get stand-ins in place of torch and transformers.

    The modules `reloaded` and those that the block imports of both packages are forgotten after it.
    """
    before = {name: sys.modules.pop(name) for name in [*sys.modules] if is_replaced(name)}
    before |= {name: sys.modules.pop(name) for name in reloaded if name in sys.modules}
    sys.meta_path.insert(0, Finder)
    try:
        yield
    finally:
        sys.meta_path.remove(Finder)
        for name in [name for name in sys.modules if is_replaced(name) or name in reloaded]:
            del sys.modules[name]
        sys.modules.update(before)


@cache
def load_modeling() -> ModuleType:
    """Return modeling_vanilla_transformer.py as a module whose classes know only shapes."""
    names = [f"{__package__}.{part}_vanilla_transformer" for part in ("layers", "modeling")]
    with standins(*names):
        for name in names:
            spec = find_spec(name)
            assert spec is not None and spec.loader is not None
            module = sys.modules[name] = module_from_spec(spec)
            spec.loader.exec_module(module)
    return module


def weight_shapes(architecture: str, config: Any) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the weights of our class `architecture` with this `config`. No torch
    is needed."""
    return dict(getattr(load_modeling(), architecture)(config).shapes())
