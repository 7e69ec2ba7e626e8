"""The batch of the call that is running, for the parts of an encoder that attend to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from ..attention.unpadding import RowGroup, UnpaddedBatch
from ..host.tracing import is_traced


class MismatchError(TypeError):
    """An encoder takes or gives something else than a level expects."""


def padded_batch(real: torch.Tensor) -> UnpaddedBatch:
    """Make the batch of a call that keeps its padding: one group with all L positions of all B rows.

    States are (B, L, D) then. The group's `visible` hides the keys that are padding, and its `positions` are None.

    Args:
        real: (B, L), True for tokens.
    """
    rows, length = real.shape
    visible = None if bool(real.all()) else real[:, None, None, :]
    group = RowGroup(slice(None), torch.arange(rows), length, None, visible)
    return UnpaddedBatch(torch.arange(real.numel()), rows, length, (group,))


@dataclass
class Running:
    """A batch, and what its encoder did with it.

    Attributes:
        is_used: whether the encoder asked for it.
    """

    batch: UnpaddedBatch
    is_used: bool = False


_running: ContextVar[Running | None] = ContextVar("running", default=None)


@contextmanager
def running(batch: UnpaddedBatch) -> Iterator[Running]:
    """While the forward of an encoder runs, its parts find its batch by `take_batch`."""
    found = Running(batch)
    token = _running.set(found)
    try:
        yield found
    finally:
        _running.reset(token)


def take_batch() -> UnpaddedBatch | None:
    """The batch of this thread's call; None for a call that Transformers' own code computes."""
    found = None if is_traced() else _running.get()
    if found is None:
        return None
    found.is_used = True
    return found.batch
