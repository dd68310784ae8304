"""The models of the benchmarks, made from a seed in the files that each engine reads.

It runs in a separate process.
"""

import time
from pathlib import Path

import numpy as np

# Zero rows of a tied embedding have the logit 0, which is never the largest of thousands: no row
# ends early, and no engine needs a rule against the end token.
SEQ2SEQ = dict(
    vocab_size=32000, d_model=512, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=2048,
    decoder_ffn_dim=2048, encoder_attention_heads=8, decoder_attention_heads=8,
    activation_function="relu", scale_embedding=True, max_position_embeddings=2560,
    pad_token_id=31999, decoder_start_token_id=31999, eos_token_id=None, forced_eos_token_id=None,
)  # fmt: skip
GPT2 = dict(
    vocab_size=50257, n_layer=12, n_embd=768, n_head=12, bos_token_id=None, eos_token_id=None
)
BERT = dict(
    vocab_size=30522, num_hidden_layers=12, hidden_size=768, num_attention_heads=12,
    intermediate_size=3072, max_position_embeddings=2048,
)  # fmt: skip
# The shapes of facebook/bart-large-cnn and google/flan-t5-xl, with the same rule about tokens.
BART = dict(
    vocab_size=50264, d_model=1024, encoder_layers=12, decoder_layers=12, encoder_ffn_dim=4096,
    decoder_ffn_dim=4096, encoder_attention_heads=16, decoder_attention_heads=16,
    max_position_embeddings=1024, pad_token_id=1, decoder_start_token_id=2, eos_token_id=None,
    forced_eos_token_id=None,
)  # fmt: skip
T5 = dict(
    vocab_size=32128, d_model=2048, d_kv=64, d_ff=5120, num_layers=24, num_decoder_layers=24,
    num_heads=32, feed_forward_proj="gated-gelu", tie_word_embeddings=False, pad_token_id=0,
    decoder_start_token_id=0, eos_token_id=None,
)  # fmt: skip
MODERNBERT = dict(vocab_size=50368, pad_token_id=0)  # the rest is ModernBERT base's in transformers
# kind: (class of transformers, fields, fields over them for --quick)
MODELS = {
    "seq2seq": (
        "MarianMTModel",
        SEQ2SEQ,
        dict(
            vocab_size=499,
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
        )
        | dict(
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            pad_token_id=498,
            decoder_start_token_id=498,
        ),
    ),
    "gpt2": ("GPT2LMHeadModel", GPT2, dict(vocab_size=499, n_layer=2, n_embd=64, n_head=4)),
    "bert": (
        "BertModel",
        BERT,
        dict(
            vocab_size=499,
            num_hidden_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            intermediate_size=128,
        ),
    ),
    "bart": (
        "BartForConditionalGeneration",
        BART,
        dict(vocab_size=499, d_model=64, encoder_layers=2, decoder_layers=2)
        | dict(encoder_ffn_dim=128, decoder_ffn_dim=128)
        | dict(encoder_attention_heads=4, decoder_attention_heads=4),
    ),
    "t5": (
        "T5ForConditionalGeneration",
        T5,
        dict(vocab_size=499, d_model=64, d_ff=128, num_layers=2, num_decoder_layers=2, num_heads=4),
    ),
    "modernbert": (
        "ModernBertModel",
        MODERNBERT,
        dict(
            vocab_size=499,
            num_hidden_layers=3,
            hidden_size=64,
            num_attention_heads=4,
            intermediate_size=128,
        )
        | {name: None for name in ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")},
    ),
}
ENCODERS = ("bert", "modernbert")
FAMILY = {name: name for name in MODELS} | {"seq2seq": "marian"}
OURS = {
    "seq2seq": "VanillaSeq2SeqForConditionalGeneration",
    "bart": "VanillaSeq2SeqForConditionalGeneration",
    "t5": "VanillaSeq2SeqForConditionalGeneration",
    "gpt2": "VanillaDecoderForCausalLM",
    **dict.fromkeys(ENCODERS, "VanillaEncoderModel"),
}
FIRST_TOKEN = 3  # first token that inputs are drawn from


def fields(kind: str, quick: bool) -> dict:
    return MODELS[kind][1] | (MODELS[kind][2] if quick else {})


def make_checkpoints(kind: str, quick: bool, root: Path) -> dict:
    """Save a model with seeded weights to `root`, as a checkpoint of transformers and as ours.

    `kind` is a key of `MODELS`; with `quick` it is tiny. Return {"parameters": their number}.
    """
    import torch
    import transformers

    from vanilla_transformer.conversion import convert

    transformers.set_seed(0)
    name = MODELS[kind][0]
    model = getattr(transformers, name)(
        getattr(transformers, name).config_class(**fields(kind, quick))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            # wide enough that inputs matter to what is generated
            if parameter.requires_grad and parameter.dim() == 2:
                # T5 does not scale its scores
                parameter.normal_(std=(0.4 if kind == "t5" else 1) * min(parameter.shape) ** -0.5)
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            if table is not None:
                table.weight[:FIRST_TOKEN] = 0
                table.weight[-1] = 0
    model.save_pretrained(root / "transformers")
    convert(root / "transformers", root / "vanilla")
    write_text(root, model.config.vocab_size)
    return {"parameters": model.num_parameters()}


def write_text(root: Path, vocabulary: int) -> None:
    """Write lines of token numbers for calibration to `root / "text"`, and a tokenizer that reads
    them.

    `vocabulary` is its number of tokens.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordLevel({str(token): token for token in range(vocabulary)}, unk_token="0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(root / "vanilla/tokenizer.json"))
    rows = np.random.default_rng(1).integers(FIRST_TOKEN, vocabulary - 1, (64, 32))
    (root / "text").write_text("\n".join(" ".join(map(str, row)) for row in rows))


def prepare(engine: str, kind: str, root: Path) -> dict:
    """Write what `engine` loads to `root / engine`, and return {"seconds": …, "bytes": size}.

    `kind` is the kind of model in `root`.
    """
    start = time.perf_counter()
    group, dtype = engine.rsplit("-", 1)
    if group == "ctranslate2":
        convert_ctranslate2(kind, root / "transformers", root / engine, dtype)
    elif group == "openvino":
        from peer_files import convert_openvino

        convert_openvino(kind, root / "vanilla", root / engine, dtype)
    elif group == "llamacpp":
        from peer_files import convert_llama_cpp

        convert_llama_cpp(root / "transformers", root / engine, dtype)
    else:
        from vanilla_transformer_export import export

        export(
            root / "vanilla",
            root / engine,
            cases=1,
            target=group,
            **export_settings(dtype, root / "text"),
        )
    return {"seconds": time.perf_counter() - start, "bytes": size(root / engine)}


def export_settings(name: str, text: Path) -> dict:
    """Return the settings of `export` for a dtype `name`, or for "calibrated", int8 with `text`."""
    return {"dtype": "int8", "calibrate": text} if name == "calibrated" else {"dtype": name}


def size(directory):
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


class NumberTokenizer:
    """A tokenizer whose tokens are their own numbers, with what CTranslate2's converter asks for.

    `vocabulary` is the number of tokens; with `pad` the last is the padding token.
    """

    bos_token = eos_token = unk_token = "0"

    def __init__(self, vocabulary: int, pad: bool):
        self.names = [str(token) for token in range(vocabulary)]
        if pad:
            self.names[-1] = "<pad>"  # the converter of Marian removes it

    def get_vocab(self):
        return {name: token for token, name in enumerate(self.names)}


def convert_ctranslate2(kind, checkpoint, out, dtype):
    from ctranslate2.converters import TransformersConverter

    class Converter(TransformersConverter):
        def load_model(self, model_class, path, **kwargs):
            model = super().load_model(model_class, path, **kwargs)
            # transformers 5 lacks this field, which the converter reads
            model.config.position_embedding_type = "absolute"
            self.vocabulary = model.config.vocab_size
            return model

        def load_tokenizer(self, *args, **kwargs):
            return NumberTokenizer(self.vocabulary, kind == "seq2seq")

    Converter(str(checkpoint)).convert(str(out), quantization=dtype)


def bytes_per_step(directory: Path) -> int:
    """Return the bytes of weights that the decoder graph of the export in `directory` reads per
    token.

    Embeddings do not count, because only some of their rows are read.
    """
    import onnx

    from vanilla_transformer_export.inference.export_info import read_export_info

    info = read_export_info(directory)
    files = info.manifest["variants"][info.dtypes[0]]["graphs"]
    graph = onnx.load(directory / files["decoder"]).graph
    read = {
        name
        for node in graph.node
        for name in (node.input[1:] if "Gather" in node.op_type else node.input)
    }
    return sum(
        onnx.numpy_helper.to_array(weight).nbytes
        for weight in graph.initializer
        if weight.name in read
    )


def read_bandwidth(count: int, threads: int, repeats: int) -> dict:
    """Return {"reader": name, "bytes_per_second": …} for a buffer of `count` bytes and `threads`
    threads.

    It is the fastest of several readers, by the median of `repeats` reads.
    """
    import torch

    torch.set_num_threads(threads)
    floats = torch.ones(count // 4 // 1024, 1024)
    array, vector = floats.numpy().ravel(), torch.ones(1024)
    readers = {
        "torch.sum": floats.sum,
        "torch.sum of int64": floats.view(torch.int64).sum,
        "torch.mv": lambda: torch.mv(floats, vector),
        "numpy.dot": lambda: np.dot(array, array),
    }
    speeds = {name: array.nbytes / median_seconds(read, repeats) for name, read in readers.items()}
    reader = max(speeds, key=speeds.get)
    return {"reader": reader, "bytes_per_second": speeds[reader]}


def median_seconds(function, repeats):
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:]))
