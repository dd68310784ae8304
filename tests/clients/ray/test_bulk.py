"""Tests of offline inference on a Ray cluster of two nodes on one machine.

Workers and the driver are killed. The tests need about 2 GB of memory and five minutes.
"""

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
COMMAND = [sys.executable, "-m", "vanilla_transformer_export", "predict"]
FLAGS = ["--threads", "1", "--shard-lines", "16", "--max-new-tokens", "4"]
STARTED = []  # the commands that run


@pytest.fixture(autouse=True)
def end_commands():
    """Kill the commands that a failed test leaves: they would take the CPUs of the tests after
    it."""
    yield
    while STARTED:
        STARTED.pop().kill()


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
    """Yield the address of a cluster with two nodes, each with a CPU for one worker."""
    cluster = Cluster(initialize_head=True, head_node_args={**SIZES, "include_dashboard": False})
    try:
        cluster.add_node(**SIZES)
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.fixture
def bulk(export):
    return make_runner(export, 1, shard_lines=16)


def make_runner(export, threads, **settings):
    return Runner(Predictions(open_runtime(export, threads), "translate", OPTIONS), **settings)


def make_texts(count):
    return [f"{number} dogs run on the grass." for number in range(count)]


def write_lines(path, lines):
    path.write_bytes(b"".join(line.encode() + b"\n" for line in lines))
    return path


def read_files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def start_command(export, source, out, address):
    """Start the command, on the cluster at `address` unless that is None."""
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
    STARTED.append(
        subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    )
    return STARTED[-1]


def wait_for_success(process):
    """Wait for `process` to succeed, and return its standard error."""
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, stderr
    return stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("source") / "a", make_texts(1500))


@pytest.fixture(scope="module")
def expected(export, source, tmp_path_factory):
    """Return the files that the command writes for `source` without a cluster."""
    out = tmp_path_factory.mktemp("here") / "out"
    wait_for_success(start_command(export, source, out, None))
    return read_files(out)


def worker_pids():
    """Return the ids of the processes that compute shards, by the name that Ray gives them."""
    result = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::MapWorker(MapBatches(PredictionWorker)).submit"):
                result.append(int(path.parent.name))
        except OSError:
            pass  # the process has ended since the folder was listed
    return result


def count_shards(out):
    return len([*out.glob("*.parts/*.facts")])


def wait_for(condition, process):
    limit = time.monotonic() + PATIENCE
    while not condition() and process.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()


def test_cluster_writes_same_bytes_for_every_format(bulk, address, tmp_path):
    lines = make_texts(100)
    inputs = [
        write_lines(tmp_path / "a.en", lines),
        tmp_path / "b.jsonl.gz",
        tmp_path / "c.parquet",
    ]
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
    result = bulk.to_directory(inputs, tmp_path / "there", ray=address)
    assert read_files(tmp_path / "there") == read_files(tmp_path / "here")
    assert [*result["files"].values()] == [*expected["files"].values()] and result[
        "bad"
    ] == expected["bad"] == 4
    assert not ray.is_initialized()


def test_killed_worker_is_replaced_and_its_shard_recomputed(
    export, source, expected, address, tmp_path
):
    process = start_command(export, source, tmp_path / "out", address)
    wait_for(lambda: count_shards(tmp_path / "out") > 2 and len(worker_pids()) == 2, process)
    os.kill(worker_pids()[0], signal.SIGKILL)
    wait_for_success(process)
    assert read_files(tmp_path / "out") == expected


def test_shard_with_always_dying_workers_is_an_error_and_run_can_resume(
    export, source, expected, address, tmp_path
):
    """The same command then resumes without a cluster."""
    process = start_command(export, source, tmp_path / "out", address)
    wait_for(lambda: count_shards(tmp_path / "out") > 2, process)
    limit = time.monotonic() + PATIENCE
    while process.poll() is None:
        assert time.monotonic() < limit
        for number in worker_pids():
            os.kill(number, signal.SIGKILL)
        time.sleep(0.002)
    _, stderr = process.communicate()
    assert process.returncode == 1 and "Traceback" not in stderr, stderr
    assert (
        "the Ray cluster could not compute a shard" in stderr
        and "the finished shards stay in" in stderr
    )
    assert count_shards(tmp_path / "out") > 2
    wait_for_success(start_command(export, source, tmp_path / "out", None))
    assert read_files(tmp_path / "out") == expected


def test_killed_driver_can_resume_and_damaged_shard_is_recomputed(
    export, source, expected, address, tmp_path
):
    out = tmp_path / "out"
    for min_shards in (3, 9):
        process = start_command(export, source, out, address)
        wait_for(lambda min_shards=min_shards: count_shards(out) >= min_shards, process)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    part = out / "a.parts" / "000001"
    part.write_bytes(part.read_bytes()[:-3])
    assert "000001" in wait_for_success(start_command(export, source, out, address))
    assert read_files(out) == expected


def test_truncated_input_raises_and_keeps_finished_shards(bulk, address, tmp_path):
    content = gzip.compress("\n".join(make_texts(2000)).encode())
    source = tmp_path / "a.gz"
    source.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="a.gz"):
        bulk.to_directory([source], tmp_path / "out", ray=address)
    assert count_shards(tmp_path / "out") > 10


def test_error_names_export_missing_or_changed_on_node(export, address, tmp_path):
    copy = shutil.copytree(export, tmp_path / "export")
    bulk = make_runner(copy, 1)
    copy.rename(tmp_path / "elsewhere")
    source = write_lines(tmp_path / "a", make_texts(1))
    with pytest.raises(OSError, match=str(copy)):
        bulk.to_directory([source], tmp_path / "out", ray=address)
    (tmp_path / "elsewhere").rename(copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "comment": "another"}))
    with pytest.raises(ValueError, match=str(copy)):
        bulk.to_directory([source], tmp_path / "out", ray=address)


def test_invalid_cluster_or_threads_raise_before_files_are_written(export, bulk, address, tmp_path):
    source = write_lines(tmp_path / "a", make_texts(1))
    two = make_runner(export, 2)
    for run, where, kind, values in (
        (bulk, "127.0.0.1:1", ConnectionError, "'127.0.0.1:1'.*auto.*local.*HOST:PORT"),
        (bulk, "somewhere", ConnectionError, "'somewhere'"),
        (bulk, "ray://127.0.0.1:1", UsageError, "'ray://127.0.0.1:1'.*auto.*local.*HOST:PORT"),
        (two, address, UsageError, "threads.* 2.* 1"),
    ):
        with pytest.raises(kind, match=values):
            run.to_directory([source], tmp_path / "out", ray=where)
        assert not ray.is_initialized()
    assert not (tmp_path / "out").exists()


def test_resources_of_cpu_and_cuda_workers():
    assert resources({"threads": 3, "device": "cpu"}) == {"num_cpus": 3, "num_gpus": 0}
    assert resources({"threads": 1, "device": "cuda"}) == {"num_cpus": 1, "num_gpus": 1}
