"""Checks of quality: `verify` of each export, and the BLEU of a checkpoint in torch and as
exports."""

import tempfile
from pathlib import Path

CHECKPOINT = Path(__file__).parents[1] / "model_cards" / "vanilla-seq2seq-tiny-multi30k-en-de"
CASES = 12
ROWS = 128  # rows per batch


def verified(engine: str, root: Path, device: str) -> dict:
    """Return the report of `verify` on the export `root / engine`, run on `device`.

    It has the first failures in "problems".
    """
    from vanilla_transformer_export import load_checkpoint, verify

    report = verify(root / engine, load_checkpoint(root / "vanilla"), CASES, device=device)
    return {**report.summary(), "problems": report.failures[:3]}


def bleu(engine: str, source: Path, target: Path) -> dict:
    """Return the result of `evaluate` for the shipped checkpoint on the files `source` and
    `target`.

    It runs in torch with float32 if `engine` is "torch", else as that export.
    """
    from vanilla_transformer_export import export
    from vanilla_transformer_export.exporting.evaluation import evaluate

    if engine == "torch":
        return evaluate(CHECKPOINT, source, target, batch_size=ROWS)
    group, dtype = engine.split("-")
    with tempfile.TemporaryDirectory() as folder:
        export(CHECKPOINT, Path(folder) / "export", cases=1, target=group, dtype=dtype)
        return evaluate(Path(folder) / "export", source, target, batch_size=ROWS)
