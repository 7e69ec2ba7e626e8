"""The place that is written: checked first, filled beside it, renamed at the end."""

import errno
import shutil
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from transformers import PreTrainedModel

from .modules import MODULES
from .source import TOKENIZER_FILES, ConversionError


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


@contextmanager
def new_folder(target: Path, overwrite: bool) -> Iterator[Path]:
    """A folder that becomes `target` when the block ends, and vanishes when it does not end well.

    It lies beside `target`, on the same file system, so that the change is one renaming. An existing `target` is moved
    aside first, and removed at the very end.

    Raises:
        FileExistsError: when `target` came into being meanwhile and may not be overwritten.
    """
    mark = uuid.uuid4().hex[:8]
    partial = target.with_name(f".{target.name}.{mark}.partial")
    aside = target.with_name(f".{target.name}.{mark}.old")
    missing = [parent for parent in target.parents if not parent.exists()]
    try:
        partial.mkdir(parents=True)
        yield partial
        try:
            if target.exists():
                if not overwrite:
                    raise FileExistsError(errno.EEXIST, "it appeared during the conversion", str(target))
                target.rename(aside)
            partial.rename(target)
        finally:
            if aside.exists() and not target.exists():
                aside.rename(target)
            shutil.rmtree(aside, ignore_errors=True)
    except BaseException:  # KeyboardInterrupt too
        shutil.rmtree(partial, ignore_errors=True)
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()
        raise
    if aside.exists():
        warnings.warn(f"the replaced folder could not be removed and lies in {aside}", stacklevel=2)


def copy_companions(folder: Path, partial: Path, model: PreTrainedModel) -> tuple[str, ...]:
    """Copy the files of the tokenizer, and those of generation, byte for byte; their names."""
    wanted = (*TOKENIZER_FILES, *(["generation_config.json"] if model.can_generate() else []))
    files = sorted({path for pattern in wanted for path in folder.glob(pattern) if path.is_file()})
    for path in files:
        shutil.copyfile(path, partial / path.name)
    return tuple(path.name for path in files)


def describe(error: Exception, target: Path, left: str = "nothing was left behind") -> str:
    """An error of the file system, in words.

    Args:
        left: what lies there now.
    """
    text = " ".join(str(error).split())
    # safetensors reports the system's errors in words only
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in text
    remedy = "free some space or choose another disk" if full else "check that the place can be written"
    return f"{target}: could not be written ({text}); {left}. To go on, {remedy}"
