"""The tasks of an export's head, in the formats of transformers' pipelines, one module for each
task. Their functions are the methods of `TextRuntime`; nothing here imports torch."""
