"""Layers that an interrupted calibration has fitted, for the same command to resume from."""

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
    """Lock a folder: within this context no other process resumes from it or writes into it.

    Args:
        folder: created, and removed again if it stays empty; None for none.

    Raises:
        CalibrationError: where another process is at it, and where the folder cannot be created.
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
            folder.rmdir()  # unless there are layers to resume from


class Saved:
    """Fitted layers in a folder, from which an interrupted calibration resumes.

    Layers of another calibration are removed. Other files in the folder stay.
    """

    def __init__(self, folder: Path, fingerprint: str, writes: bool = True):
        """
        Args:
            folder: created if it does not exist.
            fingerprint: of everything that the fits depend on.
            writes: whether this process writes; one of several does.

        Raises:
            CalibrationError: where the folder cannot be created.
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
        """Tensors and report of a layer, or None: also where they are broken, so that the layer is fitted anew."""
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
            CalibrationError: where it cannot be written.
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
