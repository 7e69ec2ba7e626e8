"""Checkpoints of a Trainer from which a killed run can resume, and the folder of a distillation."""

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


# The last file that the Trainer writes into a checkpoint. It is not written atomically, so it may be invalid JSON.
TRAINER_STATE = "trainer_state.json"
CHECKPOINT = "checkpoint-"


def checkpoints(folder: str | Path) -> dict[int, Path]:
    """All checkpoints in the output folder of a Trainer, by step, complete or not."""
    paths = (path for path in Path(folder).glob(f"{CHECKPOINT}*") if path.is_dir())
    return {int(step): path for path in paths if (step := path.name.removeprefix(CHECKPOINT)).isdecimal()}


def is_complete(checkpoint: str | Path) -> bool:
    """Whether a checkpoint was written completely, before the process was killed."""
    try:
        return isinstance(json.loads((Path(checkpoint) / TRAINER_STATE).read_bytes()), dict)
    except (FileNotFoundError, ValueError):
        return False


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The last complete checkpoint of a Trainer, or None.

    `resume_from_checkpoint=True` takes the last of all checkpoints, and fails if the run was killed while writing it.
    Use instead:

        trainer.train(resume_from_checkpoint=last_checkpoint(trainer.args.output_dir))

    Args:
        output_dir: as in `TrainingArguments`; it may not exist yet.
    """
    complete = {step: path for step, path in checkpoints(output_dir).items() if is_complete(path)}
    return str(complete[max(complete)]) if complete else None


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
