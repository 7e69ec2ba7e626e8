"""Distillation: train a converted student to reproduce the outputs of its teacher with absolute positions.

It needs no labels: the targets are the frozen teacher's hidden states on windows of text, and its attention weights or
predictions. The training loop is Transformers' `Trainer`, with its mixed precision, distribution and checkpoints.
"""

import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial, reduce
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ..attention.cpu_gemm import fast_linears
from ..attention.dispatch import AUTO
from ..console import ProgressCallback, progress_bar
from ..data.seed import check_seed
from ..evaluation.inspection import has_mlm_head, model_max_length
from ..models.modeling_relpos_bert import RelPosBertPreTrainedModel
from ..schemes.scheme import is_count, is_number
from ..settings import check_settings, setting
from .data import WindowBatches, collate
from .losses import DEFAULT_LOSSES, LOSSES, Targets, compute_outputs, loss_parts, model_targets


TEMPERATURE = 2.0  # of the logits

# `TrainingArguments` that `distil` sets itself, and the setting or argument of `distil` to use instead, if any.
OWN_ARGUMENTS = {
    "output_dir": None,
    "save_strategy": None,
    "max_steps": "steps",
    "learning_rate": "learning_rate",
    "logging_steps": None,
    "logging_strategy": None,
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
        losses: weights by key of `LOSSES`; None for `DEFAULT_LOSSES`, without `attention` unless both models have
            attn_implementation='eager'. Load the teacher with that: it improves the result considerably.
        seed: seed of the batches.
        trainer_arguments: other `TrainingArguments`: `bf16`, `gradient_accumulation_steps`, `lr_scheduler_type`, …

    Raises:
        ValueError: for an invalid value; names the setting and its valid values.
    """

    steps: int = setting(200, "a positive integer", is_count)
    batch_tokens: int = setting(4096, "a positive integer", is_count)
    learning_rate: float = setting(1e-4, "a positive number", is_number)
    table_learning_rate: float = setting(3e-2, "a positive number", is_number)
    losses: Mapping[str, float] | None = None
    seed: int = 0
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_settings(self)
        check_seed(self.seed)
        if self.losses is not None:
            _check_losses(self.losses)
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
            raise ValueError(
                f"trainer_arguments[{name!r}] = {value!r}: TrainingArguments has no such field; leave it out"
            )


@dataclass(frozen=True)
class DistillationReport:
    """The result of a distillation.

    Attributes:
        steps: optimizer steps.
        tokens: tokens that the student read in these steps, without padding, over all processes.
        seconds: wall time of this call.
        processes: number of processes.
        losses: for each part of the loss, and `total`, its mean at the `start` and the `end`: over the first and the
            last twentieth of the steps that had it. Parts are unweighted, `total` is weighted.
        settings: the settings, with the parts of the loss that were used.
    """

    steps: int
    tokens: int
    seconds: float
    processes: int
    losses: dict[str, dict[str, float]]
    settings: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self)


# Name of the modules with the parameters of position schemes, in every model of this package.
TABLES = "distance_embedding"


class DistillationTrainer(Trainer):
    """`Trainer` with targets instead of labels, and a separate learning rate for the tables.

    It logs the mean of each part of the loss since the last log as `loss_<part>`.
    """

    optimizer: torch.optim.Optimizer | None

    def __init__(
        self,
        *args: Any,
        targets: Callable[[Mapping[str, torch.Tensor]], Targets],
        losses: Mapping[str, float],
        table_learning_rate: float | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            args: positional arguments of Trainer.
            targets: maps a batch from `collate` to Targets.
            losses: weights by key of `LOSSES`.
            table_learning_rate: for parameters named `distance_embedding`; None for `args.learning_rate`.
            kwargs: keyword arguments of Trainer.
        """
        super().__init__(*args, **kwargs)
        self.targets = targets
        self.losses = dict(losses)
        self.table_learning_rate = self.args.learning_rate if table_learning_rate is None else table_learning_rate
        # the loss is a mean over the batch, so the Trainer divides it by the number of accumulated batches
        self.model_accepts_loss_kwargs = False
        self._sums = torch.zeros(2, len(self.losses), device=self.args.device)  # sum and number of batches, by part

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Targets]:
        """The weighted sum of the parts; `inputs` is a batch for `targets`."""
        with torch.no_grad(), self.accelerator.autocast():
            targets = self.targets(inputs)
        names = [name for name in self.losses if name not in targets.without]
        outputs = compute_outputs(model, inputs, names)
        parts = loss_parts(outputs, targets, inputs["attention_mask"], names, TEMPERATURE)
        for column, name in enumerate(self.losses):
            if name in parts:
                self._sums[:, column] += torch.stack([parts[name].detach(), parts[name].new_ones(())])
        loss = reduce(torch.add, [self.losses[name] * value for name, value in parts.items()])
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As Trainer's, with the parts of the loss."""
        if "loss" in logs:
            totals, counts = self.accelerator.reduce(self._sums, reduction="sum").tolist()
            sums = zip(self.losses, totals, counts, strict=True)
            logs = {**logs, **{f"loss_{name}": total / count for name, total, count in sums if count}}
            self._sums.zero_()
        super().log(logs, start_time)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimizer of the arguments, with two groups: the tables, and all other trained parameters."""
        if self.optimizer is None:
            model = model or self.model
            trained = [(TABLES in name, p) for name, p in model.named_parameters() if p.requires_grad]
            groups = [
                {"params": [p for table, p in trained if table], "lr": self.table_learning_rate},
                {"params": [p for table, p in trained if not table], "lr": self.args.learning_rate},
            ]
            kind, settings = self.get_optimizer_cls_and_kwargs(self.args, model)
            groups = [{**group, "weight_decay": self.args.weight_decay} for group in groups if group["params"]]
            self.optimizer = kind(groups, **settings)
        return self.optimizer


# Modules that no part of the loss reaches. They are frozen, since DDP waits for gradients of all trained parameters.
UNREACHED = ("pooler", "seq_relationship")


def distil(
    student: RelPosBertPreTrainedModel,
    teacher: PreTrainedModel,
    windows: Sequence[Any],
    settings: DistillationSettings | None = None,
    *,
    progress: bool | ProgressCallback = False,
    callbacks: Sequence[TrainerCallback] = (),
) -> DistillationReport:
    """Train a student with relative positions to reproduce the outputs of a teacher with absolute positions.

    The student is trained in place; it stays on its device and is left in evaluation mode. With several processes
    (`accelerate launch`) each process has its own batches of `batch_tokens`.

    Args:
        student: a model of this package.
        teacher: a model with BERT's outputs and the student's sizes, which is not changed.
        windows: token ids of different lengths, special tokens included: a list or dataset of lists, such as
            `hf_relpos.data.cut_windows(…).ids`, or of mappings with `input_ids` and, for segment pairs,
            `token_type_ids`. Only the lengths of these windows improve: 512 tokens need windows of 512. For windows
            longer than the teacher's maximum length the targets come from overlapping windows, and attention is not
            compared: see `model_targets`.
        settings: None for the defaults.
        progress: show a progress bar; without a terminal, print a line every 30 seconds. Or a function to call as
            `progress(description, completed, total)`.
        callbacks: callbacks of the Trainer.

    Raises:
        ValueError: for models, windows and settings that do not fit each other, before anything is trained.
    """
    settings = settings or DistillationSettings()
    losses = _default_losses(student, teacher) if settings.losses is None else dict(settings.losses)
    _check_models(student, teacher, losses)
    limit = model_max_length(teacher)
    batches = WindowBatches(
        windows,
        settings.batch_tokens,
        student.config.vocab_size,
        _max_length(student, limit, losses),
        settings.seed,
        _token_types(student, teacher),
    )
    batches.check()
    started = time.perf_counter()
    trained = student if "logits" in losses else student.base_model  # skips a head that is not compared
    targets = partial(model_targets, teacher if "logits" in losses else teacher.base_model, limit, names=losses)
    with (
        tempfile.TemporaryDirectory(prefix="hf-relpos-distil-") as folder,
        _prepared(student),
        _evaluating(teacher),
        fast_linears(student, teacher),
    ):
        arguments = _training_arguments(settings, folder)
        teacher.to(arguments.device)  # type: ignore[arg-type]  # Transformers' decorator hides self
        trainer = DistillationTrainer(
            model=trained,
            args=arguments,
            train_dataset=batches,
            data_collator=partial(collate, pad_token_id=student.config.pad_token_id or 0),
            callbacks=list(callbacks),
            targets=targets,
            losses=losses,
            table_learning_rate=settings.table_learning_rate,
        )
        trainer.remove_callback(PrinterCallback)
        with (
            nullcontext(progress)
            if callable(progress)
            else progress_bar(Console(stderr=True), progress and arguments.process_index == 0)
        ) as update:
            trainer.add_callback(_Progress(update))
            trainer.train()
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
        settings={**asdict(settings), "losses": losses, "trainer_arguments": dict(settings.trainer_arguments)},
    )


def _max_length(student: PreTrainedModel, limit: int | None, losses: Mapping[str, float]) -> int | None:
    """Length of the longest window: the student's limit, and the teacher's if only the attention is compared."""
    limits = [model_max_length(student), limit if set(losses) == {"attention"} else None]
    return min((each for each in limits if each is not None), default=None)


def _token_types(student: PreTrainedModel, teacher: PreTrainedModel) -> int:
    """Number of token types that both read."""
    return min(student.config.type_vocab_size, getattr(teacher.config, "type_vocab_size", 0))


class _Progress(TrainerCallback):
    """Reports the number of completed steps."""

    def __init__(self, update: ProgressCallback) -> None:
        self.update = update

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.update("distilling", state.global_step, state.max_steps)

    on_train_begin = on_step_end


def _training_arguments(settings: DistillationSettings, folder: str) -> TrainingArguments:
    """`TrainingArguments` for the settings; `trainer_arguments` override some of them."""
    logging_steps = max(1, settings.steps // 20)
    defaults = {
        "warmup_steps": math.ceil(settings.steps / 10),
        "report_to": "none",
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    return TrainingArguments(
        output_dir=folder,
        save_strategy="no",
        max_steps=settings.steps,
        learning_rate=settings.learning_rate,
        seed=settings.seed,
        disable_tqdm=True,  # see _Progress
        logging_steps=logging_steps,
        per_device_train_batch_size=1,  # an item of the data set is a batch
        accelerator_config={"dispatch_batches": False, "split_batches": False},
        include_num_input_tokens_seen="non_padding",
        remove_unused_columns=False,
        **{**defaults, **settings.trainer_arguments},
    )


def _default_losses(student: PreTrainedModel, teacher: PreTrainedModel) -> dict[str, float]:
    """The parts of `DEFAULT_LOSSES` that these models support."""
    comparable = _returns_attention(student) and _returns_attention(teacher)
    return {name: weight for name, weight in DEFAULT_LOSSES.items() if comparable or name != "attention"}


def _returns_attention(model: PreTrainedModel) -> bool:
    """Whether a model returns its attention weights."""
    return model.config._attn_implementation in ("eager", AUTO)


@contextmanager
def _prepared(student: PreTrainedModel) -> Iterator[None]:
    """Context without dropout, because targets are deterministic, and without gradients that no loss needs."""
    device = student.device
    probabilities = {module: module.p for module in student.modules() if isinstance(module, nn.Dropout)}
    flags = {parameter: parameter.requires_grad for parameter in student.parameters()}
    try:
        for module in probabilities:
            module.p = 0.0
        for name, parameter in student.named_parameters():
            if any(part in name.split(".") for part in UNREACHED):
                parameter.requires_grad = False
        yield
    finally:
        for module, probability in probabilities.items():
            module.p = probability
        for parameter, flag in flags.items():
            parameter.requires_grad = flag
        student.eval().to(device)


@contextmanager
def _evaluating(teacher: PreTrainedModel) -> Iterator[None]:
    """Context in which the teacher is in evaluation mode; its mode and device are restored afterwards."""
    device, training = teacher.device, teacher.training
    teacher.eval()
    try:
        yield
    finally:
        teacher.train(training).to(device)


def _check_models(student: PreTrainedModel, teacher: PreTrainedModel, losses: Mapping[str, float]) -> None:
    """
    Raises:
        ValueError: for models that cannot be compared, or lack outputs that a part of the loss compares.
    """
    if student is teacher:
        raise ValueError("student and teacher are the same object; load the teacher a second time")
    sizes = ["vocab_size", "hidden_size", "num_hidden_layers"]
    if "attention" in losses:
        sizes.append("num_attention_heads")
    for name in sizes:
        student_size, teacher_size = getattr(student.config, name), getattr(teacher.config, name)
        if student_size != teacher_size:
            raise ValueError(
                f"{name} = {student_size} in the student, but {teacher_size} in the teacher; distil a student that "
                "was converted from this teacher"
            )
    for name, model in (("student", student), ("teacher", teacher)):
        if "logits" in losses and not has_mlm_head(model):
            raise ValueError(
                f"losses['logits'] = {losses['logits']!r}: the {name}, a {type(model).__name__}, has no masked "
                "language model head; load it as …ForMaskedLM, or leave 'logits' out"
            )
        if "attention" in losses and not _returns_attention(model):
            raise ValueError(
                f"losses['attention'] = {losses['attention']!r}: attn_implementation = "
                f"{model.config._attn_implementation!r} of the {name} does not return attention weights; call "
                f"{name}.set_attn_implementation('eager'), or leave 'attention' out"
            )
