"""Training speed, measured: `python benchmarks/training_speed.py --data DIR` with the text of the
recipe multi30k-en-de in DIR.

Our model under its recipe, and transformers' MarianMTModel of the same shape, vocabulary and data
under plain `Seq2SeqTrainer`, three times: with its default, random batches; with
`train_sampling_strategy="group_by_length"`; and with the batches of our recipe, over which what is
left is the gain of the model and its loss. The first two run at several batch sizes, since speed
depends on that, and the fastest one counts. All take turns, round by round; each trains some
updates, the first of which is not counted. What is compared is tokens of source and target that are
not padding, a second.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch
from measure import hardware, spread, versions
from transformers import (
    DataCollatorForSeq2Seq,
    MarianConfig,
    MarianMTModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    set_seed,
)

from vanilla_transformer.training.augment import build_augmentation
from vanilla_transformer.training.batches import collate_batches
from vanilla_transformer.training.dry_run import quiet_trainer
from vanilla_transformer.training.prepare import prepare
from vanilla_transformer.training.recipe import read_recipe
from vanilla_transformer.training.trainer import training_arguments, training_dataset
from vanilla_transformer_export.arguments import key_value

PACKAGES = ("vanilla-transformer", "torch", "transformers", "accelerate", "datasets")
STRATEGIES = ("random", "group_by_length")  # the Trainer's sampling strategies
OUR_BATCHES = "our batches"
# sentences: the Trainer's default, a common one, and about what the recipe's updates hold
BATCH_SIZES = (8, 64, 512)
TOKENS = 40_000  # approximate tokens of a round


class Clock(TrainerCallback):
    """A callback that counts the tokens and seconds of all updates but the first.

    `see` is a forward hook of the model, which counts tokens other than `pad_token_id`.
    """

    def __init__(self, pad_token_id):
        self.pad, self.tokens, self.seconds = pad_token_id, 0, 0.0

    def see(self, model, args, inputs, outputs):
        for name in ("input_ids", "decoder_input_ids"):
            self.tokens += int((inputs[name] != self.pad).sum())

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.tokens, self.began = 0, time.monotonic()
        else:
            self.seconds = time.monotonic() - self.began


def measured(trainer, pad_token_id) -> float:
    """Run `trainer`, and return the tokens per second that are not `pad_token_id`."""
    clock = Clock(pad_token_id)
    hook = trainer.model.register_forward_hook(clock.see, with_kwargs=True)
    trainer.add_callback(clock)
    trainer.train()
    hook.remove()
    return clock.tokens / clock.seconds


def ours(recipe, prepared, folder):
    return quiet_trainer(
        recipe, folder, prepared, max_steps=count_updates(recipe), disable_tqdm=True
    )


def count_updates(recipe):
    return 1 + -(-TOKENS // (2 * recipe.training["tokens_per_update"]))


def make_marian(config) -> MarianMTModel:
    """Return a new Marian model of the shape in `config`, one of ours.

    The decoder begins with the padding token.
    """
    return MarianMTModel(
        MarianConfig(
            vocab_size=config.vocab_size, d_model=config.hidden_size,
            encoder_layers=config.encoder_layers, decoder_layers=config.decoder_layers,
            encoder_attention_heads=config.num_attention_heads,
            decoder_attention_heads=config.num_attention_heads,
            encoder_ffn_dim=config.intermediate_size, decoder_ffn_dim=config.intermediate_size,
            activation_function=config.hidden_act, dropout=config.dropout, scale_embedding=True,
            pad_token_id=config.pad_token_id, eos_token_id=config.eos_token_id,
            decoder_start_token_id=config.pad_token_id,
        )
    )  # fmt: skip


def trained(model):
    return model.num_parameters(only_trainable=True)  # not MarianMTModel's sinusoids


def plain(model, tokenizer, rows, folder, **settings):
    """Return a trainer of `model` as one would write it without this package.

    `rows` are the encoded training rows, `folder` is its output directory, and `settings` are
    further training arguments.
    """
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(folder),
        label_smoothing_factor=0.1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    collator = collate_batches(DataCollatorForSeq2Seq(tokenizer, model))
    return Seq2SeqTrainer(model=model, args=arguments, train_dataset=rows, data_collator=collator)


def with_strategy(model, prepared, folder, strategy, batch_size):
    tokenizer, _, rows = prepared
    per_sentence = sum(map(len, rows["train"]["input_ids"])) / len(rows["train"])
    updates = 1 + max(2, round(TOKENS / (2 * batch_size * per_sentence)))
    settings = {
        "per_device_train_batch_size": batch_size,
        "train_sampling_strategy": strategy,
        "max_steps": updates,
    }
    return plain(model, tokenizer, rows["train"], folder, **settings)


def with_our_batches(model, prepared, folder, recipe):
    tokenizer, _, rows = prepared
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    settings = {name: getattr(training_arguments(recipe, folder), name) for name in names}
    dataset = training_dataset(
        rows["train"], recipe, build_augmentation(recipe, tokenizer, rows["train"])
    )
    return plain(
        model,
        tokenizer,
        dataset,
        folder,
        max_steps=count_updates(recipe),
        remove_unused_columns=False,
        **settings,
    )


def make_makers(recipe, prepared, marian, folder) -> dict[tuple, Callable[[], Seq2SeqTrainer]]:
    """Return {(model, batches) or (model, batches, batch size): function that makes a trainer}.

    `prepared` is our (tokenizer, model, rows), `marian` the model to compare with, and `folder` the
    trainers' output directory.
    """
    makers = {("ours", OUR_BATCHES): partial(ours, recipe, prepared, folder)}
    for strategy, size in product(STRATEGIES, BATCH_SIZES):
        makers["MarianMTModel", strategy, size] = partial(
            with_strategy, marian, prepared, folder, strategy, size
        )
    makers["MarianMTModel", OUR_BATCHES] = partial(
        with_our_batches, marian, prepared, folder, recipe
    )
    return makers


def ratio(speeds: dict[tuple, list[float]], kind: str) -> dict:
    """Return our speed over that of the fastest MarianMTModel with batches of `kind`.

    It is a spread over the rounds, with the name of that model in "over". `speeds` are those of
    each trainer and round.
    """
    others = [key for key in speeds if key[:2] == ("MarianMTModel", kind)]
    best = max(others, key=lambda key: statistics.median(speeds[key]))
    ratios = [
        one / other for one, other in zip(speeds["ours", OUR_BATCHES], speeds[best], strict=True)
    ]
    return {"over": join_key(best), **spread(ratios)}


def join_key(key):
    model, kind, *size = key
    return ", ".join([model, kind, *(f"batch {number}" for number in size)])


def run(options, folder) -> dict:
    recipe = read_recipe(options.recipe, {"data.directory": str(options.data), **dict(options.set)})
    set_seed(0)
    prepared = prepare(recipe)
    marian, pad = make_marian(prepared[1].config), prepared[1].config.pad_token_id
    makers = make_makers(recipe, prepared, marian, folder)
    speeds = {key: [] for key in makers}
    for _ in range(options.repeats):
        for key, make in makers.items():
            speeds[key].append(measured(make(), pad))
    return {
        "command": f"python benchmarks/training_speed.py --data DATA --repeats {options.repeats}",
        "recipe": options.recipe,
        "parameters": {"ours": trained(prepared[1]), "MarianMTModel": trained(marian)},
        "threads": torch.get_num_threads(),
        "hardware": hardware(),
        "versions": versions(PACKAGES),
        "tokens_per_second": {join_key(key): spread(values) for key, values in speeds.items()},
        "ratios": {kind: ratio(speeds, kind) for kind in (*STRATEGIES, OUR_BATCHES)},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="directory of the recipe's text")
    parser.add_argument("--recipe", default="multi30k-en-de")
    parser.add_argument("--set", action="append", default=[], type=key_value, metavar="KEY=VALUE")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/training.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(options, Path(folder))
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: result[name] for name in ("tokens_per_second", "ratios")}, indent=1))


if __name__ == "__main__":
    main()
