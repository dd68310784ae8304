"""Tests of output files and directories.

Wherever a run stops, outputs appear complete or not at all, and foreign files are never removed.
"""

import json
import os
import shutil
import stat
import tempfile
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from messages import raises
from output_files import CHECKPOINT, NEW, assert_rejected, kill_at_step, read, save, write

from vanilla_transformer import outputs
from vanilla_transformer.outputs import new_directory, new_file


def manifest(*names: str) -> str:
    facts = {
        "schema_version": 1,
        "architecture": "VanillaEncoderModel",
        "model_type": "vanilla-encoder",
    }
    return json.dumps({**facts, "files": dict.fromkeys(names, {})})


# ------------------------------------------------------------------------------------------ writing


def test_new_directory_appears_when_block_ends(folder):
    with new_directory(folder / "deep/out") as directory:
        (directory / "file").write_text("text")
        assert not (folder / "deep/out").exists()
    assert read(folder) == {"deep/out/file": "text"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("force", [False, True])
def test_error_in_block_changes_nothing(folder, error, force):
    if force:
        write(folder / "deep/out", CHECKPOINT)
    before = sorted(folder.rglob("*"))
    with pytest.raises(error), new_directory(folder / "deep/out", force) as directory:
        (directory / "file").write_text("half")
        raise error
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("umask, mode", [(0o022, 0o755), (0o077, 0o700), (0o002, 0o775)])
def test_file_modes_follow_umask(folder, umask, mode):
    before = os.umask(umask)
    try:
        with new_directory(folder / "out") as directory:
            (directory / "deep").mkdir(mode=0o700)
            (directory / "deep/file").touch(mode=0o600)
        with new_file(folder / "file") as file:
            file.touch(mode=0o600)
    finally:
        after = os.umask(before)
    assert after == umask
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
    assert modes == {"out": mode, "deep": mode, "file": mode & 0o666}


def test_modes_of_replaced_files_stay_and_unfinished_ones_are_private(folder):
    for name in ("map.png", "out/config.json", "out/README.md"):
        write(folder, {name: '{"model_type": "vanilla-encoder"}'})
    (folder / "map.png").chmod(0o600)
    (folder / "out").chmod(0o710)
    (folder / "out/config.json").chmod(0o640)
    with new_file(folder / "map.png", force=True) as file:
        file.write_text("new")
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    with new_directory(folder / "out", force=True) as directory:
        write(directory, {"config.json": "new", "vocab.txt": "new"})
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
    assert modes == {"map.png": 0o600, "out": 0o710, "config.json": 0o640, "vocab.txt": 0o644}


def test_replaced_text_keeps_its_mode_and_follows_no_link(folder):
    write(folder, {"precious": "mine", "run.json": "old"})
    (folder / "run.json").chmod(0o600)
    (folder / "link.json").symlink_to("precious")
    for name in ("run.json", "link.json", "new.json"):
        outputs.replace_text(folder / name, "new")
    assert read(folder) == {"precious": "mine"} | dict.fromkeys(
        ("run.json", "link.json", "new.json"), "new"
    )
    assert stat.S_IMODE((folder / "run.json").stat().st_mode) == 0o600
    assert stat.S_IMODE((folder / "new.json").stat().st_mode) == 0o644


def test_new_file_appears_when_block_ends_and_is_replaced_only_with_force(folder):
    with new_file(folder / "deep/map.png") as file:
        assert file.name == "map.png" and not (folder / "deep/map.png").exists()
        file.write_text("new")
    assert read(folder) == {"deep/map.png": "new"}
    exists = raises(FileExistsError, seen="map.png", expected="--force")
    with exists, new_file(folder / "deep/map.png"):
        pytest.fail("the block must not run")
    with new_file(folder / "deep/map.png", force=True) as file:
        file.write_text("newer")
    assert read(folder) == {"deep/map.png": "newer"}
    with (
        raises(IsADirectoryError, seen="deep"),
        new_file(folder / "deep", force=True),
    ):
        pytest.fail("the block must not run")


# ---------------------------------------------------------------------------------------- replacing


@pytest.mark.parametrize("out", [".", "./", "..", "sub/..", "", "../..", "/", "~", "../home"])
def test_working_directory_home_and_their_parents_are_never_replaced(folder, out):
    write(Path.cwd(), CHECKPOINT)  # only own files, so that nothing else forbids it
    Path("sub").mkdir()
    before = sorted(folder.parent.rglob("*"))
    assert_rejected(ValueError, os.path.expanduser(out), os.path.expanduser(out), force=True)
    assert sorted(folder.parent.rglob("*")) == before


@pytest.mark.parametrize("out", ["model", "link", "model/../model", "above"])
def test_inputs_and_their_parents_are_never_replaced(folder, out):
    write(folder / "model", CHECKPOINT)
    write(folder / "above", CHECKPOINT | {"vocab.txt": "a"})
    (folder / "link").symlink_to(folder / "model")
    inputs = [folder / "model", folder / "above/vocab.txt", "org/name-on-the-hub"]
    assert_rejected(ValueError, folder / out, folder / out, force=True, inputs=inputs)
    # an output inside an input is allowed
    save(folder / "model/onnx", {"graph": "new"}, inputs=inputs)
    assert read(folder / "model") == CHECKPOINT | {"onnx/graph": "new"}


def test_file_is_not_replaced_by_directory(folder):
    (folder / "out").write_text("notes")
    assert_rejected(NotADirectoryError, folder / "out", folder / "out", force=True)


def test_symlink_is_kept_and_its_target_is_replaced(folder):
    write(folder / "real", CHECKPOINT)
    (folder / "out").symlink_to(folder / "real")
    save(folder / "out", {"config.json": "new"}, force=True)
    assert (folder / "out").is_symlink() and read(folder / "real") == {"config.json": "new"}
    (folder / "nowhere").symlink_to(folder / "missing")
    assert_rejected(FileNotFoundError, ("nowhere", folder / "missing"), folder / "nowhere")


def test_directory_without_permission_to_write_raises_before_the_block(folder, monkeypatch):
    (folder / "out").mkdir()
    access = os.access
    monkeypatch.setattr(  # a superuser may write to all
        os, "access", lambda path, mode: Path(path).name != "out" and access(path, mode)
    )
    with raises(PermissionError, seen=folder / "out"), new_directory(folder / "out"):
        raise AssertionError("the block has begun")
    assert os.listdir(folder) == ["out"]


def test_empty_directory_is_used(folder):
    (folder / "out").mkdir()
    save(folder / "out", {"file": "new"})
    assert read(folder) == {"out/file": "new"}


@pytest.mark.parametrize(
    "contents",
    [
        CHECKPOINT,
        {
            "config.json": '{"model_type": "bert", "vanilla_transformer_version": "0.1.0"}',
            "vocab.txt": "a",
        },
        {
            "config.json": "{}",
            "manifest.json": manifest("config.json", "onnx/model.onnx"),
            "onnx/model.onnx": "graph",
        },
        CHECKPOINT | {"__pycache__/layers.pyc": "", ".DS_Store": ""},
    ],
    ids=["checkpoint", "converted", "export", "with what systems leave"],
)
def test_own_files_are_replaced_only_with_force(folder, contents):
    write(folder / "out", contents)
    assert_rejected(FileExistsError, "out", folder / "out", expected="--force")
    assert read(folder / "out") == contents
    for text in ("new", "newer"):
        save(folder / "out", CHECKPOINT | {"README.md": text}, force=True)
        assert read(folder) == {
            f"out/{name}": result for name, result in (CHECKPOINT | {"README.md": text}).items()
        }


@pytest.mark.parametrize(
    "contents, seen",
    [
        ({"notes": "mine"}, "notes"),
        ({"config.json": '{"model_type": "bert"}'}, "config.json"),
        ({"config.json": "[]"}, "config.json"),
        ({"manifest.json": '{"name": "a web application"}'}, "manifest.json"),
        (
            {"manifest.json": '{"schema_version": 3, "files": {"a.tex": 1}}', "a.tex": ""},
            "a.tex, manifest.json",
        ),
        ({"manifest.json": manifest("a.tex"), "a.tex": ""}, "a.tex"),
        (CHECKPOINT | {"notes.md": ""}, "notes.md"),
        (CHECKPOINT | {".git/HEAD": ""}, ".git/HEAD"),
        (CHECKPOINT | {"checkpoint-9/config.json": "{}"}, "checkpoint-9/config.json"),
        (CHECKPOINT | {"onnx/model.onnx": ""}, "onnx/model.onnx"),
        (
            CHECKPOINT | {f"note{n}": "" for n in range(8)},
            ("note0, note1, note2, note3, note4", "3 more"),
        ),
        (
            {"manifest.json": manifest("config.json"), "config.json": "{}", "onnx/mine.onnx": ""},
            "onnx/mine.onnx",
        ),
    ],
)
def test_foreign_files_are_never_replaced(folder, contents, seen):
    write(folder / "out", contents)
    assert_rejected(FileExistsError, seen, folder / "out", force=True)
    assert read(folder / "out") == contents


def test_foreign_empty_folder_and_symlink_are_never_replaced(folder):
    write(folder / "out", CHECKPOINT)
    (folder / "out/empty").mkdir()
    (folder / "out/vocab").symlink_to(folder)
    assert_rejected(FileExistsError, "empty, vocab", folder / "out", force=True)


@pytest.mark.parametrize("change", ["appeared", "changed", "grew", "replaced"])
def test_concurrent_foreign_change_is_kept_and_result_is_saved_beside_it(folder, change):
    out = folder / "out"
    if change != "appeared":
        write(out, CHECKPOINT)
    kept = raises(FileExistsError, seen=("out", "out.kept-1"))
    with kept, new_directory(out, force=True) as directory:
        write(directory, {"config.json": "new"})
        if change == "replaced":
            out.rename(folder / "elsewhere")
        write(
            out, {"README.md": "my card"} if change == "changed" else CHECKPOINT | {"notes": "mine"}
        )
    theirs = read(out)
    assert theirs == (
        CHECKPOINT | ({"README.md": "my card"} if change == "changed" else {"notes": "mine"})
    )
    assert read(folder / "out.kept-1") == {"config.json": "new"}
    assert not (folder / ".out.partial").exists()


def test_concurrent_foreign_file_is_kept_and_result_is_saved_beside_it(folder):
    with (
        raises(FileExistsError, seen="map.png.kept-1"),
        new_file(folder / "map.png") as file,
    ):
        file.write_text("new")
        (folder / "map.png").write_text("theirs")
    assert read(folder) == {"map.png": "theirs", "map.png.kept-1": "new"}


def test_new_files_work_without_hard_links(folder, monkeypatch):
    def link(*_):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", link)
    test_new_file_appears_when_block_ends_and_is_replaced_only_with_force(folder)
    test_concurrent_foreign_file_is_kept_and_result_is_saved_beside_it(folder / "other")


CONTENTS = st.dictionaries(
    st.sampled_from(
        [
            *CHECKPOINT,
            "manifest.json",
            "onnx/model.onnx",
            "notes.md",
            ".git/HEAD",
            "checkpoint-3/config.json",
            "deep/x",
        ]
    ),
    st.sampled_from(
        [
            *CHECKPOINT.values(),
            "{}",
            "[]",
            manifest("onnx/model.onnx", "config.json"),
            '{"files": {}}',
        ]
    ),
    max_size=4,
)
CONTENTS |= st.sampled_from(
    [
        CHECKPOINT,
        CHECKPOINT | {"notes.md": ""},
        {"manifest.json": manifest("onnx/x.onnx"), "onnx/x.onnx": ""},
    ]
)
SEGMENTS = st.sampled_from([["one"], ["link"]]) | st.lists(
    st.sampled_from([".", "..", "one", "two", "link", "new", "onnx", "deep"]),
    min_size=1,
    max_size=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    one=CONTENTS,
    two=CONTENTS,
    segments=SEGMENTS,
    work=SEGMENTS,
    inputs=st.lists(SEGMENTS, max_size=2),
    force=st.booleans(),
)
def test_only_own_files_are_removed_for_any_path(
    folder, monkeypatch, one, two, segments, work, inputs, force
):
    """The contents of two directories, the working directory and the inputs are random."""
    top = Path(tempfile.mkdtemp(dir=folder))
    for name, contents in (("one", one), ("two", two)):
        (top / name).mkdir()
        write(top / name, contents)
    (top / "link").symlink_to(top / "two")
    monkeypatch.chdir(where if (where := top.joinpath(*work)).is_dir() else top)
    inputs = [top.joinpath(*input) for input in inputs]
    before, out = read(top.parent), top.joinpath(*segments)
    place = Path(os.path.realpath(out))
    try:
        save(out, {"new file": "new"}, force=force, inputs=inputs)
    except (OSError, ValueError):
        assert read(top.parent) == before
    else:
        gone = before.items() - read(top.parent).items()
        event(f"replaced {len(gone)} files")
        assert all(
            Path(os.path.realpath(top.parent / name)).is_relative_to(place) for name, _ in gone
        )
        assert not gone or force
        assert not {Path(name).name for name, _ in gone} & {"notes.md", "HEAD"}
        for kept in (Path.cwd(), *inputs):
            assert not gone or not Path(os.path.realpath(kept)).is_relative_to(place)
        assert read(place) == {"new file": "new"}
    assert not [*top.parent.rglob(".*.partial")]
    shutil.rmtree(top)


# ------------------------------------------------------------------------------------- mount points


@pytest.fixture
def mount(folder, monkeypatch):
    """A directory that acts as a mount point: it cannot be renamed or removed.

    Only root can create a real mount point.
    """
    place = folder / "mount"
    place.mkdir()
    rename, ismount = Path.rename, os.path.ismount

    def busy(path, target):
        if path == place:
            raise OSError(16, "Device or resource busy", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", busy)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == place or ismount(path))
    return place


def test_empty_mount_point_is_filled_in_place_with_manifest_last(mount, monkeypatch):
    (mount / "lost+found").mkdir()
    placed, place = [], outputs.place
    monkeypatch.setattr(
        outputs, "place", lambda path, out: (placed.append(out.name), place(path, out))
    )
    save(mount, NEW | {"manifest.json": "{}", "tokenizer.json": "{}"})
    assert placed == ["onnx", "tokenizer.json", "config.json", "manifest.json"]
    assert sorted(path.name for path in mount.iterdir()) == [
        "config.json",
        "lost+found",
        "manifest.json",
        "onnx",
        "tokenizer.json",
    ]
    assert_rejected(ValueError, ("mount", "config.json", "manifest.json"), mount, force=True)


def test_concurrent_foreign_file_in_mount_point_is_kept(mount):
    with raises(FileExistsError, seen="mount") as caught, new_directory(mount) as directory:
        write(directory, NEW)
        write(mount, {"notes": "mine"})
    assert "mount.kept-1" in str(caught.value)
    assert read(mount) == {"notes": "mine"} | {
        f"mount.kept-1/{name}": text for name, text in NEW.items()
    }


def test_mount_point_is_filled_by_next_call_after_kill(mount):
    for step in count():
        was_killed = kill_at_step(step, lambda: save(mount, NEW))
        try:
            save(mount, NEW)
        except ValueError as error:  # the killed call had already written everything
            assert str(mount) in str(error)
        assert read(mount) == NEW and not (mount / ".partial").exists(), step
        for name in ("config.json", "onnx/model.onnx"):
            (mount / name).unlink()
        (mount / "onnx").rmdir()
        if not was_killed:
            assert step > 10
            return


# ----------------------------------------------------------------------------------- a single file


def test_whole_file_gets_mode_of_what_it_replaces(folder):
    path = folder / "file"
    path.write_text("old")
    path.chmod(0o604)
    with outputs.whole_file(path, folder, outputs.regular_file(path)) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o604
    assert os.listdir(folder) == ["file"]


def test_file_of_another_writer_stays(folder):
    path = folder / "file"
    path.write_text("old")
    before = outputs.regular_file(path)
    with (
        raises(FileExistsError, seen=(path, "another process")),
        outputs.whole_file(path, folder, before) as file,
    ):
        file.write(b"new")
        path.write_text("theirs")
    assert path.read_text() == "theirs" and os.listdir(folder) == ["file"]
    with (
        raises(FileExistsError, seen=(path, "another process")),
        outputs.whole_file(path, folder, None) as file,
    ):
        file.write(b"new")
    with outputs.whole_file(path, folder, None) as file:  # of the same content
        file.write(b"theirs")
    assert path.read_text() == "theirs" and os.listdir(folder) == ["file"]


@pytest.mark.parametrize("kind", ["whole_file", "replace_text"])
def test_file_that_fails_leaves_nothing(kind, folder, monkeypatch):
    path = folder / "file"
    if kind == "whole_file":
        with pytest.raises(KeyboardInterrupt), outputs.whole_file(path, folder, None) as file:
            file.write(b"half")
            raise KeyboardInterrupt
    else:
        monkeypatch.setattr(outputs.os, "replace", lambda *paths: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            outputs.replace_text(path, "half")
    assert os.listdir(folder) == []
