"""What the model classes share: opening, saving, devices, and runs of full-sequence graphs."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import ModelOutput, PushToHubMixin, logging

from ..exporting.repository_files import MARIAN_NAMES
from ..heads import HEADS, READS_IMAGES, Task, has_task
from ..runtime import Runtime
from . import opening

logger = logging.get_logger(__name__)


class ORTModel(PushToHubMixin):
    """An export behind the interface of a transformers model, with the arguments of optimum-onnx.

    Subclasses set the task that the export must have, and the class of AutoModel they stand for.

    Args:
        directory: directory of an export.
        config: config of the model, by default that of the export.
        arguments: arguments of `Runtime`: `threads`, `device` and `dtype`.

    Raises:
        ValueError: for an export of another task.
        FileNotFoundError, ValueError, OSError: as `Runtime`.
    """

    tasks: ClassVar[tuple[Task, ...]] = ()
    auto_class: ClassVar[Any] = None
    dtype = torch.float32
    training = False
    _temporary: TemporaryDirectory | None = None

    def __init__(
        self,
        directory: str | os.PathLike,
        config: PreTrainedConfig | None = None,
        **arguments: Any,
    ):
        self.directory = Path(directory)
        self.arguments = arguments
        self.runtime = Runtime(directory, **arguments)
        self._check_task()
        self.config = config or load_config(self.runtime.config)
        reads_images = HEADS[self.runtime.architecture].reads == READS_IMAGES
        self.main_input_name = "pixel_values" if reads_images else "input_ids"
        self.input_modalities = ("image",) if reads_images else ("text",)

    def _check_task(self) -> None:
        architecture = self.runtime.architecture
        if not any(has_task(architecture, task) for task in self.tasks):
            known = [name for name in HEADS if any(has_task(name, task) for task in self.tasks)]
            raise ValueError(
                f"{self.directory} is a {architecture}, expected for {type(self).__name__} one of "
                f"{', '.join(known)}"
            )

    @classmethod
    def from_pretrained(
        cls,
        model_id: str | os.PathLike,
        config: PreTrainedConfig | None = None,
        export: bool = False,
        target: str | None = None,
        file_name: str | None = None,
        subfolder: str = "",
        trust_remote_code: bool | None = None,
        provider: str | None = None,
        providers: Any = None,
        provider_options: Any = None,
        session_options: Any = None,
        use_cache: bool = True,
        use_merged: bool | None = None,
        use_io_binding: bool | None = None,
        dtype: Any = None,
        **hub: Any,
    ) -> Self:
        """Return the model of an export, or of a checkpoint that is exported first.

        `use_merged`, `use_io_binding` and `dtype` are accepted for optimum's callers and have no
        effect: an export has one form and chooses its bindings itself.

        Args:
            model_id: directory or Hub repository.
            config: config of the model, by default that of the export.
            export: whether to export a checkpoint, also if there are graphs. Without any graph it
                is exported anyway, with a warning.
            target: target of the export, by default portable.
            file_name: graph whose dtype is loaded, such as `model_int8.onnx`.
            subfolder: folder of the export or of its graphs.
            trust_remote_code: passed to transformers if a checkpoint is exported.
            provider: onnxruntime provider, by default that of the target. The Azure provider is
                the CPU.
            providers: onnxruntime providers, of which the first counts. They replace `provider`.
            provider_options: not supported; a warning if set.
            session_options: options of which only `intra_op_num_threads` is supported.
            use_cache: only a warning if False, because exports always have caches.
            hub: `revision`, `token`, `cache_dir`, `local_files_only` and `force_download`.

        Raises:
            TypeError: for an unknown argument.
            UsageError: for a provider that no export runs on.
            FileNotFoundError: for a `file_name` that the export does not have.
            OSError: by transformers, for a `model_id` that does not exist.
        """
        if unknown := sorted(hub.keys() - {*opening.HUB_OPTIONS}):
            raise TypeError(f"from_pretrained got {unknown}, expected {opening.HUB_OPTIONS}")
        for name in [] if use_cache else ["use_cache"]:
            logger.warning(f"{name}=False has no effect: exports always have caches")
        if provider_options:
            logger.warning(f"provider_options={provider_options} has no effect")
        arguments = {
            "threads": opening.find_threads(session_options),
            "device": opening.find_device(provider, providers),
        }
        root = opening.local_directory(model_id, hub)
        if not opening.must_export(model_id, root, export):
            directory = opening.find_export(root, subfolder)
            arguments["dtype"] = opening.find_dtype(directory, file_name)
            return cls(directory, config, **arguments)
        options = {**hub, "subfolder": subfolder, "trust_remote_code": trust_remote_code}
        temporary = opening.export_checkpoint(cls.auto_class, model_id, options, config, target)
        model = cls(Path(temporary.name) / "export", config, **arguments)
        model._temporary = temporary
        return model

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Copy the export to `save_directory`, where it replaces another export. Arguments of
        transformers have no effect."""
        info = self.runtime.info
        opening.copy_export(info.directory, list(info.manifest["files"]), Path(save_directory))

    _save_pretrained = save_pretrained  # sentence-transformers replaces it

    def __getstate__(self) -> dict[str, Any]:
        return {"directory": self.directory, "config": self.config, **self.arguments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    # ------------------------------------------------------------------ interface of torch modules

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.runtime.device == "cpu" else "cuda")

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the model, which stays on its device and keeps its dtype. Log one warning for
        another device."""
        wanted = kwargs.get("device", args[0] if args else None)
        if isinstance(wanted, str | int | torch.device):
            kind = torch.device(wanted).type
            if kind != self.device.type:
                logger.warning_once(f"the model stays on {self.device}, and cannot move to {kind}")
        return self

    def eval(self) -> Self:
        return self

    def can_generate(self) -> bool:
        return False

    def get_input_embeddings(self) -> SimpleNamespace:
        """Return an object with the size of the vocabulary, which pipelines compare with the
        tokenizer's."""
        return SimpleNamespace(num_embeddings=self.runtime.config.get("vocab_size"))


def load_config(fields: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the config of an export, without the names that Transformers.js reads."""
    return AutoConfig.for_model(
        **{name: value for name, value in fields.items() if name not in MARIAN_NAMES}
    )


# ----------------------------------------------------------------------------------------- tensors


def to_numpy(inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors that are set as arrays."""
    return {
        name: value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        for name, value in inputs.items()
        if value is not None
    }


def converter(like: Any) -> Callable[[np.ndarray], Any]:
    """Return a function that converts arrays to the type and device of the input `like`."""
    if isinstance(like, torch.Tensor):
        return lambda array: torch.from_numpy(array).to(like.device)
    return lambda array: array


def build_output(
    output_class: type[ModelOutput], arrays: Mapping[str, np.ndarray], like: Any, as_dict: Any
) -> Any:
    """Return the outputs that `output_class` has, as tensors like the input `like`, or as a tuple
    if `as_dict` is False."""
    convert = converter(like)
    fields = output_class.__dataclass_fields__  # type: ignore[attr-defined]
    output = output_class(
        **{name: convert(array) for name, array in arrays.items() if name in fields}
    )
    return output.to_tuple() if as_dict is False else output


def warn_of_ignored(model: Any, inputs: Mapping[str, Any]) -> None:
    """Log one warning for each input that is set and that no graph takes."""
    for name, value in inputs.items():
        if value is not None and value is not False:
            logger.warning_once(
                f"{type(model).__name__} ignores {name}: its graph has no such input"
            )
