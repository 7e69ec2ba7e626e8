"""Toy data, and one training run with the stock Trainer, in this process or in several."""

import os
from pathlib import Path

import torch
from oracles import tiny_config
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from hf_relpos import (
    RelPosBertForMaskedLM,
    RelPosBertForSequenceClassification,
    RelPosBertForTokenClassification,
    RelPosBertLMHeadModel,
)


LENGTH, MASK = 10, 1
HEADS = {
    "order": RelPosBertForSequenceClassification,
    "kind": RelPosBertForTokenClassification,
    "echo": RelPosBertForMaskedLM,
    "next": RelPosBertLMHeadModel,
}


class Toy(Dataset):
    """One task per head; all but `kind` need the order of words.

    order: whether word 2 stands before word 3.
    kind: for each word, whether it is in the upper half of the vocabulary; the first one does not count.
    echo: a masked word equals the ones two places to its left and right.
    next: every word of the same rows, from those before it.
    """

    def __init__(self, task: str, count: int = 64):
        generator = torch.Generator().manual_seed(5)
        self.examples = []
        for _ in range(count):
            ids = torch.randint(4, 20, (LENGTH,), generator=generator)
            if task == "order":
                places = torch.randperm(LENGTH, generator=generator)[:2]
                ids[places] = torch.tensor([2, 3])
                labels = (places[0] < places[1]).long()
            elif task == "kind":
                labels = (ids >= 12).long()
                labels[0] = -100
            elif task == "next":
                ids = ids[:2].repeat(LENGTH // 2)
                labels = ids
            else:
                ids = ids[:2].repeat(LENGTH // 2)
                hidden = torch.randperm(LENGTH, generator=generator)[:2]
                labels = torch.full((LENGTH,), -100)
                labels[hidden] = ids[hidden]
                ids[hidden] = MASK
            self.examples.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        return self.examples[index]


class Losses(TrainerCallback):
    """The loss of every step, as the Trainer logs it."""

    def __init__(self):
        self.values = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.values.append(float(logs["loss"]))


def make_model(task: str, scheme: str, dropout: float = 0.0):
    """A tiny model, the same for the same arguments."""
    set_seed(0)
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return HEADS[task](tiny_config(scheme, vocab_size=20, is_decoder=task == "next", **rates))


def train(
    model, task: str, folder: Path, resume: Path | None = None, more_callbacks: tuple | list = (), **arguments
) -> tuple[list[float], Trainer]:
    """Train with the stock Trainer on CPU.

    Args:
        folder: for checkpoints.
        resume: checkpoint to go on from.
        more_callbacks: beside the one that collects the losses.
        arguments: of `TrainingArguments`, beside the defaults here or in place of them.

    Returns:
        Loss of each step, and the trainer.
    """
    losses = Losses()
    defaults = {"max_steps": 30, "learning_rate": 5e-3, "lr_scheduler_type": "constant", "logging_steps": 1, "seed": 3}
    defaults |= {"per_device_train_batch_size": 8, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    defaults |= {"use_cpu": True, "ddp_backend": "gloo" if "LOCAL_RANK" in os.environ else None}
    trainer = Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(folder), **{**defaults, **arguments}),
        train_dataset=Toy(task),
        eval_dataset=Toy(task, count=16),
        callbacks=[losses, *more_callbacks],
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return losses.values, trainer
