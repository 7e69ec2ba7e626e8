"""Saved layers of an interrupted calibration, from which the same command resumes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from ...files import describe_write_error, write_json, write_tensors, write_text
from ...models.checkpoint_files import open_tensors, read_json
from .settings import CalibrationError


LOCK = "lock"


@contextmanager
def one_process(folder: Path | None) -> Iterator[None]:
    """Context with a lock on a folder, so that no other process reads from it or writes into it.

    Args:
        folder: created, and removed again if it is empty; None for none.

    Raises:
        CalibrationError: if another process uses the folder, or it cannot be created.
    """
    if folder is None:
        yield
        return
    lock = FileLock(folder / LOCK, blocking=False, is_singleton=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise CalibrationError(
            f"{folder}: another process is calibrating into the same folder; wait for it, or choose another folder"
        ) from error
    except OSError as error:
        raise CalibrationError(describe_write_error(error, folder)) from error
    try:
        yield
    finally:
        lock.release()
        with suppress(OSError):
            (folder / LOCK).unlink(missing_ok=True)
            folder.rmdir()  # fails if there are layers to resume from


class Saved:
    """Fitted layers in a folder, from which an interrupted calibration resumes.

    Layers of another calibration are removed. Other files in the folder are kept.
    """

    def __init__(self, folder: Path, fingerprint: str, writes: bool = True):
        """
        Args:
            folder: created if it does not exist.
            fingerprint: digest of all inputs of the fits.
            writes: whether this process writes; only one of several does.

        Raises:
            CalibrationError: if the folder cannot be created.
        """
        self.folder, self.writes = folder, writes
        if not writes:
            return
        file = folder / "fingerprint"
        if not file.is_file() or file.read_bytes() != fingerprint.encode():
            self.clear()
            try:
                folder.mkdir(parents=True, exist_ok=True)
                write_text(file, fingerprint)
            except OSError as error:
                self.clear()
                raise CalibrationError(describe_write_error(error, folder)) from error

    def load(self, layer: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        """Tensors and report of a layer; None if they are missing or broken, so that the layer is fitted again."""
        path = self.folder / f"layer-{layer}"
        if not path.with_suffix(".json").is_file():  # written last
            return None
        try:
            report = read_json(path.with_suffix(".json"))
            with open_tensors(path.with_suffix(".safetensors")) as file:
                return {name: file.get_tensor(name) for name in file.keys()}, report
        except ValueError:
            return None

    def save(self, layer: int, tensors: Mapping[str, torch.Tensor], report: Mapping[str, Any]) -> None:
        """Save a layer.

        Raises:
            CalibrationError: if it cannot be written.
        """
        if not self.writes:
            return
        path = self.folder / f"layer-{layer}"
        try:
            write_tensors(path.with_suffix(".safetensors"), tensors)
            write_json(path.with_suffix(".json"), dict(report))
        except (OSError, SafetensorError) as error:
            left = "the layers before it are kept there, and the same command goes on with them"
            raise CalibrationError(describe_write_error(error, path, left)) from error

    def clear(self) -> None:
        """Remove the files, and the folder if nothing else is in it."""
        if not self.writes:
            return
        for pattern in ("fingerprint", "layer-*", ".fingerprint.*", ".layer-*"):
            for path in self.folder.glob(pattern):
                with suppress(OSError):
                    path.unlink()
        with suppress(OSError):
            self.folder.rmdir()
