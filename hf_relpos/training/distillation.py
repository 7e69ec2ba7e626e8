"""Distillation: train a converted student to reproduce the outputs of its teacher with absolute positions.

It needs no labels: the targets are the frozen teacher's hidden states on windows of text, and its attention weights or
predictions. The training loop is Transformers' `Trainer`, with its mixed precision, distribution and checkpoints.
"""

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments

from ..attention.dispatch import AUTO
from ..console import ProgressCallback, progress_bar
from ..data.seed import check_seed
from ..evaluation.inspection import check_sizes, has_mlm_head, model_max_length
from ..models.modeling_relpos_bert import RelPosBertPreTrainedModel
from ..products.cpu_gemm import fast_linears
from ..schemes.scheme import is_count, is_number
from .data import WindowBatches, collate
from .losses import DEFAULT_LOSSES, LOSSES, Batch, Targets, compute_outputs, loss_parts, model_targets


TEMPERATURE = 2.0  # of the logits


@dataclass(frozen=True)
class DistillationReport:
    """The result of a distillation.

    Attributes:
        steps: optimizer steps.
        tokens: tokens that the student read in these steps, without padding, over all processes.
        seconds: wall time of this call.
        losses: for each part of the loss, and `total`, its mean at the `start` and the `end`: over the first and the
            last twentieth of the steps that had it. Parts are unweighted, `total` is weighted.
    """

    steps: int
    tokens: int
    seconds: float
    losses: dict[str, dict[str, float]]


# Name of the modules with the parameters of position schemes, in every model of this package.
TABLES = "distance_embedding"


class DistillationTrainer(Trainer):
    """`Trainer` with targets instead of labels, and a separate learning rate for the tables.

    It logs the mean of each part of the loss since the last log as `loss_<part>`.
    """

    optimizer: torch.optim.Optimizer | None

    def __init__(
        self, targets: Callable[..., Targets], losses: Mapping[str, float], table_learning_rate: float, **kwargs: Any
    ) -> None:
        """
        Args:
            targets: maps a batch from `collate` to Targets.
            losses: weights by name of `LOSSES`.
            table_learning_rate: for parameters named `distance_embedding`.
            kwargs: keyword arguments of Trainer.
        """
        super().__init__(**kwargs)
        self.targets = targets
        self.losses = dict(losses)
        self.table_learning_rate = table_learning_rate
        # the loss is a mean over the batch, so the Trainer divides it by the number of accumulated batches
        self.model_accepts_loss_kwargs = False
        self._sums = torch.zeros(2, len(self.losses), device=self.args.device)  # sum and number of batches, by part

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
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


def distil(
    student: RelPosBertPreTrainedModel,
    teacher: PreTrainedModel,
    windows: Sequence[Any],
    *,
    steps: int = 200,
    batch_tokens: int = 4096,
    learning_rate: float = 1e-4,
    table_learning_rate: float = 3e-2,
    losses: Mapping[str, float] | None = None,
    seed: int = 0,
    progress: bool | ProgressCallback = False,
    callbacks: Sequence[TrainerCallback] = (),
    **trainer_arguments: Any,
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
        steps: optimizer steps.
        batch_tokens: tokens of a batch, padding included; a longer window is a batch by itself.
        learning_rate: peak learning rate of all parameters except the scheme's.
        table_learning_rate: peak learning rate of the scheme's parameters.
        losses: weights by name of `LOSSES`; None for `DEFAULT_LOSSES`, without `attention` unless both models have
            attn_implementation='eager'. Load the teacher with that: it improves the result considerably.
        seed: seed of the batches.
        progress: show a progress bar; without a terminal, print a line every 30 seconds. Or a function to call as
            `progress(description, completed, total)`.
        callbacks: callbacks of the Trainer.
        trainer_arguments: other `TrainingArguments`: `bf16`, `gradient_accumulation_steps`, `lr_scheduler_type`, …

    Raises:
        ValueError: for models, windows and values that do not fit each other, before anything is trained.
        TypeError: for a `TrainingArguments` field that does not exist, or that `distil` sets itself.
    """
    if losses is None:
        comparable = _returns_attention(student) and _returns_attention(teacher)
        losses = {name: weight for name, weight in DEFAULT_LOSSES.items() if comparable or name != "attention"}
    if not losses or not losses.keys() <= set(LOSSES):
        raise ValueError(f"losses = {losses}: give weights of some of {', '.join(LOSSES)}")
    counts = {"steps": steps, "batch_tokens": batch_tokens}
    rates = {"learning_rate": learning_rate, "table_learning_rate": table_learning_rate}
    for name, value in (counts | rates | {f"losses[{name!r}]": weight for name, weight in losses.items()}).items():
        if not (is_count(value) if name in counts else is_number(value)):
            raise ValueError(f"{name} = {value!r}: give a positive {'integer' if name in counts else 'number'}")
    check_seed(seed)
    _check_models(student, teacher, losses)
    limit = model_max_length(teacher)
    # attention is not compared past the teacher's limit
    limits = [model_max_length(student), limit if set(losses) == {"attention"} else None]
    longest = min((each for each in limits if each is not None), default=None)
    types = min(student.config.type_vocab_size, getattr(teacher.config, "type_vocab_size", 0))
    batches = WindowBatches(windows, batch_tokens, student.config.vocab_size, longest, seed, types)
    batches.check()
    defaults: dict[str, Any] = {"warmup_steps": math.ceil(steps / 10), "report_to": "none"}
    defaults["dataloader_pin_memory"] = torch.cuda.is_available()
    started = time.perf_counter()
    trained = student if "logits" in losses else student.base_model  # skips a head that is not compared
    targets = partial(model_targets, teacher if "logits" in losses else teacher.base_model, limit, names=losses)
    with tempfile.TemporaryDirectory() as folder, _prepared(student, teacher), fast_linears(student, teacher):
        arguments = TrainingArguments(
            output_dir=folder,
            save_strategy="no",
            max_steps=steps,
            learning_rate=learning_rate,
            seed=seed,
            disable_tqdm=True,  # see _Progress
            logging_steps=max(1, steps // 20),
            per_device_train_batch_size=1,  # an item of the data set is a batch
            accelerator_config={"dispatch_batches": False, "split_batches": False},
            include_num_input_tokens_seen="non_padding",
            remove_unused_columns=False,
            **defaults | trainer_arguments,
        )
        teacher.to(arguments.device)  # type: ignore[arg-type]  # Transformers' decorator hides self
        trainer = DistillationTrainer(
            model=trained,
            args=arguments,
            train_dataset=batches,
            data_collator=partial(collate, pad_token_id=student.config.pad_token_id or 0),
            callbacks=list(callbacks),
            targets=targets,
            losses=losses,
            table_learning_rate=table_learning_rate,
        )
        trainer.remove_callback(PrinterCallback)
        is_shown = bool(progress) and arguments.process_index == 0
        bar = nullcontext(progress) if callable(progress) else progress_bar(Console(stderr=True), is_shown)
        with bar as update:
            trainer.add_callback(_Progress(update))
            trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    parts = {**{name: f"loss_{name}" for name in losses}, "total": "loss"}
    return DistillationReport(
        steps=trainer.state.global_step,
        tokens=int(trainer.state.num_input_tokens_seen),
        seconds=time.perf_counter() - started,
        losses={
            name: {"start": values[0], "end": values[-1]}
            for name, key in parts.items()
            if (values := [entry[key] for entry in history if key in entry])
        },
    )


class _Progress(TrainerCallback):
    """Reports the number of completed steps."""

    def __init__(self, update: ProgressCallback) -> None:
        self.update = update

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.update("distilling", state.global_step, state.max_steps)

    on_train_begin = on_step_end


def _returns_attention(model: PreTrainedModel) -> bool:
    """Whether a model returns its attention weights."""
    return model.config._attn_implementation in ("eager", AUTO)


# Modules that no part of the loss reaches. They are frozen, since DDP waits for gradients of all trained parameters.
UNREACHED = frozenset({"pooler", "seq_relationship"})


@contextmanager
def _prepared(student: PreTrainedModel, teacher: PreTrainedModel) -> Iterator[None]:
    """Context without dropout, because targets are deterministic; devices, modes and dropout are restored."""
    own, other, training = student.device, teacher.device, teacher.training
    probabilities = {module: module.p for module in student.modules() if isinstance(module, nn.Dropout)}
    named = student.named_parameters()
    frozen = [each for name, each in named if each.requires_grad and UNREACHED.intersection(name.split("."))]
    try:
        teacher.eval()
        for module in probabilities:
            module.p = 0.0
        for parameter in frozen:
            parameter.requires_grad = False
        yield
    finally:
        for module, probability in probabilities.items():
            module.p = probability
        for parameter in frozen:
            parameter.requires_grad = True
        student.eval().to(own)
        teacher.train(training).to(other)


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
    check_sizes(teacher, student, sizes)
    for name, model in (("student", student), ("teacher", teacher)):
        if "logits" in losses and not has_mlm_head(model):
            lacking = f"the {name}, a {type(model).__name__}, has no masked language model head"
            raise ValueError(f"losses['logits'] = {losses['logits']!r}: {lacking}; load …ForMaskedLM, or leave it out")
        if "attention" in losses and not _returns_attention(model):
            own = f"attn_implementation = {model.config._attn_implementation!r} of the {name} returns no weights"
            remedy = f"call {name}.set_attn_implementation('eager'), or leave 'attention' out"
            raise ValueError(f"losses['attention'] = {losses['attention']!r}: {own}; {remedy}")
