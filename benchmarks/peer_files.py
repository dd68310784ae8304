"""The files of the engines in peers.py: OpenVINO graphs traced from our models, and llama.cpp
files.

They come from the same checkpoints as those of all other engines.
"""

import json
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer
from workload import ENCODERS, FIRST_TOKEN, OURS

MASKED = -1e9
CALIBRATION = {"rows": 32, "length": 128}
GROUP = 32  # 4-bit weights that share a scale

# ----------------------------------------------------------------------------------------- OpenVINO


class Encoder(nn.Module):
    """The encoder of a model: tokens and mask (B, S) in, states (B, S, D) out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        is_token = attention_mask[:, None, None] > 0
        masks = {"full_attention": added(is_token)}
        if window := self.model.config.sliding_window:
            order = torch.arange(attention_mask.shape[1])
            is_near = (order - order[:, None]).abs() <= window
            masks["sliding_attention"] = added(is_token & is_near)
        return self.model(input_ids, masks).last_hidden_state


class CrossStates(nn.Module):
    """The encoder of a seq2seq model: tokens and mask (B, S) in, keys and values (B, H, S, d) out.

    They are those of cross-attention, key and value of each layer of the decoder.
    """

    def __init__(self, model):
        super().__init__()
        self.encoder, self.layers = Encoder(model.get_encoder()), model.get_decoder().layers

    def forward(self, input_ids, attention_mask):
        states = self.encoder(input_ids, attention_mask)
        both = (layer.cross_attn.keys_and_values(None, states, None, None) for layer in self.layers)
        return tuple(state for pair in both for state in pair)


class Decoder(nn.Module):
    """A decode step with past keys and values as inputs, and the last logits and present ones as
    outputs.

    Inputs are new tokens and their positions (B, T), the mask of all tokens (B, past + T), and the
    rows (B,) whose past each row continues. With `cross`, T is 1, the mask (B, S) is that of the
    source, and the source's keys and values follow the others.
    """

    def __init__(self, model, cross: bool):
        super().__init__()
        self.model, self.cross = model, cross

    def forward(self, input_ids, position_ids, attention_mask, beam_idx, *states):
        count = len(states) // 2 if self.cross else len(states)
        reordered = make_cache([past.index_select(0, beam_idx) for past in states[:count]])
        if self.cross:
            cache = EncoderDecoderCache(reordered, make_cache(states[count:]))
            cache.is_updated = dict.fromkeys(range(len(reordered.layers)), True)
            mask = added(attention_mask[:, None, None] > 0)
            source = {"encoder_hidden_states": states[count], "encoder_attention_mask": mask}
        else:
            cache, source = reordered, {"attention_mask": added(causal(input_ids, attention_mask))}
        decoder = self.model.get_decoder()
        states = decoder(
            input_ids, position_ids=position_ids, past_key_values=cache, use_cache=True, **source
        )
        logits = self.model.lm_head(states.last_hidden_state[:, -1:])
        return logits, *(
            state for layer in reordered.layers for state in (layer.keys, layer.values)
        )


def added(allowed):
    return torch.where(allowed, 0.0, MASKED)


def causal(input_ids, mask):
    """Return True (B, 1, T, past + T) where a new token of `input_ids` (B, T) may look.

    `mask` (B, past + T) is 0 for padding.
    """
    positions = torch.arange(mask.shape[1])
    return (positions <= positions[-input_ids.shape[1] :, None])[None, None] & (
        mask[:, None, None] > 0
    )


def make_cache(states) -> DynamicCache:
    """Return a cache of transformers with `states`: the key and value of each layer in turn."""
    cache = DynamicCache()
    for key, value in zip(states[::2], states[1::2], strict=True):
        layer = DynamicLayer()
        layer.lazy_initialization(key, value)
        layer.keys, layer.values = key, value
        cache.layers.append(layer)
    return cache


def convert_openvino(kind: str, checkpoint: Path, out: Path, dtype: str) -> None:
    """Write `decoder.xml` and, if there is an encoder, `encoder.xml` of our `checkpoint` to `out`.

    `kind` is the kind of model, such as "seq2seq", and `dtype` that of the weights.
    """
    os.environ["CI"] = "true"  # otherwise openvino and nncf send telemetry
    import openvino

    import vanilla_transformer

    model = (
        getattr(vanilla_transformer, OURS[kind])
        .from_pretrained(checkpoint, attn_implementation="sdpa")
        .eval()
    )
    out.mkdir()
    with torch.no_grad():
        for name, graph in make_graphs(kind, model).items():
            openvino.save_model(
                compressed(graph, dtype, model.config), out / f"{name}.xml", compress_to_fp16=False
            )


def make_graphs(kind, model) -> dict:
    config = model.config
    if kind in ENCODERS:
        inputs = tokens("input_ids", 7) | tokens("attention_mask", 7)
        return {"encoder": traced(Encoder(model), inputs, ["states"])}
    heads, width = config.num_attention_heads, config.head_dim
    if kind == "gpt2":
        past = caches("past", config.num_hidden_layers, (heads, 3, width))
        return {"decoder": stateful(Decoder(model, False), make_inputs(4, mask=7) | past)}
    past = caches("past", config.decoder_layers, (heads, 3, width))
    cross = caches("cross", config.decoder_layers, (heads, 5, width))
    encoder = traced(
        CrossStates(model), {**tokens("input_ids", 7), **tokens("attention_mask", 7)}, list(cross)
    )
    return {
        "encoder": encoder,
        "decoder": stateful(Decoder(model, True), make_inputs(1, mask=5) | past | cross),
    }


def tokens(name, length):
    return {name: torch.ones(2, length, dtype=torch.int64)}


def make_inputs(length, mask):
    # with 64 bits, OpenVINO's graph is slow and wrong
    rows = torch.arange(2, dtype=torch.int32)
    return {
        **tokens("input_ids", length),
        **tokens("position_ids", length),
        **tokens("attention_mask", mask),
        "beam_idx": rows,
    }


def caches(name, layers, shape):
    return {
        f"{name}.{layer}.{part}": torch.randn(2, *shape)
        for layer in range(layers)
        for part in ("key", "value")
    }


def traced(module, examples: dict, outputs: list[str]):
    """Return OpenVINO's graph of `module`, with free batch size and lengths.

    Its inputs have the names of `examples`, {name: tensor}, its outputs the names `outputs`.
    """
    import openvino

    graph = openvino.convert_model(module.eval(), example_input=tuple(examples.values()))
    for ports, names in ((graph.inputs, examples), (graph.outputs, outputs)):
        for port, name in zip(ports, names, strict=True):
            port.get_tensor().set_names({name})
    free = {2: [-1, -1], 1: [-1]}
    graph.reshape(
        {
            name: free.get(example.ndim) or [-1, example.shape[1], -1, example.shape[3]]
            for name, example in examples.items()
        }
    )
    return graph


def stateful(module, examples: dict):
    """Return OpenVINO's graph of the decoder `module`, which keeps its past itself, empty at first.

    `examples` are its inputs, {name: tensor}.
    """
    from openvino import opset13 as operators
    from openvino._offline_transformations import apply_make_stateful_transformation

    present = {
        name: name.replace("past.", "present.") for name in examples if name.startswith("past.")
    }
    graph = traced(module, examples, ["logits", *present.values()])
    apply_make_stateful_transformation(graph, present)

    def constant(*values):
        return operators.constant(np.array(values, np.int64))

    rows = operators.gather(
        operators.shape_of(graph.input("input_ids"), output_type="i64"), constant(0), constant(0)
    )
    for node in graph.get_ops():
        if node.get_type_name() == "ReadValue":
            rest = [axis.min_length for axis in list(node.get_output_partial_shape(0))[1:]]
            shape = operators.concat([rows, constant(*rest)], axis=0)
            node.set_arguments([operators.broadcast(operators.constant(np.float32(0)), shape)])
    graph.validate_nodes_and_infer_types()
    return graph


def compressed(graph, dtype, config):
    """Return `graph` with weights of 8 or 4 bits by `dtype`: "int8", "int4" or "ptq".

    With "ptq", activations have 8 bits too, calibrated on random tokens. Another dtype changes
    nothing.
    """
    import nncf

    if dtype == "int8":
        return nncf.compress_weights(graph, mode=nncf.CompressWeightsMode.INT8_SYM)
    if dtype == "int4":
        return nncf.compress_weights(
            graph, mode=nncf.CompressWeightsMode.INT4_SYM, group_size=GROUP, all_layers=True
        )
    if dtype == "ptq":
        shape = (CALIBRATION["rows"], 1, CALIBRATION["length"])
        rows = np.random.default_rng(1).integers(FIRST_TOKEN, config.vocab_size - 1, shape)
        data = nncf.Dataset(
            [{"input_ids": ids, "attention_mask": np.ones_like(ids)} for ids in rows]
        )
        return nncf.quantize(
            graph, data, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(rows)
        )
    return graph


# ---------------------------------------------------------------------------------------- llama.cpp

GPT2_MODULES = {  # modules of a layer: (name in llama.cpp, True if transformers has it transposed)
    "ln_1": ("attn_norm", False),
    "attn.c_attn": ("attn_qkv", True),
    "attn.c_proj": ("attn_output", True),
    "ln_2": ("ffn_norm", False),
    "mlp.c_fc": ("ffn_up", True),
    "mlp.c_proj": ("ffn_down", True),
}


def convert_llama_cpp(checkpoint: Path, out: Path, dtype: str) -> None:
    """Write `model.gguf` to `out` for a GPT-2 model of transformers, with weights of `dtype`.

    The output projection, which is the embedding, has at least 8 bits, as in published files.
    """
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((checkpoint / "config.json").read_text())
    weights = {
        name.removeprefix("transformer."): array
        for name, array in load_file(checkpoint / "model.safetensors").items()
    }
    kind = {
        "f32": gguf.GGMLQuantizationType.F32,
        "q8": gguf.GGMLQuantizationType.Q8_0,
        "q4": gguf.GGMLQuantizationType.Q4_0,
    }
    out.mkdir()
    writer = gguf.GGUFWriter(out / "model.gguf", "gpt2")
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])

    def put(name, array, dtype="f32"):
        array = np.ascontiguousarray(array, np.float32)
        if dtype == "f32":
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind[dtype]), raw_dtype=kind[dtype])

    put("token_embd.weight", weights["wte.weight"], "f32" if dtype == "f32" else "q8")
    put("position_embd.weight", weights["wpe.weight"])
    for part in ("weight", "bias"):
        put(f"output_norm.{part}", weights[f"ln_f.{part}"])
    for layer in range(config["n_layer"]):
        for name, (theirs, transposed) in GPT2_MODULES.items():
            weight, bias = (weights[f"h.{layer}.{name}.{part}"] for part in ("weight", "bias"))
            put(
                f"blk.{layer}.{theirs}.weight",
                weight.T if transposed else weight,
                dtype if transposed else "f32",
            )
            put(f"blk.{layer}.{theirs}.bias", bias)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
