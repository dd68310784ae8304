"""Exports, run with onnxruntime and numpy; nothing here imports torch."""
