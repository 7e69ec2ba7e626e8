"""`Trainer` for distillation: targets instead of labels, and a separate learning rate for the tables."""

from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from ..attention.products import fast_bmm
from .distillation_losses import TargetFunction, Targets, compute_outputs, loss_parts


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
        targets: TargetFunction,
        losses: Mapping[str, float],
        temperature: float = 1.0,
        table_learning_rate: float | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            args: positional arguments of Trainer.
            targets: maps a batch from `collate` to Targets.
            losses: weights by key of `LOSSES`.
            temperature: temperature of the logits.
            table_learning_rate: for parameters named `distance_embedding`; None for `args.learning_rate`.
            kwargs: keyword arguments of Trainer.
        """
        super().__init__(*args, **kwargs)
        self.targets = targets
        self.losses = dict(losses)
        self.temperature = temperature
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
        parts = loss_parts(outputs, targets, inputs["attention_mask"], names, self.temperature)
        for column, name in enumerate(self.losses):
            if name in parts:
                self._sums[:, column] += torch.stack([parts[name].detach(), parts[name].new_ones(())])
        loss = reduce(torch.add, [self.losses[name] * value for name, value in parts.items()])
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As Trainer's, with fast products of the attention, forward and backward."""
        with fast_bmm(self._sums):
            return super().training_step(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As Trainer's, with the parts of the loss."""
        if "loss" in logs:
            totals, counts = self.accelerator.reduce(self._sums, reduction="sum").tolist()
            sums = zip(self.losses, totals, counts, strict=True)
            logs = {**logs, **{f"loss_{name}": total / count for name, total, count in sums if count}}
            self._sums.zero_()
        super().log(logs, start_time)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer of the arguments, with two groups: the tables, and all other trained parameters."""
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

    def _save_rng_state(self, output_dir: str) -> None:
        """As Trainer's, but waits for all processes, since the first one then writes the checkpoint's last file."""
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()
