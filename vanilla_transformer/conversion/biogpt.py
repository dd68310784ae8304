"""BioGPT (Luo et al. 2022): GPT-2's layers, positions from row 2 on. The epsilon of norms is 1e-5,
whatever the config says."""

from collections.abc import Collection

from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from . import bart, bert
from .fields import Fields
from .tensors import TensorMap, drop_rows, linear, tensor_map, tokens

CONFIG = "BioGptConfig"
ARCHITECTURES = {
    "BioGptModel": "VanillaDecoderModel",
    "BioGptForCausalLM": "VanillaDecoderForCausalLM",
    "BioGptForSequenceClassification": "VanillaDecoderForSequenceClassification",
    "BioGptForTokenClassification": "VanillaDecoderForTokenClassification",
}
PREFIX = "biogpt."


def to_vanilla_config(
    theirs: PreTrainedConfig, architecture: str, names: Collection[str]
) -> Fields:
    fields = {"norm_first": True, "lm_head_bias": False, "scale_embedding": theirs.scale_embedding}
    sizes = {
        "max_position_embeddings": theirs.max_position_embeddings,
        "activation_dropout": theirs.activation_dropout,
    }
    return bert.stack_fields(theirs) | fields | sizes


def tensor_maps(
    ours: VanillaTransformerConfig, theirs: PreTrainedConfig, architecture: str
) -> list[TensorMap]:
    return [
        *tokens("embed_tokens.weight", "output_projection.weight", theirs.tie_word_embeddings),
        tensor_map(
            "model.embeddings.embed_positions.weight", "embed_positions.weight", drop_rows(2)
        ),
        *bart.layers("model.layers", "layers", ours.num_hidden_layers),
        *linear("model.norm", "layer_norm"),
        tensor_map("score.weight", "score.weight"),
        *linear("classifier", "classifier"),
    ]
