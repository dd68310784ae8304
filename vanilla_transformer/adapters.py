"""The default target modules of PEFT's adapters: each PEFT method has a dictionary by model
type."""

import re
import sys

DICTIONARY = re.compile(r"TRANSFORMERS_MODELS_TO_(\w+)_MODULES_MAPPING")
QUERIES_AND_VALUES = ["q_proj", "v_proj"]  # Hu et al. 2021, LoRA, section 7.1
TARGET_MODULES = {
    "IA3_TARGET": ["k_proj", "v_proj", "down_proj"],  # Liu et al. 2022, section 3.3
    "IA3_FEEDFORWARD": ["down_proj"],  # those of them whose input is scaled
    "LNTUNING_TARGET": ["self_attn_norm", "cross_attn_norm", "feed_forward_norm"],
}


def register_adapters(model_type: str) -> None:
    """Add `model_type` to PEFT's dictionaries of target modules, if PEFT has been imported.

    Existing entries stay.
    """
    constants = sys.modules.get("peft.utils.constants")
    for name, dictionary in vars(constants).items() if constants else ():
        if match := DICTIONARY.fullmatch(name):
            dictionary.setdefault(
                model_type, list(TARGET_MODULES.get(match[1], QUERIES_AND_VALUES))
            )
