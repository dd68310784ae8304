"""A checkpoint of a translator with its tokenizer."""

import pytest
from checkpoints import SIZES, copy_folder, perturbed, toy_corpus

from vanilla_transformer.training.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A seq2seq checkpoint with its tokenizer. Its head dims allow a conversion to Marian."""
    directory = tmp_path_factory.mktemp("saved") / "seq2seq"
    fields = SIZES | dict(encoder_layers=1, decoder_layers=2, head_dim=8, value_head_dim=8)
    perturbed("VanillaSeq2SeqForConditionalGeneration", fields).save_pretrained(directory)
    train_tokenizer([text for pair in toy_corpus(50, seed=0) for text in pair], 48).save_pretrained(
        directory
    )
    return directory


@pytest.fixture
def checkpoint(saved, tmp_path):
    """A copy of the saved checkpoint that the test may damage."""
    return copy_folder(saved, tmp_path)
