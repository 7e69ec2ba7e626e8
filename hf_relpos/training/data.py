"""Batches of windows for distillation."""

import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

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


class WindowBatches(torch.utils.data.IterableDataset[list[Window]]):
    """An endless stream of batches of windows of similar length, bounded by their number of tokens.

    A list is shuffled in each epoch; an iterable keeps its order. A window goes into the open batch of its length
    group. A batch is complete when no further window fits: at most `batch_tokens` tokens with padding, or one longer
    window. A batch that is incomplete after an epoch is filled up in the next, unless its group made no other. The
    same arguments give the same batches, which resumption relies on.
    """

    def __init__(
        self,
        windows: Iterable[Any],
        batch_tokens: int,
        vocab_size: int,
        max_length: int | None,
        seed: int,
        token_types: int = 2,
    ) -> None:
        """
        Args:
            windows: a list or map-style dataset, or an iterable that can be iterated over again, of token ids or of
                mappings with `input_ids`, and with `token_type_ids` where these are not all 0.
            batch_tokens: tokens of a batch.
            vocab_size: number of token ids.
            max_length: maximum length of a window; None for no limit.
            seed: seed of the shuffling.
            token_types: number of token types of both models; with 0 or 1, all token types must be 0.
        """
        self.token_types = token_types
        self.windows = windows
        self.batch_tokens = batch_tokens
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.seed = seed

    def fingerprint(self) -> str | None:
        """Check the windows before training: all of a list, the first of another iterable.

        Returns:
            Number and checksum of the windows of a list; None for other iterables.

        Raises:
            ValueError: if there are no windows, and as `_window`.
        """
        if isinstance(self.windows, Iterator):  # a window read here would be missing later
            return None
        is_list = isinstance(self.windows, list | tuple)
        count = checksum = 0
        for number, window in enumerate(self.windows if is_list else _first(self.windows)):
            count += 1
            own = self._window(number, window)
            for numbers in (own.ids, own.types or ()):
                checksum = zlib.crc32(np.array(numbers, dtype="<i8").tobytes(), checksum)
        if not count:
            raise ValueError("windows is empty: give at least one window of token ids")
        return f"{count} windows, CRC {checksum:08x}" if is_list else None

    def __iter__(self) -> Iterator[list[Window]]:
        batches = self._batches()
        worker = torch.utils.data.get_worker_info()
        if worker is not None:  # a data loader reads from its workers in turn
            batches = itertools.islice(batches, worker.id, None, worker.num_workers)
        return batches

    def _batches(self) -> Iterator[list[Window]]:
        waiting: dict[int, list[Window]] = {}
        seen = 0
        for epoch in itertools.count():
            before = seen
            complete = set()
            for number, given in self._epoch(epoch):
                window = self._window(number, given)
                seen += 1
                group = math.ceil(PER_OCTAVE * math.log2(len(window)))
                batch = waiting.setdefault(group, [])
                if batch and max(len(window), *map(len, batch)) * (len(batch) + 1) > self.batch_tokens:
                    yield batch
                    complete.add(group)
                    batch = waiting[group] = []
                batch.append(window)
            if seen == before:
                raise ValueError(
                    f"windows ended after {seen}, before the last step: an iterator is read once only. Give a list, a "
                    "dataset or another iterable that starts again, more text, or fewer steps"
                )
            for group in sorted(waiting.keys() - complete):
                if waiting[group]:
                    yield waiting.pop(group)

    def _epoch(self, epoch: int) -> Iterator[tuple[int, Any]]:
        if not _indexed(self.windows):
            yield from enumerate(self.windows)
            return
        for number in np.random.default_rng((self.seed, epoch)).permutation(len(self.windows)).tolist():
            yield number, self.windows[number]

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
                f"windows[{number}] has {len(ids)} tokens, and at most {self.max_length} can be compared; cut the "
                "windows"
            )
        if not (isinstance(ids[0], int) and 0 <= min(ids) and max(ids) < self.vocab_size):
            raise ValueError(
                f"windows[{number}] holds something else than token ids from 0 to {self.vocab_size - 1}; make the "
                "windows with the teacher's tokenizer"
            )
        types = [] if types is None else _listed(types)
        if not any(types):
            return Window(ids)
        if len(types) != len(ids):
            raise ValueError(
                f"windows[{number}] has {len(ids)} input_ids and {len(types)} token_type_ids; give both for each token"
            )
        if not (all(isinstance(number, int) for number in types) and 0 <= min(types) <= max(types) < self.token_types):
            known = f"from 0 to {self.token_types - 1}" if self.token_types > 1 else "0 alone"
            raise ValueError(
                f"windows[{number}] has other token_type_ids than student and teacher both read, {known}; leave them "
                "out, or make them with the teacher's tokenizer"
            )
        return Window(ids, types)


def _listed(numbers: Any) -> list[int]:
    """Convert a tensor, an array or an iterable to a list."""
    return numbers.tolist() if hasattr(numbers, "tolist") else list(numbers)


def _first(windows: Iterable[Any]) -> list[Any]:
    """The first window, or an empty list."""
    if _indexed(windows):
        return [windows[0]] if len(windows) else []
    return list(itertools.islice(windows, 1))


def _indexed(windows: Iterable[Any]) -> TypeGuard[Sequence[Any]]:
    """Whether windows are a list or a map-style dataset."""
    return hasattr(windows, "__len__") and hasattr(windows, "__getitem__")


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
