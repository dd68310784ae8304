"""The config of a checkpoint as graphs read it."""

from typing import Any


class Config:
    """A config of `vanilla_transformer.checkpoint_config`, with the name of the model's class."""

    def __init__(self, values: Any, architecture: str):
        self.values = values
        self.architecture = architecture

    def __getattr__(self, name: str) -> Any:
        if name == "values":  # of a copy that is not complete
            raise AttributeError(name)
        return getattr(self.values, name)

    @property
    def is_seq2seq(self) -> bool:
        return self.model_type == "vanilla-seq2seq"

    @property
    def has_rotary_positions(self) -> bool:
        return getattr(self, "position_embedding_type", None) == "rotary"

    @property
    def prefix(self) -> str:
        """Prefix of the names of the weights that are not of a head."""
        return "" if self.architecture.endswith("Model") else "model."
