"""Reading rows of tokens with an encoder: batches, sentence vectors, and texts longer than a model reads.

A row is a list of token ids, `[CLS] … [SEP]`. What is computed for it does not depend on which rows share its batch.
Letters: B rows of a batch, L tokens of a row, D model size.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel


Row = Sequence[int]
# Called as progress(what, done, total) while something long runs.
Progress = Callable[[str, int, int], None]

POOLINGS = ("mean", "cls")
BATCH_TOKENS = 8192
# Eager attention holds several numbers for each pair of tokens and head, so it is pairs that fill memory in long rows
BATCH_PAIRS = 4 * 1024 * 1024


def check_pooling(pooling: str) -> None:
    """
    Raises:
        ValueError: for a pooling other than `mean` and `cls`.
    """
    if pooling not in POOLINGS:
        raise ValueError(f"pooling = {pooling!r} is unknown; use one of: {', '.join(map(repr, POOLINGS))}")


def encoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model that returns `last_hidden_state`: the model itself, or what carries its head."""
    return model.base_model


def has_masked_head(model: PreTrainedModel) -> bool:
    """Whether a model predicts a token at each place, from both sides."""
    return model.get_output_embeddings() is not None and not getattr(model.config, "is_decoder", False)


def _position_table(model: PreTrainedModel) -> nn.Embedding | None:
    """The table of absolute positions, if it is a plain one."""
    embeddings = getattr(encoder_of(model), "embeddings", None)
    table = getattr(embeddings, "position_embeddings", None)
    return table if isinstance(table, nn.Embedding) else None


def first_position(model: PreTrainedModel) -> int:
    """The position id of the first token: 0, and past the padding id in RoBERTa and those made after it."""
    table = _position_table(model)
    return 0 if table is None or table.padding_idx is None else table.padding_idx + 1


def readable_length(model: PreTrainedModel) -> int | None:
    """Tokens that a model reads at once, special ones included; None for a model without a limit.

    RoBERTa and those made after it start to count past the padding id, so that their table of 514 reads 512.
    """
    table = _position_table(model)
    if (
        table is not None and getattr(table, "out_of_range", "error") == "clip"
    ):  # ours, told to go on with its last row
        return None
    if table is not None:
        return table.num_embeddings - first_position(model)
    # ours: purely relative, unless a table of absolute positions is there
    if hasattr(model.config, "has_absolute_table") and not model.config.has_absolute_table:
        return None
    return getattr(model.config, "max_position_embeddings", None)


def rows_per_batch(length: int, batch_tokens: int = BATCH_TOKENS) -> int:
    """How many rows of that length are read together, at least one."""
    return max(1, min(batch_tokens // length, BATCH_PAIRS // length**2))


def batches(rows: Sequence[Row], batch_tokens: int = BATCH_TOKENS) -> Iterator[list[int]]:
    """Numbers of rows, all of them, by batch: rows of like length together, the longest first.

    The longest first: a batch that does not fit into memory fails at once.
    """
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
    at = 0
    while at < len(order):
        count = rows_per_batch(len(rows[order[at]]), batch_tokens)
        yield order[at : at + count]
        at += count


def pad(rows: Sequence[Row], model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, filled up on the right, and which tokens are not padding: (B, L) int64 and (B, L) bool, on its device."""
    length = max(map(len, rows))
    filler = getattr(model.config, "pad_token_id", None) or 0
    ids = torch.full((len(rows), length), filler)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.as_tensor(row)
        mask[number, : len(row)] = True
    return ids.to(model.device), mask.to(model.device)


@torch.inference_mode()
def hidden_states(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, position_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Last hidden states of one batch, (B, L, D) in float32 at least.

    Args:
        model: any with `last_hidden_state`, or with a head on top of such a one; its mode is left as it is.
        ids: (B, L).
        mask: (B, L), true for tokens that are not padding.
        position_ids: (B, L), or None for the model's own.

    Raises:
        ValueError: for hidden states of real tokens that are not finite.
    """
    extra = {} if position_ids is None else {"position_ids": position_ids}
    hidden = encoder_of(model)(input_ids=ids, attention_mask=mask.long(), **extra).last_hidden_state
    hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if not hidden[mask].isfinite().all():
        name = getattr(model.config, "name_or_path", "") or type(model).__name__
        raise ValueError(
            f"{name}: the hidden states are not finite (NaN or infinite), so nothing can be compared; check the "
            "weights, or load the model in float32"
        )
    return hidden


def pool(hidden: torch.Tensor, mask: torch.Tensor, pooling: str = "mean") -> torch.Tensor:
    """Sentence vectors, (B, D), of hidden states (B, L, D).

    Args:
        mask: (B, L), true for tokens that are not padding.
        pooling: `mean` over these tokens, special ones included, or `cls`, the first one.
    """
    check_pooling(pooling)
    if pooling == "cls":
        return hidden[:, 0]
    weights = mask[..., None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


def window_starts(length: int, room: int, stride: int) -> list[int]:
    """Where windows of `room` start that cover `length` tokens, `stride` apart; the last one ends with the text."""
    if length <= room:
        return [0]
    return [*range(0, length - room, stride), length - room]


def central_windows(starts: Sequence[int], length: int, room: int) -> torch.Tensor:
    """For each of `length` tokens the window in which it is farthest from the nearer end; of two alike the first."""
    places, first = torch.arange(length), torch.tensor(starts)
    last = first[:, None] + min(room, length) - 1
    return torch.minimum(places - first[:, None], last - places).argmax(0)


def windowed_hidden_states(
    model: PreTrainedModel,
    ids: Row,
    length: int | None = None,
    stride: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> torch.Tensor:
    """What a model with a limit says of a text past it, the reference past the limit of a teacher.

    The text is read in overlapping windows, each of which starts with the text's first token ([CLS]). Each token's
    state is taken from the window in which it is most central, that is, farthest from the nearer end of the window (of
    two alike, the first). The first token, which is in all of them, gets its mean. A text that fits into one window is
    read as it is. The text's [SEP] is in the last window only, as the student, too, reads it at the end only.

    Args:
        model: any with `last_hidden_state`.
        ids: one text, `[CLS] … [SEP]`, L tokens.
        length: tokens per window, [CLS] included; None for what the model reads.
        stride: tokens between the starts of two windows; None for half a window.

    Returns:
        (L, D), float32 at least.

    Raises:
        ValueError: for a window of fewer than three tokens or a stride that leaves tokens out.
    """
    length = length or readable_length(model) or len(ids)
    room = length - 1
    stride = length // 2 if stride is None else stride
    if length < 3 or not 1 <= stride <= room:
        raise ValueError(
            f"length = {length}, stride = {stride}: windows need three tokens at least, and a stride from 1 to "
            "length − 1, so that none is left out"
        )
    body = list(ids[1:])
    starts = window_starts(len(body), room, stride)
    rows = [[ids[0], *body[start : start + room]] for start in starts]
    states: list[torch.Tensor] = [None] * len(rows)
    for numbers in batches(rows, batch_tokens):
        for number, row in zip(numbers, hidden_states(model, *pad([rows[n] for n in numbers], model)), strict=True):
            states[number] = row[: len(rows[number])]
    places = torch.arange(len(body))
    chosen = central_windows(starts, len(body), room)
    out = torch.stack([row[0] for row in states]).mean(0, keepdim=True).repeat(len(ids), 1)
    for number, (start, row) in enumerate(zip(starts, states, strict=True)):
        mine = places[chosen == number]
        out[mine + 1] = row[mine - start + 1]
    return out


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether `forward` takes `position_ids`."""
    return "position_ids" in inspect.signature(encoder_of(model).forward).parameters


@dataclass(frozen=True)
class Encoder:
    """A model that turns texts into vectors.

    Attributes:
        model: any with `last_hidden_state`, in eval mode.
        tokenizer: its tokenizer.
        pooling: `mean` or `cls`.
        max_length: tokens read of a text, special ones included; None for what the model reads.
        batch_tokens: tokens per batch.
    """

    model: PreTrainedModel
    tokenizer: object
    pooling: str = "mean"
    max_length: int | None = None
    batch_tokens: int = BATCH_TOKENS

    def __post_init__(self) -> None:
        check_pooling(self.pooling)

    def limit(self, length: int | None = None) -> int | None:
        """`length`, `max_length` or what the model reads, the smallest of those that there are.

        Raises:
            ValueError: for a `length` that the model does not read.
        """
        readable = readable_length(self.model)
        if length is not None and readable is not None and length > readable:
            raise ValueError(
                f"max_length = {length}: {self.model.config.name_or_path or 'the model'} reads {readable} tokens; "
                "give that or less, or read in chunks"
            )
        return min((n for n in (length, self.max_length, readable) if n is not None), default=None)

    def tokenize(self, texts: Sequence[str], length: int | None = None) -> list[list[int]]:
        """Rows of at most `length` tokens, special ones included; None for all of a text, however long."""
        cut = {} if length is None else {"truncation": True, "max_length": length}
        rows = self.tokenizer(list(texts), add_special_tokens=True, verbose=False, **cut).input_ids
        return [row or [self.tokenizer.pad_token_id or 0] for row in rows]

    def encode(
        self, texts: Sequence[str], length: int | None = None, progress: Progress | None = None, what: str = "reading"
    ) -> torch.Tensor:
        """Sentence vectors, (texts, D) on the CPU, not normalised.

        Args:
            length: read this many tokens of a text at most.
        """
        return self.encode_rows(self.tokenize(texts, self.limit(length)), progress, what)

    def encode_rows(
        self, rows: Sequence[Row], progress: Progress | None = None, what: str = "reading"
    ) -> torch.Tensor:
        """Sentence vectors of rows of tokens, (rows, D) on the CPU, not normalised."""
        vectors: list[torch.Tensor] = [None] * len(rows)
        total, done = sum(map(len, rows)), 0
        for numbers in batches(rows, self.batch_tokens):
            ids, mask = pad([rows[number] for number in numbers], self.model)
            found = pool(hidden_states(self.model, ids, mask), mask, self.pooling).cpu()
            for number, vector in zip(numbers, found, strict=True):
                vectors[number] = vector
            done += int(mask.sum())
            if progress is not None:
                progress(what, done, total)
        return torch.stack(vectors)


def unknown_rate(tokenizer, texts: Sequence[str]) -> float:
    """Share of tokens that the tokenizer does not know ([UNK]), special ones aside; 0 for one that knows all bytes.

    A high one tells of text in another language or script than the model's. Languages that share its script hide.
    """
    if tokenizer.unk_token_id is None:
        return 0.0
    unknown = count = 0
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        unknown += sum(token == tokenizer.unk_token_id for token in ids)
        count += len(ids)
    return unknown / max(count, 1)
