"""Layers that an interrupted calibration has fitted, for the same command to resume from."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..files import describe_write_error, write_json, write_tensors, write_text
from .errors import CalibrationError


class Saved:
    """Fitted layers in a folder, from which an interrupted calibration resumes.

    Those of another calibration are removed; what else lies in the folder stays.
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
        if not file.is_file() or file.read_text(encoding="utf-8") != fingerprint:
            self.clear()
            try:
                folder.mkdir(parents=True, exist_ok=True)
                write_text(file, fingerprint)
            except OSError as error:
                self.clear()
                raise CalibrationError(describe_write_error(error, folder)) from error

    def load(self, layer: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        """Tensors and report of a layer, or None."""
        path = self.folder / f"layer-{layer}"
        if not path.with_suffix(".json").is_file():  # written last
            return None
        report = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        return load_file(path.with_suffix(".safetensors")), report

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
