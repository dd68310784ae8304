"""The base class of all models: opening, saving, devices, and runs of full-sequence graphs."""

import inspect
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn, Self

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModel, GenerationConfig, PreTrainedConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, PushToHubMixin, logging

from vanilla_transformer.generation_settings import forget_default_length

from ..exporting.repository_files import MARIAN_NAMES
from ..heads import HEADS, Task, has_task
from ..inference.options import PROMPT_LOOKUP
from . import opening
from .encoder_graph import DEFAULT_NAME, ForeignEncoder
from .saving import read_json, save

logger = logging.get_logger(__name__)

MODEL_CLASSES: "dict[str, type[ORTModel]]" = {}  # by name
# outputs of graphs that have another name in transformers
OUTPUT_NAMES = {"prediction_logits": "logits"}


class ORTModel(PushToHubMixin):
    """An export with the methods of a transformers model and the arguments of optimum-onnx.

    Args:
        runtime: a `Runtime` of an export, or a `ForeignEncoder`.
        config: config of the model, by default that of the export.

    Raises:
        ValueError: if the model has no outputs for this class.
    """

    auto_class: ClassVar[Any]
    output_class: ClassVar[Any]
    tasks: ClassVar[Sequence[Task]]
    is_generator: ClassVar[bool] = False
    generation_config: GenerationConfig | None = None
    dtype, training = torch.float32, False
    _temporary: opening.TemporaryFolder | None = None

    def __init_subclass__(cls, tasks: Sequence[Task] = (), output_class: Any = None) -> None:
        """Register a subclass with the Auto class of the same name, so that pipelines accept it.

        An export must have one of `tasks`; users do not open classes without tasks. `output_class`
        is a class of transformers.
        """
        if tasks:  # registered for a model type that no checkpoint has
            name = cls.__name__
            cls.tasks, cls.output_class = tasks, output_class
            cls.auto_class = getattr(transformers, name.replace("ORT", "Auto"), AutoModel)
            config_class = type(f"{name}Config", (PreTrainedConfig,), {"model_type": name.lower()})
            cls.auto_class.register(config_class, cls, exist_ok=True)
            MODEL_CLASSES[name] = cls

    def __init__(self, runtime: Any, config: PreTrainedConfig | None = None):
        self.runtime = runtime
        self._check_class()
        fields = self.runtime.config
        names = fields.keys() - MARIAN_NAMES  # which only Transformers.js reads
        self.config = config or AutoConfig.for_model(**{name: fields[name] for name in names})
        if self.can_generate():
            # prompt lookup changes no tokens, and few graphs check several tokens per step
            stored = self.runtime.info.generation_config
            settings = {name: stored[name] for name in stored.keys() - {*PROMPT_LOOKUP}}
            forget_default_length(settings)  # transformers generates 20 tokens then
            default = GenerationConfig.from_model_config(self.config)
            self.generation_config = GenerationConfig.from_dict(settings) if settings else default
        self._saved_fields = self._config_fields()
        file = read_json(self.runtime.info.directory / CONFIG_NAME)
        if config is not None and config.model_type == file.get("model_type"):
            self._saved_fields[CONFIG_NAME] = json_fields(type(config).from_dict(file))
        reads_images = hasattr(self.config, "num_channels")
        self.main_input_name = "pixel_values" if reads_images else "input_ids"
        self.input_modalities = ("image",) if reads_images else ("text",)

    def _check_class(self) -> None:
        """Raise ValueError if the export or the graph has no outputs for this class."""
        if isinstance(self.runtime, ForeignEncoder):
            actual, expected = self.runtime.output_names, [*self.output_class.__dataclass_fields__]
        else:
            actual = [self.runtime.architecture]
            expected = [head for head in HEADS if any(has_task(head, task) for task in self.tasks)]
        if not {*actual} & {*expected}:
            names = f"for {type(self).__name__} one of {', '.join(expected)}"
            where = self.runtime.info.directory
            raise ValueError(f"{where} has {', '.join(actual)}, expected {names}")

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
        """Open an export, an encoder of another exporter, or a checkpoint.

        A checkpoint is exported to a temporary folder first.

        Args:
            model_id: directory or Hub repository.
            config: config of the model, or its directory or Hub repository, by default that of the
                export.
            export: True to export a checkpoint that has graphs already. One without graphs is
                exported anyway, with a warning.
            target: target of a new export, by default portable; an export that is there keeps its
                own, with a warning.
            file_name: graph whose dtype is loaded, such as `model_int8.onnx`; or an encoder of
                another exporter, by default model.onnx.
            subfolder: folder of the model or of its graphs.
            options: `provider` or `providers`, of which the first counts; `session_options`, of
                which `intra_op_num_threads` counts; `revision`, `token`, `cache_dir`,
                `local_files_only`, `force_download` and `trust_remote_code` of transformers.
                `use_cache`, `use_merged`, `use_io_binding`, `provider_options` and `dtype` have no
                effect.

        Raises:
            TypeError: for an unknown option, and an argument or a class of a wrong type.
            UsageError: for a provider that no export runs on.
            FileNotFoundError: for a `file_name` or `subfolder` that is not there.
            ValueError: if the model has no outputs for this class, and for graphs of another
                exporter that generate.
            OSError: for a `model_id` that does not exist.
        """
        if not hasattr(cls, "tasks"):
            raise TypeError(f"{cls.__name__} has no task, expected one of {[*MODEL_CLASSES]}")
        arguments, subfolder = opening.runtime_arguments(options), subfolder or ""
        config = None if config is None else opening.resolve_config(config, options)
        graph = None if export or cls.is_generator else str(file_name or DEFAULT_NAME)
        root = opening.model_directory(model_id, subfolder, graph, options)
        folder, temporary = root / subfolder, None
        if opening.must_export(folder, export):
            hub = opening.checkpoint_options(options)
            hub |= {"config": config, "subfolder": subfolder}
            checkpoint = cls.auto_class.from_pretrained(model_id, **hub)
            temporary = opening.export_checkpoint(checkpoint, folder, target)
            root = folder = temporary.path
        open_runtime, config = opening.find_runtime(
            root, folder, file_name, config, options, cls.is_generator
        )
        model = cls(open_runtime(**arguments), config)
        if target not in (None, model.runtime.target):
            logger.warning(f"target={target!r} has no effect on the graphs in {root}")
        model._temporary = temporary
        return model

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Copy the files to `save_directory`, in place of an export that is there.

        Changed fields of `config` and `generation_config` are saved, and those of a `config` that
        was passed to `from_pretrained`. `push_to_hub=True` also calls `push_to_hub`, with `repo_id`
        or the name of the folder. Other arguments of transformers have no effect.

        Raises FileNotFoundError if files of the model are gone, and FileExistsError if
        `save_directory` has graphs that are neither an export nor replaced.
        """
        info, directory = self.runtime.info, Path(save_directory)
        before, after = self._saved_fields, self._config_fields()
        changes = {name: changed_fields(before.get(name, {}), after[name]) for name in after}
        save(info, directory, changes)
        if directory.resolve() == info.directory.resolve():
            self._saved_fields = after
        if kwargs.pop("push_to_hub", False):
            names = inspect.signature(self.push_to_hub).parameters.keys() & kwargs.keys()
            hub = {"repo_id": directory.name} | {name: kwargs[name] for name in names}
            self.push_to_hub(**hub)

    _save_pretrained = save_pretrained  # sentence-transformers wraps it

    def _config_fields(self) -> dict[str, dict[str, Any]]:
        """Return the fields of the configs, by the names of their files."""
        configs = {CONFIG_NAME: self.config, GENERATION_CONFIG_NAME: self.generation_config}
        return {name: json_fields(config) for name, config in configs.items() if config is not None}

    def __getstate__(self) -> dict[str, Any]:
        # sentence-transformers sets `_save_pretrained` to a local function, which no pickle holds
        return {name: value for name, value in vars(self).items() if name != "_save_pretrained"}

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
        """Run the graph and return its outputs, as the class in transformers does.

        They are arrays for arrays, and otherwise tensors on the device of the inputs.

        Args:
            input_ids, attention_mask, token_type_ids: (B, S), for multiple choice (B, C, S).
            pixel_values: (B, C, H, W), in place of tokens.
            return_dict: False to return a tuple in place of named outputs.
            kwargs: inputs of other models, ignored with a warning.

        Raises ValueError for inputs of a wrong shape, dtype or range.
        """
        self.warn_of_ignored(kwargs)
        if self.main_input_name == "pixel_values" and pixel_values is None:
            input_ids, pixel_values = None, input_ids  # the first argument of image models
        like = pixel_values if input_ids is None else input_ids
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        inputs |= {"token_type_ids": token_type_ids, "pixel_values": pixel_values}
        arrays = self.runtime.outputs(**{name: to_numpy(inputs[name]) for name in inputs})
        outputs = {OUTPUT_NAMES.get(name, name): array for name, array in arrays.items()}
        names = outputs.keys() & self.output_class.__dataclass_fields__.keys()
        return self._output({name: outputs[name] for name in names}, like, return_dict)

    def _output(self, fields: Mapping[str, Any], like: Any, return_dict: bool | None) -> Any:
        """Return `fields` as the outputs of `forward`, with tensors if `like` is a tensor."""
        output = self.output_class(**{name: from_numpy(fields[name], like) for name in fields})
        return output.to_tuple() if return_dict is False else output

    def warn_of_ignored(self, inputs: Mapping[str, Any]) -> None:
        """Log a warning for each of `inputs` that is neither `None` nor `False`: it is ignored."""
        for name, value in inputs.items():
            if value is not None and value is not False:
                logger.warning_once(f"{type(self).__name__} ignores {name}, which no graph takes")

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.runtime.device == "cpu" else "cuda")

    def to(self, device: Any = None, *args: Any, **kwargs: Any) -> Self:
        """Return the model, which keeps its device and dtype. Another device logs a warning."""
        is_device = isinstance(device, str | int | torch.device)
        if is_device and (kind := torch.device(device).type) != self.device.type:
            logger.warning_once(f"the model stays on {self.device} and cannot move to {kind}")
        return self

    @property
    def _modules(self) -> NoReturn:
        """The attribute of modules that `Trainer` and accelerate read first, which raises TypeError
        with the reason."""
        raise TypeError(
            f"{type(self).__name__} is not a torch.nn.Module, which Trainer and accelerate expect: "
            "call the model, or use pipeline()"
        )

    def eval(self) -> Self:
        return self

    def can_generate(self) -> bool:
        return self.is_generator

    def get_input_embeddings(self) -> SimpleNamespace:
        """Return an object with `num_embeddings`, the size of the vocabulary or `None`."""
        return SimpleNamespace(num_embeddings=self.runtime.config.get("vocab_size"))


def changed_fields(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `after` that `before` lacks or has with another value."""
    return {name: after[name] for name in after if after[name] != before.get(name, ...)}


def json_fields(config: PreTrainedConfig | GenerationConfig) -> dict[str, Any]:
    """Return the fields of `config` as its file has them."""
    fields = json.loads(config.to_json_string(use_diff=False))
    return {name: fields[name] for name in fields if name != "_name_or_path"}


def to_numpy(value: Any) -> np.ndarray | None:
    """Return a tensor, an array or a list as an array, and `None` as it is."""
    if isinstance(value, torch.Tensor):
        value = value.float() if value.dtype == torch.bfloat16 else value
        return value.detach().cpu().numpy()
    return None if value is None else np.asarray(value)


def from_numpy(value: Any, like: Any) -> Any:
    """Return an array as a tensor on the device of the tensor `like`, and others as they are."""
    if isinstance(value, np.ndarray) and isinstance(like, torch.Tensor):
        return torch.from_numpy(value).to(like.device)
    return value
