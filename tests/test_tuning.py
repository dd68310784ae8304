"""`export --tune`: which way of an int8 product is chosen, and where the result may run. Fast tests make up the times."""

import collections
import json
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import tuned as tuned_benchmark
from checkpoints import copy_of, edit_json, perturbed
from targets import MODELS, SIZES, build, prompts
from test_row_independence import COMPANY, check_sequences, check_steps

from vanilla_transformer_export import Runtime, cli, export, tuning
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.passes.quantization import INT8_PRODUCTS, VNNI
from vanilla_transformer_export.runtime import processor
from vanilla_transformer_export.runtime.processor import Processor

BLOCKS = ["block-32", "block-64"]
NAMED = "Made up, cpu family 1, model 2"


@pytest.fixture
def cpuinfo(tmp_path, monkeypatch):
    """Makes the system say what the processor is."""

    def say(flags, name="Made up"):
        path = tmp_path / "cpuinfo"
        path.write_text(
            f"processor\t: 0\ncpu family\t: 1\nmodel\t\t: 2\nmodel name\t: {name}\nflags\t\t: fpu {flags}\n\nx: 1\n"
        )
        monkeypatch.setattr(processor, "CPUINFO", path)

    return say


@pytest.fixture
def times(monkeypatch):
    """Makes the times of ways, over that of the default; 1 if not given."""

    def say(**ratios):
        def interleaved(sessions, feeds):
            return {name: ratios.get(name.replace("-", "_"), 1.0) for name in sessions}

        monkeypatch.setattr(tuning, "interleaved", interleaved)

    return say


def matrix(rows=70, columns=40, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


# ------------------------------------------------------------------------------------------------------------------ the ways


def test_each_way_gives_the_product_on_a_processor_that_can():
    here, weights = Processor.here(), matrix(256, 96)
    x = matrix(33, 256, seed=1)[:, None]
    errors = {}
    for name, way in INT8_PRODUCTS.items():
        if not (way.needs and here.lacks([" or ".join(way.needs)])):
            session = tuning.opened(tuning.products(weights, name, 1), 1)
            errors[name] = np.abs(session.run(None, {"x0": x})[0] - x @ weights).mean() / np.abs(x @ weights).mean()
    assert "row" in errors and max(errors.values()) == errors["block-32-int4"] < 0.12
    assert all(error < 0.012 for name, error in errors.items() if name != "block-32-int4")
    assert errors.get("row-full", 0) < errors["row"]  # the default leaves room for sums of 16 bits


def test_the_loss_is_that_of_the_rounded_weights():
    """One scale for a column, or a block, whose steps are its largest weight over 127."""
    weights = matrix()
    steps = np.abs(weights).max(axis=0) / 127
    expected = np.square(np.rint(weights / steps) * steps - weights).mean()
    assert INT8_PRODUCTS["row-full"].loss(weights) == pytest.approx(expected, rel=1e-4)
    blocks = np.pad(weights, ((0, 26), (0, 0))).reshape(3, 32, 40)
    steps = np.abs(blocks).max(axis=1, keepdims=True) / 127
    expected = np.square(np.rint(blocks / steps) * steps - blocks).mean()
    assert INT8_PRODUCTS["block-32"].loss(weights) == pytest.approx(expected, rel=1e-4)
    grid = np.random.default_rng(0).integers(-8, 8, (64, 5)).astype(np.float32)
    grid[::32] = -8
    assert INT8_PRODUCTS["block-32-int4"].loss(grid) == 0 < INT8_PRODUCTS["block-32-int4"].loss(grid + 0.3)


class Session:
    """Of a kernel that takes another way for odd numbers of rows, as those of blocks of 128 do."""

    def run(self, names, feeds):
        [x] = feeds.values()
        return [x + (np.float32(1e-6) if len(x) % 2 and len(x) > 1 else 0)]


def test_a_way_whose_rows_depend_on_their_number_does_not_count(monkeypatch):
    assert all(tuning.keeps_bits(name, matrix(32, 8), 1) for name in ("row", "block-32-int4"))
    monkeypatch.setattr(tuning, "opened", lambda graph, threads: Session())
    assert not tuning.keeps_bits("row", matrix(32, 8), 1)


# ---------------------------------------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    "seconds, chosen",
    [
        ({}, "row-full"),
        ({"block_32": 0.96, "block_64": 0.951}, "row-full"),
        ({"block_32": 0.94, "block_64": 0.951}, "block-32"),
        ({"block_32": 0.94, "block_64": 0.5}, "block-64"),
        ({"block_32_int4": 0.1}, "row-full"),  # which loses too much
    ],
)
def test_a_choice_needs_a_lead(cpuinfo, times, seconds, chosen):
    cpuinfo("avx2 avx512_vnni")
    times(**seconds)
    assert tuning.best_way(matrix(), 1, (1, 8)) == chosen


def test_the_lead_is_the_mean_over_numbers_of_rows(cpuinfo, monkeypatch):
    cpuinfo("avx_vnni")
    seconds = {1: 0.5, 8: 1.7}  # 0.92

    def interleaved(sessions, feeds):
        return {name: seconds[len(feeds["x0"])] if name == "block-64" else 1.0 for name in sessions}

    monkeypatch.setattr(tuning, "interleaved", interleaved)
    assert tuning.best_way(matrix(), 1, (1, 8)) == "block-64"
    seconds[8] = 1.9  # 0.97
    assert tuning.best_way(matrix(), 1, (1, 8)) == "row-full"


def test_a_processor_without_vnni_keeps_the_default_of_seven_bits(cpuinfo, times):
    cpuinfo("avx2 avx512f")
    times(row_full=0.1, block_32=0.1, block_64=0.1, block_32_int4=0.1)
    assert tuning.best_way(matrix(), 1, (1,)) == "row"


def test_the_fastest_that_keeps_its_bits_is_chosen(cpuinfo, times, monkeypatch):
    cpuinfo("avx512_vnni")
    times(block_32=0.9, block_64=0.5)
    monkeypatch.setattr(tuning, "keeps_bits", lambda name, matrix, tokens: name != "block-64")
    assert tuning.best_way(matrix(), 1, (1,)) == "block-32"


def test_weights_that_would_lose_more_keep_the_default(cpuinfo, times):
    """The first of a shape stands on a grid of 4 bits, the second does not."""
    cpuinfo("avx512_vnni")
    times(block_32_int4=0.5)
    grid = np.random.default_rng(0).integers(-8, 8, (64, 5)).astype(np.float32)
    grid[::32] = -8
    choose = tuning.Tuning.start("latency").chooser("decoder")
    assert [choose(grid), choose(matrix(64, 5)), choose(grid)] == ["block-32-int4", "row", "block-32-int4"]


def test_sessions_take_turns(monkeypatch):
    order = []

    class Turn:
        def __init__(self, name):
            self.run = lambda names, feeds: order.append(name)

    found = tuning.interleaved({name: Turn(name) for name in "ab"}, {})
    assert order == ["a", "b"] * (1 + tuning.ROUNDS) and found.keys() == {"a", "b"}


# --------------------------------------------------------------------------------------------------------------- the exports


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("tuning") / "checkpoint"
    architecture, fields = MODELS["seq2seq"]
    perturbed(architecture, {**SIZES, **fields, "decoder_layers": 1}).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tuned(checkpoint):
    """An export with choices that depend on the shape, as if they had been found on a machine that is made up."""
    with pytest.MonkeyPatch.context() as patch:
        info = checkpoint.parent / "cpuinfo"
        info.write_text("model name: Made up\ncpu family: 1\nmodel: 2\nflags: avx512_vnni avx2\n")
        patch.setattr(processor, "CPUINFO", info)
        patch.setattr(
            tuning, "best_way", lambda matrix, tokens, rows: BLOCKS[matrix.shape[1] % 3 % 2] if tokens == 1 else "row-full"
        )
        out = checkpoint.parent / "tuned"
        export(checkpoint, out, target="cpu", dtype="int8", tune="latency")
    return out


def contents(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_the_file_gives_the_same_export_byte_for_byte(checkpoint, tuned, cpuinfo, tmp_path, monkeypatch, capsys):
    """In the place of such an export, whose files are all known as ours."""
    cpuinfo("avx512_vnni")
    monkeypatch.setattr(tuning, "best_way", None)  # nothing is timed
    again = copy_of(tuned, tmp_path)
    (again / "config.json").unlink()  # which must come back
    words = ["export", str(checkpoint), str(again), "--force", "--target", "cpu", "--dtype", "int8"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        cli.main([*words, "--tune", str(tuned / "tuning.json")])
    assert json.loads(capsys.readouterr().out)["parity"]["failures"] == 0
    assert contents(again) == contents(tuned)


def test_the_graphs_have_the_ways_that_were_chosen(tuned):
    manifest = json.loads((tuned / "manifest.json").read_text())
    assert (manifest["tuned_on"], manifest["needs"]) == (NAMED, ["avx512_vnni or avx_vnni"])
    choices = json.loads((tuned / "tuning.json").read_text())["choices"]
    assert set(choices["steps"].values()) == set(BLOCKS) and set(choices["sequences"].values()) == {"row-full"}
    for role, file in manifest["graphs"].items():
        counts = collections.Counter(node.op_type for node in onnx.load(tuned / file).graph.node)
        products = manifest["optimized"][role]["quantize_products"]
        assert counts["MatMulIntegerToFloat" if role == "encoder" else "MatMulNBits"] == products > 4


def test_without_its_instructions_nothing_runs(tuned, cpuinfo):
    cpuinfo("avx2 avx512f", name="Older")
    said = "tuned needs a processor with avx512_vnni or avx_vnni, and this one is Older, cpu family 1, model 2, without: its"
    with pytest.raises(OSError, match=said):
        Runtime(tuned)


def test_on_another_processor_that_has_them_it_warns(tuned, cpuinfo):
    cpuinfo("avx_vnni", name="Newer")
    with pytest.warns(
        UserWarning, match="tuned on Made up, cpu family 1, model 2, this processor is Newer, .* it runs as it is"
    ):
        Runtime(tuned)
    cpuinfo("avx_vnni")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Runtime(tuned)


def test_a_system_that_does_not_name_its_processor_refuses(tuned, tmp_path, monkeypatch):
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "nowhere")
    with pytest.raises(OSError, match="needs a processor with avx512_vnni or avx_vnni, and this one is "):
        Runtime(tuned)


@pytest.mark.parametrize("fact, said", [({"needs": "vnni"}, "has needs 'vnni', expected a list"), ({"tuned_on": 3}, "a str")])
def test_a_manifest_with_other_types_is_an_error(tuned, tmp_path, fact, said):
    directory = copy_of(tuned, tmp_path)
    edit_json(directory / "manifest.json", **fact)
    with pytest.raises(ValueError, match=said):
        Runtime(directory)


# ----------------------------------------------------------------------------------------------------------------- bad input

GOOD = {
    "version": 1, "goal": "latency", "processor": NAMED, "onnxruntime": onnxruntime.__version__, "threads": 2,
    "choices": {"steps": {}, "sequences": {}},
}  # fmt: skip


@pytest.mark.parametrize(
    "content, said",
    [
        ("{", "is not JSON: .*, expected a tuning.json"),
        ("[]", "is a tuning file of version None, expected 1: tune again, nothing is written"),
        ({**GOOD, "version": 2}, "is a tuning file of version 2, expected 1"),
        ({**GOOD, "threads": "2"}, "has fields of the types .*'threads': 'str'.*, expected .*'threads': 'int'"),
        ({"version": 1}, "has fields of the types {}, expected {'goal': 'str', "),
        ({**GOOD, "goal": "speed"}, "has the goal 'speed', expected one of latency, throughput"),
        ({**GOOD, "choices": {"steps": {}}}, "has choices for steps, expected objects for steps, sequences"),
        (
            {**GOOD, "choices": {"steps": {"3x4": "block-128"}, "sequences": {}}},
            "has the way 'block-128', expected one of row, ",
        ),
    ],
)
def test_a_file_that_is_none_of_this_version_is_an_error(tmp_path, content, said):
    path = tmp_path / "tuning.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=said):
        export("nowhere", tmp_path / "out", target="cpu", dtype="int8", tune=path)
    assert not (tmp_path / "out").exists()


def test_a_file_for_other_shapes_is_an_error(checkpoint, tmp_path, cpuinfo):
    cpuinfo("avx2")
    choices = {"steps": {}, "sequences": {"7x8": "row"}}
    (tmp_path / "tuning.json").write_text(json.dumps({**GOOD, "choices": choices}))
    said = "tuning.json has no product 32x.* for sequences, it has 7x8: tune with this model"
    with pytest.raises(ValueError, match=said):
        export(checkpoint, tmp_path / "out", target="cpu", dtype="int8", tune=tmp_path / "tuning.json")
    assert not (tmp_path / "out").exists()


def test_a_file_of_another_machine_says_so(tmp_path, cpuinfo):
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps({**GOOD, "onnxruntime": "1.30.0"}))
    cpuinfo("avx2", name="Other")
    with pytest.warns(UserWarning) as said:
        tuning.Tuning.read(path)
    assert ["was tuned on Made up" in str(each.message) for each in said] == [True, False]
    assert f"with onnxruntime 1.30.0, this one is {onnxruntime.__version__}: its choices" in str(said[1].message)
    path.write_text(json.dumps({**GOOD, "choices": {"steps": {"3x4": "row-full"}, "sequences": {}}}))
    with pytest.raises(OSError, match="needs a processor with avx512_vnni or avx_vnni, and this one is Other"):
        tuning.Tuning.read(path)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"target": "cpu"}, "tune is 'latency' for the target 'cpu' with dtype None, expected 'cpu' with 'int8'"),
        ({"target": "cpu", "dtype": "int4"}, "with dtype 'int4', expected 'cpu' with 'int8'"),
        ({"target": "portable", "dtype": "int8"}, "for the target 'portable' with dtype 'int8', expected 'cpu' with 'int8'"),
        (
            {"target": "cpu", "dtype": "int8", "calibrate": "text"},
            "tune is 'latency' and calibrate 'text', expected one of them",
        ),
        (
            {"target": "cpu", "dtype": "int8", "generate": "greedy"},
            "tune is 'latency' and generate 'greedy', expected one of them",
        ),
        ({"target": "cpu", "dtype": "int8", "triton": "model"}, "tune is 'latency' and triton 'model', expected one of them"),
    ],
)
def test_what_it_is_not_for(tmp_path, settings, said):
    with pytest.raises(UsageError, match=said):
        export("nowhere", tmp_path / "out", tune="latency", **settings)


def test_a_goal_that_is_none_is_taken_for_a_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no tuning file speed, expected latency, throughput or a tuning.json"):
        export("nowhere", tmp_path / "out", target="cpu", dtype="int8", tune="speed")


# ------------------------------------------------------------------------------------------------------------ on this machine


@pytest.mark.slow
@pytest.mark.parametrize("goal", list(tuning.GOALS))
@pytest.mark.parametrize("name", ["seq2seq", "causal", "encoder"])
def test_what_this_machine_chooses_gives_rows_the_same_bits(tmp_path, name, goal):
    """And in every way it can: the choice depends on the times of a moment."""
    here = Processor.here()
    model = build(name)
    model.save_pretrained(tmp_path / "model")
    manifest = export(tmp_path / "model", tmp_path / "out", target="cpu", dtype="int8", tune=goal)
    found = json.loads((tmp_path / "out" / "tuning.json").read_text())
    assert found["processor"] == here.name
    ways = {way for choices in found["choices"].values() for way in choices.values()}
    assert ways and all(not INT8_PRODUCTS[way].needs or here.instructions & set(VNNI) for way in ways)
    check_rows(tmp_path / "out", manifest)
    able = [way for way in ("row", "row-full", *BLOCKS) if not INT8_PRODUCTS[way].needs or here.instructions & set(VNNI)]
    for way in able:
        choices = {kind: dict.fromkeys(shapes, way) for kind, shapes in found["choices"].items()}
        (tmp_path / "tuning.json").write_text(json.dumps({**found, "choices": choices}))
        settings = {"target": "cpu", "dtype": "int8", "cases": 2}
        check_rows(tmp_path / way, export(tmp_path / "model", tmp_path / way, tune=tmp_path / "tuning.json", **settings))


def check_rows(directory: Path, manifest: dict):
    if "encoder" in manifest["graphs"]:
        check_sequences(directory / manifest["graphs"]["encoder"], 48, COMPANY)
    if "step" in manifest:
        check_steps(directory / manifest["graphs"][manifest["step"]], 48, COMPANY)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(128, 6000), (512, 512), (512, 2048), (2048, 512), (768, 3072), (768, 2)])
def test_each_way_keeps_its_bits_at_the_sizes_of_models(size):
    able = {name for name, way in INT8_PRODUCTS.items() if not way.needs or Processor.here().instructions & set(VNNI)}
    assert {
        name for name in able if tuning.keeps_bits(name, matrix(*size), 1) and tuning.keeps_bits(name, matrix(*size), 3)
    } == able


@pytest.mark.slow
def test_a_quick_run_of_the_benchmark(tmp_path):
    found = tuned_benchmark.run(tuned_benchmark.parse(["--quick", "--repeats", "2", "--new-tokens", "4"]), tmp_path)
    assert found["choices"].keys() == tuning.GOALS.keys() and [*found["per_second"]] == [1, 8, 32]
    for speeds in found["per_second"].values():
        assert [*speeds] == ["default", "latency", "throughput"]
        assert all(len(each["runs"]) == 2 and each["min"] > 0 for each in speeds.values())


@pytest.mark.slow
@pytest.mark.parametrize("goal", list(tuning.GOALS))
def test_a_tuned_export_is_at_least_as_close_to_torch(tmp_path, goal):
    """Of the ways that count each loses no more of the weights."""
    model = build("seq2seq")
    model.save_pretrained(tmp_path / "model")
    settings = {"target": "cpu", "dtype": "int8", "cases": 20}
    plain = export(tmp_path / "model", tmp_path / "plain", **settings)["parity"]
    tuned = export(tmp_path / "model", tmp_path / "tuned", tune=goal, **settings)["parity"]
    assert tuned["mean_error"] < 1.1 * plain["mean_error"]
    ids, mask = prompts("seq2seq")
    expected = model.generate(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), max_new_tokens=7).numpy()
    assert (Runtime(tmp_path / "tuned").generate(ids, mask, max_new_tokens=7) == expected).mean() > 0.7
