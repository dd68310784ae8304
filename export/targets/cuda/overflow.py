"""A check for overflow in float16."""

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vanilla_transformer.layers_vanilla_transformer import eager_attention_forward

from ...heads import HEADS, READS_CHOICES, READS_IMAGES
from ...shared.options import as_list
from ...specs.sequences import pair

FLOAT16_MAX = torch.finfo(torch.float16).max


@torch.no_grad()
def overflow(model: PreTrainedModel) -> str | None:
    """Return text on the first module of `model` whose values are too large for float16, or `None`.

    Too large is more than half of the largest float16, or NaN. `model` must be in float32. It runs
    on random tokens or images. The outputs of all modules and the attention scores before the
    softmax are checked.
    """
    problems = []

    def check(name, states):
        if isinstance(states, torch.Tensor) and states.is_floating_point():
            largest = states.abs().max().item()
            # a margin of a factor of 2 for other inputs
            if not largest <= FLOAT16_MAX / 2:
                problems.append(f"{name or 'the model'} reaches {largest:.3g}")

    # `Attention` keeps scores in float32, where they must not reach the mask value. Other graphs
    # scale the queries first, so scores are stored in float16 after scaling.
    def scores(module, query, key, value, mask, scaling, **kwargs):
        keys = key.repeat_interleave(module.num_key_value_groups, 1)
        check(f"{names[module]}, scores", query @ keys.transpose(2, 3) * scaling)
        return eager_attention_forward(module, query, key, value, mask, scaling, **kwargs)

    names = {module: name for name, module in model.named_modules()}
    hooks = [
        module.register_forward_hook(lambda module, inputs, output: check(names[module], output))
        for module in names
    ]
    ALL_ATTENTION_FUNCTIONS.register("measured", scores)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("measured")
    model(**random_inputs(model))
    model.set_attn_implementation(implementation)
    for hook in hooks:
        hook.remove()
    return problems[0] if problems else None


def random_inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    head, config = HEADS[type(model).__name__], model.config
    if head.reads == READS_IMAGES:
        return {
            "pixel_values": torch.randn(
                4, config.num_channels, *pair(config.image_size), generator=generator
            )
        }
    ids = torch.randint(
        config.vocab_size, (4, min(64, config.max_position_embeddings)), generator=generator
    )
    ids = ids[:, None].expand(-1, 2, -1) if head.reads == READS_CHOICES else ids
    if head.needs_end_token:
        ids[:, -1] = as_list(config.eos_token_id)[0]
    return {"input_ids": ids, **({"decoder_input_ids": ids} if config.is_encoder_decoder else {})}
