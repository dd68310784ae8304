"""BioGPT (Luo et al. 2022): GPT-2's layers, positions from row 2 on. The epsilon of norms is 1e-5,
whatever the config says."""

from . import bart, bert
from .fields import Fields, Ours, TensorNames, Theirs, our_classes, same_names
from .tensors import TensorMap, drop_rows, layers, linear, tensor_map, tokens

CLASSES = our_classes(
    "Decoder", "Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification"
)


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    names = bert.STACK | same_names(
        *("max_position_embeddings", "activation_dropout", "scale_embedding")
    )
    return bert.stack_fields(theirs, names) | {"norm_first": True, "lm_head_bias": False}


def tensor_maps(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    return [
        *tokens(ours, "embed_tokens.weight", "output_projection.weight"),
        tensor_map(
            "model.embeddings.embed_positions.weight", "embed_positions.weight", drop_rows(2)
        ),
        *layers(bart.LAYER, "model.layers", "layers", ours.num_hidden_layers),
        *linear("model.norm", "layer_norm"),
        tensor_map("score.weight", "score.weight"),
        *linear("classifier", "classifier"),
    ]
