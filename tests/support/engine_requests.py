"""Options of requests to an engine, and the tokens that the runtime gives for them."""

import numpy as np

MAX_NEW_TOKENS = 9
OPTIONS = [
    dict(),
    dict(do_sample=True, seed=3),
    dict(do_sample=True, seed=4, temperature=0.7, top_k=5, top_p=0.9, min_p=0.02),
    dict(num_beams=3),
    dict(
        num_beams=4,
        num_return_sequences=2,
        length_penalty=0.4,
        early_stopping=True,
        renormalize_logits=True,
    ),
    dict(repetition_penalty=1.4, no_repeat_ngram_size=2, min_new_tokens=4),
    dict(
        bad_words_ids=[[7], [8, 9]],
        suppress_tokens=[11],
        begin_suppress_tokens=[12],
        forced_eos_token_id=2,
    ),
    dict(forced_bos_token_id=13, max_new_tokens=1),
]
SEQ2SEQ, DECODER = "seq2seq", "causal"


def expected_tokens(runtime, ids, prefix, options):
    """Return the tokens of `Runtime.generate`, without padding."""
    start = np.array([prefix]) if prefix else None
    rows = runtime.generate(
        np.array([ids]),
        np.ones((1, len(ids)), int),
        start,
        **{"max_new_tokens": MAX_NEW_TOKENS, **options},
    )
    rows = rows[:, 1 + len(prefix) if "encoder" in runtime.specs else len(ids) :].tolist()
    return [row[: row.index(2) + 1] if 2 in row else row for row in rows]
