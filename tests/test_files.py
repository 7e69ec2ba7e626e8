"""Atomic writes: what is written is complete, or as it was before, and no temporary file stays."""

import errno
import json
import os
import warnings
from pathlib import Path

import pytest

from hf_relpos.files import atomic_file, atomic_folder, check_writable, describe_write_error, write_json, write_text


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes in folders")
def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    """As a device does, which root could replace."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_writable(pipe)
    write_json(pipe, {"a": 1})
    assert json.loads(os.read(reader, 100)) == {"a": 1}
    os.close(reader)
    assert pipe.is_fifo() and names(tmp_path) == ["pipe"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_files_are_complete_and_replaced(tmp_path):
    write_text(tmp_path / "a.txt", "α\n")
    write_text(tmp_path / "a.txt", "β\n")
    write_json(tmp_path / "a.json", {"α": [1]})
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "β\n"
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"α": [1]}
    check_writable(tmp_path / "b.txt")
    assert names(tmp_path) == ["a.json", "a.txt"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_interrupted_write_leaves_the_file_as_it_was(tmp_path, error):
    (tmp_path / "a.png").write_bytes(b"old")
    with pytest.raises(error), atomic_file(tmp_path / "a.png") as partial:
        assert partial.parent == tmp_path and partial.suffix == ".png"
        partial.write_bytes(b"half")
        raise error
    assert names(tmp_path) == ["a.png"] and (tmp_path / "a.png").read_bytes() == b"old"


def test_json_that_cannot_be_encoded_leaves_the_file_as_it_was(tmp_path):
    write_json(tmp_path / "a.json", 1)
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"a": object()})
    assert names(tmp_path) == ["a.json"] and (tmp_path / "a.json").read_text() == "1\n"


def test_a_folder_is_created_with_its_parents_and_replaced_as_a_whole(tmp_path):
    target = tmp_path / "new" / "out"
    with atomic_folder(target) as partial:
        assert not target.exists() and partial.parent == target.parent
        (partial / "a").write_text("1")
    with atomic_folder(target, overwrite=True) as partial:
        (partial / "b").write_text("2")
        assert names(target) == ["a"]
    assert names(target) == ["b"] and names(target.parent) == ["out"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_interrupted_folder_leaves_nothing_behind(tmp_path, error):
    with pytest.raises(error), atomic_folder(tmp_path / "new" / "out") as partial:
        (partial / "a").write_text("1")
        raise error
    assert names(tmp_path) == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("")
    with pytest.raises(error), atomic_folder(tmp_path / "out", overwrite=True):
        raise error
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["old"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_writers_of_one_folder_leave_one_whole_result(tmp_path, overwrite):
    (tmp_path / "out").mkdir() if overwrite else None
    try:
        with atomic_folder(tmp_path / "out", overwrite) as first:
            (first / "a").write_text("first")
            with atomic_folder(tmp_path / "out", overwrite) as second:
                (second / "a").write_text("second")
    except FileExistsError as error:
        assert not overwrite and "created meanwhile" in str(error)
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "a").read_text() == ("first" if overwrite else "second")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_appears_between_the_check_and_the_renaming(tmp_path, monkeypatch, overwrite):
    rename, others = Path.rename, []

    def after_another(path, target):
        if not others:
            others.append(target)
            target.mkdir()
            (target / "a").write_text("other")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", after_another)
    try:
        with atomic_folder(tmp_path / "out", overwrite) as partial:
            (partial / "a").write_text("ours")
    except FileExistsError as error:
        assert not overwrite and "created meanwhile" in str(error)
    assert others == [tmp_path / "out"] and names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "a").read_text() == ("ours" if overwrite else "other")


def test_a_folder_that_vanishes_while_it_is_replaced(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").write_text("old")
    rename = Path.rename

    def after_another(path, target):
        if path.name == "out":
            rename(path, path.with_name("taken by another process"))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", after_another)
    with atomic_folder(tmp_path / "out", overwrite=True) as partial:
        (partial / "a").write_text("ours")
    assert names(tmp_path) == ["out", "taken by another process"]
    assert (tmp_path / "out" / "a").read_text() == "ours"


@pytest.mark.parametrize("taken", [False, True])
def test_a_folder_that_is_refused_when_it_is_replaced(tmp_path, taken):
    """It gets its name back; or is kept, and its place told, where another process has taken the name."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis").write_text("years")

    def check(folder):
        assert folder != out and not out.exists() and names(folder) == ["thesis"]
        if taken:
            out.mkdir()
        raise ValueError("no checkpoint")

    refused = pytest.raises(ValueError, match="no checkpoint")
    with warnings.catch_warnings(record=True) as told, refused, atomic_folder(out, True, check) as partial:
        (partial / "a").write_text("ours")
    kept = [path for path in tmp_path.iterdir() if names(path) == ["thesis"]]
    assert len(kept) == 1 and len(names(tmp_path)) == 1 + taken and (kept == [out]) is not taken
    assert [str(kept[0]) in str(warning.message) for warning in told] == [True] * taken


@pytest.mark.parametrize("code, said", [(errno.ENOSPC, "free some space"), (errno.EROFS, "check that it is writable")])
@pytest.mark.parametrize("where", ["write", "rename"])
def test_a_disk_that_is_full_or_read_only(tmp_path, monkeypatch, code, said, where):
    (tmp_path / "a.json").write_text("old")

    def fails(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "write_text" if where == "write" else "replace", fails)
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        write_json(tmp_path / "a.json", 1)
    assert said in describe_write_error(caught.value, tmp_path)
    assert names(tmp_path) == ["a.json"] and (tmp_path / "a.json").read_text() == "old"


def test_an_error_names_target_state_and_remedy(tmp_path):
    full = describe_write_error(OSError(28, "No space left on device"), tmp_path)
    assert str(tmp_path) in full and "nothing was left behind" in full and "free some space" in full
    assert "free some space" in describe_write_error(RuntimeError("I/O error (os error 28)"), tmp_path)
    there = describe_write_error(FileExistsError(errno.EEXIST, "it was created meanwhile"), tmp_path)
    assert "choose another folder, or overwrite that one" in there
    assert "check that it is writable" in describe_write_error(PermissionError(13, "no"), tmp_path)
