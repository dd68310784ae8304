"""What an export's head is for, in the formats of transformers' pipelines: one module for each
task. Their functions are the methods of `TextRuntime`; nothing here imports torch."""
