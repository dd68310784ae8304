"""The families of checkpoints that convert: a line here, and a `converter.Converter` module."""

from typing import NamedTuple


class Family(NamedTuple):
    """A family of checkpoints.

    `model_type` is that of its config.json and, with `_` for `-`, the name of its module. `name` is
    for readers. `variant` is what most of its checkpoints become. Checkpoints of ours become its
    checkpoints if `converts_back`. `like` is the `model_type` of a family that differs in the names
    of its classes only, and has the module.
    """

    model_type: str
    name: str
    variant: str
    converts_back: bool = False
    like: str | None = None

    @property
    def module(self) -> str:
        return (self.like or self.model_type).replace("-", "_")


REGISTERED = (
    Family("bert", "BERT", "encoder", converts_back=True),
    Family("roberta", "RoBERTa", "encoder", converts_back=True),
    Family("xlm-roberta", "XLM-R", "encoder", converts_back=True, like="roberta"),
    Family("camembert", "CamemBERT", "encoder", converts_back=True, like="roberta"),
    Family("mpnet", "MPNet", "encoder", converts_back=True),
    Family("distilbert", "DistilBERT", "encoder"),
    Family("electra", "ELECTRA", "encoder"),
    Family("modernbert", "ModernBERT", "encoder", converts_back=True),
    Family("nomic_bert", "NomicBERT", "encoder", converts_back=True),
    Family("gte", "GTE", "encoder", converts_back=True),
    Family("eurobert", "EuroBERT", "encoder", converts_back=True),
    Family("gemma3_text", "EmbeddingGemma", "encoder", converts_back=True),
    Family("deberta-v2", "DeBERTa-v3", "encoder", converts_back=True),
    Family("albert", "ALBERT", "encoder", converts_back=True),
    Family("llama", "Llama (SmolLM)", "decoder", converts_back=True),
    Family("qwen2", "Qwen2", "decoder", converts_back=True),
    Family("qwen3", "Qwen3", "decoder", converts_back=True),
    Family("mistral", "Mistral", "decoder", converts_back=True),
    Family("gpt2", "GPT-2", "decoder", converts_back=True),
    Family("opt", "OPT", "decoder", converts_back=True),
    Family("xglm", "XGLM", "decoder"),
    Family("biogpt", "BioGPT", "decoder"),
    Family("bart", "BART", "seq2seq", converts_back=True),
    Family("mbart", "mBART", "seq2seq", converts_back=True),
    Family("marian", "Marian (OPUS-MT)", "seq2seq", converts_back=True),
    Family("m2m_100", "M2M100 (NLLB-200)", "seq2seq", converts_back=True),
    Family("pegasus", "Pegasus", "seq2seq", converts_back=True),
    Family("blenderbot", "Blenderbot", "seq2seq"),
    Family("plbart", "PLBart", "seq2seq"),
    Family("t5", "T5, Flan-T5, ByT5", "seq2seq", converts_back=True),
    Family("mt5", "mT5", "seq2seq", converts_back=True, like="t5"),
    Family("vit", "ViT", "vision", converts_back=True),
    Family("deit", "DeiT", "vision"),
    Family("dinov2", "DINOv2", "vision"),
)
FAMILIES = {family.model_type: family for family in REGISTERED}
# model type on the Hub: how its classes begin there, and in transformers
ALIASES = {"new": ("New", "Gte")}
