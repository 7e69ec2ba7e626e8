"""What the code of a saved model has in place of code of the same name that makes the package faster.

Of definitions for one feature, models without it have these, or the error of `made_without`.
"""

from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any

import torch

from ...attention.call import AttentionCall, Finish, unchanged
from ...attention.context import AttentionContext
from ...attention.formula import Terms
from .remote_code import made_without


Backend = Any
UnpaddedBatch = Any
INSTALLED: Any = SimpleNamespace(bundle=None, capabilities=None, checks=None, families=lambda: None)
WITH_MEMORY: dict[Any, Any] = {}


class SharedTerms:
    """The terms of a layer."""

    def __init__(self, terms: Terms, signature: Hashable, context: AttentionContext, like: torch.Tensor):
        self.terms, self.signature, self.device = terms, signature, like.device


class SegmentMemory:
    """The memory of earlier segments, which this code was made without."""

    def __init__(self, *arguments: Any) -> None:
        raise made_without("memory_length")


def carries_memory(head: Any) -> Any:
    """Leave a head as it is."""
    return head


def project(projection: Any, rows: torch.Tensor) -> Any:
    """Project rows of a table."""
    return projection(rows)


def rewritten(call: AttentionCall) -> tuple[AttentionCall, Finish]:
    """Leave a call as it is."""
    return call, unchanged


def unpadded_batch(*arguments: Any) -> None:
    """Keep the padding."""


def window_mask(*arguments: Any) -> None:
    """Leave the window to the mask of all pairs."""


def position_values(probabilities: torch.Tensor, terms: Terms, context: AttentionContext) -> None:
    """Compute nothing: the scheme has no value-side term."""
    if terms.value_table:
        raise made_without("position_embedding_type")


def allowed(terms: Terms, context: AttentionContext, mask: torch.Tensor | None) -> None:
    """Hide nothing: the scheme hides no key."""
    if terms.allow:
        raise made_without("position_embedding_type")
