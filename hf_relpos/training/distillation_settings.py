"""Settings of a distillation, and its report."""

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import TrainingArguments

from ..data.seed import check_seed
from ..schemes.scheme import is_count, is_number
from ..settings import check_settings, setting, setting_of
from .distillation_losses import LOSSES


TRAIN = ("all", "tables")
SCHEDULES = ("linear", "cosine", "constant_with_warmup")

# `TrainingArguments` that `distil` sets itself, and the setting or argument of `distil` to use instead, if any.
OWN_ARGUMENTS = {
    "output_dir": "output_dir",
    "max_steps": "steps",
    "learning_rate": "learning_rate",
    "logging_steps": None,
    "logging_strategy": None,
    "lr_scheduler_type": "schedule",
    "seed": "seed",
    "disable_tqdm": "progress",
    "per_device_train_batch_size": "batch_tokens",
    "accelerator_config": None,
    "auto_find_batch_size": None,
    "ignore_data_skip": None,
    "include_num_input_tokens_seen": None,
    "remove_unused_columns": None,
}


@dataclass(frozen=True)
class DistillationSettings:
    """Settings of `distil`.

    Attributes:
        steps: optimizer steps.
        batch_tokens: tokens of a batch, padding included; a longer window is a batch by itself.
        learning_rate: peak learning rate of all parameters except the scheme's.
        table_learning_rate: peak learning rate of the scheme's parameters.
        schedule: one of `SCHEDULES`; each warms up over the first tenth of the steps.
        train: `all`, or `tables` for the scheme's parameters only.
        losses: weights by key of `LOSSES`; None for `DEFAULT_LOSSES`, without `attention` unless both models have
            attn_implementation='eager'. Load the teacher with that: it improves the result considerably.
        temperature: temperature of the logits.
        dropout: keep the student's dropout; off by default, since the targets are deterministic.
        seed: seed of batches and dropout.
        trainer_arguments: other `TrainingArguments`: `bf16`, `gradient_accumulation_steps`, `save_steps`, …

    Raises:
        ValueError: for an invalid value; names the setting and its valid values.
    """

    steps: int = setting(200, "a whole number from 1 on", is_count)
    batch_tokens: int = setting(4096, "a whole number from 1 on", is_count)
    learning_rate: float = setting(1e-4, "a positive number", is_number)
    table_learning_rate: float = setting(3e-2, "a positive number", is_number)
    schedule: str = setting_of(SCHEDULES)
    train: str = setting_of(TRAIN)
    losses: Mapping[str, float] | None = None
    temperature: float = setting(2.0, "a positive number", is_number)
    dropout: bool = False
    seed: int = 0
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tables_only(self) -> bool:
        """Whether only the scheme's parameters are trained."""
        return self.train == "tables"

    def __post_init__(self) -> None:
        check_settings(self)
        check_seed(self.seed)
        if self.losses is not None:
            _check_losses(self.losses)
            if self.dropout and "attention" in self.losses:
                raise ValueError(
                    "dropout = True with losses['attention']: weights after dropout are no distribution; drop one of "
                    "both"
                )
        _check_trainer_arguments(self.trainer_arguments)


def _check_losses(losses: Mapping[str, float]) -> None:
    """
    Raises:
        ValueError: for an unknown part, a weight that is not positive, and an empty mapping.
    """
    for name, weight in losses.items():
        if name not in LOSSES:
            raise ValueError(f"losses[{name!r}] is unknown; known parts: {', '.join(LOSSES)}")
        if not is_number(weight):
            raise ValueError(f"losses[{name!r}] = {weight!r}: give a positive weight, or leave the part out")
    if not losses:
        raise ValueError(f"losses is empty: name at least one of {', '.join(LOSSES)}")


def _check_trainer_arguments(arguments: Mapping[str, Any]) -> None:
    """
    Raises:
        ValueError: for fields that `distil` sets itself, and fields that `TrainingArguments` lacks.
    """
    known = {each.name for each in dataclasses.fields(TrainingArguments)}
    for name, value in arguments.items():
        if name in OWN_ARGUMENTS:
            remedy = f"give {OWN_ARGUMENTS[name]} to distil" if OWN_ARGUMENTS[name] else "distil sets it; leave it out"
            raise ValueError(f"trainer_arguments[{name!r}] = {value!r}: {remedy}")
        if name not in known:
            raise ValueError(f"trainer_arguments[{name!r}] = {value!r}: TrainingArguments has no such field")


@dataclass(frozen=True)
class DistillationReport:
    """The result of a distillation.

    Attributes:
        steps: optimizer steps, including those before a resumption.
        tokens: tokens that the student read in these steps, without padding, over all processes.
        seconds: wall time of this call.
        processes: number of processes.
        losses: for each part of the loss, and `total`, its mean at the `start` and the `end`: over the first and the
            last twentieth of the steps that had it. Parts are unweighted, `total` is weighted.
        settings: the settings, and a fingerprint of the windows.
    """

    steps: int
    tokens: int
    seconds: float
    processes: int
    losses: dict[str, dict[str, float]]
    settings: dict[str, Any]

    def summary(self) -> str:
        """The result in one line."""
        parts = ", ".join(f"{name} {ends['start']:.4f} to {ends['end']:.4f}" for name, ends in self.losses.items())
        return f"{self.steps:,} steps, {self.tokens:,} tokens, {self.seconds:.0f} s; loss: {parts}"

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self)
