"""Classifiers of documents that are read in pieces, on models whose lower layers may be frozen."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hf_relpos.evaluation.inspection import model_max_length
from hf_relpos.evaluation.loading import load_model

from .strategies import LONG, Strategy


class PrecomputedEmbeddings(nn.Module):
    """Replaces the embeddings of a model whose inputs are hidden states."""

    def forward(self, inputs_embeds: torch.Tensor, **_: Any) -> torch.Tensor:
        return inputs_embeds


class PrecomputedEncoder(nn.Module):
    """Replaces an encoder all of which is frozen; its inputs are the encoder's outputs."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config

    def forward(self, inputs_embeds: torch.Tensor, **_: Any) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=inputs_embeds)


def split_layers(model: PreTrainedModel, below: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The embeddings with the first `below` layers; the other layers, with hidden states as `inputs_embeds`."""
    lower, upper = copy.deepcopy(model), copy.deepcopy(model)
    lower.encoder.layer, upper.encoder.layer = lower.encoder.layer[:below], upper.encoder.layer[below:]
    upper.embeddings = PrecomputedEmbeddings()
    if not below and hasattr(lower.config, "memory_length"):
        lower.config.memory_length = 0  # a memory is of the inputs of layers
    for half in (lower, upper):
        half.config.num_hidden_layers = len(half.encoder.layer)
        for index, layer in enumerate(half.encoder.layer):
            layer.attention.self.layer_idx = index  # of its part of the memory
    return lower, upper


def split_frozen(model: PreTrainedModel, train_layers: int | str) -> tuple[PreTrainedModel | None, nn.Module]:
    """The frozen part of a model, None without one, and the part that is trained.

    Args:
        train_layers: how many of the upper layers are trained, or `all`, then with the embeddings.
    """
    if train_layers == "all":
        return None, model
    if train_layers == 0:
        config = copy.deepcopy(model.config)
        config.memory_length = 0
        return model, PrecomputedEncoder(config)
    return split_layers(model, len(model.encoder.layer) - train_layers)


def load_for_strategy(
    strategy: Strategy, folder: str | Path, option: str, special_tokens: int, window: int = 0
) -> PreTrainedModel:
    """The model of a strategy, without pooler, with its memory length.

    Args:
        option: the option that names the folder.
        special_tokens: their number in each piece.
        window: attention_window of a model for long rows that has none; 0 for none.

    Raises:
        ValueError: for a model that is missing or not like BERT, cannot read as many tokens, or has no memory.
    """
    model = load_model(folder, masked=False).base_model
    if not hasattr(model, "encoder") or not hasattr(model.encoder, "layer"):
        raise ValueError(f"{option} {folder}: a {type(model).__name__} has no encoder.layer as BERT has; give a BERT")
    model.pooler = None
    if strategy.length <= special_tokens:
        raise ValueError(
            f"--strategies {strategy}: {special_tokens} of its tokens are special ones; give a larger number"
        )
    limit = model_max_length(model)
    if limit is not None and strategy.length > limit:
        raise ValueError(
            f"--strategies {strategy}: {option} {folder} reads {limit} tokens at most; give {strategy.kind}-{limit}, "
            "or read with a model that is converted to relative positions"
        )
    if strategy.memory:
        if not hasattr(model.config, "memory_length"):
            raise ValueError(
                f"--strategies {strategy}: {option} {folder} is a stock {type(model).__name__} without a memory; give "
                "the folder of a conversion"
            )
        model.config.memory_length = strategy.memory
        try:
            model.config.validate_settings()
        except ValueError as error:
            raise ValueError(f"--strategies {strategy}: {option} {folder}: {error}") from None
    elif hasattr(model.config, "memory_length"):
        model.config.memory_length = 0
        if strategy.model == LONG and window and model.config.attention_window is None:
            model.config.attention_window = window
    return model


class DocumentClassifier(nn.Module):
    """An encoder that reads a document piece by piece, the mean of all hidden states, and a head."""

    def __init__(self, encoder: nn.Module, labels: int, dropout: float):
        super().__init__()
        self.encoder = encoder
        self.has_memory = bool(getattr(encoder.config, "memory_length", 0))
        size = encoder.config.hidden_size
        self.head = nn.Sequential(
            nn.Dropout(dropout), nn.Linear(size, size), nn.Tanh(), nn.Dropout(dropout), nn.Linear(size, labels)
        )

    def forward(
        self, labels: torch.Tensor, order: torch.Tensor, steps: Sequence[dict[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Loss and logits (B, labels).

        Args:
            labels: (B,).
            order: (B,), row of each document in the steps.
            steps: the pieces, documents with more of them first: `input_ids` (R, L) or `inputs_embeds` (R, L, D),
                and `attention_mask` (R, L) where some are shorter. R falls as documents end.
        """
        total, count, memory = 0.0, 0, None
        for step in steps:
            arguments = {}
            rows = next(iter(step.values())).shape[0]
            if memory is not None:
                arguments["memory"] = memory if len(memory.mask) == rows else memory.select(torch.arange(rows))
            outputs = self.encoder(**step, **arguments)
            memory = outputs.memory if self.has_memory else None
            states, mask = outputs.last_hidden_state, step.get("attention_mask")
            mask = states.new_ones(states.shape[:2]) if mask is None else mask.to(states.dtype)
            ended = len(labels) - rows
            total = total + nn.functional.pad((states * mask[..., None]).sum(1), (0, 0, 0, ended))
            count = count + nn.functional.pad(mask.sum(1), (0, ended))
        logits = self.head(total / count[:, None])[order]
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class PieceDataset(torch.utils.data.Dataset):
    """Documents as the Trainer takes them: pieces of token ids (L,), or of hidden states (L, D)."""

    def __init__(self, pieces: list[list[torch.Tensor]], labels: list[int]):
        self.pieces, self.labels = pieces, labels

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Any]:
        # the Trainer takes lengths from `input_ids`
        return {
            "input_ids": range(sum(map(len, self.pieces[index]))),
            "pieces": self.pieces[index],
            "label": self.labels[index],
        }


def collate(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The arguments of a DocumentClassifier."""
    order = sorted(range(len(documents)), key=lambda index: -len(documents[index]["pieces"]))
    rows = [documents[index]["pieces"] for index in order]
    steps = []
    for number in range(len(rows[0])):
        pieces = [row[number] for row in rows if len(row) > number]
        key = "inputs_embeds" if pieces[0].is_floating_point() else "input_ids"
        step = {key: pad_sequence(pieces, batch_first=True)}
        if len({len(piece) for piece in pieces}) > 1:
            ones = [torch.ones(len(piece), dtype=torch.long) for piece in pieces]
            step["attention_mask"] = pad_sequence(ones, batch_first=True)
        steps.append(step)
    return {
        "labels": torch.tensor([document["label"] for document in documents]),
        "order": torch.tensor(order).argsort(),
        "steps": steps,
    }
