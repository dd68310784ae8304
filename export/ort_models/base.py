"""The base class of all models: opening, saving, devices, and runs of full-sequence graphs."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModel, PreTrainedConfig
from transformers.utils import PushToHubMixin, logging

from ..exporting.repository_files import MARIAN_NAMES
from ..heads import HEADS, READS_IMAGES, Task, has_task
from ..runtime import Runtime
from . import opening
from .foreign import ForeignGraph, find_graph

logger = logging.get_logger(__name__)

MODEL_CLASSES: "dict[str, type[ORTModel]]" = {}  # by name
# outputs of graphs that have another name in transformers
OUTPUT_NAMES = {"prediction_logits": "logits"}


class ORTModel(PushToHubMixin):
    """An export with the methods of a transformers model and the arguments of optimum-onnx.

    Args:
        directory: directory of an export.
        config: config of the model, by default that of the export.
        graph: path of a graph of another exporter, if the directory is no export.
        arguments: `threads`, `device` and `dtype`, as `Runtime` takes them.

    Raises:
        ValueError: if the model has no outputs for this class.
        FileNotFoundError, OSError: if the export cannot be opened, as `Runtime` raises them.
    """

    tasks: ClassVar[tuple[Task, ...]] = ()  # of which the export must have one
    auto_class: ClassVar[Any] = None
    output_class: ClassVar[Any] = None
    dtype = torch.float32
    training = False
    _temporary: TemporaryDirectory | None = None

    def __init_subclass__(cls) -> None:
        """Register a new subclass with the Auto class of the same name, so that pipelines accept
        it.

        It is registered for a config class of its own, which no checkpoint has.
        """
        if cls.tasks:
            name = cls.__name__
            cls.auto_class = getattr(transformers, name.replace("ORT", "Auto"), AutoModel)
            config_class = type(f"{name}Config", (PreTrainedConfig,), {"model_type": name.lower()})
            cls.auto_class.register(config_class, cls, exist_ok=True)
            MODEL_CLASSES[name] = cls

    def __init__(
        self,
        directory: str | os.PathLike,
        config: PreTrainedConfig | None = None,
        graph: Path | None = None,
        **arguments: Any,
    ):
        self.directory = Path(directory).resolve()
        self.arguments = {"graph": graph, **arguments}
        self.runtime = self._open(graph, **arguments)
        if graph is None:
            self.config = config or load_config(self.runtime.config)
            reads_images = HEADS[self.runtime.architecture].reads == READS_IMAGES
        else:
            self.config = config or AutoConfig.from_pretrained(directory)
            reads_images = self.runtime.reads_images
        self.main_input_name = "pixel_values" if reads_images else "input_ids"
        self.input_modalities = ("image",) if reads_images else ("text",)

    def _open(self, graph: Path | None, **arguments: Any) -> Any:
        """Return the `Runtime` of our export if `graph` is `None`, else a `ForeignGraph` for that
        path.

        `arguments` are those of `Runtime`.

        Raises:
            ValueError: if the model or the graph has no outputs for this class.
        """
        name = type(self).__name__
        if graph is None:
            runtime = Runtime(self.directory, **arguments)
            known = [name for name in HEADS if any(has_task(name, task) for task in self.tasks)]
            if runtime.architecture not in known:
                raise ValueError(
                    f"{self.directory} is a {runtime.architecture}, expected for {name} one of "
                    f"{', '.join(known)}"
                )
            return runtime
        if self.output_class is None:
            raise ValueError(
                f"{graph} is of another exporter, expected for {name} an export with "
                f"{opening.MANIFEST}: use export=True"
            )
        return ForeignGraph(self.directory, graph, self.output_class, **arguments)

    @classmethod
    def from_pretrained(
        cls,
        model_id: str | os.PathLike,
        config: PreTrainedConfig | None = None,
        export: bool = False,
        target: str | None = None,
        file_name: str | None = None,
        subfolder: str = "",
        **options: Any,
    ) -> Self:
        """Open an export, a graph of another exporter for whole sequences, or a checkpoint.

        A checkpoint is exported to a temporary folder first.

        Args:
            model_id: directory or Hub repository.
            config: config of the model, by default that of the export.
            export: True to export a checkpoint that has graphs already. One without graphs is
                exported anyway, with a warning.
            target: target of a new export, by default portable.
            file_name: graph whose dtype is loaded, such as `model_int8.onnx`; or a graph of another
                exporter, by default model.onnx.
            subfolder: folder of the export or of its graphs.
            options: `provider` or `providers`, of which the first counts; `session_options`, of
                which `intra_op_num_threads` counts; `revision`, `token`, `cache_dir`,
                `local_files_only`, `force_download` and `trust_remote_code` of transformers.
                `use_cache`, `use_merged`, `use_io_binding`, `provider_options` and `dtype` of
                optimum have no effect.

        Raises:
            TypeError: for an unknown option.
            UsageError: for a provider that no export runs on.
            FileNotFoundError: for a `file_name` that is not there.
            ValueError: if the model has no outputs for this class.
            OSError: by transformers, for a `model_id` that does not exist.
        """
        if unknown := sorted(options.keys() - opening.OPTIONS):
            raise TypeError(f"unknown {unknown}, expected some of {sorted(opening.OPTIONS)}")
        arguments = opening.runtime_arguments(options)
        root = opening.local_directory(model_id, options)
        if not opening.must_export(root, export):
            if (directory := opening.find_export(root, subfolder)) is None:
                graph = find_graph(root, subfolder, file_name)
                return cls(root, config, graph=graph, **arguments)
            arguments["dtype"] = opening.find_dtype(directory, file_name)
            return cls(directory, config, **arguments)
        temporary = TemporaryDirectory(prefix="vanilla-transformer-")
        out = Path(temporary.name) / "export"
        source = {"pretrained_model_name_or_path": model_id, "subfolder": subfolder}
        source |= opening.checkpoint_options(options)
        files = root / subfolder
        opening.export_checkpoint(cls.auto_class, files, out, target, config=config, **source)
        model = cls(out, config, **arguments)
        model._temporary = temporary
        return model

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Copy the files of the export to `save_directory`, in place of an export that is there.

        Changed configs are not saved. Other arguments of transformers have no effect.
        """
        source, target = self.directory, Path(save_directory)
        if target.resolve() != source:
            opening.remove_graphs(target)
            opening.copy_files(source, opening.list_files(source, self.runtime), target)

    _save_pretrained = save_pretrained  # sentence-transformers wraps it

    def __getstate__(self) -> dict[str, Any]:
        return {"directory": self.directory, "config": self.config, **self.arguments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        pixel_values: Any = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the graph on tokens or images and return its outputs, as the class in transformers
        does.

        They are arrays for arrays, and otherwise tensors on the device of the input.

        Args:
            input_ids, attention_mask, token_type_ids: (B, S), for multiple choice (B, C, S).
            pixel_values: (B, C, H, W), in place of tokens.
            return_dict: False to return a tuple in place of named outputs.
            kwargs: inputs of other models, ignored with a warning.

        Raises:
            ValueError: for inputs of a wrong shape, dtype or range.
        """
        warn_of_ignored(self, kwargs)
        inputs = to_numpy(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            pixel_values=pixel_values,
        )
        convert = converter(pixel_values if input_ids is None else input_ids)
        outputs = {
            OUTPUT_NAMES.get(name, name): convert(array)
            for name, array in self.runtime.outputs(**inputs).items()
        }
        known = self.output_class.__dataclass_fields__
        output = self.output_class(**{name: outputs[name] for name in outputs if name in known})
        return output.to_tuple() if return_dict is False else output

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.runtime.device == "cpu" else "cuda")

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the model itself: it keeps its device and its dtype. Another device logs a
        warning."""
        device = kwargs.get("device", args[0] if args else None)
        if isinstance(device, str | int | torch.device):
            kind = torch.device(device).type
            if kind != self.device.type:
                logger.warning_once(f"the model stays on {self.device} and cannot move to {kind}")
        return self

    def eval(self) -> Self:
        return self

    def can_generate(self) -> bool:
        return False

    def get_input_embeddings(self) -> SimpleNamespace:
        """Return an object whose `num_embeddings` is the size of the vocabulary, `None` without
        one."""
        return SimpleNamespace(num_embeddings=self.runtime.config.get("vocab_size"))


def load_config(fields: Mapping[str, Any]) -> PreTrainedConfig:
    """Return a config object for `fields`, the config.json of an export.

    Names that only Transformers.js reads are left out.
    """
    ours = {name: value for name, value in fields.items() if name not in MARIAN_NAMES}
    return AutoConfig.for_model(**ours)


def to_numpy(**inputs: Any) -> dict[str, np.ndarray]:
    """Return `{name: array}` of the inputs, tensors or arrays, that are not `None`."""
    return {
        name: value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        for name, value in inputs.items()
        if value is not None
    }


def converter(like: Any) -> Callable[[np.ndarray], Any]:
    """Return a function that converts an array to a tensor on the device of `like`.

    If `like` is no tensor, the function returns the array as it is.
    """
    if isinstance(like, torch.Tensor):
        return lambda array: torch.from_numpy(array).to(like.device)
    return lambda array: array


def warn_of_ignored(model: ORTModel, inputs: Mapping[str, Any]) -> None:
    """Log one warning for each of `inputs` that is set, because `model` ignores it.

    Inputs are set if they are not `None` or `False`.
    """
    for name, value in inputs.items():
        if value is not None and value is not False:
            logger.warning_once(f"{type(model).__name__} ignores {name}, which no graph takes")
