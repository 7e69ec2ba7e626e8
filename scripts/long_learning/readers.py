"""Readers: how an article is cut into rows, which tokens are a passage's, and an encoder in two halves."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_relpos.data.batching import batch_indices
from hf_relpos.evaluation import Encoder, hidden_states
from hf_relpos.evaluation.encoder import pad_batch

from .data import Article


Row = list[int]
TRAINED = 512  # tokens that the source reads
WINDOW = 256
BATCH_TOKENS = 2048
NO_PASSAGE = -1


@dataclass(frozen=True)
class Layout:
    """An article as rows of tokens.

    Attributes:
        rows: `[CLS] … [SEP]` each.
        passages: for each token of each row the number of its passage, or `NO_PASSAGE`.
    """

    rows: list[Row]
    passages: list[Row]

    @property
    def passage_of_token(self) -> torch.Tensor:
        """(T,), of all tokens of all rows."""
        return torch.tensor([number for row in self.passages for number in row])

    @property
    def row_of_token(self) -> torch.Tensor:
        """(T,)."""
        return torch.repeat_interleave(torch.arange(len(self.rows)), torch.tensor([len(row) for row in self.rows]))


def in_rows(article: Article, tokenizer: PreTrainedTokenizerBase, size: int) -> Layout:
    """The article in rows of at most `size` tokens, its passages one after the other."""
    tokens = [token for passage in article.passages for token in passage]
    owners = [number for number, passage in enumerate(article.passages) for _ in passage]
    starts = range(0, len(tokens), size - 2)
    return Layout(
        [[tokenizer.cls_token_id, *tokens[start : start + size - 2], tokenizer.sep_token_id] for start in starts],
        [[NO_PASSAGE, *owners[start : start + size - 2], NO_PASSAGE] for start in starts],
    )


def by_passage(article: Article, tokenizer: PreTrainedTokenizerBase, titled: bool) -> Layout:
    """Each passage in a row of its own, all tokens of which are its; its first 512 where there are more."""
    title = tokenizer(f"{article.title}: ", add_special_tokens=False).input_ids if titled else []
    rows = [
        [tokenizer.cls_token_id, *[*title, *passage][: TRAINED - 2], tokenizer.sep_token_id]
        for passage in article.passages
    ]
    return Layout(rows, [[number] * len(row) for number, row in enumerate(rows)])


@dataclass(frozen=True)
class Reader:
    """A way to read an article.

    Attributes:
        label: in the tables, with a place for what a passage is.
        layout: its rows, from article, tokenizer and tokens that are read.
        converted: by the converted model, in a window.
    """

    label: str
    layout: Callable[[Article, PreTrainedTokenizerBase, int], Layout]
    converted: bool = False


READERS = {
    "converted": Reader("converted, at once", in_rows, converted=True),
    "pieces": Reader("source, pieces of 512", lambda article, tokenizer, _: in_rows(article, tokenizer, TRAINED)),
    "alone": Reader(
        "source, {unit}s alone", lambda article, tokenizer, _: by_passage(article, tokenizer, titled=False)
    ),
    "titled": Reader(
        "source, {unit}s after the title",
        lambda article, tokenizer, _: by_passage(article, tokenizer, titled=True),
    ),
}


@dataclass(frozen=True)
class Vectors:
    """Of one article: `document` (D,), the mean of all tokens; `rows` (R, D) and `passages` (P, D)."""

    document: torch.Tensor
    rows: torch.Tensor
    passages: torch.Tensor


class Given(nn.Module):
    """In place of embeddings: the states that are given."""

    def forward(self, inputs_embeds: torch.Tensor, **_: object) -> torch.Tensor:
        return inputs_embeds


class Halves:
    """An encoder with mean pooling whose embeddings and lower layers stay as they are, so that they run but once.

    Dropout is off in both halves.
    """

    def __init__(self, encoder: Encoder, frozen: int):
        """
        Args:
            encoder: is not changed.
            frozen: layers that are not trained.

        Raises:
            ValueError: for another pooling, and as many layers as there are.
        """
        layers = encoder.model.config.num_hidden_layers
        if encoder.pooling != "mean" or frozen >= layers:
            raise ValueError(
                f"pooling = {encoder.pooling!r}, frozen = {frozen} of {layers} layers: give mean and fewer"
            )
        self.tokenizer = encoder.tokenizer
        self.lower, self.upper = copy.deepcopy(encoder.model).eval(), copy.deepcopy(encoder.model).eval()
        self.lower.encoder.layer = self.lower.encoder.layer[:frozen]
        self.upper.encoder.layer = self.upper.encoder.layer[frozen:]
        self.upper.embeddings = Given()

    def below(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """States of the lower half, (L, D) of each row."""
        found: list[torch.Tensor] = [torch.empty(0)] * len(rows)
        for indices in batch_indices(rows, BATCH_TOKENS):
            hidden = hidden_states(self.lower, *pad_batch([rows[index] for index in indices], self.lower))
            for index, states in zip(indices, hidden, strict=True):
                found[index] = states[: len(rows[index])].clone()
        return found

    def above(self, below: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """States of the upper half, (L, D) of each row; with gradients, where they are on."""
        found: list[torch.Tensor] = [torch.empty(0)] * len(below)
        for indices in batch_indices(below, BATCH_TOKENS):
            states = [below[index] for index in indices]
            mask = pad_sequence([torch.ones(len(each), dtype=torch.long) for each in states], batch_first=True)
            hidden = self.upper(inputs_embeds=pad_sequence(states, batch_first=True), attention_mask=mask)
            for index, row in zip(indices, hidden.last_hidden_state, strict=True):
                found[index] = row[: len(below[index])]
        return found

    def article(self, layout: Layout, below: torch.Tensor) -> Vectors:
        """Vectors of an article.

        Args:
            below: (T, D), states of the lower half of all its rows.
        """
        hidden = torch.cat(self.above(below.split([len(row) for row in layout.rows])))
        return Vectors(hidden.mean(0), means(hidden, layout.row_of_token), means(hidden, layout.passage_of_token))

    def texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Vectors of short texts, (n, D)."""
        rows = self.tokenizer(list(texts), truncation=True, max_length=TRAINED).input_ids
        return torch.stack([states.mean(0) for states in self.above(self.below(rows))])

    def save(self, folder: Path) -> None:
        """The model in one piece, and its tokenizer."""
        model: PreTrainedModel = copy.deepcopy(self.lower)
        model.encoder.layer.extend(self.upper.encoder.layer)
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def means(hidden: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The mean of each group's states, (groups, D).

    Args:
        hidden: (T, D).
        groups: (T,), the number of each token's group, or `NO_PASSAGE`; no group is empty.
    """
    inside = groups >= 0
    hidden, groups = hidden[inside], groups[inside]
    sums = hidden.new_zeros(int(groups.max()) + 1, hidden.shape[1]).index_add(0, groups, hidden)
    return sums / torch.bincount(groups)[:, None]
