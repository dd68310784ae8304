"""Tests of outputs of two runs at once, and of runs that are killed at every step."""

import os
import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
from output_files import CHECKPOINT, NEW, assert_rejected, kill_at_step, read, save, write

from vanilla_transformer import outputs
from vanilla_transformer.outputs import new_directory, new_file

# ---------------------------------------------------------------------------------- concurrent runs


def test_second_concurrent_run_is_rejected_at_start(folder):
    with new_directory(folder / "out"):
        assert_rejected(FileExistsError, folder / "out", folder / "out")
    save(folder / "out", {"file": "new"})


def test_leftovers_of_dead_process_are_removed(folder):
    write(folder / ".out.partial/new", {"half": ""})
    save(folder / "out", {"file": "new"})
    assert read(folder) == {"out/file": "new"}


def test_error_names_leftovers_that_cannot_be_removed(folder, monkeypatch):
    write(folder / ".out.partial/new", {"half": ""})
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **options: None)
    assert_rejected(FileExistsError, ".out.partial/new", folder / "out")


@pytest.mark.parametrize("kind", ["link", "file"])
def test_error_names_file_or_link_in_place_of_partial_directory(folder, kind):
    (folder / ".out.partial").symlink_to("nowhere") if kind == "link" else (
        folder / ".out.partial"
    ).touch()
    assert_rejected(FileExistsError, ".out.partial", folder / "out")


def test_zombie_process_holds_no_lock(folder):
    code = "import os, sys; sys.modules['torch'] = None  # not needed here\n"
    code += "from vanilla_transformer.outputs import new_directory\n"
    code += "with new_directory(sys.argv[1]): os._exit(9)"
    child = subprocess.Popen([sys.executable, "-c", code, folder / "out"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is a zombie
    assert (folder / ".out.partial/new").is_dir()
    save(folder / "out", {"file": "new"})
    child.wait()


@pytest.mark.parametrize("name", ["notes", "a-b-c"])
def test_error_names_foreign_file_in_partial_directory_and_file_is_kept(folder, name):
    write(folder / ".out.partial", {name: "mine"})
    assert_rejected(FileExistsError, f".out.partial/{name}", folder / "out")
    assert read(folder) == {f".out.partial/{name}": "mine"}


def test_partial_directory_removed_before_lock_is_created_again(folder, monkeypatch):
    lock, removed = outputs.lock, []

    def slow(handle, out):
        if not removed:
            removed.append((folder / ".out.partial").rmdir())
        lock(handle, out)

    monkeypatch.setattr(outputs, "lock", slow)
    save(folder / "out", {"file": "new"})
    assert read(folder) == {"out/file": "new"} and removed


def test_writing_works_without_fcntl(folder, monkeypatch):
    monkeypatch.setattr(outputs, "fcntl", None)
    write(folder / ".out.partial/new", {"half": ""})
    save(folder / "out", {"file": "new"})
    assert read(folder) == {"out/file": "new"}


def test_exactly_one_of_many_concurrent_runs_succeeds(folder):
    """A killed run left its partial directory, so every run first tries to clean up."""
    write(folder / ".out.partial/new", {"half": ""})
    begin, done = os.pipe(), os.pipe()
    children = []
    for number in range(12):
        if not (child := os.fork()):
            code = 1
            try:
                os.close(begin[1])
                os.close(done[1])
                os.read(begin[0], 1)
                with new_directory(folder / "out") as directory:
                    (directory / "file").write_text(str(number))
                    os.read(done[0], 1)  # until all have tried
                code = 0
            except FileExistsError:
                code = 3
            finally:
                os._exit(code)
        children.append(child)
    os.close(begin[1])
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in children[1:]]
    os.close(done[1])
    codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
    assert sorted(codes) == [0, *[3] * 11]
    assert len(read(folder)) == 1 and not (folder / ".out.partial").exists()


# ----------------------------------------------------------------------------- killed at every step


def save_file(out, text, **options):
    with new_file(out, **options) as file:
        file.write_text(text)


@pytest.mark.parametrize("before", [None, {}, CHECKPOINT], ids=["new", "empty", "replaced"])
def test_directory_is_old_or_new_after_kill_and_next_call_succeeds(folder, before):
    for step in count():
        out = folder / str(step) / "out"
        out.parent.mkdir()
        if before is not None:
            out.mkdir()
            write(out, before)
        was_killed = kill_at_step(step, lambda out=out: save(out, NEW, force=True))
        [old] = [*out.parent.glob(".out.partial/old")] or [None]
        result = read(out) if out.exists() else read(old) if old else None
        assert result in (before, NEW) if was_killed else result == NEW, step
        # the next call restores the old directory, even if its own block fails
        if result == before and was_killed:
            with pytest.raises(KeyError), new_directory(out, force=True):
                raise KeyError
            assert (read(out) if out.exists() else None) == before, step
        if result == NEW:  # a checkpoint with a graph in it is not replaced
            (out / "onnx/model.onnx").unlink()
            (out / "onnx").rmdir()
        save(out, NEW, force=True)
        assert read(out.parent) == {f"out/{name}": text for name, text in NEW.items()}, step
        assert [path.name for path in out.parent.iterdir()] == ["out"], step
        if not was_killed:
            assert step > 10
            return


@pytest.mark.parametrize("before", [None, "old"])
def test_file_is_old_or_new_after_kill_and_next_call_succeeds(folder, before):
    for step in count():
        out = folder / str(step) / "map.png"
        out.parent.mkdir()
        if before:
            out.write_text(before)
        was_killed = kill_at_step(step, lambda out=out: save_file(out, "new", force=True))
        [old] = [*out.parent.glob(".map.png.partial/old")] or [None]
        result = out.read_text() if out.exists() else old.read_text() if old else None
        assert result in (before, "new") if was_killed else result == "new", step
        save_file(out, "newer", force=True)
        assert read(out.parent) == {"map.png": "newer"}, step
        if not was_killed:
            assert step > 5
            return


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_exception_at_any_rename_loses_and_leaves_nothing(folder, monkeypatch, error):
    """Python still runs exception handlers, unlike in a killed process."""
    rename = Path.rename
    for step in count():
        out = folder / str(step) / "out"
        write(out, CHECKPOINT)
        steps = count()

        def interrupted(path, target, steps=steps, step=step):
            done = rename(path, target)
            if next(steps) == step:
                raise error
            return done

        monkeypatch.setattr(Path, "rename", interrupted)
        try:
            save(out, NEW, force=True)
        except error:
            assert read(out) in (CHECKPOINT, NEW), step
            left = [path.name for path in out.parent.glob(".out.partial/*")]
            assert left in ([], ["trash"]), step  # files that were about to be removed
        else:
            assert step >= 3
            return
