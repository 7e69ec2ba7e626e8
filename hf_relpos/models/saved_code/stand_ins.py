"""What the code of a saved model has in place of code of the same name that makes the package faster."""

from collections.abc import Hashable
from typing import Any

import torch

from ...attention.call import AttentionCall, Finish, unchanged
from ...attention.context import AttentionContext
from ...attention.formula import Terms


Backend = Any


class SharedTerms:
    """The terms of a layer."""

    def __init__(self, terms: Terms, signature: Hashable, context: AttentionContext, like: torch.Tensor):
        self.terms, self.signature, self.device = terms, signature, like.device


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
