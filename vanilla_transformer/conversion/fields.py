"""Conversion of config fields that families share, and the check that a family keeps all of
ours."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import VanillaTransformerConfig

# a config of ours, and one of the source, whose first architecture is the class that is converted
Ours = VanillaTransformerConfig
Theirs = PreTrainedConfig
Fields = dict[str, Any]
Names = Mapping[str, str]  # a field of ours: the source's field of the same meaning
TensorNames = Collection[str]

# fields of ours without effect on outputs, and those that `plan_parts.common_fields` copies
FREE = {field.name for field in dataclasses.fields(PreTrainedConfig)}
FREE |= {"auto_map", "use_cache", "initializer_range", "tie_word_embeddings"}
FREE |= {"bos_token_id", "eos_token_id", "sep_token_id"}
# fields of heads, with the ends of the names of the classes that read them
READ_BY = {
    "pooler_act": (
        *("Model", "PreTraining", "SentencePrediction"),
        *("SequenceClassification", "MultipleChoice"),
    ),
    "lm_transform_act": ("MaskedLM", "PreTraining"),
    "lm_head_bias": ("MaskedLM", "PreTraining", "CausalLM", "ConditionalGeneration"),
    "token_transform_act": ("TokenClassification",),
    "classifier_act": ("Classification", "QuestionAnswering", "MultipleChoice"),
    "classifier_pooling": ("SequenceClassification", "MultipleChoice"),
    "classifier_dropout": (
        *("EncoderForSequenceClassification", "Seq2SeqForSequenceClassification"),
        *("TokenClassification", "ImageClassification", "MultipleChoice"),
    ),
}


def same_names(*names: str) -> dict[str, str]:
    """Return a table of fields that have the same name in both configs."""
    return dict(zip(names, names))


def our_classes(variant: str, *heads: str) -> dict[str, str]:
    """Return {head: our class} of model classes that end with `heads`, such as "ForMaskedLM", and
    differ from ours only in what precedes it. `variant` is "Encoder" or another one."""
    return {head: f"Vanilla{variant}{head}" for head in heads}


def read_fields(theirs: Theirs, names: Names) -> Fields:
    """Return the fields of ours in the table `names`, with the values of `theirs`."""
    return {name: getattr(theirs, their_name) for name, their_name in names.items()}


def write_fields(ours: Ours, names: Names) -> Fields:
    """Return the source's fields in the table `names`, with the values of `ours`.

    If one field of theirs stands for several of ours, it has the value of the last one.
    """
    return {their_name: getattr(ours, name) for name, their_name in names.items()}


def require(config: PreTrainedConfig, **expected: Any) -> None:
    """Raise ValueError unless each field of `config` has its expected value.

    A tuple stands for several values that are allowed. The error names the field, its value and the
    values expected.
    """
    for name, values in expected.items():
        values = values if isinstance(values, tuple) else (values,)
        actual = getattr(config, name, None)
        if actual not in values:
            expected_values = " or ".join(repr(value) for value in values)
            raise ValueError(f"{name}={actual!r} cannot be converted, expected {expected_values}")


def require_padding(config: PreTrainedConfig) -> int:
    """Return the `pad_token_id` of `config`. Raises ValueError if there is none.

    Families whose positions count the ids that are not padding start them after this id.
    """
    if config.pad_token_id is None or config.pad_token_id < 0:
        raise ValueError(
            f"pad_token_id={config.pad_token_id} cannot be converted, expected a token: positions "
            "start after it"
        )
    return config.pad_token_id


# ------------------------------------------------------------------------- what a family represents


def require_kept(ours: Ours, back: Ours, model_class: str, lost: Collection[str]) -> None:
    """Raise ValueError for the first field of `ours` that another family cannot represent.

    Args:
        back: `ours`, converted to a config of the family and back.
        model_class: the name of our class.
        lost: fields that may have another value in `back`.
    """
    before, after = (effective_fields(config, model_class) for config in (ours, back))
    for name, value in before.items():
        if name not in lost and value != after.get(name):
            require(ours, **{name: getattr(back, name)})


def effective_fields(config: Ours, model_class: str) -> Fields:
    """Return the fields of `config` that `model_class`, the name of our class, reads.

    Values that stand for the same model are equal.
    """
    names = [field.name for field in dataclasses.fields(config) if field.name not in FREE]
    unread = {name for name, ends in READ_BY.items() if not model_class.endswith(ends)}
    unread |= unread_positions(config) if hasattr(config, "position_embedding_type") else set()
    if not getattr(config, "type_vocab_size", 0):  # the same as a type whose embedding is zeros
        unread.add("type_vocab_size")
    if not getattr(config, "tie_word_embeddings", True):
        unread.add("share_encoder_decoder_embeddings")
    fields = {name: getattr(config, name) for name in names if name not in unread}
    if "layer_types" in fields:
        fields["layer_types"] = types = config.types_of_layers(config.num_hidden_layers)
        if "rope_parameters" in fields:
            fields["rope_parameters"] = [*map(config.rope, types)]
    return fields


def unread_positions(config: Ours) -> set[str]:
    """Return the fields about positions that have no effect with the positions of `config`."""
    unread = set()
    if config.position_embedding_type != "rotary":
        unread.add("rope_parameters")
    if not config.has_position_bias:
        unread |= {"relative_attention_num_buckets", "relative_attention_max_distance"}
    if not config.has_learned_positions:
        unread.add("max_position_embeddings")
    if config.position_embedding_type in ("relative", "none"):
        unread.add("position_ids_from")
    if "sliding_attention" not in config.types_of_layers(config.num_hidden_layers):
        unread.add("sliding_window")
    return unread
