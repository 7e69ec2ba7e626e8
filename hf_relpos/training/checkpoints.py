"""Checkpoints of a Trainer from which a killed run can resume."""

import json
from pathlib import Path


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
