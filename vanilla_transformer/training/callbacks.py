"""Callbacks of `Trainer`: they check the loss, measure the speed and keep track of the epoch."""

import time
from typing import Any

import torch
from accelerate.utils import reduce
from torch.utils.data import DataLoader
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ..info import flops
from .checkpoints import CompleteCheckpoints
from .recipe import Recipe

# dense bfloat16 operations per second
PEAK = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}
TOKEN_INPUTS = {
    "source token": "input_ids",
    "target token": "decoder_input_ids",
    "patch": "pixel_values",
}
MIN_LOGS = 20  # of a run
MAX_SHOWN = 60  # characters of each row shown in an error


def callbacks(recipe: Recipe) -> list[TrainerCallback]:
    patience = recipe.training.get("early_stopping_patience")
    length = MaxLength(recipe.generation.get("max_length"))
    return [
        CompleteCheckpoints(),
        Epochs(),
        length,
        *([EarlyStoppingCallback(patience)] if patience else []),
    ]


class Epochs(TrainerCallback):
    """A callback that sets the epoch of the training rows.

    A `DataLoader` of several processes does not set it.
    """

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: DataLoader,
        **kwargs: Any,
    ) -> None:
        if hasattr(train_dataloader.dataset, "set_epoch"):
            train_dataloader.dataset.set_epoch(int(state.epoch))


class MaxLength(TrainerCallback):
    """A callback that restores `max_length`, which `Seq2SeqTrainer` sets after each batch.

    `generate` would warn of it at the next batch.
    """

    def __init__(self, max_length: int | None):
        self.max_length = max_length

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: PreTrainedModel,
        **kwargs: Any,
    ) -> None:
        if model.can_generate():
            model.generation_config.max_length = self.max_length


class Watch(TrainerCallback):
    """A callback that counts the tokens of a model for the log, and stops the run if a loss is not
    finite. The log has at least `MIN_LOGS` entries, also that of a short run.

    The log gets `tokens`, the source and target tokens without padding, or first tokens and
    patches, and `tokens_per_second`; both are sums over all processes. On GPUs of `PEAK` it gets
    `mfu`, the model FLOPs utilization: three times the matmuls of the forward pass, without
    attention, divided by the peak.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = tokenizer
        self.config = model.config
        self.costs = {
            TOKEN_INPUTS[kind]: cost for kind, cost in flops(model).items() if kind in TOKEN_INPUTS
        }
        self.start()

    def start(self) -> None:
        """Set the counts of tokens to 0 and the clock to now."""
        self.counts = dict.fromkeys(TOKEN_INPUTS.values(), 0)
        self.since = time.monotonic()

    @torch.compiler.disable
    def forward_hook(
        self, model: PreTrainedModel, args: tuple, inputs: dict, outputs: dict
    ) -> None:
        self.input_ids = inputs.get("input_ids")  # missing in seq2seq calls of `generate`
        if model.training:
            for side in self.counts:
                if side in inputs:
                    self.counts[side] = self.counts[side] + self.count_tokens(side, inputs[side])
        if outputs.get("loss") is not None:
            self.check(outputs["loss"])

    def count_tokens(self, side: str, values: torch.Tensor) -> torch.Tensor | int:
        if side != "pixel_values":
            return (values != self.config.pad_token_id).sum()
        rows, columns = (
            pixels // patch for pixels, patch in zip(values.shape[2:], self.config.patch_shape)
        )
        return len(values) * (self.config.num_first_tokens + rows * columns)

    def check(self, loss: torch.Tensor) -> None:
        """Raise FloatingPointError if the loss is not finite, with the batch's text, if it has
        any."""
        if not loss.isfinite():
            if self.input_ids is None:
                raise FloatingPointError(f"the loss is {loss.item()} for a batch of images")
            rows = self.tokenizer.batch_decode(self.input_ids, skip_special_tokens=True)
            raise FloatingPointError(
                f"the loss is {loss.item()} for the batch of {len(rows)} rows "
                f"{[row[:MAX_SHOWN] for row in rows]}"
            )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        state.logging_steps = max(1, min(state.logging_steps, state.max_steps // MIN_LOGS))
        self.start()

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        self.since += next(
            (value for name, value in metrics.items() if name.endswith("_runtime")), 0.0
        )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if "loss" in logs:
            seconds = time.monotonic() - self.since
            local_counts = torch.tensor(
                [int(count) for count in self.counts.values()], device=args.device
            )
            # over the processes, which all have to call this
            sums = reduce(local_counts, "sum").tolist()
            counts = dict(zip(self.counts, sums, strict=True))
            measured = {
                "tokens": sum(counts.values()),
                "tokens_per_second": round(sum(counts.values()) / seconds, 1),
            }
            name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
            if name in PEAK:
                done = 3 * sum(count * self.costs.get(side, 0) for side, count in counts.items())
                measured["mfu"] = round(done / seconds / (PEAK[name] * args.world_size), 4)
            logs |= measured
            state.log_history[-1] |= measured
            self.start()
