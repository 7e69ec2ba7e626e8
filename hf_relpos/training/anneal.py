"""Anneal the absolute position embeddings of a model with relative terms during fine-tuning.

`convert(…, method="keep")` gives a model with the outputs of its source, which still needs the table. During
fine-tuning `AnnealAbsolutePositions` reduces the table P to its mean row m: m + f (P − m) is added to the input, and f
goes from 1 to 0. `drop_absolute_positions` then adds the mean row to the token type embeddings and removes the table.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback

from ..schemes.registry import scheme_parts


SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}


class AnnealAbsolutePositions(TrainerCallback):
    """Sets `model.config.absolute_position_fade` before every step of a `Trainer`.

        Trainer(model, …, callbacks=[AnnealAbsolutePositions(0.5)])

    The value depends only on the number of optimizer steps done, so it is the same in a resumed run and in every
    process of a distributed run. A checkpoint's config.json holds the value of its step; after
    `load_best_model_at_end` the model has the value of the best step.
    """

    def __init__(self, steps: int | float = 0.5, schedule: str = "linear") -> None:
        """
        Args:
            steps: steps until f is 0: a number of optimizer steps (integer), or a share of the run (float in (0, 1]),
                as in `TrainingArguments.warmup_steps`. The rest of the run trains without the table.
            schedule: `"linear"`, or `"cosine"`, which starts and ends slowly.

        Raises:
            ValueError: for invalid steps or an unknown schedule.
        """
        whole = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1
        if not whole and not (isinstance(steps, float) and 0 < steps <= 1):
            raise ValueError(
                f"steps = {steps!r}: give an integer from 1 on, the number of steps, or a float above 0 and up to "
                "1.0, the share of the run"
            )
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule = {schedule!r} is unknown; known: {', '.join(map(repr, SCHEDULES))}")
        self.steps = steps
        self.schedule = schedule

    def fade(self, step: int, max_steps: int) -> float:
        """f after `step` optimizer steps of a run of `max_steps`; exactly 1.0 at first and 0.0 at the end."""
        steps = self.steps if isinstance(self.steps, int) else math.ceil(self.steps * max_steps)
        return SCHEDULES[self.schedule](step / steps) if step < steps else 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """
        Raises:
            ValueError: for a model without a table to anneal.
        """
        _check_table(model)
        self._set(model, state.global_step, state)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._set(model, state.global_step, state)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        # evaluation and checkpoints use the value of the next step
        self._set(model, state.global_step, state)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        self._set(model, state.best_global_step if best else state.global_step, state)

    def _set(self, model: PreTrainedModel, step: int, state: Any) -> None:
        model.config.absolute_position_fade = self.fade(step, state.max_steps)


@torch.no_grad()
def drop_absolute_positions(model: PreTrainedModel) -> PreTrainedModel:
    """Remove annealed absolute position embeddings, and their limit on length, from a model; its outputs are the same.

    At `absolute_position_fade` = 0 only the mean row of the table has an effect. It is added to the token type
    embeddings.

    Args:
        model: a RelPosBert with any head, changed in place. Save it afterwards, and make new optimizers.

    Returns:
        The model.

    Raises:
        ValueError: for a model without such a table, an absolute scheme, and `absolute_position_fade` above 0.
    """
    config = model.config
    _check_table(model)
    if config.absolute_position_fade != 0:
        raise ValueError(
            f"absolute_position_fade = {config.absolute_position_fade}: the table is still used; train on with "
            "AnnealAbsolutePositions until it is 0, or set it to 0 to lose what it adds"
        )
    embeddings = model.base_model.embeddings
    embeddings.add_everywhere(embeddings.position_embeddings.mean())
    embeddings.position_embeddings = None
    config.absolute_position_fade = 1.0
    config.absolute_position_embeddings = False
    return model


def _check_table(model: PreTrainedModel) -> None:
    config = model.config
    if any(scheme.learned_input_table for scheme, _ in scheme_parts(config)):
        raise ValueError(
            f"position_embedding_type = {config.position_embedding_type!r} is absolute itself, and nothing would take "
            "the place of its table; convert it with method='keep' and a relative scheme first"
        )
    if not config.absolute_position_embeddings:
        raise ValueError(
            f"{type(model).__name__} has no table of absolute positions besides its scheme "
            "(absolute_position_embeddings = False), so there is nothing to fade or drop; one converted with "
            "method='keep' has"
        )
