"""The models of benchmarks/serving.py, in the files that each server reads.

They are made once, in separate processes.
"""

import importlib.util
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import workload

# of the model with random weights, which never ends by itself: as many as a caption has on average
NEW_TOKENS = 16
START, END, UNKNOWN = "1", "2", "3"  # special tokens of the shipped tokenizers
DTYPES = ("calibrated", "int8", "fp32")  # "calibrated" is int8 too
CTRANSLATE2 = {"int8": "int8", "fp32": "float32"}  # CTranslate2's names


def prepare(model: str, card: Path, root: Path, texts: Sequence[str], quick: bool) -> None:
    """Write the files of `model` to `root/model`, unless they are complete.

    These are an export for each dtype, `transformers`, and CTranslate2's files if it is installed.
    Both models use greedy search.

    Args:
        model: "tiny" is `card`; "base" has the paper's base shape, random weights and the tokenizer
            of `card`.
        card: directory of the shipped translator.
        root: directory of all models.
        texts: text for calibration.
        quick: True for a tiny "base".
    """
    folder = root / model
    if (folder / "complete").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    from vanilla_transformer.conversion import convert

    if model == "tiny":
        shutil.copytree(card, folder / "vanilla")
        change_json(folder / "vanilla/generation_config.json", num_beams=1)
        # a family that transformers and CTranslate2 know
        convert(folder / "vanilla", folder / "transformers", to="marian")
    else:
        workload.make_checkpoints("seq2seq", quick, folder)
        for checkpoint in ("vanilla", "transformers"):
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(card / name, folder / checkpoint)
            change_json(
                folder / checkpoint / "generation_config.json",
                num_beams=1,
                max_new_tokens=NEW_TOKENS,
            )
    if importlib.util.find_spec("ctranslate2"):
        if model == "tiny":
            register_tiny()
        for name in CTRANSLATE2.values():
            # the shipped one has no row of padding to remove
            kind = "seq2seq" if model == "base" else model
            workload.convert_ctranslate2(
                kind, folder / "transformers", folder / f"ctranslate2-{name}", name
            )
    from vanilla_transformer_export import export

    text = folder / "text"
    text.write_text("\n".join(texts))
    for dtype in DTYPES:
        export(
            folder / "vanilla",
            folder / dtype,
            cases=1,
            target="cpu",
            **workload.export_settings(dtype, text),
        )
    (folder / "complete").touch()


def prepare_decoder(card: Path, root: Path) -> None:
    from vanilla_transformer_export import export

    if not (root / "decoder").exists():
        export(card, root / "decoder", cases=1, target="cpu", dtype="int8")


def change_json(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def register_tiny() -> None:
    """Register the model "tiny" with CTranslate2's converter.

    The converter assumes that Marian's start token has no embedding and that the last row is
    padding. Here the start token is an ordinary token.
    """
    from ctranslate2.converters import transformers as converters

    @converters.register_loader("MarianConfig")
    class Loader(converters.MarianMTLoader):
        set_decoder = converters.BartLoader.set_decoder

        def set_config(self, config, model, tokenizer):
            config.bos_token = config.decoder_start_token = START
            config.eos_token, config.unk_token, config.add_source_eos = END, UNKNOWN, False

        def _remove_pad_weights(self, spec):
            """Do nothing: there is no such row."""
