"""Checks of exports without torch, with any versions of their dependencies; `make test-versions`
runs them.

`python tests/support/torch_free.py write FOLDER` exports models for every target and dtype, and
records their results. `check FOLDER` expects the same results in an environment of numpy,
tokenizers and onnxruntime. `bare FOLDER` does so for the portable exports, with numpy and an
InferenceSession of onnxruntime only, without our package. `export FOLDER` writes its own exports,
in an environment with the extra `export` and without torch, and expects the same results of them.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime

CARD = Path(__file__).parents[2] / "model_cards" / "vanilla-seq2seq-tiny-multi30k-en-de"
# targets that a CPU can run
DTYPES = {"portable": ("fp32", "int8"), "cpu": ("fp32", "int8", "int4"), "cuda": ("fp32",)}
GREEDY = {"num_beams": 1, "max_new_tokens": 12}
OPTIONS = {
    "greedy": GREEDY,
    "beams": GREEDY | {"num_beams": 3},
    "sampled": GREEDY | {"do_sample": True, "seed": 7},
}
TEXTS = ["A dog runs across a field.", "Two men are sitting in front of a house.", "Girl."]
TOLERANCE = 1e-4  # relative to max(1, |value|)


def write(folder: Path) -> None:
    from targets import MODELS, build

    from vanilla_transformer_export import export

    checkpoints = {"text": CARD} | {name: folder / "checkpoints" / name for name in MODELS}
    for name in MODELS:
        build(name).save_pretrained(checkpoints[name])
    for name, checkpoint in checkpoints.items():
        for target, dtypes in DTYPES.items():
            for dtype in dtypes:
                directory = folder / f"{name}-{target}-{dtype}"
                export(checkpoint, directory, cases=1, target=target, dtype=dtype)
                directory.with_suffix(".json").write_text(
                    json.dumps(results(directory)), encoding="utf-8"
                )


def results(directory: Path) -> dict[str, list]:
    """Return {name: results} of `Runtime` and `TextRuntime` for the export `directory`.

    These are new tokens with each of the `OPTIONS` and from a stream, and texts if there is a
    tokenizer. For an encoder they are the outputs of real tokens.
    """
    from vanilla_transformer_export import Runtime, TextRuntime

    runtime, (ids, mask) = Runtime(directory, device="cpu"), prompts()
    if "decoder" not in runtime.model.loaded.sessions:
        return {
            name: real(values, mask).tolist() for name, values in runtime.outputs(ids, mask).items()
        }
    start = 1 if "encoder" in runtime.model.loaded.sessions else ids.shape[1]
    arrays = {
        name: runtime.generate(ids, mask, **options)[:, start:].tolist()
        for name, options in OPTIONS.items()
    }
    arrays["streamed"] = np.stack(list(runtime.stream(ids, mask, **GREEDY)), axis=1).tolist()
    if (directory / "tokenizer.json").is_file():
        arrays["texts"] = TextRuntime(directory, device="cpu").generate(TEXTS)
    return arrays


def results_again(directory: Path) -> dict[str, list]:
    """Return the `results` of a new export of the checkpoint that `directory` was exported from."""
    from vanilla_transformer_export import export

    name, target, dtype = directory.name.rsplit("-", 2)
    checkpoint = CARD if name == "text" else directory.parent / "checkpoints" / name
    with tempfile.TemporaryDirectory() as folder:
        export(checkpoint, out := Path(folder, "out"), target=target, dtype=dtype)
        return results(out)


def bare_results(directory: Path) -> dict[str, list]:
    """Return the results of the portable export `directory`, without our package.

    They are those of `results`, or for a model that generates, the greedy tokens from a past of
    length 0.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    sessions = {
        path.name.partition("_model")[0]: onnxruntime.InferenceSession(path)
        for path in directory.glob("onnx/*.onnx")
    }
    ids, mask = prompts()
    if "decoder" in sessions:
        [hidden] = sessions["encoder"].run(None, {"input_ids": ids, "attention_mask": mask})
        feeds = {"encoder_hidden_states": hidden, "encoder_attention_mask": mask}
        return {
            "greedy": greedy(
                sessions["decoder"],
                np.full((len(ids), 1), config["decoder_start_token_id"]),
                feeds,
                config,
            )
        }
    [session] = sessions.values()
    names = [tensor.name for tensor in session.get_inputs()]
    if "position_ids" not in names:
        feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        outputs = session.run(None, {name: feeds[name] for name in names})
        return {
            tensor.name: real(values, mask).tolist()
            for tensor, values in zip(session.get_outputs(), outputs, strict=True)
        }
    left = np.argsort(mask, axis=1, kind="stable")  # all padding to the left
    ids, mask = np.take_along_axis(ids, left, 1), np.take_along_axis(mask, left, 1)
    return {"greedy": greedy(session, ids, {"attention_mask": mask}, config)}


def greedy(session, tokens, feeds, config) -> list[list[int]]:
    """Return the new tokens of greedy search after `tokens` (B, T); ended rows get the pad token.

    `session` has the decoder graph, `feeds` are its other inputs, and `config` the model's fields.
    """
    names, new, ended = (
        [tensor.name for tensor in session.get_outputs()],
        [],
        np.zeros(len(tokens), bool),
    )
    for tensor in session.get_inputs():
        if tensor.name.startswith("past"):
            shape = {"batch_size": len(tokens), "past_length": 0, "past_source_length": 0}
            feeds[tensor.name] = np.zeros(
                [shape.get(size, size) for size in tensor.shape], np.float32
            )
    while len(new) < GREEDY["max_new_tokens"] and not ended.all():
        feeds["input_ids"] = tokens
        if "attention_mask" in feeds:
            feeds["position_ids"] = np.maximum(feeds["attention_mask"].cumsum(axis=1) - 1, 0)[
                :, -tokens.shape[1] :
            ]
        logits, *present = session.run(names, feeds)
        new.append(np.where(ended, config["pad_token_id"], logits[:, -1].argmax(axis=1)))
        ended |= new[-1] == config["eos_token_id"]
        tokens = new[-1][:, None]
        feeds |= {
            name.replace("present", "past_key_values"): states
            for name, states in zip(names[1:], present, strict=True)
        }
        if "attention_mask" in feeds:
            feeds["attention_mask"] = np.pad(
                feeds["attention_mask"], ((0, 0), (0, 1)), constant_values=1
            )
    return np.stack(new, axis=1).tolist()


def prompts() -> tuple[np.ndarray, np.ndarray]:
    """Return random ids and mask of rows of several lengths, padded on the right."""
    mask = (np.arange(7) < [[7], [1], [4], [6]]).astype(np.int64)
    return np.random.default_rng(0).integers(4, 48, mask.shape) * mask, mask


def real(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Set the states of padding to 0 in tokens (B, S, D); return other values (B, D) unchanged."""
    return values * mask[:, :, None] if values.ndim == 3 else values


def differences(actual: dict[str, list], expected: dict[str, list]) -> list[str]:
    """Return text for each difference of `actual` from `expected`; tokens and texts must be
    equal."""
    wrong = []
    for name, values in actual.items():
        expected_values = expected[name]
        is_close = np.array(expected_values).dtype.kind == "f" and np.shape(values) == np.shape(
            expected_values
        )
        if not (
            np.allclose(values, expected_values, rtol=TOLERANCE, atol=TOLERANCE)
            if is_close
            else values == expected_values
        ):
            wrong.append(f"{name}: {values} instead of {expected_values}")
    return wrong


def main(verb: str, folder: Path) -> None:
    if verb == "write":
        return write(folder)
    find, pattern = {
        "check": (results, "*.json"),
        "export": (results_again, "*.json"),
        "bare": (bare_results, "*-portable-*.json"),
    }[verb]
    files = sorted(folder.glob(pattern))
    wrong = []
    for path in files:
        expected = json.loads(path.read_text(encoding="utf-8"))
        wrong += [
            f"{path.stem}: {line}" for line in differences(find(path.with_suffix("")), expected)
        ]
    print(
        f"onnxruntime {onnxruntime.__version__}, numpy {np.__version__}: {len(files)} exports, "
        f"{len(wrong)} differ"
    )
    if wrong or not files:
        sys.exit("\n".join(wrong) or f"{folder} has no {pattern}: run write first")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
