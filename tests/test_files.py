"""Atomic writes: what is written is complete, or as it was before, and no temporary file stays."""

import json

import pytest
import torch
from safetensors.torch import load_file

from hf_relpos.files import (
    atomic_file,
    atomic_folder,
    check_writable,
    describe_write_error,
    write_json,
    write_tensors,
    write_text,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_files_are_complete_and_replaced(tmp_path):
    write_text(tmp_path / "a.txt", "α\n")
    write_text(tmp_path / "a.txt", "β\n")
    write_json(tmp_path / "a.json", {"α": [1]})
    write_tensors(tmp_path / "a.safetensors", {"t": torch.arange(6).view(2, 3).T})
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "β\n"
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"α": [1]}
    assert torch.equal(load_file(tmp_path / "a.safetensors")["t"], torch.arange(6).view(2, 3).T)
    check_writable(tmp_path / "b.txt")
    assert names(tmp_path) == ["a.json", "a.safetensors", "a.txt"]


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


def test_a_folder_created_meanwhile_is_kept(tmp_path):
    with pytest.raises(FileExistsError, match="created meanwhile"), atomic_folder(tmp_path / "out"):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "other").write_text("")
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["other"]


def test_an_error_names_target_state_and_remedy(tmp_path):
    full = describe_write_error(OSError(28, "No space left on device"), tmp_path)
    assert str(tmp_path) in full and "nothing was left behind" in full and "free some space" in full
    assert "free some space" in describe_write_error(RuntimeError("I/O error (os error 28)"), tmp_path)
    assert "2 layers are there" in describe_write_error(PermissionError(13, "no"), tmp_path, "2 layers are there")
    assert "check that it is writable" in describe_write_error(PermissionError(13, "no"), tmp_path)
