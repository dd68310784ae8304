"""Tests of TRL: prompts have no special tokens, and TRL appends the end token."""

from datasets import Dataset
from trl import SFTConfig, SFTTrainer


def test_sft_row_is_prompt_completion_and_one_end_token(decoder, tmp_path):
    rows = Dataset.from_list([{"prompt": "ROMEO:", "completion": " I am"}] * 2)
    settings = dict(
        max_steps=1,
        per_device_train_batch_size=2,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
    )
    trainer = SFTTrainer(
        model=decoder.path,
        processing_class=decoder.tokenizer,
        train_dataset=rows,
        args=SFTConfig(str(tmp_path), max_length=64, **settings),
    )
    [row, _] = trainer.train_dataset
    assert row["input_ids"] == [*decoder.ids("ROMEO: I am"), 2]
    assert row["labels"] == [-100] * 6 + [*decoder.ids(" I am"), 2]
    assert trainer.train().training_loss > 0
