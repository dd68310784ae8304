"""The protocols of the server. To add one, write a module here with `PROTOCOL`, an instance of
`protocol.Protocol`, and add its name to `NAMES`."""

from importlib import import_module

from .protocol import Protocol

NAMES = (
    "libretranslate",
    "openai_api",
    "text_embeddings",
    "pipelines",
    "open_inference",
)
PROTOCOLS: tuple[Protocol, ...] = tuple(
    import_module(f".{name}", __name__).PROTOCOL for name in NAMES
)
