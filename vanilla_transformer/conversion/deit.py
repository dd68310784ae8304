"""DeiT (Touvron et al. 2021): ViT with a distillation token after the class token. A classifier
reads one of them or both."""

import torch

from ..configuration_vanilla_transformer import VanillaVisionConfig
from . import vit
from .fields import Fields, TensorNames, Theirs
from .tensors import Op, TensorMap, tensor_map

CLASSES = vit.CLASSES | {
    "ForImageClassificationWithTeacher": "VanillaVisionForImageClassification",
}
FIELDS = vit.FIELDS
IMAGE_PROCESSOR = "DeiTImageProcessor"

BOTH_TOKENS = Op("both tokens", lambda cls, distillation: (torch.cat([cls[0], distillation[0]]),))
MEAN = Op("mean", lambda cls, distillation: ((cls + distillation) / 2,))
# The classifier reads the states of both tokens side by side.
MEAN_OF_BOTH = Op(
    "side by side, halved", lambda cls, distillation: (torch.cat([cls, distillation], dim=1) / 2,)
)
OF_CLASS_TOKEN = Op("and zeros", lambda t: (torch.cat([t, torch.zeros_like(t)], dim=1),))


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    return vit.to_vanilla_config(theirs, names) | {"num_first_tokens": 2}


def tensor_maps(ours: VanillaVisionConfig, theirs: Theirs) -> list[TensorMap]:
    both = ("embeddings.distillation_token",)
    first = TensorMap(
        ("model.embeddings.first_tokens",), "embeddings.cls_token", BOTH_TOKENS, extra_inputs=both
    )
    return [
        first,
        *vit.body(ours, theirs.qkv_bias),
        *classifier(theirs.architectures[0].endswith("WithTeacher")),
    ]


def classifier(is_mean: bool) -> list[TensorMap]:
    """Return the tensor maps of the classifier's weight and bias.

    With `is_mean` it is the mean of the source's classifiers of the class token and the
    distillation token. Otherwise it reads the class token alone.
    """
    if not is_mean:
        weight = tensor_map("classifier.weight", "classifier.weight", OF_CLASS_TOKEN)
        return [weight, tensor_map("classifier.bias", "classifier.bias")]
    return [
        TensorMap(
            (f"classifier.{part}",),
            f"cls_classifier.{part}",
            op,
            extra_inputs=(f"distillation_classifier.{part}",),
        )
        for part, op in (("weight", MEAN_OF_BOTH), ("bias", MEAN))
    ]
