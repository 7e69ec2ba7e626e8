"""Distillation: a converted student is trained to compute what its teacher with absolute positions computes.

No labels: on every window of text the frozen teacher's hidden states (and, if asked, its attention or its predictions)
are the student's targets. The training loop is Transformers' `Trainer`, so mixed precision, several processes and
checkpoints work as they do there; what is added is the loss, the batches, and two learning rates.
"""

import dataclasses
import itertools
import json
import math
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from ..data.batching import pad_rows
from ..evaluation.inspection import has_mlm_head, model_max_length
from ..files import write_json
from ..model.attention import OWN
from ..model.modeling_relpos_bert import RelPosBertPreTrainedModel
from ..model.scheme import is_count, is_number


# Parts of the loss, and what each compares.
LOSSES = {
    "hidden": "the last hidden states",
    "layers": "the hidden states after every layer",
    "attention": "the attention weights of every layer; both models need attn_implementation='eager', or 'relpos'",
    "logits": "the predictions of the masked language model heads",
}
# Weights and learning rates are the best of those tried on all-MiniLM-L6-v2 with `tables` from zero, 50 steps of 512
# tokens. Mean token cosine on fresh text: .831 before; with rates of 3e-4 and 1e-2 .909 for layers alone, .935 with
# attention, .941 at weight 3; .956 with the rates below. Attention tells the tables directly what to do. It is left
# out where a model does not hold its weights.
DEFAULT_LOSSES = {"layers": 1.0, "attention": 3.0}
TRAIN = ("all", "tables")
SCHEDULES = ("linear", "cosine", "constant_with_warmup")

# Parameters of the position schemes are in modules of this name, in every model of this package.
TABLES = "distance_embedding"
# Modules that no part of the loss reaches. Several processes wait for the gradient of whatever is trained.
UNREACHED = ("pooler", "seq_relationship")

# Windows whose lengths fall into one of this many intervals of an octave share batches: at most 19 % is padding.
PER_OCTAVE = 4

SETTINGS_FILE = "distil.json"
TRAINER_STATE = "trainer_state.json"  # the last file that the Trainer writes into a checkpoint
CHECKPOINT = "checkpoint-"

# `TrainingArguments` that `distil` sets from its own arguments, or that its batches rely on.
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
class Targets:
    """What the student is to compute for a batch; None for what was not asked for.

    Attributes:
        hidden_states: of every layer, the embeddings first, (B, L, D) each; or the last one alone.
        attentions: attention weights of every layer, (B, H, L, L) each.
        logits: predictions, (B, L, vocabulary).
    """

    hidden_states: tuple[torch.Tensor, ...]
    attentions: tuple[torch.Tensor, ...] | None = None
    logits: torch.Tensor | None = None


Provider = Callable[[Mapping[str, torch.Tensor]], Targets]


@dataclass(frozen=True)
class DistilReport:
    """What a distillation did.

    Attributes:
        steps: optimizer steps, those before a resumption included.
        tokens: real tokens that the student read in them, over all processes.
        seconds: wall time of this call.
        processes: how many took part.
        losses: part of the loss, and `total`, to its mean at the `start` and at the `end`: over the first and the last
            twentieth of the steps. Parts are as measured, before their weights; `total` is weighed.
        settings: the arguments.
    """

    steps: int
    tokens: int
    seconds: float
    processes: int
    losses: dict[str, dict[str, float]]
    settings: dict[str, Any]

    def summary(self) -> str:
        """One line."""
        parts = ", ".join(f"{name} {ends['start']:.4f} to {ends['end']:.4f}" for name, ends in self.losses.items())
        return f"{self.steps:,} steps, {self.tokens:,} tokens, {self.seconds:.0f} s; loss: {parts}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


# Losses ------------------------------------------------------------------------------------------------------------


def token_means(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the real tokens of each example, then over the examples: a scalar.

    Args:
        values: (B, L).
        mask: (B, L), 1 for real tokens and 0 for padding.
    """
    mask = mask.to(values.dtype)
    return ((values * mask).sum(1) / mask.sum(1)).mean()


def hidden_loss(student: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Squared error over the teacher's variance: 0 for equal states, 1 for a student that says the mean everywhere.

    The variance is that of the batch's real tokens about their mean, summed over features, so that the parts of
    different layers and models are on one scale.

    Args:
        student: (B, L, D).
        target: (B, L, D).
        mask: (B, L), 1 for real tokens.
    """
    student, target = student.float(), target.float()
    real = target[mask.bool()]
    variance = (real - real.mean(0)).square().sum(-1).mean()
    return token_means((student - target).square().sum(-1), mask) / variance.clamp(min=torch.finfo(real.dtype).tiny)


def attention_loss(student: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """KL(teacher ‖ student) of the attention weights of real queries, mean over heads, in nats.

    Args:
        student: (B, H, L, L), rows sum to 1.
        target: the same shape.
        mask: (B, L), 1 for real tokens. Padded keys have weight 0 in both.
    """
    student, target = student.float(), target.float()
    tiny = torch.finfo(torch.float32).tiny
    gap = target * (target.clamp(min=tiny).log() - student.clamp(min=tiny).log())
    return token_means(gap.sum(-1).mean(1), mask)


def logits_loss(
    student: torch.Tensor, target: torch.Tensor, mask: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """KL(teacher ‖ student) of the predictions at every real token, times temperature², in nats.

    Args:
        student: (B, L, vocabulary).
        target: the same shape.
        mask: (B, L), 1 for real tokens.
        temperature: both logits are divided by it. The factor keeps the size of gradients (Hinton et al. 2015,
            arXiv 1503.02531, §2).
    """
    student = functional.log_softmax(student.float() / temperature, dim=-1)
    target = functional.log_softmax(target.float() / temperature, dim=-1)
    gap = functional.kl_div(student, target, reduction="none", log_target=True).sum(-1)
    return token_means(gap, mask) * temperature**2


def loss_parts(
    outputs: Targets, targets: Targets, mask: torch.Tensor, names: Iterable[str], temperature: float = 1.0
) -> dict[str, torch.Tensor]:
    """The parts of the loss, keys of `LOSSES`, as scalars.

    Args:
        outputs: the student's.
        targets: the teacher's.
        mask: (B, L), 1 for real tokens.

    Raises:
        ValueError: for targets that lack what a part compares.
    """
    mine, theirs = outputs.hidden_states, targets.hidden_states
    parts = {}
    for name in names:
        if name == "hidden":
            parts[name] = hidden_loss(mine[-1], theirs[-1], mask)
        elif name == "layers":
            if len(mine) != len(theirs):
                raise ValueError(
                    f"losses: 'layers' compares {len(mine)} hidden states and the targets hold {len(theirs)}; let the "
                    "provider return those of every layer, the embeddings first, or use 'hidden'"
                )
            # not the embeddings: the teacher's hold the positions, which the student's cannot
            values = [hidden_loss(a, b, mask) for a, b in zip(mine[1:], theirs[1:], strict=True)]
            parts[name] = sum(values) / len(values)
        elif name == "attention":
            if targets.attentions is None:
                raise ValueError("losses: 'attention' needs targets with attentions; let the provider return them")
            pairs = list(zip(outputs.attentions, targets.attentions, strict=True))
            parts[name] = sum(attention_loss(a, b, mask) for a, b in pairs) / len(pairs)
        else:
            if targets.logits is None:
                raise ValueError("losses: 'logits' needs targets with logits; let the provider return them")
            parts[name] = logits_loss(outputs.logits, targets.logits, mask, temperature)
    return parts


def read_outputs(model: nn.Module, batch: Mapping[str, torch.Tensor], names: Iterable[str]) -> Targets:
    """What a model computes for a batch, as far as these parts of the loss compare it.

    Args:
        model: with BERT's outputs; with a masked language model's head if `names` holds "logits".
        batch: `input_ids` and `attention_mask`, (B, L).
        names: keys of `LOSSES`.
    """
    names = set(names)
    wanted = {"output_hidden_states": True, "output_attentions": "attention" in names, "return_dict": True}
    outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], **wanted)
    logits = None
    if "logits" in names:
        logits = outputs["logits"] if "logits" in outputs else outputs["prediction_logits"]  # …ForPreTraining
    return Targets(outputs["hidden_states"], outputs["attentions"] if "attention" in names else None, logits)


def row_targets(read: Callable[[list[int]], torch.Tensor]) -> Provider:
    """Targets for `losses={"hidden": …}` from a function that reads one window, however long it is.

    With `partial(hf_relpos.evaluation.windowed_hidden_states, teacher)` the student learns, on windows past the
    teacher's limit, what the teacher says in overlapping pieces.

    Args:
        read: maps the token ids of one window to its last hidden states, (L, D).
    """

    def targets(batch: Mapping[str, torch.Tensor]) -> Targets:
        rows = [
            ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        states = nn.utils.rnn.pad_sequence([read(row) for row in rows], batch_first=True)
        return Targets((states.to(batch["input_ids"].device),))

    return targets


# Batches -----------------------------------------------------------------------------------------------------------


class Batches(torch.utils.data.IterableDataset):
    """Windows of differing lengths, without end, in batches of similar length that are bounded by tokens.

    Each pass over a list is in a random order of its own; a stream is taken in its own order. A window goes into the
    open batch of its length group, which is complete when no further window fits: at most `batch_tokens` tokens with
    padding, or one longer window. What is incomplete after a pass is filled up in the next, unless the group is so
    small that it made no batch. The same arguments give the same batches, which is what resuming relies on.
    """

    def __init__(self, windows: Iterable, batch_tokens: int, vocabulary: int, longest: int | None, seed: int):
        """
        Args:
            windows: a list or map-style dataset, or what can be iterated over again and again, of token ids or of
                mappings with `input_ids`.
            batch_tokens: tokens of a batch.
            vocabulary: number of token ids.
            longest: tokens that the teacher can read at once; None for no limit.
            seed: of the order.
        """
        self.windows = windows
        self.batch_tokens = batch_tokens
        self.vocabulary = vocabulary
        self.longest = longest
        self.seed = seed

    def look(self) -> str | None:
        """Check the windows before training: all those of a list, the first of what is read or made on demand.

        Returns:
            What tells a list of windows from another; None where not all were seen.

        Raises:
            ValueError: when there is none, and for one that `_check` refuses.
        """
        if isinstance(self.windows, Iterator):  # what is read now would be missing later
            return None
        whole = isinstance(self.windows, list | tuple)
        count = checksum = 0
        for number, window in enumerate(self.windows if whole else _first(self.windows)):
            count += 1
            checksum = zlib.crc32(np.array(self._check(number, window), dtype="<i8").tobytes(), checksum)
        if not count:
            raise ValueError("windows is empty: give at least one window of token ids")
        return f"{count} windows, CRC {checksum:08x}" if whole else None

    def __iter__(self) -> Iterator[list[list[int]]]:
        batches = self._batches()
        worker = torch.utils.data.get_worker_info()
        if worker is not None:  # a data loader takes from its workers in turn
            batches = itertools.islice(batches, worker.id, None, worker.num_workers)
        return batches

    def _batches(self) -> Iterator[list[list[int]]]:
        waiting: dict[int, list[list[int]]] = {}
        seen = 0
        for epoch in itertools.count():
            before = seen
            made = set()
            for number, window in self._one_pass(epoch):
                ids = self._check(number, window)
                seen += 1
                group = math.ceil(PER_OCTAVE * math.log2(len(ids)))
                batch = waiting.setdefault(group, [])
                if batch and max(len(ids), *map(len, batch)) * (len(batch) + 1) > self.batch_tokens:
                    yield batch
                    made.add(group)
                    batch = waiting[group] = []
                batch.append(ids)
            if seen == before:
                raise ValueError(
                    f"windows ended after {seen}, before the last step: an iterator is read once only. Give a list, a "
                    "dataset or another iterable that starts again, more text, or fewer steps"
                )
            for group in sorted(waiting.keys() - made):
                if waiting[group]:
                    yield waiting.pop(group)

    def _one_pass(self, epoch: int) -> Iterator[tuple[int, Any]]:
        if not _indexed(self.windows):
            yield from enumerate(self.windows)
            return
        for number in np.random.default_rng((self.seed, epoch)).permutation(len(self.windows)).tolist():
            yield number, self.windows[number]

    def _check(self, number: int, window: Any) -> list[int]:
        """The token ids of a window.

        Raises:
            ValueError: for one that is empty, too long for the teacher, or not in its vocabulary.
        """
        ids = window["input_ids"] if isinstance(window, Mapping) else window
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if not ids:
            raise ValueError(f"windows[{number}] is empty; leave empty windows out")
        if self.longest is not None and len(ids) > self.longest:
            raise ValueError(
                f"windows[{number}] has {len(ids)} tokens and the teacher reads at most {self.longest}; cut the "
                "windows, or give in place of the teacher a function that reads longer ones in pieces"
            )
        if not (isinstance(ids[0], int) and 0 <= min(ids) and max(ids) < self.vocabulary):
            raise ValueError(
                f"windows[{number}] holds something else than token ids from 0 to {self.vocabulary - 1}; make the "
                "windows with the teacher's tokenizer"
            )
        return ids


def _first(windows: Iterable) -> list:
    """The first window, or nothing."""
    if _indexed(windows):
        return [windows[0]] if len(windows) else []
    return list(itertools.islice(windows, 1))


def _indexed(windows: Iterable) -> bool:
    """Whether windows can be taken in any order: a list or a map-style dataset."""
    return hasattr(windows, "__len__") and hasattr(windows, "__getitem__")


def collate(batches: Sequence[Sequence[Sequence[int]]], pad: int) -> dict[str, torch.Tensor]:
    """Batches of windows (one, unless the Trainer splits it over several devices) to tensors (B, longest).

    Returns:
        `input_ids`, and `attention_mask`, 1 for real tokens.
    """
    windows = [window for batch in batches for window in batch]
    ids, mask = pad_rows(windows, pad)
    return {"input_ids": ids, "attention_mask": mask.long()}


# Training ----------------------------------------------------------------------------------------------------------


class DistillationTrainer(Trainer):
    """`Trainer` with targets in place of labels, and a learning rate of their own for the tables.

    Logs the mean of each part of the loss since the last log, as `loss_<part>`.
    """

    def __init__(
        self,
        *args: Any,
        targets: Provider,
        losses: Mapping[str, float],
        temperature: float = 1.0,
        table_learning_rate: float | None = None,
        **kwargs: Any,
    ):
        """
        Args:
            args: as Trainer's.
            targets: maps a batch, `input_ids` and `attention_mask` (B, L), to Targets.
            losses: keys of `LOSSES` to weights.
            temperature: of the logits.
            table_learning_rate: for parameters named `distance_embedding`; None for `args.learning_rate`.
            kwargs: as Trainer's.
        """
        super().__init__(*args, **kwargs)
        self.targets = targets
        self.losses = dict(losses)
        self.temperature = temperature
        self.table_learning_rate = self.args.learning_rate if table_learning_rate is None else table_learning_rate
        # a mean over a batch of its own: the Trainer divides it by the number of batches that it accumulates
        self.model_accepts_loss_kwargs = False
        self._sums = torch.zeros(len(self.losses) + 1, device=self.args.device)  # of the parts, and how many

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The weighed sum of the parts; `inputs` as `targets` takes them."""
        with torch.no_grad(), self.accelerator.autocast():
            targets = self.targets(inputs)
        outputs = read_outputs(model, inputs, self.losses)
        parts = loss_parts(outputs, targets, inputs["attention_mask"], self.losses, self.temperature)
        values = [parts[name] for name in self.losses]
        self._sums += torch.stack([*(value.detach() for value in values), values[0].new_ones(())])
        loss = sum(weight * value for weight, value in zip(self.losses.values(), values, strict=True))
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, start_time=None):
        """As Trainer's, with the parts of the loss."""
        if "loss" in logs:
            *totals, count = self.accelerator.reduce(self._sums, reduction="sum").tolist()
            means = {f"loss_{name}": total / count for name, total in zip(self.losses, totals, strict=True)}
            logs = {**logs, **means}
            self._sums.zero_()
        super().log(logs, start_time)

    def create_optimizer(self, model=None):
        """The optimizer that the arguments name, with two groups: the tables, and everything else that is trained."""
        if self.optimizer is None:
            model = self.model if model is None else model
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
    teacher: PreTrainedModel | Provider,
    windows: Iterable,
    *,
    steps: int = 200,
    batch_tokens: int = 4096,
    learning_rate: float = 1e-4,
    table_learning_rate: float = 3e-2,
    schedule: str = "linear",
    train: str = "all",
    losses: Mapping[str, float] | None = None,
    temperature: float = 2.0,
    dropout: bool = False,
    seed: int = 0,
    output_dir: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
    trainer_arguments: Mapping[str, Any] | None = None,
) -> DistilReport:
    """Train a relative student to compute what an absolute teacher computes.

    The student is trained in place and is left on its device and in evaluation mode. In several processes
    (`accelerate launch`) each takes batches of its own, so that a step reads that many times `batch_tokens`.

    Args:
        student: of this package.
        teacher: a model with BERT's outputs and the student's sizes, which stays as it is; or a function from a batch,
            `input_ids` and `attention_mask` (B, L) on the training device, to Targets: see `row_targets`.
        windows: token ids, special tokens included, of differing lengths: a list or dataset of lists or of mappings
            with `input_ids`, such as `hf_relpos.data.cut_windows(…).ids`; or an iterable that can be started
            again, such as a streamed Hub dataset, tokenized and shuffled. Lengths that are not among them stay as
            bad as they were: 512 tokens need windows of 512.
        steps: optimizer steps.
        batch_tokens: tokens of a batch, padding included; a longer window makes a batch of its own.
        learning_rate: peak, of everything but the tables.
        table_learning_rate: peak, of the scheme's parameters.
        schedule: of `SCHEDULES`; each warms up over the first tenth of the steps.
        train: `all`, or `tables` for the scheme's parameters only.
        losses: keys of `LOSSES` to weights; None for `DEFAULT_LOSSES`, without `attention` unless both models have
            attn_implementation='eager'. Load the teacher with that: it is worth much.
        temperature: of the logits.
        dropout: keep the student's dropout. Its targets are deterministic, so by default there is none.
        seed: of batches and dropout.
        output_dir: for checkpoints, kept afterwards; None for none.
        resume: go on from the last checkpoint in `output_dir`, if there is one.
        progress: show a bar.
        callbacks: of the Trainer.
        trainer_arguments: more of `TrainingArguments`: `bf16`, `gradient_accumulation_steps`, `save_steps`, …

    Raises:
        ValueError: for arguments that do not fit each other, before anything is trained or written; for windows of a
            stream, when they are read.
    """
    losses = _default_losses(student, teacher, dropout) if losses is None else dict(losses)
    _check_arguments(
        {"steps": steps, "batch_tokens": batch_tokens},
        {"learning_rate": learning_rate, "table_learning_rate": table_learning_rate, "temperature": temperature},
        {"train": (train, TRAIN), "schedule": (schedule, SCHEDULES)},
        losses,
        trainer_arguments or {},
    )
    if dropout and "attention" in losses:
        raise ValueError(
            "dropout = True with losses['attention']: what it leaves is no distribution; drop one of both"
        )
    _check_models(student, teacher, losses)
    if train == "tables" and not any(TABLES in name for name, _ in student.named_parameters()):
        raise ValueError(
            f"train = 'tables': the scheme {student.config.position_scheme_name!r} of the student has no parameters; "
            "use train = 'all'"
        )
    limits = [model_max_length(model) for model in (student, teacher) if isinstance(model, nn.Module)]
    longest = min((limit for limit in limits if limit is not None), default=None)
    batches = Batches(windows, batch_tokens, student.config.vocab_size, longest, seed)
    fingerprint = batches.look()

    settings = {
        "steps": steps,
        "batch_tokens": batch_tokens,
        "learning_rate": learning_rate,
        "table_learning_rate": table_learning_rate,
        "schedule": schedule,
        "train": train,
        "losses": losses,
        "temperature": temperature,
        "dropout": dropout,
        "seed": seed,
        "windows": fingerprint,
        "trainer_arguments": dict(trainer_arguments or {}),
    }
    logging_steps = max(1, steps // 20)
    more = {
        "save_strategy": "no" if output_dir is None else "steps",
        "save_steps": 2 * logging_steps,
        "save_total_limit": 1,
        "warmup_steps": math.ceil(steps / 10),
        "report_to": "none",
        "dataloader_pin_memory": torch.cuda.is_available(),
        **settings["trainer_arguments"],
    }
    started = time.perf_counter()
    trained = student if "logits" in losses else student.base_model  # a head that is not compared is not computed
    pad = student.config.pad_token_id or 0
    with _folder(output_dir) as folder, _prepared(student, train, dropout), _evaluating(teacher):
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            learning_rate=learning_rate,
            lr_scheduler_type=schedule,
            seed=seed,
            disable_tqdm=not progress,
            logging_steps=logging_steps,
            per_device_train_batch_size=1,  # of our batches
            accelerator_config={"dispatch_batches": False, "split_batches": False},
            include_num_input_tokens_seen="non_padding",
            remove_unused_columns=False,
            **more,
        )
        checkpoint = None
        if output_dir is not None:
            with arguments.main_process_first(local=False):
                if arguments.process_index == 0:
                    _open_folder(folder, settings, resume)
                checkpoint = _last_checkpoint(folder)
        if isinstance(teacher, nn.Module):
            teacher.to(arguments.device)
            targets = partial(read_outputs, teacher if "logits" in losses else teacher.base_model, names=losses)
        else:
            targets = teacher
        trainer = DistillationTrainer(
            model=trained,
            args=arguments,
            train_dataset=batches,
            data_collator=partial(collate, pad=pad),
            callbacks=list(callbacks),
            targets=targets,
            losses=losses,
            temperature=temperature,
            table_learning_rate=table_learning_rate,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    parts = {**{name: f"loss_{name}" for name in losses}, "total": "loss"}
    return DistilReport(
        steps=trainer.state.global_step,
        tokens=int(trainer.state.num_input_tokens_seen),
        seconds=time.perf_counter() - started,
        processes=arguments.world_size,
        losses={name: {"start": history[0][key], "end": history[-1][key]} for name, key in parts.items()},
        settings=settings,
    )


def _default_losses(student: nn.Module, teacher: nn.Module | Provider, dropout: bool) -> dict[str, float]:
    """`DEFAULT_LOSSES`, as far as these models can be compared."""
    held = isinstance(teacher, nn.Module) and not dropout and _holds_attention(student) and _holds_attention(teacher)
    return {name: weight for name, weight in DEFAULT_LOSSES.items() if held or name != "attention"}


def _holds_attention(model: nn.Module) -> bool:
    """Whether a model computes attention weights, and not only what they lead to."""
    return model.config._attn_implementation in ("eager", OWN)


@contextmanager
def _folder(output_dir: str | Path | None) -> Iterator[Path]:
    """The folder of checkpoints; without one, a temporary folder that is removed afterwards."""
    if output_dir is not None:
        yield Path(output_dir)
        return
    with tempfile.TemporaryDirectory(prefix="hf-relpos-distil-") as folder:
        yield Path(folder)


@contextmanager
def _prepared(student: nn.Module, train: str, dropout: bool) -> Iterator[None]:
    """The student with only those parameters to be trained that are, and with or without dropout; then as before."""
    device = student.device
    probabilities = {module: module.p for module in student.modules() if isinstance(module, nn.Dropout)}
    flags = {parameter: parameter.requires_grad for parameter in student.parameters()}
    try:
        if not dropout:
            for module in probabilities:
                module.p = 0.0
        for name, parameter in student.named_parameters():
            unreached = any(part in name.split(".") for part in UNREACHED)
            if unreached or (train == "tables" and TABLES not in name):
                parameter.requires_grad = False
        yield
    finally:
        for module, probability in probabilities.items():
            module.p = probability
        for parameter, flag in flags.items():
            parameter.requires_grad = flag
        student.eval().to(device)


@contextmanager
def _evaluating(teacher: nn.Module | Provider) -> Iterator[None]:
    """A teacher in evaluation mode; then in the mode, and on the device, where it was."""
    if not isinstance(teacher, nn.Module):
        yield
        return
    device, training = teacher.device, teacher.training
    teacher.eval()
    try:
        yield
    finally:
        teacher.train(training).to(device)


def _checkpoints(folder: Path) -> dict[int, Path]:
    """Step to folder of the checkpoints there, complete or not."""
    found = (path for path in folder.glob(f"{CHECKPOINT}*") if path.name.removeprefix(CHECKPOINT).isdigit())
    return {int(path.name.removeprefix(CHECKPOINT)): path for path in found}


def _last_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint that was written to its end."""
    complete = {step: path for step, path in _checkpoints(folder).items() if (path / TRAINER_STATE).is_file()}
    return complete[max(complete)] if complete else None


def _open_folder(folder: Path, settings: Mapping[str, Any], resume: bool) -> None:
    """Check the folder of checkpoints, clear it of what an interruption left half-written, and note the settings.

    Raises:
        ValueError: for a place that is no folder, and for a run that is there already and not to be resumed, or was
            another one.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir = '{folder}' is a file; choose a folder")
    noted = folder / SETTINGS_FILE
    if noted.is_file() or _checkpoints(folder):
        if not resume:
            raise ValueError(
                f"output_dir = '{folder}' holds a distillation already; go on with it by resume=True, or choose "
                "another folder"
            )
        before = json.loads(noted.read_text(encoding="utf-8")) if noted.is_file() else {}
        now = json.loads(json.dumps(settings))
        for name, value in before.items():
            if value != now.get(name):
                raise ValueError(
                    f"{name} = {now.get(name)!r}: the distillation in '{folder}' has {value!r}; resume with that, or "
                    "choose another folder"
                )
    for path in _checkpoints(folder).values():
        if not (path / TRAINER_STATE).is_file():
            shutil.rmtree(path)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(noted, settings)


# Checks ------------------------------------------------------------------------------------------------------------


def _check_arguments(
    numbers: Mapping[str, Any],
    rates: Mapping[str, Any],
    choices: Mapping[str, tuple[Any, Sequence[Any]]],
    losses: Mapping[str, float],
    more: Mapping[str, Any],
) -> None:
    """
    Raises:
        ValueError: for a value that is not accepted; names it and what is.
    """
    for name, value in numbers.items():
        if not is_count(value):
            raise ValueError(f"{name} = {value!r}: give a whole number from 1 on")
    for name, value in rates.items():
        if not is_number(value):
            raise ValueError(f"{name} = {value!r}: give a positive number")
    for name, (value, known) in choices.items():
        if value not in known:
            raise ValueError(f"{name} = {value!r} is unknown; known: {', '.join(known)}")
    for name, weight in losses.items():
        if name not in LOSSES:
            raise ValueError(f"losses[{name!r}] is unknown; known parts: {', '.join(LOSSES)}")
        if not is_number(weight):
            raise ValueError(f"losses[{name!r}] = {weight!r}: give a positive weight, or leave the part out")
    if not losses:
        raise ValueError(f"losses is empty: name at least one of {', '.join(LOSSES)}")
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    for name, value in more.items():
        if name in OWN_ARGUMENTS:
            remedy = f"give {OWN_ARGUMENTS[name]} to distil" if OWN_ARGUMENTS[name] else "distil sets it; leave it out"
            raise ValueError(f"trainer_arguments[{name!r}] = {value!r}: {remedy}")
        if name not in known:
            raise ValueError(f"trainer_arguments[{name!r}] = {value!r}: TrainingArguments has no such field")


def _check_models(student: nn.Module, teacher: nn.Module | Provider, losses: Mapping[str, float]) -> None:
    """
    Raises:
        ValueError: for models that cannot be compared, or lack what a part of the loss compares.
    """
    if student is teacher:
        raise ValueError("student and teacher are one model; load the teacher a second time")
    models = {"student": student}
    if isinstance(teacher, nn.Module):
        models["teacher"] = teacher
        sizes = ["vocab_size", "hidden_size", "num_hidden_layers"]
        if "attention" in losses:
            sizes.append("num_attention_heads")
        for name in sizes:
            mine, theirs = getattr(student.config, name), getattr(teacher.config, name)
            if mine != theirs:
                raise ValueError(
                    f"{name}: the student's {mine} is not the teacher's {theirs}; distil a student that was converted "
                    "from this teacher"
                )
    for name, model in models.items():
        if "logits" in losses and not has_mlm_head(model):
            raise ValueError(
                f"losses['logits'] = {losses['logits']!r}: the {name}, a {type(model).__name__}, has no masked "
                "language model head; load it as …ForMaskedLM, or leave 'logits' out"
            )
        if "attention" in losses and not _holds_attention(model):
            raise ValueError(
                f"losses['attention'] = {losses['attention']!r}: the {name} has attn_implementation = "
                f"{model.config._attn_implementation!r}, which does not hold the attention weights; call "
                f"{name}.set_attn_implementation('eager'), or leave 'attention' out"
            )
