"""Checkpoints whose files are broken, mislabelled or hostile: refused by name, and nothing is run or left behind."""

import json
import os
import shutil
import struct
from functools import partial
from pathlib import Path

import pytest
import torch
from errors import raises
from folders import assert_not_converted, edit_tensors
from launching import run_command

from hf_relpos import RelPosBertModel
from hf_relpos.conversion import convert
from hf_relpos.conversion.inspect_checkpoint import inspect_checkpoint
from hf_relpos.evaluation.loading import load_model, pooling_of


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Runs:
    """Unpickled without care, it makes a file."""

    def __reduce__(self):
        return os.mkdir, (os.environ["RUNS_MADE"],)


@pytest.fixture(autouse=True)
def nothing_is_run(tmp_path, monkeypatch):
    monkeypatch.setenv("RUNS_MADE", str(tmp_path / "made by a pickle"))
    yield
    assert not (tmp_path / "made by a pickle").exists()


def rewritten(part="", **fields):
    """Other fields, in the header of a safetensors file, of the tensors with this part in their names."""

    def spoil(folder):
        path = folder / WEIGHTS
        content = path.read_bytes()
        size = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + size])
        for name in header:
            if part in name and name != "__metadata__":
                header[name].update(fields)
        changed = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(changed)) + changed + content[8 + size :])

    return spoil


def edited(change, file=WEIGHTS):
    """A change of the bytes of the weights, or of another file."""
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


config = partial(edited, file="config.json")


def index(change):
    """A change of the index, or what is written in its place."""

    def spoil(folder):
        content = json.loads((folder / INDEX).read_text())
        changed = change(content)
        (folder / INDEX).write_text(changed if isinstance(changed, str) else json.dumps(changed or content))

    return spoil


def first_shard(name):
    """An index that says that its first tensor is in another file."""
    return index(lambda content: content["weight_map"].update({next(iter(content["weight_map"])): name}))


def moved_out(folder):
    """The first shard lies beside the folder, where the index says so."""
    content = json.loads((folder / INDEX).read_text())
    shard = sorted(set(content["weight_map"].values()))[0]
    (folder.parent / "outside").mkdir(exist_ok=True)
    shutil.move(folder / shard, folder.parent / "outside" / shard)
    (folder / INDEX).write_text(json.dumps(content).replace(shard, f"../outside/{shard}"))


def replaced_by_a_pickle(folder):
    torch.save({"weight": Runs()}, folder / WEIGHTS)


def replaced_by_a_folder(folder):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def a_pickled_shard(folder):
    torch.save({"weight": Runs()}, folder / "pytorch_model.bin")
    first_shard("pytorch_model.bin")(folder)


def nested(brackets):
    return lambda content: content.rstrip()[:-1] + b', "x": ' + b"[" * brackets + b"]" * brackets + b"}"


# what is done to a folder, and words of the error, which also names the file
ONE_FILE = {
    "empty": (edited(lambda content: b""), "cut short or corrupt"),
    "cut": (edited(lambda content: content[:-10]), "cut short or corrupt"),
    "cut in the header": (edited(lambda content: content[:99]), "cut short or corrupt"),
    "random": (edited(lambda content: bytes(range(256)) * 9), "cut short or corrupt"),
    "longer": (edited(lambda content: content + b"more"), "cut short or corrupt"),
    "not there": (lambda folder: (folder / WEIGHTS).unlink(), ""),
    "header of 99 MB": (edited(lambda content: struct.pack("<Q", 99_999_999) + content[8:]), "cut short or corrupt"),
    "overlap": (rewritten("key.weight", data_offsets=[0, 1024]), "cut short or corrupt"),
    "unknown dtype": (rewritten("key.weight", dtype="F33"), "cut short or corrupt"),
    "integers": (rewritten(dtype="I32"), "has dtype"),
    "pointer": (
        edited(lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 440449768\n"),
        "a pointer of Git LFS, not the weights; fetch them with `git lfs pull`",
    ),
    "pickle": (replaced_by_a_pickle, "cut short or corrupt"),
    "shape": (rewritten("word_embeddings", shape=[16, 30]), ""),
    "folder": (replaced_by_a_folder, ""),
}
CONFIG = {
    "empty": (config(lambda content: b""), "not readable as JSON"),
    "list": (config(lambda content: b"[" + content + b"]"), "holds a list, not a JSON object"),
    "deep": (config(nested(200_000)), "not readable as JSON"),
    "UTF-16": (config(lambda content: content.decode().encode("utf-16")), "not readable as JSON"),
    "number of 5000 digits": (config(lambda content: content[:-2] + b', "x": ' + b"9" * 5000 + b"}"), "not readable"),
    "not there": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
}
SHARDS = {
    "no JSON": (index(lambda content: "{"), "not readable as JSON"),
    "no map": (index(lambda content: {"metadata": {}}), "weight_map = None names no tensors"),
    "map a list": (index(lambda content: {"weight_map": ["a"]}), "names no tensors"),
    "map to null": (first_shard(None), "names the file 'None', which is not in the folder"),
    "a system file": (first_shard("../../../../../../etc/passwd"), "etc/passwd', which is not in the folder"),
    "outside": (moved_out, "which is not in the folder"),
    "zero byte": (first_shard("a\0b"), "which is not in the folder"),
    "missing": (lambda folder: next(folder.glob("model-*")).unlink(), "which is not in the folder"),
    "itself": (first_shard(INDEX), "cut short or corrupt"),
    "pickle": (a_pickled_shard, "cut short or corrupt"),
}
SPOILT = [
    pytest.param(f"{kind}{suffix}", *case, id=f"{kind}-{title}-{name}")
    for title, suffix, cases in (("file", "", ONE_FILE), ("config", "", CONFIG), ("index", "-shards", SHARDS))
    for name, case in cases.items()
    for kind in ("stock", "ours")
]


@pytest.mark.parametrize("name, spoil, words", SPOILT)
def test_a_broken_checkpoint_is_refused_by_name(tmp_path, checkpoints, name, spoil, words):
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoints / name, folder)
    spoil(folder)
    if name.startswith("stock"):
        said = words.replace("has dtype", "has dtype torch.int32")
        assert_not_converted(folder, tmp_path / "out", folder, said)
    else:
        errors = {"": (OSError, RuntimeError)}.get(words, ValueError)  # Transformers' own for a shape and no weights
        with pytest.raises(errors) as caught:
            RelPosBertModel.from_pretrained(folder)
        assert words in str(caught.value)
        assert not words or str(folder) in str(caught.value)
    is_told = spoil is ONE_FILE["shape"][0]  # by `inspect`, which does not refuse it
    for read in (load_model,) if is_told else (load_model, inspect_checkpoint):  # stock ones, too
        with pytest.raises(ValueError, match=str(folder)) as caught:
            read(folder)
        assert words in str(caught.value)


def test_an_index_with_a_tensor_that_its_shard_lacks(tmp_path, checkpoints):
    folder = Path(shutil.copytree(checkpoints / "stock-shards", tmp_path / "checkpoint"))
    index(lambda content: content["weight_map"].update(more=next(iter(content["weight_map"].values()))))(folder)
    assert_not_converted(folder, tmp_path / "out", folder, f"lacks more, which {INDEX} expects there")


def test_a_broken_shard_of_a_variant_is_refused_by_name(tmp_path, checkpoints):
    model = RelPosBertModel.from_pretrained(checkpoints / "ours")
    model.save_pretrained(tmp_path, variant="fp16", max_shard_size="4KB")
    assert RelPosBertModel.from_pretrained(tmp_path, variant="fp16")
    shard = sorted(tmp_path.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with raises(ValueError, shard):
        RelPosBertModel.from_pretrained(tmp_path, variant="fp16")


@pytest.mark.parametrize("command", ["convert", "compare"])
@pytest.mark.parametrize("spoil", [ONE_FILE["cut"][0], CONFIG["deep"][0]], ids=["weights", "config"])
def test_the_command_line_says_it_in_one_line(tmp_path, checkpoints, command, spoil):
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoints / ("stock" if command == "convert" else "ours"), folder)
    spoil(folder)
    (tmp_path / "a.tsv").write_text("score\tsentence1\tsentence2\n1\ta\tb\n2\tb\tc\n")
    arguments = {"convert": [tmp_path / "out"], "compare": [folder, "--texts", tmp_path / "a.tsv"]}
    result = run_command(command, folder, *arguments[command])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    told = [line for line in result.stderr.splitlines() if not line.endswith(" …")]  # what a slow machine is doing
    assert len(told) == 1 and told[0].startswith(f"Error: {folder}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tsv", "checkpoint"]


def test_weights_that_are_not_finite_are_not_measured(tmp_path, checkpoints):
    folder = Path(shutil.copytree(checkpoints / "ours", tmp_path / "checkpoint"))
    with edit_tensors(folder) as tensors:
        tensors["bert.encoder.layer.0.output.dense.bias"][0] = float("nan")
    with pytest.raises(ValueError, match=r"output\.dense\.bias holds NaN or infinite values"):
        load_model(folder)


# Links ---------------------------------------------------------------------------------------------------------------


def test_a_folder_of_the_cache_is_links_to_its_blobs(tmp_path, checkpoints):
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    folder.mkdir(parents=True)
    for number, path in enumerate([*(checkpoints / "stock-shards").iterdir(), tmp_path / "vocab.txt"]):
        if path.parent == tmp_path:
            path.write_text("[PAD]\n[UNK]\n")
        shutil.copyfile(path, blobs / str(number))
        (folder / path.name).symlink_to(f"../../blobs/{number}")
    convert(folder, tmp_path / "out", position_embedding_type="tables")
    assert (tmp_path / "out" / "vocab.txt").read_text() == "[PAD]\n[UNK]\n"
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    RelPosBertModel.from_pretrained(folder, position_embedding_type="absolute")


def test_weights_may_be_links_and_copied_files_may_not_lead_out(tmp_path, checkpoints):
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoints / "stock", folder)
    shutil.move(folder / WEIGHTS, tmp_path / "on another disk")
    (folder / WEIGHTS).symlink_to(tmp_path / "on another disk")
    convert(folder, tmp_path / "out")
    (tmp_path / "secret").write_text("a private key")
    (folder / "vocab.txt").symlink_to("../secret")
    words = r"vocab\.txt: a link out of the folder, to .*secret.*remove the link"
    assert_not_converted(folder, tmp_path / "other", match=words)


@pytest.mark.parametrize("content", ["", "[]", "[" * 200_000, '{"pooling_mode": 5}', '{"pooling_mode": [["cls"]]}'])
def test_a_pooling_that_is_broken(tmp_path, content):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"1_Pooling/config\.json: "):
        pooling_of(tmp_path)
