"""Models with their exports, to compare generation with `transformers.generate`."""

import numpy as np
import pytest
import torch
from checkpoints import perturbed

from vanilla_transformer_export import Runtime

VOCABULARY, EOS, PAD = 48, 2, 3
# For the cpu target; the others, for the portable one, are those of `checkpoints` that have another
# pad token than 0.
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=40,
    num_attention_heads=4,
    pad_token_id=PAD,
)
CPU_MODELS = {
    "seq2seq-cpu": (
        "VanillaSeq2SeqForConditionalGeneration",
        dict(encoder_layers=1, decoder_layers=1),
    ),
    "causal-cpu": (
        "VanillaDecoderForCausalLM",
        dict(num_hidden_layers=1, max_position_embeddings=25),
    ),
}
MODELS = ("seq2seq-untied", "causal-learned", *CPU_MODELS)
each_model = pytest.mark.parametrize("name", MODELS)


def build(name):
    architecture, fields = CPU_MODELS[name]
    model = perturbed(architecture, {**SIZES, **fields}, scale=0.25)
    model.lm_head.bias.data[EOS] += 1.5  # so that rows end at different times
    return model


class Pair:
    """A `model` in torch, the `directory` of its export, and its `runtime`."""

    def __init__(self, model, directory):
        self.model, self.directory, self.runtime = model, directory, Runtime(directory)

    @torch.no_grad()
    def in_torch(self, ids, mask, **options):
        return self.model.generate(
            torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), **options
        ).numpy()

    def check(self, ids, mask, **options):
        expected = self.in_torch(ids, mask, **options)
        assert self.runtime.generate(ids, mask, **options).tolist() == expected.tolist(), options


def prompts(name, seed=0, lengths=(7, 1, 4, 6)):
    """Return random ids and mask (B, S) of rows of these `lengths` for the model `name`.

    Sources are padded on the right, prompts of a decoder on the left.
    """
    rng, longest = np.random.default_rng(seed), max(lengths)
    ids, mask = np.full((len(lengths), longest), PAD), np.zeros((len(lengths), longest), np.int64)
    for row, length in enumerate(lengths):
        real = slice(0, length) if name.startswith("seq2seq") else slice(longest - length, longest)
        ids[row, real], mask[row, real] = rng.integers(4, VOCABULARY, length), 1
    return ids, mask
