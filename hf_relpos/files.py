"""Atomic writes: a file or folder is complete, or as it was before.

Each is written under a temporary name in the same folder, on the same file system, and then renamed.
"""

import errno
import json
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def _hidden(path: Path, suffix: str) -> Path:
    """A unique hidden path next to `path`, with this ending."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{suffix}")


def _is_special(path: Path) -> bool:
    """Whether a path is a device, a pipe or a socket, which must not be replaced by a file."""
    return path.exists() and not path.is_file() and not path.is_dir()


@contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """A temporary path that is renamed to `path` when the block ends, and removed when it raises.

    Its suffix is that of `path`, from which some writers choose the format. An existing file is replaced. The result
    is readable as the umask says, whatever the writer makes of it (safetensors writes for the owner alone). A device
    or pipe, such as /dev/stdout, is written to as it is.

    Raises:
        OSError: where the file cannot be created or renamed.
    """
    path = Path(path)
    if _is_special(path):
        yield path
        return
    partial = _hidden(path, path.suffix)
    try:
        partial.touch()
        yield partial
        apply_umask([partial])
        partial.replace(path)
    except BaseException:  # KeyboardInterrupt too
        partial.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write text in UTF-8 atomically.

    Raises:
        OSError: where the file cannot be written.
    """
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: str | Path, content: Any, indent: int | None = 1) -> None:
    """Write JSON in UTF-8 atomically, with a newline at the end.

    Raises:
        OSError: where the file cannot be written.
        TypeError: for content that JSON does not have.
    """
    write_text(path, json.dumps(content, indent=indent, ensure_ascii=False) + "\n")


def apply_umask(files: Iterable[Path]) -> None:
    """Give files the permissions of any other new file in their folder; safetensors 0.8 writes for the owner alone."""
    for file in files:
        probe = _hidden(file, "")  # os.umask would change it for all threads
        probe.touch(exist_ok=False)
        mode = probe.stat().st_mode
        probe.unlink()
        file.chmod(mode)


def check_writable(path: str | Path) -> None:
    """Create and remove a temporary file next to `path`, before time is spent on its content.

    Permissions alone do not tell: root has them on a read-only file system.

    Raises:
        OSError: where no file can be written.
    """
    if _is_special(Path(path)):
        return
    probe = _hidden(Path(path), ".tmp")
    probe.touch()
    probe.unlink()


def _renamed(partial: Path, target: Path) -> bool:
    """Rename a folder, unless there is something at the target."""
    if target.exists():
        return False
    try:
        partial.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def _remove(partial: Path, missing: Iterable[Path]) -> None:
    """Remove an unfinished folder, and the parents that were made for it."""
    shutil.rmtree(partial, ignore_errors=True)
    for parent in missing:
        with suppress(OSError):
            parent.rmdir()


@contextmanager
def atomic_folder(
    target: Path, overwrite: bool = False, check: Callable[[Path], object] | None = None, keep: bool = True
) -> Iterator[Path]:
    """A temporary folder that is renamed to `target` when the block ends, and removed when it raises.

    An existing `target` is renamed first and removed last; a process that is killed between both renames leaves both
    folders, whole, under hidden names beside it. Parents that were missing are created, and removed again
    when the block raises. Of two processes that write the same target each has a folder of its own, and the later one
    replaces it, or raises.

    Args:
        check: is called with a folder that is about to be replaced, already renamed, so that no other process changes
            it; one that it refuses, by raising, gets its name back.
        keep: False to remove the temporary folder at the end: a trial, which leaves nothing.

    Raises:
        FileExistsError: when `target` exists at the end and may not be overwritten.
    """
    partial, replaced = _hidden(target, ".partial"), _hidden(target, ".old")
    missing = [parent for parent in target.parents if not parent.exists()]
    try:
        partial.mkdir(parents=True)
        yield partial
        if not keep:
            _remove(partial, missing)
            return
        try:
            while not _renamed(partial, target):
                if not overwrite:
                    raise FileExistsError(errno.EEXIST, "it was created meanwhile", str(target))
                shutil.rmtree(replaced, ignore_errors=True)  # of another process, which was faster
                with suppress(FileNotFoundError):  # another process has just renamed it
                    target.rename(replaced)
                if check is not None and replaced.exists():
                    check(replaced)
        except BaseException:
            if replaced.exists() and not target.exists():
                replaced.rename(target)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:  # KeyboardInterrupt too
        _remove(partial, missing)
        raise
    finally:
        if replaced.exists():  # it cannot be removed; or has lost its name to another process, and was not to be
            warnings.warn(f"what lay at {target} before lies in {replaced}", stacklevel=3)


def describe_write_error(error: Exception, target: Path) -> str:
    """An error message for what could not be written: target, cause and remedy.

    Args:
        error: of the file system, or safetensors' wording of one.
    """
    text = " ".join(str(error).split())
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in text
    remedy = "free some space or choose another disk" if full else "check that it is writable"
    if getattr(error, "errno", None) == errno.EEXIST:
        remedy = "choose another folder, or overwrite that one"
    return f"{target}: could not be written ({text}); nothing was left behind. To go on, {remedy}"
