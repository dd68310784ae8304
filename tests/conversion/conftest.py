"""A checkpoint of BERT."""

import pytest
from saved_families import save_checkpoint


@pytest.fixture
def bert(tmp_path):
    """Save a BERT checkpoint with the masked-LM head; return its directory and the model."""
    return save_checkpoint("BertForMaskedLM", "bert", tmp_path)
