"""Trains a translation model on two parallel text files with `Seq2SeqTrainer`."""

import difflib
import json
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import sacrebleu
import torch
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

from ..configuration_vanilla_transformer import VanillaSeq2SeqConfig
from ..files import new_directory, refuse_existing
from ..modeling_vanilla_transformer import VanillaSeq2SeqForConditionalGeneration
from .data import encode_pairs, read_parallel
from .tokenizer import train_tokenizer

UNFINISHED = "run.json"  # in the state directory until the run is done: its settings


@dataclass
class TranslationRun:
    """What one run is made of. `train` and `validation` are (source file, target file); `overrides` are fields of
    `VanillaSeq2SeqConfig` over the preset; `eval_epochs` is how often validation BLEU is computed, greedily; `half`
    stores the finished tensors as float16."""

    train: tuple[Path, Path]
    validation: tuple[Path, Path]
    output: Path
    preset: str
    overrides: dict
    epochs: int
    batch_size: int
    learning_rate: float
    warmup_steps: int
    eval_epochs: int
    seed: int
    half: bool = False


def train_translation(run: TranslationRun, force: bool = False) -> dict[str, float]:
    """Writes a checkpoint to `run.output` and returns the last validation metrics.

    The Adam settings and the label smoothing are the paper's (sections 5.3 and 5.4); the learning rate falls linearly
    to 0 after warm-up, which suits a short run of known length. The state of a running training is kept in
    `<output>-run`: the same call again goes on from its newest checkpoint.

    Raises:
        FileExistsError: if `run.output` exists and `force` is not given.
        ValueError: for parallel files that do not fit each other, for config fields that do not exist, and, unless
            `force` is given, if `<output>-run` is the state of a run with other settings.
    """
    refuse_existing(run.output, force)
    config = translation_config(run)
    set_seed(run.seed)
    pairs, validation = read_parallel(*run.train), read_parallel(*run.validation)
    state = run.output.with_name(run.output.name + "-run")
    checkpoint = unfinished_checkpoint(state, run, force)
    if checkpoint:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    else:
        tokenizer = train_tokenizer((line for pair in pairs for line in pair), config.vocab_size)
        shutil.rmtree(state, ignore_errors=True)
        state.mkdir(parents=True)
        (state / UNFINISHED).write_text(json.dumps(settings_of(run)))
    model = VanillaSeq2SeqForConditionalGeneration(config)
    model.generation_config = generation_config(config)
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_arguments(run, state, eval_steps=run.eval_epochs * math.ceil(len(pairs) / run.batch_size)),
        train_dataset=encode_pairs(pairs, tokenizer),
        eval_dataset=encode_pairs(validation, tokenizer),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        processing_class=tokenizer,
        compute_metrics=lambda prediction: {"bleu": bleu_of_ids(*prediction, tokenizer)},
    )
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    metrics = trainer.evaluate()
    # The Trainer switched the cache off, and filled every field of the generation config with a default.
    model.config.use_cache, model.generation_config = True, generation_config(config)
    with new_directory(run.output, force) as directory:
        save_checkpoint(model, tokenizer, directory, run.half)
    (state / UNFINISHED).unlink()
    return metrics


def save_checkpoint(model, tokenizer, directory: Path, half: bool) -> None:
    """With `half`, tensors are stored as float16 and `model` becomes that; they load as float32, as its config says."""
    if half:
        model.half()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if half:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")


def settings_of(run: TranslationRun) -> dict:
    """As JSON gives them back."""
    return json.loads(json.dumps({name: value for name, value in asdict(run).items() if name != "output"}, default=str))


def unfinished_checkpoint(state: Path, run: TranslationRun, force: bool) -> Path | None:
    """The newest whole checkpoint of an unfinished run with the same settings, if `state` holds one."""
    if not (state / UNFINISHED).is_file():
        return None
    before, settings = json.loads((state / UNFINISHED).read_text()), settings_of(run)
    if before == settings:
        # trainer_state.json is written last.
        whole = [path for path in state.glob("checkpoint-*") if (path / "trainer_state.json").is_file()]
        return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    if force:
        return None
    name = next(name for name in settings if before.get(name) != settings[name])
    raise ValueError(
        f"{state} is the state of an unfinished run with {name} {before.get(name)}, expected {settings[name]}; "
        "--force starts anew"
    )


def translation_config(run: TranslationRun) -> VanillaSeq2SeqConfig:
    known = VanillaSeq2SeqConfig.field_names()
    for name in run.overrides:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"VanillaSeq2SeqConfig has no field {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    config = VanillaSeq2SeqConfig.preset(run.preset, **run.overrides)
    for name in ("pad_token_id", "decoder_start_token_id", "eos_token_id"):
        if getattr(config, name) is None:
            raise ValueError(f"{name} is None, expected a token id: a translation model needs one")
    return config


def generation_config(config: VanillaSeq2SeqConfig) -> GenerationConfig:
    """Beam search as `generate` does it by default for the finished model; length penalty 1 is that of Wu et al. 2021."""
    return GenerationConfig(
        num_beams=5,
        max_new_tokens=128,
        early_stopping=True,
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
    )


def training_arguments(run: TranslationRun, state: Path, eval_steps: int) -> Seq2SeqTrainingArguments:
    return Seq2SeqTrainingArguments(
        output_dir=str(state),
        num_train_epochs=run.epochs,
        per_device_train_batch_size=run.batch_size,
        per_device_eval_batch_size=128,
        train_sampling_strategy="group_by_length",
        learning_rate=run.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=run.warmup_steps,
        adam_beta1=0.9,
        adam_beta2=0.98,
        adam_epsilon=1e-9,
        label_smoothing_factor=0.1,
        max_grad_norm=1.0,
        eval_strategy="steps",
        eval_steps=eval_steps,
        save_strategy="steps",
        save_steps=eval_steps,
        save_total_limit=2,
        logging_steps=100,
        dataloader_pin_memory=torch.cuda.is_available(),
        predict_with_generate=True,
        generation_num_beams=1,
        generation_max_length=128,
        seed=run.seed,
        data_seed=run.seed,
        report_to="none",
    )


def bleu_of_ids(predictions: np.ndarray, labels: np.ndarray, tokenizer) -> float:
    """sacreBLEU (13a, cased) of generated ids against label ids, both (B, T) padded with -100 or the pad token."""
    texts = [
        tokenizer.batch_decode(np.where(ids == -100, tokenizer.pad_token_id, ids), skip_special_tokens=True)
        for ids in (predictions, labels)
    ]
    return sacrebleu.corpus_bleu(texts[0], [texts[1]]).score
