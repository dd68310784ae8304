"""Checkpoint to ONNX, and ONNX to tokens."""
