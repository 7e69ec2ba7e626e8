"""Folders of checkpoints: what is in them, other fields and tensors, and conversions that leave all as it was."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from errors import raises
from safetensors.torch import load_file, save_file

from hf_relpos.conversion import ConversionError, convert


def contents(folder: Path) -> dict[str, bytes]:
    """Path to bytes of every file below."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_not_converted(source, out: Path, *names: object, match: str = "", within: Path | None = None, **options):
    """`convert` raises an error, and changes nothing around the folder of the result.

    Args:
        names: that the message has.
        match: a pattern that it has.
        within: the folder in which nothing changes, if not that of `out`.
        options: of `convert`.
    """
    around = within or out.parent
    before, listed = contents(around), sorted(around.rglob("*"))
    with raises(ConversionError, *names) as raised:
        convert(source, out, **options)
    assert re.search(match, str(raised.value)), raised.value
    assert contents(around) == before and sorted(around.rglob("*")) == listed


@contextmanager
def edit_tensors(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of model.safetensors in a folder, which are written back as the block leaves them."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    yield tensors
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def write_modules(folder: Path, *kinds: str, encoder: str = "", **pooling) -> None:
    """Make a checkpoint one of sentence-transformers: a Transformer, and modules of these kinds after it.

    Args:
        encoder: the folder of the Transformer, inside.
        pooling: the settings of the module Pooling.
    """
    paths = {"Transformer": encoder, **{kind: f"{number}_{kind}" for number, kind in enumerate(kinds, 1)}}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(paths.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for kind in kinds:
        (folder / paths[kind]).mkdir()
    if "Pooling" in kinds:
        (folder / paths["Pooling"] / "config.json").write_text(json.dumps(pooling))


def edit(folder: Path, name: str = "config.json", **fields) -> Path:
    """Set fields of a JSON file in a folder, which is returned; None removes."""
    changed = {**json.loads((folder / name).read_text()), **fields}
    (folder / name).write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))
    return folder
