"""Joint byte-pair encoding (section 5.1 of the paper, Sennrich et al. 2016) with the `tokenizers` library."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # ids 0 to 3


def train_tokenizer(lines: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """One vocabulary for all `lines`, source and target together.

    Words keep the space in front of them as "▁", so decoding gives back the text; punctuation is always its own token.
    An encoded sequence ends with `</s>`.

    Raises:
        ValueError: if `lines` have fewer distinct pieces than `vocab_size`, or more characters.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS.values()), show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    if (found := tokenizer.get_vocab_size()) != vocab_size:
        remedy = "ask for fewer" if found < vocab_size else "ask for more, its characters alone need them"
        raise ValueError(f"the text gives a vocabulary of {found} entries, expected {vocab_size}: {remedy}")
    eos = SPECIAL_TOKENS["eos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", pair=f"$A {eos} $B {eos}", special_tokens=[(eos, tokenizer.token_to_id(eos))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=["input_ids", "attention_mask"], **SPECIAL_TOKENS
    )
