"""Tests of the kernel that onnxruntime chooses for each form of attention in the graphs."""
