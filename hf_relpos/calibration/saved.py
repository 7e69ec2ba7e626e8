"""What an interrupted calibration leaves behind, so that the same command goes on where it was."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..conversion.folder import describe
from ..conversion.source import ConversionError


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
            ConversionError: where the folder cannot be made.
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
                raise ConversionError(describe(error, folder)) from error

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
            ConversionError: where it cannot be written.
        """
        if not self.writes:
            return
        path = self.folder / f"layer-{layer}"
        for suffix, write in (
            (".safetensors", lambda file: save_file({name: t.contiguous() for name, t in tensors.items()}, file)),
            (".json", lambda file: file.write_text(json.dumps(report), encoding="utf-8")),
        ):
            aside = path.with_suffix(f"{suffix}.{os.getpid()}")
            try:
                write(aside)
                aside.replace(path.with_suffix(suffix))
            except (OSError, SafetensorError) as error:
                aside.unlink(missing_ok=True)
                left = "the layers before it are kept there, and the same command goes on with them"
                raise ConversionError(describe(error, path, left)) from error

    def clear(self) -> None:
        """Remove the folder."""
        if self.writes:
            shutil.rmtree(self.folder, ignore_errors=True)
