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
        row = given if isinstance(given, Mapping) else {"input_ids": given}
        ids, types = (_listed(row.get(name)) for name in ("input_ids", "token_type_ids"))
        limit = math.inf if self.max_length is None else self.max_length
        if not ids:
            problem = "is empty; leave it out"
        elif len(ids) > limit:
            problem = f"has {len(ids)} tokens, but the limit of the models is {limit}; cut it"
        elif not _are_numbers(ids, self.vocab_size):
            problem = f"has values that are not token ids from 0 to {self.vocab_size - 1}; use the teacher's tokenizer"
        elif not any(types):
            return Window(ids)
        elif len(types) != len(ids):
            problem = f"has {len(ids)} input_ids, but {len(types)} token_type_ids; give one for each token"
        elif not _are_numbers(types, self.token_types):
            known = f"0 to {self.token_types - 1}" if self.token_types > 1 else "only 0"
            problem = f"has token_type_ids that the models do not both have ({known}); leave them out"
        else:
            return Window(ids, types)
        raise ValueError(f"windows[{number}] {problem}")


def _listed(numbers: Any) -> list[int]:
    """Convert a tensor, an array, an iterable or None to a list."""
    return numbers.tolist() if hasattr(numbers, "tolist") else list(numbers or ())


def _are_numbers(values: list[int], count: int) -> bool:
    """Whether all values are integers from 0 to `count` - 1."""
    return all(isinstance(value, int) and 0 <= value < count for value in values)


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
