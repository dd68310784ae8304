"""Opening an export while it is replaced gives the old export, the new one or an error, never a
mix."""

import builtins
import itertools
import os
import shutil
import threading
import time

import numpy as np
import onnxruntime
import pytest
from checkpoints import copy_folder, list_file, seal
from messages import raises
from tokenizers import Tokenizer, models, pre_tokenizers

from vanilla_transformer_export import Runtime, TextRuntime
from vanilla_transformer_export.inference import export_info as info

TEXT = "w5 w9 w20 w7"


@pytest.fixture(scope="module")
def exports(exported_for, tmp_path_factory):
    """Two exports of one architecture with different weights and different vocabularies."""
    _, directory = exported_for("seq2seq", "cpu")
    result = []
    for number in range(2):
        export = copy_folder(directory, tmp_path_factory.mktemp(f"export-{number}"))
        if number:  # the weights are float32
            path = export / "onnx/model.onnx_data"
            path.write_bytes(np.frombuffer(path.read_bytes(), np.float32)[::-1].tobytes())
        tokens = range(48) if number == 0 else [*range(4), *range(47, 3, -1)]
        vocabulary = {f"w{place}": token for place, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(export / "tokenizer.json"))
        list_file(export, "tokenizer.json")
        result.append(export)
    return result


def answer(directory):
    return TextRuntime(directory, threads=1).generate(
        [TEXT], max_new_tokens=6, suppress_tokens=[0, 1, 2]
    )


def tokens(directory):
    ids = np.array([[5, 9, 20, 7]])
    return (
        Runtime(directory, threads=1)
        .generate(ids, max_new_tokens=6, suppress_tokens=[0, 1, 2])
        .tolist()
    )


@pytest.fixture
def place(exports, tmp_path):
    """The directory of the first export, and a function that replaces it with the second export by
    renaming."""
    out, new = tmp_path / "out", tmp_path / "new"
    shutil.copytree(exports[0], out)
    shutil.copytree(exports[1], new)

    def replace():
        out.rename(tmp_path / "old")
        new.rename(out)

    return out, replace


class OpenCounter:
    """A counter of the files that Python and onnxruntime open. It calls `act` before (or after)
    opening number `at`."""

    def __init__(self, monkeypatch, at=None, after=False, act=None):
        self.count, self.at, self.after, self.act = 0, at, after, act
        self.lock = threading.RLock()  # graphs are opened side by side
        monkeypatch.setattr(info, "open", self.counted(builtins.open), raising=False)
        monkeypatch.setattr(
            onnxruntime, "InferenceSession", self.counted(onnxruntime.InferenceSession)
        )

    def counted(self, opens):
        def call(*args, **kwargs):
            with self.lock:
                here = self.count == self.at
                self.count += 1
                if here and not self.after:
                    self.act()
                opened = opens(*args, **kwargs)
                if here and self.after:
                    self.act()
                return opened

        return call


def test_exports_and_their_mixes_give_different_answers(exports, tmp_path):
    """The tests below rely on this."""
    old, new = map(answer, exports)
    mixed = []
    for name in ("tokenizer.json", "onnx/model.onnx_data"):
        directory = copy_folder(exports[0], tmp_path / name.replace("/", "-"))
        shutil.copy(exports[1] / name, directory / name)
        seal(directory)
        mixed.append(answer(directory))
    answers = [old, new, *mixed]
    assert all(one != other for one, other in itertools.combinations(answers, 2)), answers


@pytest.mark.parametrize("opened", [answer, tokens])
def test_export_replaced_while_opening_is_old_or_new_or_an_error(
    exports, place, monkeypatch, tmp_path, opened
):
    out, replace = place
    old, new = map(opened, exports)
    with monkeypatch.context() as patch:
        counting = OpenCounter(patch)
        assert opened(out) == old
    assert counting.count >= 8  # the manifest, its files, both graphs twice
    seen = []
    for at, after in itertools.product(range(counting.count), (False, True)):
        with monkeypatch.context() as patch:
            OpenCounter(patch, at, after, replace)
            try:
                seen.append(opened(out))
            except (ValueError, FileNotFoundError) as error:
                assert "\n" not in str(error)
                seen.append("error")
        assert not (tmp_path / "new").exists(), "replaced"
        out.rename(tmp_path / "new")
        (tmp_path / "old").rename(out)
    assert all(result in (old, new, "error") for result in seen), seen
    # the tokenizer, which TextRuntime reads last, is checked by its hash alone
    assert "error" in seen and (seen[-1] == old) == (opened is answer)


def test_export_replaced_after_opening_keeps_old_answers(exports, place):
    out, replace = place
    runtime = TextRuntime(out, threads=1)
    replace()
    assert runtime.generate([TEXT], max_new_tokens=6, suppress_tokens=[0, 1, 2]) == answer(
        exports[0]
    )


def test_session_created_on_demand_uses_opened_export(exported_for, tmp_path):
    """Beam search of the cuda target has a session for each number of beams."""
    _, directory = exported_for("seq2seq", "cuda")
    out, ids = copy_folder(directory, tmp_path), np.array([[5, 9, 20, 7]])
    runtime = Runtime(out, threads=1, device="cpu")
    shutil.rmtree(out)
    expected = Runtime(directory, threads=1, device="cpu").generate(
        ids, num_beams=3, max_new_tokens=4
    )
    assert runtime.generate(ids, num_beams=3, max_new_tokens=4).tolist() == expected.tolist()


def test_export_replaced_and_restored_while_opening_is_rejected(
    exports, place, monkeypatch, tmp_path
):
    """The second export is opened in between, and the first is restored at the end."""
    out, replace = place
    opened, lock = onnxruntime.InferenceSession, threading.Lock()

    def there_and_back(*args, **kwargs):
        with lock:
            replace()
            try:
                return opened(*args, **kwargs)
            finally:
                out.rename(tmp_path / "new")
                (tmp_path / "old").rename(out)

    monkeypatch.setattr(onnxruntime, "InferenceSession", there_and_back)
    with raises(ValueError, seen="out"):
        Runtime(out, threads=1)


def test_file_changed_in_place_while_opening_is_rejected(exports, tmp_path, monkeypatch):
    out = copy_folder(exports[0], tmp_path)

    def change():
        shutil.copyfile(exports[1] / "onnx/model.onnx_data", out / "onnx/model.onnx_data")
        os.utime(out / "onnx/model.onnx_data", ns=(0, 0))

    with monkeypatch.context() as patch:
        steps = OpenCounter(patch)
        Runtime(out, threads=1)
    OpenCounter(monkeypatch, steps.count - 1, False, change)  # just before the last session
    with raises(ValueError, seen="model.onnx_data"):
        Runtime(out, threads=1)


def test_weight_hashes_are_checked_while_graphs_open(exports, monkeypatch):
    expected, opens, check = tokens(exports[0]), threading.Event(), info.check_hash

    def late(file, facts, path):
        assert path.suffix != ".onnx_data" or opens.wait(60)
        check(file, facts, path)

    def session(*args, opened=onnxruntime.InferenceSession, **kwargs):
        opens.set()
        return opened(*args, **kwargs)

    monkeypatch.setattr(info, "check_hash", late)
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    assert tokens(exports[0]) == expected


def test_error_names_changed_weights_even_if_graphs_fail_to_open(exports, tmp_path, monkeypatch):
    out = copy_folder(exports[0], tmp_path)
    # weights of the same size
    shutil.copyfile(exports[1] / "onnx/model.onnx_data", out / "onnx/model.onnx_data")
    with raises(ValueError, seen=("model.onnx_data", "SHA-256")):
        Runtime(out, threads=1)
    monkeypatch.setattr(onnxruntime, "InferenceSession", None)  # opening a graph fails
    with raises(ValueError, seen=("model.onnx_data", "SHA-256")):
        Runtime(out, threads=1)


def test_directory_is_rejected_until_manifest_is_written(exports, tmp_path):
    """An export to a mount point fills it in place, and writes the manifest last."""
    out = tmp_path / "mounted"
    names = sorted(path.relative_to(exports[0]) for path in exports[0].rglob("*") if path.is_file())
    names.sort(key=lambda name: str(name) == "manifest.json")
    for name in names:
        if out.exists():
            with raises(FileNotFoundError, seen="manifest.json"):
                Runtime(out, threads=1)
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(exports[0] / name, out / name)
    assert answer(out) == answer(exports[0])


@pytest.mark.slow
def test_concurrent_readers_of_replaced_export_never_see_a_mix(exports, tmp_path):
    """One thread swaps the two exports repeatedly, while the others open the current one."""
    start = time.perf_counter()
    expected = [answer(directory) for directory in exports]
    seconds = time.perf_counter() - start  # some readers end between two swaps
    out, ends = tmp_path / "out", threading.Event()
    spare = [
        shutil.copytree(directory, tmp_path / str(number))
        for number, directory in enumerate(exports)
    ]
    spare[0].rename(out)
    seen, wrong = {"old": 0, "new": 0, "error": 0}, []

    def write():
        for number in itertools.cycle((0, 1)):
            out.rename(spare[number])
            spare[1 - number].rename(out)
            if ends.wait(seconds * (number + 1)):
                return

    def read():
        for _ in range(60):
            try:
                texts = answer(out)
            except (ValueError, OSError):
                seen["error"] += 1
                continue
            if texts not in expected:
                wrong.append(texts)
            seen["old" if texts == expected[0] else "new"] += 1

    threads = [threading.Thread(target=read) for _ in range(3)]
    writer = threading.Thread(target=write)
    for thread in (writer, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    ends.set()
    writer.join()
    assert not wrong and sum(seen.values()) == 180 and seen["old"] + seen["new"] > 0, seen
