"""Checkpoints that are often asked for and cannot be converted: fields of their config.json, the
reason, and what to use instead."""

from os import PathLike
from typing import Any, NamedTuple

ANY = object()  # any value but None, False and 0


class Rejected(NamedTuple):
    """A kind of checkpoint that cannot be converted.

    `fields` are fields of config.json with their values, of which one may be `ANY`. Fields of
    rope_scaling and rope_parameters count too.
    """

    fields: dict[str, Any]
    reason: str
    instead: str

    def fits(self, content: dict) -> bool:
        """Return True if the `content` of a config.json has these fields."""
        values = flat(content)
        return all(
            bool(values.get(name)) if value is ANY else values.get(name) == value
            for name, value in self.fields.items()
        )


def flat(content: dict) -> dict:
    """Return `content` with the fields of its rotary positions, also those for a type of layers.
    The oldest name of rope_type, type, is replaced."""
    values = dict(content)
    parts = [content.get(name) for name in ("rope_scaling", "rope_parameters")]
    parts += [nested for part in parts if isinstance(part, dict) for nested in part.values()]
    for part in parts:
        if isinstance(part, dict):
            kind = part.get("rope_type", part.get("type"))
            values |= {name: value for name, value in part.items() if name not in content}
            values |= {} if kind in (None, "default", "linear") else {"rope_type": kind}
    return values


def check_supported(content: dict, source: str | PathLike) -> None:
    """Raise ValueError if a row of `REJECTED` fits the `content` of a config.json.

    The message calls the checkpoint `source`.
    """
    row = next((row for row in REJECTED if row.fits(content)), None)
    if row is None:
        return
    values = flat(content)
    seen = " and ".join(f"{name} {values[name]}" for name in row.fields)
    raise ValueError(f"{source} has {seen}, which cannot be converted: {row.reason}; {row.instead}")


def of_type(model_type: str, reason: str, instead: str, **fields: Any) -> Rejected:
    return Rejected({"model_type": model_type, **fields}, reason, instead)


TRANSFORMERS = "use transformers"
EMBEDDER = "use a text embedder such as BAAI/bge-m3"
GENAI = "use onnxruntime-genai or llama.cpp"
SMALL_LM = "use Qwen3, Qwen2, Mistral or Llama 2 and SmolLM"
T5 = "use T5 or Flan-T5"
LONG = "use ModernBERT, NomicBERT or GTE, which read 8,192 tokens"
YARN = "the angles of rotary positions change with their frequency and scores are scaled"
REJECTED = (
    # encoders
    of_type("deberta", "DeBERTa (v1) has one matrix for queries, keys and values, and biases apart",
            "use DeBERTa-v2 or v3"),
    of_type("esm", "ESM scales embeddings by the share of masked tokens", TRANSFORMERS),
    of_type("xlm-roberta-xl", "XLM-R-XL has other norms than XLM-R, and no converter", "use XLM-R"),
    of_type("xlm-roberta", "jina-embeddings-v3 and its rerankers have adapters for each task",
            "use BAAI/bge-m3 or bge-reranker-v2-m3", position_embedding_type="rotary"),
    of_type("jina_embeddings_v3", "jina-embeddings-v3 has adapters for each task",
            "use BAAI/bge-m3"),
    of_type("nomic_bert", "nomic-embed-text-v2-moe has layers of experts",
            "use nomic-embed-text-v1.5", num_experts=ANY),
    of_type("eurobert", "EuroBERT's late classifier averages the logits of tokens",
            "use classifier_pooling=bos, or a token classifier", classifier_pooling="late",
            architectures=["EuroBertForSequenceClassification"]),
    of_type("longformer", "Longformer has local attention and global tokens", LONG),
    of_type("big_bird", "BigBird has blocks of random attention", LONG),
    of_type("xlnet", "XLNet has two streams of attention", "use RoBERTa or XLM-R"),
    of_type("fnet", "FNet has Fourier transforms in place of attention", "use BERT"),
    of_type("funnel", "Funnel pools its states between layers", "use BERT or ELECTRA"),
    of_type("mobilebert", "MobileBERT has bottlenecks around each layer", "use DistilBERT"),
    of_type("convbert", "ConvBERT mixes attention with convolutions", "use ELECTRA"),
    of_type("canine", "CANINE hashes characters and shortens their sequence", "use XLM-R"),
    *(of_type(name, "LayoutLM reads the places of words on a page", "use BERT on the text alone")
      for name in ("layoutlm", "layoutlmv2", "layoutlmv3", "lilt")),
    # decoders
    of_type("gemma3_text", "Gemma 3 converts only where it looks at all tokens",
            f"{SMALL_LM}, or EmbeddingGemma for embeddings", use_bidirectional_attention=False),
    of_type("gemma3", "Gemma 3 reads images, and its text model is causal", SMALL_LM),
    *(of_type(name, "Gemma caps its scores or scales its norms as no decoder of ours", SMALL_LM)
      for name in ("gemma", "gemma2", "gemma3n", "gemma4")),
    *(of_type(name, "it has layers of experts", SMALL_LM)
      for name in ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "nllb-moe")),
    *(of_type(name, "a state-space model has no attention", SMALL_LM)
      for name in ("mamba", "mamba2", "falcon_mamba", "rwkv")),
    *(of_type(name, "some of its layers are no attention", SMALL_LM)
      for name in ("jamba", "lfm2", "qwen3_next", "qwen3_5", "recurrent_gemma", "zamba2")),
    of_type("smollm3", "SmolLM3 has layers without positions", "use SmolLM2"),
    *(of_type(name, "its attention and feed-forward run in parallel", SMALL_LM)
      for name in ("codegen", "gptj", "gpt_neox", "falcon", "phi")),
    of_type("phi3", "Phi-3 turns a part of each head", SMALL_LM),
    *(of_type(name, "it adds ALiBi, a slope for each head, to its scores", SMALL_LM)
      for name in ("bloom", "mpt")),
    of_type("gpt_neo", "GPT-Neo alternates layers with and without a window", "use GPT-2 or OPT"),
    # encoder-decoders
    of_type("blenderbot-small", "its decoder normalizes tokens before it adds positions",
            "use Blenderbot"),
    of_type("fsmt", "FSMT has two vocabularies", "use Marian (OPUS-MT) or M2M100"),
    of_type("led", "LED has local attention and global tokens", "use BART, or Pegasus"),
    of_type("umt5", "UMT5 has relative positions in each layer", "use mT5"),
    of_type("longt5", "LongT5 has local attention and global tokens", T5),
    of_type("switch_transformers", "Switch Transformers have layers of experts", T5),
    *(of_type(name, "T5Gemma has Gemma's layers in both stacks", T5)
      for name in ("t5gemma", "t5gemma2")),
    of_type("prophetnet", "ProphetNet predicts several tokens at once", "use BART"),
    # sound and images
    of_type("whisper", "Whisper reads audio", "use CTranslate2 (faster-whisper) or whisper.cpp"),
    *(of_type(name, "it reads audio", TRANSFORMERS)
      for name in ("wav2vec2", "hubert", "speech_to_text")),
    *(of_type(name, "it has a text model and an image model", EMBEDDER)
      for name in ("clip", "siglip", "siglip2", "jina_clip", "chinese_clip")),
    of_type("swin", "Swin attends in windows of an image that shift", "use ViT, DeiT or DINOv2"),
    # positions of any family
    Rejected({"rope_type": "llama3"}, f"with rope_type llama3, of Llama 3.1 and later, {YARN}",
             f"{SMALL_LM}, or {GENAI} for this one"),
    Rejected({"rope_type": "yarn"}, f"with rope_type yarn, {YARN}",
             "use the checkpoint before it was extended, without rope_scaling"),
    *(Rejected({"rope_type": kind}, f"with rope_type {kind}, angles depend on the length of a text",
               "use the checkpoint before it was extended, without rope_scaling")
      for kind in ("longrope", "dynamic", "su")),
)  # fmt: skip
