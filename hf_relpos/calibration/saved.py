"""What an interrupted calibration leaves behind, so that the same command goes on where it was."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..files import describe_write_error, write_json, write_tensors
from .errors import CalibrationError


class Saved:
    """Layers that are fitted, in a folder, so that an interrupted calibration can go on.

    Whatever another calibration left there is removed.
    """

    def __init__(self, folder: Path, fingerprint: str, writes: bool = True):
        """
        Args:
            folder: made if it is not there.
            fingerprint: of all that the fits depend on.
            writes: whether this process does; of several processes one.

        Raises:
            CalibrationError: where the folder cannot be made.
        """
        self.folder, self.writes = folder, writes
        if not writes:
            return
        mark = folder / "fingerprint"
        if not mark.is_file() or mark.read_text(encoding="utf-8") != fingerprint:
            shutil.rmtree(folder, ignore_errors=True)
            try:
                folder.mkdir(parents=True)
                mark.write_text(fingerprint, encoding="utf-8")
            except OSError as error:
                shutil.rmtree(folder, ignore_errors=True)
                raise CalibrationError(describe_write_error(error, folder)) from error

    def load(self, layer: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        """Tensors and report of a layer, or None."""
        path = self.folder / f"layer-{layer}"
        if not path.with_suffix(".json").is_file():  # written last
            return None
        report = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        return load_file(path.with_suffix(".safetensors")), report

    def save(self, layer: int, tensors: Mapping[str, torch.Tensor], report: Mapping[str, Any]) -> None:
        """Keep a layer.

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
        """Remove the folder."""
        if self.writes:
            shutil.rmtree(self.folder, ignore_errors=True)
