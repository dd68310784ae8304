"""Conversion of the weights of a torch.nn.Transformer, with a comparison of the outputs.

    python examples/convert_torch_transformer.py --norm-first

The same names are those of torch.nn.TransformerEncoder and TransformerDecoder, without a prefix.
"""

import argparse
import sys

import torch
from torch import nn

from vanilla_transformer import VanillaSeq2SeqConfig, VanillaSeq2SeqModel

ENCODER = {"norm1": "self_attn_norm", "norm2": "feed_forward_norm"}
DECODER = {**ENCODER, "norm2": "cross_attn_norm", "norm3": "feed_forward_norm"}
PARTS = {"linear1": "feed_forward.up_proj", "linear2": "feed_forward.down_proj"}
PARTS |= {"multihead_attn": "cross_attn", "out_proj": "o_proj"}


def converted(state_dict):
    """Yield our names and tensors. Queries, keys and values are one matrix in torch's attention."""
    for name, tensor in state_dict.items():
        norms = DECODER if name.startswith("decoder.") else ENCODER
        name = ".".join((PARTS | norms).get(part, part) for part in name.split("."))
        if "in_proj_" in name:
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                yield name.replace("in_proj_", f"{letter}_proj."), part
        else:
            yield name, tensor


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--norm-first", action="store_true", help="norms before each sublayer")
    norm_first = parser.parse_args(argv).norm_first
    theirs = nn.Transformer(32, 4, 2, 2, 64, 0.0, batch_first=True, norm_first=norm_first).eval()
    # state dicts have no embeddings: here there are no positions, and tables are not scaled
    config = VanillaSeq2SeqConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_attention_heads=4,
        encoder_layers=2, decoder_layers=2, norm_first=norm_first, final_norm=True,
        position_embedding_type="none", scale_embedding=False,
    )  # fmt: skip
    ours = VanillaSeq2SeqModel(config).eval()
    missing, unexpected = ours.load_state_dict(dict(converted(theirs.state_dict())), strict=False)
    if unexpected or any("embed_tokens" not in name for name in missing):
        sys.exit(f"the weights do not fit: {unexpected} are unknown, {missing} are missing")
    source, target = torch.randint(3, 100, (2, 7)), torch.randint(3, 100, (2, 5))
    table, mask = ours.get_input_embeddings(), nn.Transformer.generate_square_subsequent_mask(5)
    with torch.no_grad():
        expected = theirs(table(source), table(target), tgt_mask=mask)
        actual = ours(input_ids=source, decoder_input_ids=target).last_hidden_state
    print(f"largest difference of the last hidden states: {(actual - expected).abs().max():.1e}")


if __name__ == "__main__":
    main()
