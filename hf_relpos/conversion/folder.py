"""The folder of the result: checks before anything is written, and files that are copied into it."""

import shutil
from pathlib import Path

from transformers import PreTrainedModel

from .errors import ConversionError
from .modules import MODULES
from .source import TOKENIZER_FILES


def check_target(out: str | Path, overwrite: bool) -> Path:
    """The folder to write, with links resolved.

    Raises:
        ConversionError: for one that exists, unless it is a checkpoint and may be overwritten.
    """
    target = Path(out).expanduser().resolve()
    if target.exists():
        if not target.is_dir():
            raise ConversionError(f"out = '{out}' is a file; choose a folder")
        if not overwrite:
            raise ConversionError(
                f"out = '{out}' exists; choose another folder, or replace it with overwrite=True (--overwrite)"
            )
        if not any((target / name).is_file() for name in ("config.json", MODULES)) and any(target.iterdir()):
            raise ConversionError(
                f"out = '{out}' holds no config.json: only a checkpoint is overwritten, never another folder; choose "
                "another one"
            )
    return target


def copy_companions(folder: Path, partial: Path, model: PreTrainedModel) -> tuple[str, ...]:
    """Copy the files of the tokenizer, and those of generation, byte for byte; their names."""
    patterns = (*TOKENIZER_FILES, *(["generation_config.json"] if model.can_generate() else []))
    files = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    for path in files:
        shutil.copyfile(path, partial / path.name)
    return tuple(path.name for path in files)
