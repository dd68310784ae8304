"""Distillation (Hinton et al. 2015): a model learns what several others, together better than each, say of its rows."""

import torch
from transformers import AutoTokenizer


class Teachers:
    """Checkpoints whose mean prediction, the geometric one, takes the place of the labels while `model` is trained. They see
    what it sees, without dropout.

    Args:
        paths: the checkpoints.
        model: what is trained. They are of its class.
        tokenizer: of the rows.
        device: where it is trained.

    Raises:
        ValueError: for a checkpoint with another vocabulary or other labels.
    """

    def __init__(self, paths: list[str], model, tokenizer, device: torch.device):
        self.models = [type(model).from_pretrained(path).to(device) for path in paths]
        for path, teacher in zip(paths, self.models):
            if AutoTokenizer.from_pretrained(path).get_vocab() != tokenizer.get_vocab():
                raise ValueError(f"the teacher {path} has another vocabulary, expected that of the run")
            if teacher.config.id2label != model.config.id2label:
                raise ValueError(f"the teacher {path} has labels {teacher.config.id2label}, expected {model.config.id2label}")

    @torch.no_grad()
    @torch.compiler.disable
    def see(self, model, args, inputs, outputs):
        """A forward hook: `probabilities` are those of the rows that `model` has just seen."""
        if model.training:
            logits = [teacher(**inputs).logits.float() for teacher in self.models]
            self.probabilities = torch.stack(logits).mean(0).softmax(-1)
