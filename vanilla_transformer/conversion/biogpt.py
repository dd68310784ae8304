"""BioGPT (Luo et al. 2022): GPT-2's layers, positions from row 2 on. The epsilon of norms is 1e-5,
whatever the config says."""

from . import bart, bert
from .fields import Fields, Ours, TensorNames, Theirs, same_names
from .tensors import TensorMap, drop_rows, layers, linear, tensor_map, tokens

ARCHITECTURES = {
    "BioGptModel": "VanillaDecoderModel",
    "BioGptForCausalLM": "VanillaDecoderForCausalLM",
    "BioGptForSequenceClassification": "VanillaDecoderForSequenceClassification",
    "BioGptForTokenClassification": "VanillaDecoderForTokenClassification",
}


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    names = bert.STACK | same_names(
        *("max_position_embeddings", "activation_dropout", "scale_embedding")
    )
    return bert.stack_fields(theirs, names) | {"norm_first": True, "lm_head_bias": False}


def tensor_maps(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    return [
        *tokens("embed_tokens.weight", "output_projection.weight", theirs.tie_word_embeddings),
        tensor_map(
            "model.embeddings.embed_positions.weight", "embed_positions.weight", drop_rows(2)
        ),
        *layers(bart.LAYER, "model.layers", "layers", ours.num_hidden_layers),
        *linear("model.norm", "layer_norm"),
        tensor_map("score.weight", "score.weight"),
        *linear("classifier", "classifier"),
    ]
