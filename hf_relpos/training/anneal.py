"""From a table of absolute positions beside relative terms to relative terms alone, during fine-tuning.

`convert(…, method="keep")` gives a model that computes what its source computes and still needs the table. While it
is trained on, `AnnealAbsolutePositions` fades the table P out to its mean row m: what the input gets is m + f (P − m),
and f goes from 1 to 0. What is left at the end is one vector for all tokens, which `drop_absolute_positions` folds
into the token types.
"""

import math
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback

from ..model.schemes import scheme_parts


SCHEDULES = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}


class AnnealAbsolutePositions(TrainerCallback):
    """Sets `model.config.absolute_position_fade` before every step of a `Trainer`.

        Trainer(model, …, callbacks=[AnnealAbsolutePositions(0.5)])

    The fade depends on the number of optimizer steps done and on nothing else, so that a resumed run and every process
    of a distributed one have the same. A checkpoint's config.json holds that of its step; after
    `load_best_model_at_end` the model has that of the best step.
    """

    def __init__(self, steps: int | float = 0.5, schedule: str = "linear"):
        """
        Args:
            steps: when the table is gone: a number of optimizer steps (integer), or a share of the run (float in
                (0, 1]), as in `TrainingArguments.warmup_steps`. The rest of the run trains without it.
            schedule: `"linear"`, or `"cosine"`, which begins and ends slowly.

        Raises:
            ValueError: for a number of steps or a schedule that is not one of these.
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
        """f after `step` optimizer steps of a run of `max_steps`; exactly 1.0 at its beginning and 0.0 at its end."""
        steps = self.steps if isinstance(self.steps, int) else math.ceil(self.steps * max_steps)
        return SCHEDULES[self.schedule](step / steps) if step < steps else 0.0

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """
        Raises:
            ValueError: for a model without a table to fade out.
        """
        _check_table(model)
        self._set(model, state.global_step, state)

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self._set(model, state.global_step, state)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        # what is evaluated and saved now has done one step more
        self._set(model, state.global_step, state)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        self._set(model, state.best_global_step if best else state.global_step, state)

    def _set(self, model: PreTrainedModel, step: int, state: Any) -> None:
        model.config.absolute_position_fade = self.fade(step, state.max_steps)


@torch.no_grad()
def drop_absolute_positions(model: PreTrainedModel) -> PreTrainedModel:
    """Take a faded table of absolute positions out of a model; its outputs stay, and its limit on length goes.

    The mean row of the table, all that is left of it at `absolute_position_fade` = 0, is added to the token types, of
    which every token has one.

    Args:
        model: any head of RelPosBert, changed in place; save it afterwards, and make new optimizers.

    Returns:
        The model.

    Raises:
        ValueError: for a model without such a table, for one whose scheme is absolute itself, and while the table is
            not wholly faded.
    """
    config = model.config
    _check_table(model)
    if config.absolute_position_fade != 0:
        raise ValueError(
            f"absolute_position_fade = {config.absolute_position_fade}: the table still has a say; train on with "
            "AnnealAbsolutePositions until it is 0, or set it to 0 to lose what it says"
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
            f"{type(model).__name__} has no table of absolute positions beside its scheme "
            "(absolute_position_embeddings = False), so there is nothing to fade or drop; one converted with "
            "method='keep' has"
        )
