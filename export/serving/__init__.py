"""Exports behind HTTP. No torch and no transformers; what needs FastAPI is imported where it is
used."""
