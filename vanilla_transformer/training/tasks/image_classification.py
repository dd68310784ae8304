"""Image classification: one label for each image.

`data.dataset` is a directory DIR with images as DIR/SPLIT/LABEL/*.png (and other formats that
Pillow reads), or a data set with a column of images and one of labels.
"""

import io

import torch
from datasets import Features, Image, Value
from PIL import Image as Pillow
from transformers import BaseImageProcessor, PreTrainedConfig, PreTrainedModel, ViTImageProcessorPil

from ...configuration_vanilla_transformer import pair
from ...modeling_vanilla_transformer import VanillaVisionForImageClassification
from ..data import data_set, select_columns
from ..values import data_keys
from .sequence_classification import label_fields
from .task import Collator, Rows, Task, accuracy, named_labels, top_label

DATA = data_keys("dataset", "config", "columns")  # `columns` are those of images and labels
# names that `datasets` uses for a directory, as do most data sets on the Hub
COLUMNS = ("image", "label")
# images are decoded when they are read
FEATURES = Features(image=Image(decode=False), label=Value("string"))


def read(data: dict, split: str) -> Rows | None:
    splits = data_set(data)
    if split not in splits:
        return None
    rows = select_columns(splits[split], data.get("columns", COLUMNS), COLUMNS)
    return named_labels(rows.cast_column("image", FEATURES["image"]), "label", FEATURES)


def processor(config: PreTrainedConfig) -> BaseImageProcessor:
    """Return a new image processor that resizes images to the `image_size` of `config`."""
    height, width = pair(config.image_size)
    return ViTImageProcessorPil(size={"height": height, "width": width})


def collator(processor: BaseImageProcessor, model: PreTrainedModel) -> Collator:
    def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
        images = [open_image(row["image"]) for row in rows]
        labels = torch.tensor([model.config.label2id[row["label"]] for row in rows])
        return {**processor(images, return_tensors="pt"), "labels": labels}

    return collate


def open_image(image: dict) -> Pillow.Image:
    """Return a data set's `image`, a dict with "bytes" or "path", in RGB. Raises ValueError if it
    is damaged."""
    file = image["path"] if image["bytes"] is None else io.BytesIO(image["bytes"])
    try:
        with Pillow.open(file) as opened_image:
            return opened_image.convert("RGB")
    except (OSError, SyntaxError) as error:
        raise ValueError(f"{image['path']} is not a complete image: {error}") from None


TASK = Task(
    model=VanillaVisionForImageClassification,
    pipeline="image-classification",
    data=DATA,
    metric_names=("accuracy",),
    read=read,
    config_fields=label_fields,
    collator=collator,
    reduce=top_label,
    metrics=accuracy,
    processor=processor,
)
