"""Folders of checkpoints: what is in them, and config.json with other fields."""

import json
from pathlib import Path


def contents(folder: Path) -> dict[str, bytes]:
    """Path to bytes of every file below."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit(folder: Path, name: str = "config.json", **fields) -> Path:
    """Set fields of a JSON file in a folder, which is returned; None removes."""
    changed = {**json.loads((folder / name).read_text()), **fields}
    (folder / name).write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))
    return folder
