"""The unpadded batch of the call that is running, for the parts of an encoder that take it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from ..attention.tracing import is_traced
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
    """The batch of this thread's call, for a part that computes without its padding; None where padding stays."""
    found = None if is_traced() else _running.get()
    if found is None:
        return None
    found.is_used = True
    return found.batch
