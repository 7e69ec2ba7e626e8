"""Folders of checkpoints: what is in them, and config.json with other fields."""

import json
from pathlib import Path


def contents(folder: Path) -> dict[str, bytes]:
    """Path to bytes of every file below."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_modules(folder: Path, *kinds: str, **pooling) -> None:
    """Make a checkpoint one of sentence-transformers: a Transformer, and modules of these kinds after it.

    Args:
        pooling: the settings of the module Pooling.
    """
    paths = {"Transformer": "", **{kind: f"{number}_{kind}" for number, kind in enumerate(kinds, 1)}}
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
