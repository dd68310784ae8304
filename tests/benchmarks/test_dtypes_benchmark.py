"""Tests of benchmarks/dtypes.py: its numbers, and a run that goes on with the files of another."""

import dtypes
import numpy as np
import pytest
from heads import save_head, word_pieces
from scipy.stats import spearmanr

THINGS = ("man", "house", "woman", "book", "river")


def test_numbers_match_scipy_and_a_search_row_by_row():
    rng = np.random.default_rng(0)
    expected = rng.standard_normal((40, 8))
    vectors = expected + 0.3 * rng.standard_normal((40, 8))
    result = dtypes.compare(vectors, expected)

    def cosine(a, b):
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    cosines = [cosine(a, b) for a, b in zip(vectors, expected)]
    kept, all_ranks, near_ranks = [], [], []
    for row in range(40):
        rest = [other for other in range(40) if other != row]
        seen = [cosine(vectors[row], vectors[other]) for other in rest]
        wanted = [cosine(expected[row], expected[other]) for other in rest]
        best = [sorted(range(39), key=lambda i: -values[i])[:10] for values in (seen, wanted)]
        kept.append(len({*best[0]} & {*best[1]}) / 10)
        all_ranks.append(spearmanr(seen, wanted).statistic)
        near = best[1]
        near_ranks.append(spearmanr([seen[i] for i in near], [wanted[i] for i in near]).statistic)
    assert result == pytest.approx(
        {
            "mean": np.mean(cosines),
            "lowest": np.min(cosines),
            "kept": np.mean(kept),
            "spearman": np.mean(all_ranks),
            "spearman_near": np.mean(near_ranks),
        }
    )


def test_interrupted_call_goes_on_and_prints_every_checkpoint(tmp_path, monkeypatch, capsys):
    save_head("VanillaEncoderModel", word_pieces(), tmp_path / "model")
    texts = [f"{kind} {thing}" for kind in ("old", "red", "the") for thing in THINGS]
    (tmp_path / "texts").write_text("\n".join(texts))
    files = ["--inputs", "texts", "--calibrate", "texts", "--work", "work", "--out", "out.json"]
    command = ["model", *files, "--lines", "14", "--repeats", "1"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dtypes, "TIMED", 4)
    monkeypatch.setattr(dtypes, "time_exports", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dtypes.main(command)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dtypes, "export_vectors", lambda *arguments: 1 / 0)
    dtypes.main(command)
    lines = capsys.readouterr().out.splitlines()[-4:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[:2] for row in cells] == [["model", dtype] for dtype in dtypes.DTYPES]
    assert cells[0][2:5] == ["1.0000", "1.0000", "1.000"] and cells[0][7:9] == ["1.00", "1.00"]
    assert 0.5 < float(cells[3][2]) < 1
