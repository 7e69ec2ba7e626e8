"""The unpadded batch of the call that is running, for the parts of an encoder that take it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from ..attention.unpadding import UnpaddedBatch


class MismatchError(TypeError):
    """An encoder takes or gives something else than a level expects."""


@dataclass
class Running:
    """A batch, and what its encoder did with it.

    Attributes:
        is_used: whether the encoder asked for it.
    """

    batch: UnpaddedBatch
    is_used: bool = False

    def taken(self) -> UnpaddedBatch:
        """The batch, for whoever computes without its padding."""
        self.is_used = True
        return self.batch


_running: ContextVar[Running | None] = ContextVar("running", default=None)


@contextmanager
def running(batch: UnpaddedBatch) -> Iterator[Running]:
    """While the forward of an encoder runs, its parts find its batch by `current`."""
    found = Running(batch)
    token = _running.set(found)
    try:
        yield found
    finally:
        _running.reset(token)


def current() -> Running | None:
    """The batch of this thread's call; None where padding stays."""
    return _running.get()
