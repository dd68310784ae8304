"""Clients that others wrote, by `make test-clients`: each folder has an environment of its own, see
.ci/clients."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
