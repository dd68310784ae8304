"""mT5 (Xue et al. 2021): T5 v1.1 for many languages. It never scales what its head reads, tied or
not."""

from .t5 import ARCHITECTURES as T5
from .t5 import LOST, UNUSED, tensor_maps, to_source_config, to_vanilla_config

__all__ = ["LOST", "UNUSED", "tensor_maps", "to_source_config", "to_vanilla_config"]

ARCHITECTURES = {f"M{theirs}": ours for theirs, ours in T5.items()}
