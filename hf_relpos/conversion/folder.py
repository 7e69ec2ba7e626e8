"""The folder of the result: checks before it is written, and files that are copied into it.

`KNOWN` lists the files of a checkpoint. Only a folder without other files is overwritten.
"""

import os
import shutil
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from transformers import PreTrainedModel

from ..families.checkpoint import (
    CARD,
    INDEX,
    PICKLED_FILES,
    TOKENIZER_FILES,
    WEIGHTS,
    check_link,
    has_safetensors,
    read_json,
)
from ..families.errors import ConversionError, abbreviate
from ..families.privacy import without_local_paths
from ..files import write_json
from ..models.remote_code import own_files
from .card import PICTURES
from .folder_layout import ENCODER_FILES, MODULE_FILES, MODULES, TOP_FILES, Layout, read_layout
from .report import REPORT


# Files that a conversion and `save_pretrained` of a model and a tokenizer write, and .gitattributes.
KNOWN = (
    "config.json",
    "generation_config.json",
    WEIGHTS,
    "model-?????-of-?????.safetensors",
    INDEX,
    *TOKENIZER_FILES,
    *TOP_FILES,
    *ENCODER_FILES,
    CARD,
    REPORT,
    *PICTURES,
    ".gitattributes",
)


def check_target(out: str | Path, overwrite: bool, source: str | Path | None = None) -> Path:
    """Check and return the folder to write, with links resolved: a link to a folder is kept, and the folder replaced.

    Args:
        source: folder or Hub repository of the source; None for none.

    Raises:
        ConversionError: for an existing folder, unless it holds only a checkpoint and may be overwritten; and as
            `check_apart`.
    """
    try:
        target = Path(out).expanduser().resolve()
    except (OSError, RuntimeError) as error:  # circular links
        raise ConversionError(f"out = '{out}' cannot be followed ({error}); choose another folder") from error
    if source is not None:
        check_apart(source, target)
    if target.exists():
        if not target.is_dir():
            raise ConversionError(f"out = '{out}' is a file; choose a folder")
        if not overwrite:
            raise ConversionError(
                f"out = '{out}' exists; choose another folder, or replace it with overwrite=True (--overwrite)"
            )
        check_replaceable(out, target)
    return target


def check_replaceable(out: str | Path, folder: Path) -> None:
    """Check that a folder to replace holds only a checkpoint.

    Args:
        out: name of the folder, for messages.
        folder: its current path.

    Raises:
        ConversionError: for files that do not belong to a checkpoint, and a folder without a checkpoint.
    """
    refuse_other_files(out, other_files(folder))
    encoder = folder / _layout(folder).encoder
    files = sorted(path.name for path in folder.iterdir())
    if files and not ((encoder / "config.json").is_file() and has_safetensors(encoder)):
        raise ConversionError(
            f"out = '{out}' is overwritten only if it holds a checkpoint, and its files ({abbreviate(files, 10)}) are "
            "none: config.json or safetensors are missing. Move them, or choose another folder"
        )


def refuse_other_files(out: str | Path, others: Iterable[str]) -> None:
    """
    Args:
        others: paths in `out` that do not belong to a checkpoint.

    Raises:
        ConversionError: if there are any.
    """
    if others := list(others):
        raise ConversionError(
            f"out = '{out}' is overwritten only if it holds a checkpoint and nothing else; in the way: "
            f"{abbreviate(others, 10)}. Move {'it' if len(others) == 1 else 'them'}, or choose another folder"
        )


def check_apart(source: str | Path, target: Path) -> None:
    """Check that the result is not written into the source, or over it.

    Args:
        source: folder or Hub repository given by the caller.
        target: the folder to write, with links resolved.

    Raises:
        ConversionError: if the folders are the same, or one contains the other.
    """
    folder = Path(source).expanduser()
    if not os.path.exists(folder):  # unlike Path's, false for a name that is too long
        return
    # the folder itself, and the path of a link to it
    name = folder.absolute().name
    link = folder.absolute().parent.resolve() / name if name != ".." else folder.resolve()
    for place in {folder.resolve(), link}:
        if target == place or target in place.parents:
            raise ConversionError(f"out = '{target}' is the source or holds it; choose another folder")
        if place in target.parents:
            raise ConversionError(f"out = '{target}' lies in the source, '{source}'; choose a folder outside of it")


def other_files(folder: Path, known: Iterable[str] = KNOWN) -> list[str]:
    """Relative paths, sorted, of files in a folder that do not belong to a checkpoint.

    Args:
        known: patterns of the names of a checkpoint's files.
    """
    layout = _layout(folder)
    patterns = {"": [*known, *own_files(folder)]}
    patterns |= {name: [*MODULE_FILES] for name in layout.modules}
    if layout.encoder:
        patterns[layout.encoder] = [*known, *own_files(folder / layout.encoder)]
    folders = {folder, *(folder / name for name in patterns)}
    folders |= {parent for name in patterns for parent in (folder / name).parents if folder in parent.parents}
    found = []
    for each in sorted(folders):
        own = patterns.get("" if each == folder else each.relative_to(folder).as_posix(), [])
        for path in each.iterdir() if each.is_dir() else ():
            is_folder = path.is_dir() and not path.is_symlink()
            belongs = path in folders if is_folder else any(fnmatch(path.name, pattern) for pattern in own)
            if not belongs:
                found.append(path.relative_to(folder).as_posix() + "/" * is_folder)
    return sorted(found)


def _layout(folder: Path) -> Layout:
    """The layout of a folder; a plain layout if modules.json cannot be read."""
    try:
        return read_layout(folder)
    except ConversionError:
        return Layout()


def copy_companions(folder: Path, partial: Path, model: PreTrainedModel) -> tuple[str, ...]:
    """Copy the tokenizer and generation files byte for byte; returns their names.

    Fields of tokenizer_config.json with local paths are removed.
    """
    patterns = (*TOKENIZER_FILES, *(["generation_config.json"] if model.can_generate() else []))
    files = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    for path in files:
        check_link(path, folder)
        content = read_json(path) if path.name == "tokenizer_config.json" else {}
        if (kept := without_local_paths(content)) != content:
            write_json(partial / path.name, kept, indent=2)
        else:
            shutil.copyfile(path, partial / path.name)
    return tuple(path.name for path in files)


def left_out(top: Path, layout: Layout, copied: Iterable[str]) -> tuple[str, ...]:
    """Relative paths in the folder of a source that were neither converted nor copied.

    Args:
        copied: relative paths.
    """
    folder = top / layout.encoder
    weights = list(folder.glob("model*.safetensors")) or [
        path for pattern in PICKLED_FILES for path in folder.glob(pattern)
    ]
    read = {path.relative_to(top).as_posix() for path in (*weights, folder / "config.json", folder / INDEX)}
    made = {REPORT, *PICTURES, *(str(Path(layout.encoder, name)) for name in own_files(folder))}
    done = {*copied, *read, *made, MODULES, CARD}
    used = {"", layout.encoder, *layout.modules}
    folders = {parent for name in used for parent in (top / name, *(top / name).parents)}
    found = [path for name in used if (top / name).is_dir() for path in (top / name).iterdir() if path not in folders]
    names = {path.relative_to(top).as_posix() + "/" * path.is_dir() for path in found}
    return tuple(sorted(names - done))
