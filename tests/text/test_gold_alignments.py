"""F1 of the heads of the shipped cards against links of eflomal; what the file of links holds."""

import re

import pytest
from alignments import card
from gold import COUNT, PAIRS, captions, f1, gold_links, gold_parts, needs_captions

from vanilla_transformer_export import TextRuntime, export
from vanilla_transformer_export.text.alignments import align_words, source_spans, target_spans


def test_file_has_a_line_of_pairs_for_each_caption_of_each_part():
    parts = gold_parts()
    kinds = ("references", "translations")
    assert [*parts] == [f"{pair} {kind}" for pair in PAIRS for kind in kinds]
    for name, lines in parts.items():
        start = "[0-9a-f]{8} " if name.endswith("translations") else ""
        assert len(lines) == COUNT
        assert all(re.fullmatch(rf"{start}\d+-\d+( \d+-\d+)*", line) for line in lines)


def links_of(runtime, sources, rows, targets):
    """Return the links of `sources` and their translations, the token ids `targets`."""
    start = runtime.info.config["decoder_start_token_id"]
    weights = runtime.runtime.alignments(rows, [[start, *tokens] for tokens in targets])
    found = []
    for text, row, tokens, of_tokens in zip(sources, rows, targets, weights, strict=True):
        [encoding] = runtime.encode([text], False)
        target, places = target_spans(tokens, runtime.detokenizer(), runtime.special_ids)
        spans = source_spans(row, encoding), places
        found.append(align_words((text, target), spans, of_tokens).links)
    return found


@pytest.mark.slow
@needs_captions
@pytest.mark.parametrize("pair", PAIRS)
def test_heads_of_cards_find_the_words_that_belong_together(pair, tmp_path):
    sources, references = captions(pair)
    scores = {}
    for dtype in ("fp32", "int8"):
        export(card(pair), tmp_path / dtype, target="cpu", dtype=dtype, cases=1)
        runtime = TextRuntime(tmp_path / dtype)
        if dtype == "fp32":
            translated = runtime.generate(sources, return_alignments=True)
            gold = gold_links(pair, [each.text for each in translated])
            assert gold.count(None) < COUNT / 100
            own = f1([each.links for each in translated], gold)
            rows, [options, *_] = runtime.checked_rows(sources, None, None, {})
            results = runtime.generate_rows(rows, [options] * COUNT)
            tokens = [result.tokens for result in results]
        else:
            own = f1(links_of(runtime, sources, rows, tokens), gold)
        encodings = runtime.encode(references, False, runtime.target_tokenizer)
        found = links_of(runtime, sources, rows, [encoding.ids for encoding in encodings])
        scores[dtype] = f1(found, gold_links(pair)), own
    assert scores["fp32"][0] >= 0.87 and scores["fp32"][1] >= 0.89
    for exact, rounded in zip(*scores.values()):
        assert abs(exact - rounded) <= 0.005
