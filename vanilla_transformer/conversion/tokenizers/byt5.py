"""The tokenizer of ByT5 (Xue et al. 2021): bytes, at their values plus the number of special tokens
before them."""

from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode


def make_backend(theirs: PreTrainedTokenizerBase) -> Tokenizer:
    """Return a tokenizer of the `tokenizers` library with the ids of `theirs`, a `ByT5Tokenizer`.

    Its tokens are the letters that GPT-2 writes for bytes (Radford et al. 2019).
    """
    added = sorted(theirs.added_tokens_decoder.items())
    letters = {letter: byte + theirs.offset for byte, letter in bytes_to_unicode().items()}
    specials = {str(token): id for id, token in added if id < theirs.offset}
    tokenizer = Tokenizer(BPE(vocab=specials | letters, merges=[], unk_token=theirs.unk_token))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for _, token in added:
        add = (
            tokenizer.add_special_tokens
            if str(token) in theirs.all_special_tokens
            else tokenizer.add_tokens
        )
        add([token])
    end = theirs.eos_token
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, theirs.eos_token_id)]
    )
    # Bytes that are not text are dropped, as in `ByT5Tokenizer`.
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("\ufffd", "")])
    return tokenizer
