"""The batch of the call that is running, for the parts of an encoder that attend to it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from ..attention.context import moved
from ..attention.unpadding import RowGroup, UnpaddedBatch
from ..host.tracing import is_traced


class MismatchError(TypeError):
    """An encoder takes or gives something else than a level expects."""


@dataclass(frozen=True)
class PaddedBatch:
    """A batch whose padding stays, with the interface of an `UnpaddedBatch`: one group of all rows, states (B, L, D).

    Attributes:
        groups: the group, whose `visible` hides the keys that are padding.
    """

    groups: tuple[RowGroup, ...]

    @classmethod
    def of(cls, real: torch.Tensor) -> "PaddedBatch":
        """From a mask (B, L), True for real tokens."""
        rows, length = real.shape
        visible = None if bool(real.all()) else real[:, None, None, :]
        return cls((RowGroup(slice(None), torch.arange(rows), length, None, visible),))

    def to(self, device: torch.device) -> "PaddedBatch":
        """The batch on a device, as of `UnpaddedBatch`."""
        on_device: PaddedBatch = moved(self, device)
        return on_device

    def by_group(self, attend: Callable[..., torch.Tensor], *vectors: torch.Tensor) -> torch.Tensor:
        """Compute attention of the group, (B, L, D).

        Args:
            attend: from a group and its vectors to its output.
            vectors: of the batch, each (B, L, E).
        """
        return attend(self.groups[0], *vectors)


Batch = UnpaddedBatch | PaddedBatch


@dataclass
class Running:
    """A batch, and what its encoder did with it.

    Attributes:
        is_used: whether the encoder asked for it.
    """

    batch: Batch
    is_used: bool = False


_running: ContextVar[Running | None] = ContextVar("running", default=None)


@contextmanager
def running(batch: Batch) -> Iterator[Running]:
    """While the forward of an encoder runs, its parts find its batch by `take_batch`."""
    found = Running(batch)
    token = _running.set(found)
    try:
        yield found
    finally:
        _running.reset(token)


def take_batch() -> Batch | None:
    """The batch of this thread's call; None for a call that Transformers' own code computes."""
    found = None if is_traced() else _running.get()
    if found is None:
        return None
    found.is_used = True
    return found.batch
