"""The ONNX graphs of a checkpoint, written node by node from its config and weights.

| module | writes |
|---|---|
| `layers` | embeddings, sublayers and stacks: Figure 1 of the paper |
| `activations`, `positions` | what layers are made of |
| `attention` | attention in standard operators |
| `onnxruntime_attention` | attention in onnxruntime's operators |
| `precisions` | matrix multiplications and embedding look-ups for each dtype of the weights |
| `sequences`, `images` | models that read whole sequences or images, with their heads |
| `build` | the files of an export |

`targets/NAME/graphs.py` says which of these a target uses, and writes its decoders. `ops` has the nodes, `weights` the tensors,
`config` the config, `context` puts the three together.
"""
