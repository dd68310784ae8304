"""Exports need memory for one matrix at a time, whatever the size of the model."""

import tracemalloc

import pytest
import torch
from checkpoints import perturbed

from vanilla_transformer.source import Source
from vanilla_transformer_export.exporting.graphs import Graphs, write_graphs
from vanilla_transformer_export.graphs.config import Config
from vanilla_transformer_export.graphs.weights import CheckpointWeights
from vanilla_transformer_export.specs.alignment import alignment_heads
from vanilla_transformer_export.targets.registry import get_target

VOCABULARY, WIDTH = 15_000, 256
MATRIX = VOCABULARY * WIDTH * 4  # bytes
FORMATS = [
    ("cpu", "fp32"),
    ("cpu", "int8"),
    ("cpu", "int4"),
    ("portable", "fp32"),
    ("portable", "int8"),
    ("cuda", "fp16"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The folder of a sharded translator in each dtype, with three matrices of vocabulary size."""
    fields = dict(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=WIDTH, num_attention_heads=4
    )
    fields |= dict(encoder_layers=1, decoder_layers=1, tie_word_embeddings=False)
    model = perturbed("VanillaSeq2SeqForConditionalGeneration", fields)
    folder = tmp_path_factory.mktemp("large")
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype).save_pretrained(folder / str(dtype), max_shard_size="20MB")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target, weights", FORMATS)
def test_export_peak_memory_is_below_three_times_largest_matrix(
    checkpoints, target, weights, dtype, tmp_path
):
    checkpoint = checkpoints / str(dtype)
    assert len(list(checkpoint.glob("*.safetensors"))) > 1
    source = Source.open(checkpoint)
    config = Config(source.config(), source.architecture)
    kind = get_target(target)
    activations = weights if weights == "fp16" else "fp32"
    specs = kind.graph_specs(config.to_dict(), config.architecture, weights, activations)
    form = kind, activations, kind.opsets[0], {weights: specs}
    tracemalloc.start()
    heads = alignment_heads(config.to_dict())
    graphs = Graphs(config, CheckpointWeights(checkpoint, config), *form, alignment=heads)
    write_graphs(graphs, tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert MATRIX / 8 < peak < 3 * MATRIX
