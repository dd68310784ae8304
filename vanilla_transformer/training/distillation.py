"""Distillation (Hinton et al. 2015): a model learns the mean prediction of several teachers."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ..checkpoint import load_checkpoint, load_tokenizer


class Teachers:
    """Checkpoints whose mean prediction replaces the labels while `model` is trained.

    The mean is geometric. Each teacher encodes the text with its own tokenizer, so that one may see
    what another cannot. Teachers run without dropout.

    Args:
        paths: the checkpoints, of the class of `model`.
        model: the model that is trained.
        device: the device of the training.

    Raises:
        FileNotFoundError: if a teacher or a file of it is missing.
        ValueError: for damaged files, and if a teacher has other labels.
    """

    def __init__(self, paths: list[str], model: PreTrainedModel, device: torch.device):
        self.tokenizers = [load_tokenizer(path) for path in paths]
        self.models = [load_checkpoint(path).to(device) for path in paths]
        for path, teacher in zip(paths, self.models):
            if teacher.config.id2label != model.config.id2label:
                raise ValueError(
                    f"the teacher {path} has labels {teacher.config.id2label}, expected "
                    f"{model.config.id2label}"
                )

    @torch.compiler.disable
    def forward_pre_hook(
        self, model: PreTrainedModel, args: tuple, inputs: dict
    ) -> tuple[tuple, dict]:
        """Remove the text from the inputs of `model`, and return its arguments and the other
        inputs.

        In training, `probabilities` becomes the teachers' prediction for that text.
        """
        texts = inputs.pop("text")
        if model.training:
            self.probabilities = self.predict(texts)
        return args, inputs

    @torch.no_grad()
    def predict(self, texts: list[str]) -> torch.Tensor:
        """Return the teachers' mean prediction for `texts` (B) as probabilities (B, C)."""
        logits = [
            self.logits(tokenizer, model, texts)
            for tokenizer, model in zip(self.tokenizers, self.models, strict=True)
        ]
        return torch.stack(logits).mean(0).softmax(-1)

    def logits(
        self, tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel, texts: list[str]
    ) -> torch.Tensor:
        """Return the logits (B, C) of the teacher `model` for `texts`, in float32."""
        return model(
            **tokenizer(texts, padding=True, return_tensors="pt").to(model.device)
        ).logits.float()


def with_text(collator: Callable[[list[dict]], dict]) -> Callable[[list[dict]], dict]:
    """Return a function like `collator` whose batches also have the rows' text, a list of
    strings."""
    return lambda rows: {**collator(rows), "text": [row["text"] for row in rows]}
