"""Tests of aligned translations of the shipped translator, by words with one translation each."""

import dataclasses
import json

import numpy as np
import pytest
from alignments import CARD, DICTIONARY, SENTENCES, dictionary_scores
from command_line import main, read_error
from messages import raises

from vanilla_transformer_export import TextRuntime, export
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.exporting.alignment_heads import symmetrized
from vanilla_transformer_export.files.predictions import Predictions
from vanilla_transformer_export.files.run import Runner

GREEDY = dict(num_beams=1)


@pytest.fixture(scope="module")
def parallel_text(tmp_path_factory, plain):
    """A file of parallel text: the sentences and their translations."""
    path = tmp_path_factory.mktemp("parallel") / "pairs.tsv"
    targets = plain.translate(SENTENCES, **GREEDY)
    pairs = zip(SENTENCES, targets, strict=True)
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    return path


@pytest.fixture(scope="module")
def plain(shipped):
    """An export with the default heads."""
    return shipped("en-de")


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory, parallel_text):
    """An export whose heads were chosen on the parallel text."""
    directory = tmp_path_factory.mktemp("calibrated") / "export"
    export(CARD, directory, target="cpu", cases=1, alignments=parallel_text)
    return TextRuntime(directory)


def test_chosen_heads_find_the_words_of_a_dictionary(plain, calibrated):
    facts = calibrated.info.manifest["alignment"]
    assert 1 <= len(facts["heads"]) <= 4 and facts["pairs"] == len(SENTENCES)
    shares = []
    for runtime in (plain, calibrated):
        found = runtime.translate(SENTENCES, return_alignments=True, **GREEDY)
        right, number = dictionary_scores(SENTENCES, found)
        assert number > 200
        shares.append(right / number)
    assert shares[0] > 0.6 and shares[1] > 0.95 and shares[1] >= shares[0]


def test_spans_are_of_the_texts_as_given_and_as_returned(calibrated):
    text = "A dog is sleeping. A man is standing!\n\n12:30\n  A woman is sitting.  "
    [plain] = calibrated.translate([text], **GREEDY)
    [found] = calibrated.translate([text], return_alignments=True, **GREEDY)
    assert found.text == plain
    pairs = [
        (text[start:end].lower(), found.text[first:last].lower())
        for (start, end), (first, last) in found.alignments
    ]
    for word in ("dog", "sleeping", "man", "standing", "woman", "sitting"):
        assert (word, DICTIONARY[word]) in pairs
    starts = [target for _, target in found.alignments]
    assert starts == sorted(starts)


def test_copied_sentences_are_aligned_with_themselves(calibrated):
    [found] = calibrated.translate(["12:30\nA dog is sleeping."], return_alignments=True, **GREEDY)
    assert found.text.startswith("12:30\n")
    assert found.alignments[:3] == [((0, 2), (0, 2)), ((2, 3), (2, 3)), ((3, 5), (3, 5))]


def test_alignments_do_not_depend_on_other_texts(calibrated):
    texts = [*SENTENCES[:12], "A dog."]
    together = calibrated.translate(texts, return_alignments=True, **GREEDY)
    alone = [calibrated.translate([text], return_alignments=True, **GREEDY)[0] for text in texts]
    assert together == alone


def test_generate_aligns_each_of_several_results(calibrated):
    options = dict(num_beams=3, num_return_sequences=3)
    texts = SENTENCES[:3]
    found = calibrated.generate(texts, return_alignments=True, **options)
    assert [result.text for result in found] == calibrated.generate(texts, **options)
    sources = [text for text in texts for _ in range(3)]
    right, number = dictionary_scores(sources, found)
    assert right / number > 0.9


def test_moses_pairs_follow_a_tab_in_text_and_are_a_field_in_json(calibrated, tmp_path):
    (tmp_path / "in").write_text("A dog is sleeping.\n\nA man is standing.\n")
    runner = Runner(Predictions(calibrated, "generate", dict(GREEDY), alignments="moses"))
    runner.to_file(tmp_path / "in", tmp_path / "out")
    lines = [line.split("\t") for line in (tmp_path / "out").read_text().split("\n")]
    assert lines[1:2] + lines[3:] == [[""], [""]]
    assert [text for text, _ in lines[::2]] == calibrated.generate(
        ["A dog is sleeping.", "A man is standing."], **GREEDY
    )
    assert all({"0-0", "1-1", "3-2"} <= {*pairs.split()} for _, pairs in lines[::2])
    (tmp_path / "in.jsonl").write_text('{"text": "A dog is sleeping."}\n')
    runner.to_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    [record] = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert record["translation"] == dict(zip(("text", "alignments"), lines[0], strict=True))


def test_soft_alignments_are_json_with_words_and_weights(calibrated, tmp_path):
    source = "A dog is\tsleeping."
    [expected] = calibrated.generate([source], return_alignments=True, **GREEDY)
    runner = Runner(Predictions(calibrated, "generate", dict(GREEDY), alignments="json"))
    (tmp_path / "in").write_text(f"{source}\n\n")
    runner.to_file(tmp_path / "in", tmp_path / "out")
    line, blank, end = (tmp_path / "out").read_text().split("\n")
    text, found = line.split("\t")
    assert (text, blank, end) == (expected.text, "", "")
    found = json.loads(found)
    assert [word["word"] for word in found["source"]] == ["A", "dog", "is", "sleeping", "."]
    for side, whole in (("source", source), ("target", text)):
        spans = [(word["start"], word["end"]) for word in found[side]]
        assert [word["word"] for word in found[side]] == [whole[slice(*span)] for span in spans]
    np.testing.assert_allclose(found["weights"], expected.weights, rtol=0, atol=5.1e-5)
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": source}))
    runner.to_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    record = json.loads((tmp_path / "out.jsonl").read_text())
    assert record["translation"] == {"text": text, "alignments": found}


def test_alignments_exclude_scores_and_other_tasks(calibrated):
    for others in (dict(scores=True), dict(n_best=2)):
        with raises(UsageError, seen="alignments", expected="one"):
            Predictions(calibrated, "generate", alignments="moses", **others)
    with raises(UsageError, seen=("alignments", "translate"), expected="generate"):
        Predictions(calibrated, "translate", alignments="json")
    with raises(UsageError, seen="pharaoh", expected=("moses", "json")):
        Predictions(calibrated, "generate", alignments="pharaoh")


def test_heads_of_a_portable_export_are_chosen_on_its_own_graph(
    calibrated, parallel_text, tmp_path
):
    export(CARD, tmp_path / "out", dtype=["fp32", "int8"], cases=1, alignments=parallel_text)
    runtime = TextRuntime(tmp_path / "out", dtype="int8")
    assert runtime.info.manifest["alignment"] == calibrated.info.manifest["alignment"]
    found = runtime.translate(SENTENCES, return_alignments=True, **GREEDY)
    right, number = dictionary_scores(SENTENCES, found)
    assert number > 200 and right / number > 0.95
    missing = tmp_path / "missing.tsv"
    error = read_error("export", CARD, tmp_path / "again", "--alignments", missing)
    assert str(missing) in error


def test_flag_alone_keeps_the_heads_of_the_card_and_certify_compares_them(tmp_path, capsys):
    out = tmp_path / "out"
    main(["export", str(CARD), str(out), "--alignments"])
    heads = json.loads((CARD / "config.json").read_text())["alignment_heads"]
    assert json.loads((out / "manifest.json").read_text())["alignment"] == {"heads": heads}
    capsys.readouterr()
    main(["certify", str(out)])
    assert "alignment" in capsys.readouterr().out
    graph = out / "onnx/alignment_model.onnx"
    assert graph.stat().st_size < (out / "onnx/decoder_model_merged.onnx").stat().st_size


def test_portable_export_says_that_it_has_no_alignment_graph(tmp_path):
    export(CARD, tmp_path / "export", cases=1)
    runtime = TextRuntime(tmp_path / "export")
    for method in (runtime.translate, runtime.generate):
        with raises(ValueError, seen="no alignment graph", expected="--target cpu"):
            method(["A dog."], return_alignments=True)


# --------------------------------------------------------------------------- export with alignments


def lines_of(path, count):
    return path.read_text().splitlines()[:count]


@pytest.mark.parametrize(
    ("change", "seen", "expected"),
    [
        (lambda lines: lines[:99], 99, 100),
        (lambda lines: [*lines, "no tab"], (len(SENTENCES) + 1, "no tab"), "one tab"),
        (lambda lines: [*lines, "two\ttabs\there"], len(SENTENCES) + 1, "one tab"),
        (lambda lines: [*lines, "source\t "], len(SENTENCES) + 1, "its translation"),
        (lambda lines: [], 0, 100),
    ],
)
def test_parallel_text_is_checked_first(parallel_text, tmp_path, change, seen, expected):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{line}\n" for line in change(lines_of(parallel_text, None))))
    with raises(ValueError, seen=seen, expected=expected):
        export(CARD, tmp_path / "export", target="cpu", alignments=path)
    assert not (tmp_path / "export").exists()


def test_alignments_of_models_and_targets_without_a_graph_are_rejected(tmp_path, parallel_text):
    with pytest.raises(FileNotFoundError, match="missing"):
        export(CARD, tmp_path / "export", target="cpu", alignments=tmp_path / "missing.tsv")
    with raises(UsageError, seen=("greedy", "pairs.tsv"), expected="False"):
        options = dict(target="cpu", generate="greedy", alignments=parallel_text)
        export(CARD, tmp_path / "export", **options)
    decoder = CARD.parent / "vanilla-decoder-tiny-shakespeare"
    for alignments in (parallel_text, True):
        with raises(ValueError, seen="VanillaDecoderForCausalLM", expected="encoder-decoder"):
            export(decoder, tmp_path / "export", target="cpu", alignments=alignments)
    with raises(UsageError, seen=5, expected=("path", "True")):
        export(CARD, tmp_path / "export", alignments=5)


def test_two_directions_grow_as_in_moses():
    """A neighbor of a common link grows if a word of it is free; words of no link come last."""
    forward, backward = {(0, 0), (1, 1), (3, 5)}, {(0, 0), (0, 1), (4, 5)}
    assert symmetrized(forward, backward) == {(0, 0), (0, 1), (1, 1), (3, 5)}


def test_spans_of_a_text_with_a_language_word_are_of_the_words_after_it(plain, monkeypatch):
    languages = dataclasses.replace(plain.languages, words=[">>de<<"])
    monkeypatch.setattr(plain, "languages", languages)
    for text in (">>de<< A dog is sleeping.", ">>de<<   A dog is sleeping. A man is standing."):
        [translation] = plain.translate([text], return_alignments=True, **GREEDY)
        words = {text[start:end] for (start, end), _ in translation.alignments}
        assert words and words < {"A", "dog", "man", "is", "sleeping", "standing", "."}
