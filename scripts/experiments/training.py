"""The Trainer in experiments."""

from typing import Any

from transformers import Trainer


# Fields of TrainingArguments for a run of which only the final figures are kept.
QUIET: dict[str, Any] = {
    "save_strategy": "no",
    "logging_strategy": "epoch",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "remove_unused_columns": False,
}


def logged_losses(trainer: Trainer) -> list[float]:
    """Training losses in the order of logging."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
