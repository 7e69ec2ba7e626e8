"""Batches of windows for distillation."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..data.batching import pad_rows


# Number of length groups per factor of two; windows of one group share batches, so at most 19 % is padding.
PER_OCTAVE = 4


@dataclass(frozen=True)
class Window:
    """A window of tokens.

    Attributes:
        ids: token ids.
        types: token types; None for zeros.
    """

    ids: list[int]
    types: list[int] | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(eq=False)
class WindowBatches(torch.utils.data.IterableDataset[list[Window]]):
    """An endless stream of batches of windows of similar length, bounded by their number of tokens.

    The windows are shuffled in each epoch. A window goes into the open batch of its length
    group. A batch is complete when no further window fits: at most `batch_tokens` tokens with padding, or one longer
    window. A batch that is incomplete after an epoch is filled up in the next, unless its group made no other. The
    same arguments give the same batches.

    Attributes:
        windows: a list or map-style dataset of token ids, or of mappings with `input_ids`, and with `token_type_ids`
            where these are not all 0.
        batch_tokens: tokens of a batch.
        vocab_size: number of token ids.
        max_length: maximum length of a window; None for no limit.
        seed: seed of the shuffling.
        token_types: number of token types of both models; with 0 or 1, all token types must be 0.
    """

    windows: Sequence[Any]
    batch_tokens: int
    vocab_size: int
    max_length: int | None
    seed: int
    token_types: int = 2

    def check(self) -> None:
        """Check the windows before training: all of a list, the first of a dataset.

        Raises:
            ValueError: if there are none, and for a window that is empty or too long, or does not fit the models.
        """
        if not len(self.windows):
            raise ValueError("windows is empty: give at least one window of token ids")
        for number in range(len(self.windows) if isinstance(self.windows, list | tuple) else 1):
            self._window(number, self.windows[number])

    def __iter__(self) -> Iterator[list[Window]]:
        batches = self._batches()
        worker = torch.utils.data.get_worker_info()
        if worker is not None:  # a data loader reads from its workers in turn
            batches = itertools.islice(batches, worker.id, None, worker.num_workers)
        return batches

    def _batches(self) -> Iterator[list[Window]]:
        waiting: dict[int, list[Window]] = {}
        for epoch in itertools.count():
            complete = set()
            for number in np.random.default_rng((self.seed, epoch)).permutation(len(self.windows)).tolist():
                window = self._window(number, self.windows[number])
                group = math.ceil(PER_OCTAVE * math.log2(len(window)))
                batch = waiting.setdefault(group, [])
                if batch and max(len(window), *map(len, batch)) * (len(batch) + 1) > self.batch_tokens:
                    yield batch
                    complete.add(group)
                    batch = waiting[group] = []
                batch.append(window)
            for group in sorted(waiting.keys() - complete):
                if waiting[group]:
                    yield waiting.pop(group)

    def _window(self, number: int, given: Any) -> Window:
        """Check a window and return it.

        Raises:
            ValueError: for a window that is empty or too long, ids outside the vocabulary, and invalid token types.
        """
        ids = _listed(given["input_ids"] if isinstance(given, Mapping) else given)
        types = given.get("token_type_ids") if isinstance(given, Mapping) else None
        if not ids:
            raise ValueError(f"windows[{number}] is empty; leave empty windows out")
        if self.max_length is not None and len(ids) > self.max_length:
            raise ValueError(
                f"windows[{number}] has {len(ids)} tokens, but the limit of the models is {self.max_length}; cut it"
            )
        if not (isinstance(ids[0], int) and 0 <= min(ids) and max(ids) < self.vocab_size):
            wrong = f"windows[{number}] has values that are not token ids from 0 to {self.vocab_size - 1}"
            raise ValueError(f"{wrong}; cut windows with the teacher's tokenizer")
        types = [] if types is None else _listed(types)
        if not any(types):
            return Window(ids)
        if len(types) != len(ids):
            raise ValueError(
                f"windows[{number}] has {len(ids)} input_ids, but {len(types)} token_type_ids; give one for each token"
            )
        if not (all(isinstance(number, int) for number in types) and 0 <= min(types) <= max(types) < self.token_types):
            known = f"0 to {self.token_types - 1}" if self.token_types > 1 else "only 0"
            raise ValueError(
                f"windows[{number}] has token_type_ids that the models do not both have ({known}); leave them out"
            )
        return Window(ids, types)


def _listed(numbers: Any) -> list[int]:
    """Convert a tensor, an array or an iterable to a list."""
    return numbers.tolist() if hasattr(numbers, "tolist") else list(numbers)


def collate(batches: Sequence[Sequence[Window]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Join batches of windows (one, unless the Trainer has several devices) into padded tensors (B, L).

    Returns:
        `input_ids`, `attention_mask` with 1 for real tokens, and `token_type_ids` if some are not 0.
    """
    windows = [window for batch in batches for window in batch]
    ids, mask = pad_rows([window.ids for window in windows], pad_token_id)
    batch = {"input_ids": ids, "attention_mask": mask.long()}
    if any(window.types is not None for window in windows):
        batch["token_type_ids"], _ = pad_rows([window.types or [0] * len(window) for window in windows], 0)
    return batch
