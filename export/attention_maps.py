"""Attention maps of exports: the cross-attention that the alignment graph returns."""

import os
from functools import partial

import numpy as np

from .engine.alignments import head_weights, recorded_heads
from .engine.inputs import start_tokens
from .errors import UsageError
from .inference.options import Options
from .shared.attention_figures import AttentionMaps, check_length, plot, save_figure
from .text_runtime import TextRuntime, open_runtime

CROSS = "cross"


def save_attention_maps(
    directory: str | os.PathLike,
    out: str | os.PathLike,
    source: str,
    target: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    kind: str | None = None,
    force: bool = False,
) -> None:
    """Draw the attention maps of an export, and write the figure to the file `out`.

    `source`, `target` and `kind` are those of `attention_maps`. `layer` and `head`, counted from 0,
    select maps; by default all are drawn that the export returns.

    Raises:
        FileExistsError: if `out` exists without `force`.
        UsageError: if the ending of `out` is not an image format, for a layer or head that the
            export does not return, and for a kind other than "cross".
        FileNotFoundError, ValueError: see `open_runtime` and `attention_maps`.
        ImportError: if matplotlib is not installed.
    """
    if kind not in (None, CROSS):
        raise UsageError(f"an export has no {kind!r} attention, expected {CROSS}")
    with open_runtime(directory) as runtime:
        maps = partial(attention_maps, runtime, source, target)
        save_figure(out, force, [directory], lambda: plot(maps(), layer, head))


def attention_maps(runtime: TextRuntime, source: str, target: str | None = None) -> AttentionMaps:
    """Return the cross-attention of the text `source` and its translation `target`.

    The default `target` is the model's own translation, by its generation settings without
    sampling. Weights are float32, NaN for heads that the alignment graph does not return.

    Raises:
        ValueError: for an export without an alignment graph, a blank text, and a text of more
            tokens than the model has positions or maps can show.
    """
    runtime.info.check_alignment()
    [row], [options] = runtime.checked_rows(
        [source], None, None, {"do_sample": False, "num_return_sequences": 1}
    )
    tokens = target_tokens(runtime, row, options, target)
    config = runtime.info.config
    maps = config["decoder_layers"], config["num_attention_heads"]
    check_length(max(len(row), len(tokens)), maps[0] * maps[1])
    [of_heads] = head_weights(runtime.runtime.model, [row], [tokens])
    weights = np.full((*maps, *of_heads.shape[1:]), np.nan, np.float32)
    for recorded, of_head in zip(recorded_heads(runtime.info), of_heads, strict=True):
        weights[recorded.layer, recorded.head] = of_head
    names = ([runtime.tokenizer.id_to_token(id) or str(id) for id in ids] for ids in (tokens, row))
    return AttentionMaps(CROSS, weights, *names)


def target_tokens(
    runtime: TextRuntime, row: list[int], options: Options, target: str | None
) -> list[int]:
    """Return what the decoder reads: the start token, and the tokens of the text `target` or of the
    translation of `row`. An end token is only predicted."""
    [[start]] = start_tokens(runtime.info, 1, None, options).tolist()
    if target is None:
        [result] = runtime.generate_rows([row], [options])
        return [start, *result.tokens[:-1]]
    [encoding] = runtime.encode([target], False, runtime.target_tokenizer)
    if not encoding.ids:
        raise ValueError(f"the text {target!r} has no tokens, expected at least one")
    return [start, *runtime.languages.first_tokens(options), *encoding.ids]
