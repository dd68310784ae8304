"""Tests of runs over files of other people that are in their way: none is touched, and the same
command finishes the run afterwards."""

import os
import stat
from pathlib import Path

import pytest
from messages import raises
from shards import Stopped, contents, names, some_lines, stop_after, write

from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.files import run
from vanilla_transformer_export.files.resumable_output import Directory

pytestmark = pytest.mark.filterwarnings("ignore:.* was cut after")


@pytest.fixture
def source(tmp_path):
    """An input of three shards with one bad line, in a directory of its own."""
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a"
    path.write_bytes("\n".join(some_lines(20)).encode() + b"\n\xff\n")
    return path


@pytest.fixture
def expected(bulk, source, tmp_path):
    """The results and the bad lines of `source`."""
    (tmp_path / "expected").mkdir()
    bulk().to_file(source, tmp_path / "expected" / "a")
    return contents(tmp_path / "expected")


def interrupt(write_results, count):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, count)
        write_results()


def during(monkeypatch, action):
    """Call `action` while the second shard is computed."""
    compute, calls = run.compute, []

    def acting(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            action()
        return compute(*arguments)

    monkeypatch.setattr(run, "compute", acting)


def test_no_link_at_a_foreseeable_name_is_followed(bulk, source, expected, tmp_path):
    precious = write(tmp_path / "precious", ["mine"])
    out = tmp_path / "out"
    interrupt(lambda: bulk().to_directory([source], out), 1)
    links = [
        out / f".{name}.new"
        for name in ("a", "a.bad.jsonl", "manifest.json", "a.parts/000001", "a.parts/000001.facts")
    ]
    links += [out / "a.parts" / f".{name}.new" for name in ("000001", "000001.facts", "000002")]
    links += [tmp_path / f".{name}.new" for name in ("b", "b.bad.jsonl")]
    for link in links:
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(precious)
    bulk().to_directory([source], out)
    bulk().to_file(source, tmp_path / "b")
    assert precious.read_text() == "mine\n" and all(map(os.path.islink, links))
    assert (out / "a").read_bytes() == (tmp_path / "b").read_bytes() == expected["a"]


@pytest.mark.parametrize("link", [".b.partial", "out/a.parts"])
def test_link_in_place_of_a_directory_of_the_run_is_rejected(bulk, source, tmp_path, link):
    (tmp_path / "theirs").mkdir()
    interrupt(lambda: bulk().to_directory([source], tmp_path / "out"), 0)
    (tmp_path / link).symlink_to(tmp_path / "theirs")
    with raises(FileExistsError, seen=link):
        if link == ".b.partial":
            bulk().to_file(source, tmp_path / "b")
        else:
            bulk().to_directory([source], tmp_path / "out")
    assert names(tmp_path / "theirs") == [] and (tmp_path / link).is_symlink()


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", ["a", "a.bad.jsonl"])
def test_file_that_appears_beside_the_output_is_kept(
    bulk, source, expected, tmp_path, monkeypatch, name, force
):
    out = tmp_path / "out"
    out.mkdir()
    if force:
        for old in ("a", "a.bad.jsonl"):
            write(out / old, ["old"])
    during(monkeypatch, lambda: write(out / name, ["theirs"]))
    with raises(FileExistsError, seen=(out / name, ".a.partial")):
        bulk().to_file(source, out / "a", force)
    assert (out / name).read_text() == "theirs\n"
    (out / name).unlink()
    with pytest.MonkeyPatch.context() as patch:
        assert stop_after(patch, 0) == []
        bulk().to_file(source, out / "a", force)
    assert contents(out) == expected


@pytest.mark.parametrize("name", ["a", "a.bad.jsonl", "manifest.json"])
def test_file_that_appears_in_the_output_directory_is_kept(
    bulk, source, expected, tmp_path, monkeypatch, name
):
    out = tmp_path / "out"
    manifest = []

    def put():
        manifest.append((out / "manifest.json").read_bytes())
        write(out / name, ["theirs"])

    during(monkeypatch, put)
    with raises(FileExistsError, seen=out / name):
        bulk().to_directory([source], out)
    assert (out / name).read_text() == "theirs\n"
    with raises(FileExistsError, seen=name):
        bulk().to_directory([source], out)
    assert (out / name).read_text() == "theirs\n"
    if name == "manifest.json":
        (out / name).write_bytes(manifest[0])
    else:
        (out / name).unlink()
    bulk().to_directory([source], out)
    assert {key: contents(out)[key] for key in expected} == expected
    assert names(out) == ["a", "a.bad.jsonl", "manifest.json"]


def test_file_of_bad_lines_that_appears_is_kept_if_no_line_is_bad(bulk, tmp_path, monkeypatch):
    source = write(tmp_path / "a", some_lines(20))
    theirs = tmp_path / "out.bad.jsonl"
    during(monkeypatch, lambda: write(theirs, ["theirs"]))
    with raises(FileExistsError, seen=theirs):
        bulk().to_file(source, tmp_path / "out")
    assert theirs.read_text() == "theirs\n" and not (tmp_path / "out").exists()


def test_file_put_between_two_calls_is_rejected_before_anything_is_computed(
    bulk, source, tmp_path, monkeypatch
):
    other = write(tmp_path / "b", some_lines(9))
    out = tmp_path / "out"
    interrupt(lambda: bulk().to_directory([source, other], out), 1)
    write(out / "b", ["theirs"])
    done = stop_after(monkeypatch, 100)
    with raises(FileExistsError, seen=out / "b"):
        bulk().to_directory([source, other], out)
    assert done == [] and (out / "b").read_text() == "theirs\n"


def test_foreign_files_among_the_parts_are_kept(bulk, source, expected, tmp_path):
    out = tmp_path / "out"
    interrupt(lambda: bulk().to_file(source, out), 1)
    parts = tmp_path / ".out.partial" / "out.parts"
    notes = [parts / "notes", parts.parent / "notes", parts / "000099", parts / "000001"]
    for path in notes:
        write(path, ["theirs"])
    with raises(FileExistsError, seen=notes[-1]):
        bulk().to_file(source, out)
    notes.pop().rename(tmp_path / "elsewhere")
    bulk().to_file(source, out)
    assert out.read_bytes() == expected["a"]
    assert {path.read_text() for path in notes} == {"theirs\n"}
    assert sorted(path for path in parts.parent.rglob("*") if path.is_file()) == sorted(notes)


@pytest.mark.parametrize("step", ["publish", "note", "remove"])
def test_run_killed_after_its_output_appeared_is_finished(
    bulk, source, expected, tmp_path, monkeypatch, step
):
    """The output, or only its bad lines, are there, and the manifest may not list them."""
    targets = {
        "publish": (run.Output, "write_bad"),
        "note": (run.Output, "publish"),
        "remove": (run.Output, "remove"),
    }
    owner, name = targets[step]
    method = getattr(owner, name)

    def stopping(*arguments):
        method(*arguments)
        raise Stopped

    out = tmp_path / "out"
    for write_results in (
        lambda: bulk().to_file(source, out / "a"),
        lambda: bulk().to_directory([source], tmp_path / "all"),
    ):
        out.mkdir(exist_ok=True)
        with monkeypatch.context() as patch, pytest.raises(Stopped):
            patch.setattr(owner, name, stopping)
            patch.setattr(Directory, "remove", lambda directory: None)  # a kill removes nothing
            write_results()
        write_results()
    assert contents(out) == expected
    assert names(tmp_path / "all") == ["a", "a.bad.jsonl", "manifest.json"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_modes_of_replaced_outputs_stay_and_new_ones_follow_umask(bulk, source, tmp_path, umask):
    before = os.umask(umask)
    try:
        (tmp_path / "out").mkdir()
        out = write(tmp_path / "out" / "a", ["old"])
        out.chmod(0o640)
        bulk().to_file(source, out, force=True)
        interrupt(lambda: bulk().to_file(source, tmp_path / "new"), 1)
        partial = tmp_path / ".new.partial"
        assert stat.S_IMODE(partial.stat().st_mode) == 0o700
        bulk().to_file(source, tmp_path / "new")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (out, tmp_path / "new")]
    assert modes == [0o640, 0o666 & ~umask]


def test_outputs_work_without_hard_links(bulk, source, expected, tmp_path, monkeypatch):
    def link(*_):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", link)
    (tmp_path / "out").mkdir()
    bulk().to_file(source, tmp_path / "out" / "a")
    assert contents(tmp_path / "out") == expected
    write(tmp_path / "out" / "a", ["theirs"])
    (tmp_path / "out" / "a.bad.jsonl").unlink()
    during(monkeypatch, lambda: write(tmp_path / "b", ["theirs"]))
    with raises(FileExistsError, seen=tmp_path / "b"):
        bulk().to_file(source, tmp_path / "b")
    assert (tmp_path / "b").read_text() == "theirs\n"


@pytest.mark.parametrize("name", ["x" * 246, "\u00e9" * 125])
def test_name_without_room_for_the_files_beside_it_is_rejected(bulk, source, tmp_path, name):
    length = len(name.encode())
    with raises(UsageError, seen=length, expected=245):
        bulk().to_file(source, tmp_path / "new" / name)
    source.rename(source.parent / name)
    with raises(UsageError, seen=length, expected=245):
        bulk().to_directory([source.parent / name], tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (source.parent / name).rename(source)
    bulk().to_file(source, tmp_path / ("x" * 245))


def test_device_is_rejected_as_output(bulk, source):
    for device in ("/dev/null", "/dev/zero"):
        with raises(FileExistsError, seen=device):
            bulk().to_file(source, Path(device))
