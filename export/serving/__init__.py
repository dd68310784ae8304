"""The HTTP server of exports. It needs neither torch nor transformers, and imports FastAPI only
where it is used."""
