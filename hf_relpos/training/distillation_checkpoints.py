"""The folder with the checkpoints and settings of a distillation."""

import json
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..files import write_json
from ..models.checkpoint_files import read_json
from .checkpoints import checkpoints, is_complete


SETTINGS_FILE = "distil.json"


@contextmanager
def checkpoint_folder(output_dir: str | Path | None) -> Iterator[Path]:
    """Context with the folder of checkpoints; for None, a temporary folder."""
    if output_dir is not None:
        yield Path(output_dir)
        return
    with tempfile.TemporaryDirectory(prefix="hf-relpos-distil-") as folder:
        yield Path(folder)


def model_fingerprint(model: PreTrainedModel) -> str:
    """Class of a model and a checksum of its weights; a student's is computed before the first step."""
    checksum = 0
    for name, tensor in sorted(model.state_dict().items()):
        checksum = zlib.crc32(name.encode(), checksum)
        checksum = zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, checksum)
    return f"{type(model).__name__}, CRC {checksum:08x}"


def prepare_folder(folder: Path, settings: Mapping[str, Any], resume: bool) -> None:
    """Check the folder, remove checkpoints that are incomplete, and write the settings.

    Raises:
        ValueError: for a path that is not a folder, and for a folder with an earlier distillation if `resume` is not
            set or its settings differ.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir = '{folder}' is a file; choose a folder")
    saved = folder / SETTINGS_FILE
    if saved.is_file() or checkpoints(folder):
        if not resume:
            raise ValueError(
                f"output_dir = '{folder}' holds a distillation already; go on with it by resume=True, or choose "
                "another folder"
            )
        if not saved.is_file():
            raise ValueError(
                f"output_dir = '{folder}' holds checkpoints of another training, and no {SETTINGS_FILE}; choose "
                "another folder"
            )
        before = read_json(saved)
        now = json.loads(json.dumps(settings))
        for name, value in before.items():
            if value != now.get(name):
                raise ValueError(
                    f"{name} = {now.get(name)!r}: the distillation in '{folder}' has {value!r}; resume with that, or "
                    "choose another folder"
                )
    for path in checkpoints(folder).values():
        if not is_complete(path):
            shutil.rmtree(path)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(saved, settings)
