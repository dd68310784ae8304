"""PLBart (Ahmad et al. 2021): BART, with a sequence's last token, its language, in front of it for
the decoder."""

from . import bart

UNUSED = bart.UNUSED
tensor_maps = bart.tensor_maps
CLASSES = {end: ours for end, ours in bart.CLASSES.items() if end != "ForQuestionAnswering"}
FIXED = bart.FIXED
to_vanilla_config = bart.wrapped_config
