"""Whole files on a cluster of two nodes on one machine, whose workers and driver are killed.

Needs about 2 GB of memory and five minutes."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import pyarrow
import pyarrow.parquet
import ray
from ray.cluster_utils import Cluster

from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.files.predictions import Predictions
from vanilla_transformer_export.files.ray import resources
from vanilla_transformer_export.files.run import Runner
from vanilla_transformer_export.text_runtime import open_runtime

SIZES = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
OPTIONS = {"max_new_tokens": 4}
PATIENCE = 240
COMMAND = [sys.executable, "-m", "vanilla_transformer_export.cli.main", "predict"]
FLAGS = ["--threads", "1", "--shard-lines", "16", "--max-new-tokens", "4"]


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    root = tmp_path_factory.mktemp("exports")
    subprocess.run(
        [os.environ["VANILLA_TRANSFORMER_PYTHON"], Path(__file__).with_name("make.py"), root],
        check=True,
    )
    return root / "translator"


@pytest.fixture(scope="module")
def address():
    """The address of a cluster with a head and another node, each with room for one worker."""
    cluster = Cluster(initialize_head=True, head_node_args={**SIZES, "include_dashboard": False})
    try:
        cluster.add_node(**SIZES)
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.fixture
def bulk(export):
    return runner(export, 1, shard_lines=16)


def runner(export, threads, **settings):
    return Runner(Predictions(open_runtime(export, threads), "translate", OPTIONS), **settings)


def texts(count):
    return [f"{number} dogs run on the grass." for number in range(count)]


def write(path, lines):
    path.write_bytes(b"".join(line.encode() + b"\n" for line in lines))
    return path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def started(export, source, out, address):
    """The command, on the cluster."""
    call = [
        *COMMAND,
        export,
        "--task",
        "translate",
        "--input",
        source,
        "--output-dir",
        out,
        *FLAGS,
        *(["--ray", address] if address else []),
    ]
    return subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process):
    """Wait for `process` to succeed, and return its standard error."""
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    return said


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write(tmp_path_factory.mktemp("source") / "a", texts(1500))


@pytest.fixture(scope="module")
def expected(export, source, tmp_path_factory):
    """The files that come of `source` without a cluster."""
    out = tmp_path_factory.mktemp("here") / "out"
    finished(started(export, source, out, None))
    return contents(out)


def workers():
    """The processes that compute a shard, by the name that Ray gives them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::MapWorker(MapBatches(PredictionWorker)).submit"):
                found.append(int(path.parent.name))
        except OSError:  # it has ended
            pass
    return found


def shards(out):
    return len([*out.glob("*.parts/*.facts")])


def wait_for(holds, process):
    limit = time.monotonic() + PATIENCE
    while not holds() and process.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()


def test_every_format_gives_the_same_bytes_as_without_a_cluster(bulk, address, tmp_path):
    lines = texts(100)
    inputs = [write(tmp_path / "a.en", lines), tmp_path / "b.jsonl.gz", tmp_path / "c.parquet"]
    inputs[0].write_bytes(inputs[0].read_bytes() + b"\n caf\xe9\nA dog.")
    rows = [json.dumps({"id": number, "text": line}) for number, line in enumerate(lines)]
    inputs[1].write_bytes(
        gzip.compress("\n".join([*rows[:50], "{", '{"id": 7}', *rows[50:]]).encode())
    )
    pyarrow.parquet.write_table(
        pyarrow.table({"id": [*range(100)], "text": [*lines[1:], None]}),
        inputs[2],
        row_group_size=30,
    )
    expected = bulk.to_directory(inputs, tmp_path / "here")
    found = bulk.to_directory(inputs, tmp_path / "there", ray=address)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert [*found["files"].values()] == [*expected["files"].values()] and found["bad"] == expected[
        "bad"
    ] == 4
    assert not ray.is_initialized()


def test_a_killed_worker_is_replaced_and_its_shard_is_made_again(
    export, source, expected, address, tmp_path
):
    process = started(export, source, tmp_path / "out", address)
    wait_for(lambda: shards(tmp_path / "out") > 2 and len(workers()) == 2, process)
    os.kill(workers()[0], signal.SIGKILL)
    finished(process)
    assert contents(tmp_path / "out") == expected


def test_a_shard_whose_workers_always_die_is_an_error_that_says_what_is_kept(
    export, source, expected, address, tmp_path
):
    """Then the same call goes on, without a cluster."""
    process = started(export, source, tmp_path / "out", address)
    wait_for(lambda: shards(tmp_path / "out") > 2, process)
    limit = time.monotonic() + PATIENCE
    while process.poll() is None:
        assert time.monotonic() < limit
        for number in workers():
            os.kill(number, signal.SIGKILL)
        time.sleep(0.002)
    _, said = process.communicate()
    assert process.returncode == 1 and "Traceback" not in said, said
    assert (
        "the Ray cluster could not compute a shard" in said
        and "the finished shards stay in" in said
    )
    assert shards(tmp_path / "out") > 2
    finished(started(export, source, tmp_path / "out", None))
    assert contents(tmp_path / "out") == expected


def test_a_killed_driver_goes_on_and_a_damaged_shard_is_made_again(
    export, source, expected, address, tmp_path
):
    out = tmp_path / "out"
    for least in (3, 9):
        process = started(export, source, out, address)
        wait_for(lambda least=least: shards(out) >= least, process)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    part = out / "a.parts" / "000001"
    part.write_bytes(part.read_bytes()[:-3])
    assert "000001" in finished(started(export, source, out, address))
    assert contents(out) == expected


def test_an_input_that_is_damaged_leaves_the_shards_before(bulk, address, tmp_path):
    content = gzip.compress("\n".join(texts(2000)).encode())
    source = tmp_path / "a.gz"
    source.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="a.gz"):
        bulk.to_directory([source], tmp_path / "out", ray=address)
    assert shards(tmp_path / "out") > 10


def test_an_export_that_a_node_lacks_is_named(export, address, tmp_path):
    copy = shutil.copytree(export, tmp_path / "export")
    bulk = runner(copy, 1)
    copy.rename(tmp_path / "elsewhere")
    source = write(tmp_path / "a", texts(1))
    with pytest.raises(OSError, match=str(copy)):
        bulk.to_directory([source], tmp_path / "out", ray=address)
    (tmp_path / "elsewhere").rename(copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "comment": "another"}))
    with pytest.raises(ValueError, match=str(copy)):
        bulk.to_directory([source], tmp_path / "out", ray=address)


def test_what_the_cluster_cannot_do_is_refused_before_anything_is_written(
    export, bulk, address, tmp_path
):
    source = write(tmp_path / "a", texts(1))
    two = runner(export, 2)
    for run, where, kind, values in (
        (bulk, "127.0.0.1:1", ConnectionError, "'127.0.0.1:1'.*auto.*local.*HOST:PORT"),
        (bulk, "somewhere", ConnectionError, "'somewhere'"),
        (bulk, "ray://127.0.0.1:1", UsageError, ""),
        (two, address, UsageError, "threads.* 2.* 1"),
    ):
        with pytest.raises(kind, match=values):
            run.to_directory([source], tmp_path / "out", ray=where)
        assert not ray.is_initialized()
    assert not (tmp_path / "out").exists()


def test_what_ray_keeps_for_a_worker():
    assert resources({"threads": 3, "device": "cpu"}) == {"num_cpus": 3, "num_gpus": 0}
    assert resources({"threads": 1, "device": "cuda"}) == {"num_cpus": 1, "num_gpus": 1}
