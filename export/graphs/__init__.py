"""The ONNX graphs of a checkpoint, written node by node from its config and weights, without torch.

In reading order:

| module | writes |
|---|---|
| `layers` | embeddings, sublayers, stacks and logits: Figure 1 of the paper |
| `activations` | the activations of `transformers.activations.ACT2FN` |
| `positions` | positions, biases of the scores, and masks: causal, padding, sliding windows |
| `attention` | attention in standard operators |
| `onnxruntime_attention` | attention in onnxruntime's operators |
| `precisions`, `quantization` | matrix multiplications and embedding look-ups of each dtype |
| `sequences`, `images` | models that read whole sequences or images, with their heads |
| `saving` | the files of graphs |

`targets/NAME/graphs.py` has the graphs of a target: it says which attention stands where. `context`
has what all functions take, `ops` the nodes, `weights` the tensors, `config` the config,
`input_scales` the scales of a calibration.
"""
