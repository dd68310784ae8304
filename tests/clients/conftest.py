"""Tests of clients that others wrote run with `make test-clients`, each folder in an environment of its own; see .ci/clients."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
