"""Distillation: train a converted student to reproduce the outputs of its teacher with absolute positions.

It needs no labels: the targets are the frozen teacher's hidden states on windows of text, and its attention weights or
predictions. The training loop is Transformers' `Trainer`, with its mixed precision, distribution and checkpoints.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ..attention.dispatch import AUTO
from ..console import ProgressCallback, progress_bar
from ..evaluation.inspection import has_mlm_head, model_max_length
from ..models.modeling_relpos_bert import RelPosBertPreTrainedModel
from .checkpoints import TRAINER_STATE, last_checkpoint
from .distillation_checkpoints import checkpoint_folder, model_fingerprint, prepare_folder
from .distillation_data import WindowBatches, collate
from .distillation_losses import DEFAULT_LOSSES, TargetFunction, model_targets
from .distillation_settings import DistillationReport, DistillationSettings
from .distillation_trainer import TABLES, DistillationTrainer


# Modules that no part of the loss reaches. They are frozen, since DDP waits for gradients of all trained parameters.
UNREACHED = ("pooler", "seq_relationship")


def distil(
    student: RelPosBertPreTrainedModel,
    teacher: PreTrainedModel | TargetFunction,
    windows: Iterable[Any],
    settings: DistillationSettings | None = None,
    *,
    output_dir: str | Path | None = None,
    resume: bool = False,
    progress: bool | ProgressCallback = False,
    callbacks: Sequence[TrainerCallback] = (),
) -> DistillationReport:
    """Train a student with relative positions to reproduce the outputs of a teacher with absolute positions.

    The student is trained in place; it stays on its device and is left in evaluation mode. With several processes
    (`accelerate launch`) each process has its own batches of `batch_tokens`.

    Args:
        student: a model of this package.
        teacher: a model with BERT's outputs and the student's sizes, which is not changed; or a function from a batch,
            `input_ids` and `attention_mask` (B, L) on the training device, to Targets: see `row_targets`. A function
            with an attribute `reads_token_types = True` also gets `token_type_ids`, if some are not 0.
        windows: token ids of different lengths, special tokens included: a list or dataset of lists, such as
            `hf_relpos.data.cut_windows(…).ids`, or of mappings with `input_ids` and, for segment pairs,
            `token_type_ids`; or an iterable that can be iterated over again, such as a streamed Hub dataset, tokenized
            and shuffled. Only the lengths of these windows improve: 512 tokens need windows of 512. For windows longer
            than the teacher's maximum length the targets come from overlapping windows, and attention is not compared:
            see `model_targets`.
        settings: None for the defaults.
        output_dir: folder for checkpoints, which is kept; None for no checkpoints.
        resume: continue from the last checkpoint in `output_dir`, if there is one.
        progress: show a progress bar; without a terminal, a line every half minute. Or a function to call as
            `progress(description, completed, total)`.
        callbacks: callbacks of the Trainer.

    Raises:
        ValueError: for models, windows and settings that do not fit each other, before anything is trained or written;
            for windows of an iterable, when they are read.
    """
    settings = settings or DistillationSettings()
    model = _as_model(teacher)
    losses = _default_losses(student, model, settings.dropout) if settings.losses is None else dict(settings.losses)
    _check_models(student, model, losses)
    if settings.tables_only and not any(TABLES in name for name, _ in student.named_parameters()):
        raise ValueError(
            f"train = 'tables': the scheme {student.config.position_scheme_name!r} of the student has no parameters; "
            "use train = 'all'"
        )
    limit = None if model is None else model_max_length(model)
    batches = WindowBatches(
        windows,
        settings.batch_tokens,
        student.config.vocab_size,
        _max_length(student, limit, losses),
        settings.seed,
        _token_types(student, teacher),
    )
    run_settings = {
        **asdict(settings),
        "losses": losses,
        "windows": batches.fingerprint(),
        "student": model_fingerprint(student),
        "teacher": None if model is None else model_fingerprint(model),
        "trainer_arguments": dict(settings.trainer_arguments),
    }
    started = time.perf_counter()
    trained = student if "logits" in losses else student.base_model  # skips a head that is not compared
    with (
        checkpoint_folder(output_dir) as folder,
        _prepared(student, settings),
        _evaluating(model),
    ):
        arguments = _training_arguments(settings, folder, output_dir is not None)
        checkpoint = None
        if output_dir is not None:
            with arguments.main_process_first(local=False):
                if arguments.process_index == 0:
                    prepare_folder(folder, run_settings, resume)
                checkpoint = last_checkpoint(folder)
        targets: TargetFunction = teacher
        if model is not None:
            model.to(arguments.device)
            targets = partial(model_targets, model if "logits" in losses else model.base_model, limit, names=losses)
        trainer = DistillationTrainer(
            model=trained,
            args=arguments,
            train_dataset=batches,
            data_collator=partial(collate, pad_token_id=student.config.pad_token_id or 0),
            callbacks=list(callbacks),
            targets=targets,
            losses=losses,
            temperature=settings.temperature,
            table_learning_rate=settings.table_learning_rate,
        )
        trainer.remove_callback(PrinterCallback)
        with (
            nullcontext(progress)
            if callable(progress)
            else progress_bar(Console(stderr=True), progress and arguments.process_index == 0)
        ) as update:
            trainer.add_callback(_Progress(update))
            state = None if checkpoint is None else TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE))
            if state is None or state.global_step < arguments.max_steps:
                trainer.train(resume_from_checkpoint=checkpoint)
            else:  # `train` would do one step more
                trainer._load_from_checkpoint(checkpoint)
                trainer.state = state
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    parts = {**{name: f"loss_{name}" for name in losses}, "total": "loss"}
    return DistillationReport(
        steps=trainer.state.global_step,
        tokens=int(trainer.state.num_input_tokens_seen),
        seconds=time.perf_counter() - started,
        processes=arguments.world_size,
        losses={
            name: {"start": values[0], "end": values[-1]}
            for name, key in parts.items()
            if (values := [entry[key] for entry in history if key in entry])
        },
        settings=run_settings,
    )


def _as_model(teacher: PreTrainedModel | TargetFunction) -> PreTrainedModel | None:
    """The teacher, if it is a model."""
    return teacher if isinstance(teacher, nn.Module) else None


def _max_length(student: PreTrainedModel, limit: int | None, losses: Mapping[str, float]) -> int | None:
    """Length of the longest window: the student's limit, and the teacher's if only the attention is compared."""
    limits = [model_max_length(student), limit if set(losses) == {"attention"} else None]
    return min((each for each in limits if each is not None), default=None)


def _token_types(student: PreTrainedModel, teacher: PreTrainedModel | TargetFunction) -> int:
    """Number of token types that both read; 0 for a function without `reads_token_types`."""
    own: int = student.config.type_vocab_size
    if isinstance(teacher, nn.Module):
        return min(own, getattr(teacher.config, "type_vocab_size", 0))
    return own if getattr(teacher, "reads_token_types", False) else 0


class _Progress(TrainerCallback):
    """Reports the number of completed steps."""

    def __init__(self, update: ProgressCallback) -> None:
        self.update = update

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.update("distilling", state.global_step, state.max_steps)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.update("distilling", state.global_step, state.max_steps)


def _training_arguments(settings: DistillationSettings, folder: Path, saves: bool) -> TrainingArguments:
    """`TrainingArguments` for the settings; `trainer_arguments` override some of them."""
    logging_steps = max(1, settings.steps // 20)
    defaults = {
        "save_strategy": "steps" if saves else "no",
        "save_steps": 2 * logging_steps,
        "save_total_limit": 1,
        "warmup_steps": math.ceil(settings.steps / 10),
        "report_to": "none",
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.steps,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.schedule,
        seed=settings.seed,
        disable_tqdm=True,  # see _Progress
        logging_steps=logging_steps,
        per_device_train_batch_size=1,  # an item of the data set is a batch
        accelerator_config={"dispatch_batches": False, "split_batches": False},
        include_num_input_tokens_seen="non_padding",
        remove_unused_columns=False,
        **{**defaults, **settings.trainer_arguments},
    )


def _default_losses(student: PreTrainedModel, teacher: PreTrainedModel | None, dropout: bool) -> dict[str, float]:
    """The parts of `DEFAULT_LOSSES` that these models support."""
    comparable = teacher is not None and not dropout and _returns_attention(student) and _returns_attention(teacher)
    return {name: weight for name, weight in DEFAULT_LOSSES.items() if comparable or name != "attention"}


def _returns_attention(model: PreTrainedModel) -> bool:
    """Whether a model returns its attention weights."""
    return model.config._attn_implementation in ("eager", AUTO)


@contextmanager
def _prepared(student: PreTrainedModel, settings: DistillationSettings) -> Iterator[None]:
    """Context in which only the trained parameters require gradients, and dropout follows the settings."""
    device = student.device
    probabilities = {module: module.p for module in student.modules() if isinstance(module, nn.Dropout)}
    flags = {parameter: parameter.requires_grad for parameter in student.parameters()}
    try:
        if not settings.dropout:
            for module in probabilities:
                module.p = 0.0
        for name, parameter in student.named_parameters():
            unreached = any(part in name.split(".") for part in UNREACHED)
            if unreached or (settings.tables_only and TABLES not in name):
                parameter.requires_grad = False
        yield
    finally:
        for module, probability in probabilities.items():
            module.p = probability
        for parameter, flag in flags.items():
            parameter.requires_grad = flag
        student.eval().to(device)


@contextmanager
def _evaluating(teacher: PreTrainedModel | None) -> Iterator[None]:
    """Context in which the teacher is in evaluation mode; its mode and device are restored afterwards."""
    if teacher is None:
        yield
        return
    device, training = teacher.device, teacher.training
    teacher.eval()
    try:
        yield
    finally:
        teacher.train(training).to(device)


def _check_models(student: PreTrainedModel, teacher: PreTrainedModel | None, losses: Mapping[str, float]) -> None:
    """
    Raises:
        ValueError: for models that cannot be compared, or lack outputs that a part of the loss compares.
    """
    if student is teacher:
        raise ValueError("student and teacher are one model; load the teacher a second time")
    models = {"student": student}
    if teacher is not None:
        models["teacher"] = teacher
        sizes = ["vocab_size", "hidden_size", "num_hidden_layers"]
        if "attention" in losses:
            sizes.append("num_attention_heads")
        for name in sizes:
            student_size, teacher_size = getattr(student.config, name), getattr(teacher.config, name)
            if student_size != teacher_size:
                raise ValueError(
                    f"{name}: the student's {student_size} is not the teacher's {teacher_size}; distil "
                    "a student that was converted from this teacher"
                )
    for name, model in models.items():
        if "logits" in losses and not has_mlm_head(model):
            raise ValueError(
                f"losses['logits'] = {losses['logits']!r}: the {name}, a {type(model).__name__}, has no masked "
                "language model head; load it as …ForMaskedLM, or leave 'logits' out"
            )
        if "attention" in losses and not _returns_attention(model):
            raise ValueError(
                f"losses['attention'] = {losses['attention']!r}: the {name} has attn_implementation = "
                f"{model.config._attn_implementation!r}, which does not return the attention weights; call "
                f"{name}.set_attn_implementation('eager'), or leave 'attention' out"
            )
