"""The config of a checkpoint as graphs read it."""

from typing import Any

from ..specs.sequences import pair


class Config:
    """A config of `vanilla_transformer.checkpoint_config`, with the name of the model's class."""

    def __init__(self, values: Any, architecture: str):
        self.values = values
        self.architecture = architecture

    def __getattr__(self, name: str) -> Any:
        if name == "values":  # during an incomplete copy
            raise AttributeError(name)
        return getattr(self.values, name)

    @property
    def is_seq2seq(self) -> bool:
        return self.model_type == "vanilla-seq2seq"

    @property
    def has_rotary_positions(self) -> bool:
        return getattr(self, "position_embedding_type", None) == "rotary"

    @property
    def has_disentangled_positions(self) -> bool:
        return getattr(self, "position_embedding_type", None) == "disentangled"

    @property
    def head(self) -> str:
        """End of the class name after "For", such as "MaskedLM"; "" for a model without a head."""
        return self.architecture.partition("For")[2]

    @property
    def prefix(self) -> str:
        """Prefix of the names of all weights but those of the head: "model.", or "" for a model
        without a head."""
        return "model." if self.head else ""

    @property
    def encoder_prefix(self) -> str:
        """Prefix of the names of the encoder's weights in the checkpoint, such as
        "model.encoder."."""
        return f"{self.prefix}encoder." if self.is_seq2seq else self.prefix

    @property
    def decoder_prefix(self) -> str:
        """Prefix of the names of the decoder's weights in the checkpoint, such as
        "model.decoder."."""
        return f"{self.prefix}decoder." if self.is_seq2seq else self.prefix

    @property
    def grid(self) -> tuple[int, ...]:
        """Rows and columns of patches in an image of the config's `image_size`."""
        sides = zip(pair(self.image_size), pair(self.patch_size))
        return tuple(image // patch for image, patch in sides)

    @property
    def num_key_value_groups(self) -> int:
        """Number of query heads that share one head of keys and values."""
        return self.num_attention_heads // self.num_key_value_heads

    def layer_type(self, name: str) -> str:
        """Return the type of the layer that the module `name` is in, such as "full_attention"."""
        number = int(name.partition("layers.")[2].partition(".")[0])
        return self.types_of_layers(number + 1)[number]

    def window(self, layer_type: str) -> int | None:
        """Return the sliding window of layers of this type, or None if they have none."""
        return self.sliding_window if layer_type == "sliding_attention" else None

    def types_of_stack(self, prefix: str) -> list[str]:
        """Return the types of layers that the stack `prefix` has, each once."""
        return list(dict.fromkeys(self.types_of_layers(self.depth(prefix))))

    def depth(self, prefix: str) -> int:
        """Return the number of layers of the stack whose weights begin with `prefix`, such as
        "model.encoder.". The "model." may be missing."""
        part = prefix.removeprefix(self.prefix)
        return getattr(self, part.replace(".", "_layers") or "num_hidden_layers")
