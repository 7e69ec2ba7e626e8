"""Which keys queries see: by rules about documents, windows and padding, and by masks that hide or add."""

import functools
import operator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False, kw_only=True)
class Visibility:
    """The rules by which queries see keys, from vectors of the K keys of B rows.

    Attributes:
        global_tokens: tokens that an attention window does not limit, by their index in a document.
        is_causal: whether queries see no later key.
        positions: (B, K), the positions from which distances in a window are computed, arbitrary for padding; None
            for indices.
        documents: (B, K), the number of each key's document, ascending; None for one document in each row.
        index_in_document: (B, K), the index (packed: position id) by which tokens are global; None for the index
            among the keys.
        is_token: boolean (B, K), False for padding; None if there is none, or it is not known.
    """

    global_tokens: tuple[int, ...] = (0,)
    is_causal: bool = False
    positions: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    index_in_document: torch.Tensor | None = None
    is_token: torch.Tensor | None = None

    def sees(
        self, row: torch.Tensor, query: torch.Tensor, key: torch.Tensor, window: int | None = None
    ) -> torch.Tensor:
        """Whether queries see keys by all of the rules, for index tensors that broadcast.

        Args:
            query: an index among the keys.
            window: the largest distance between query and key, unless one of them is a global token; None for any.
        """
        rules = [] if window is None else [self._is_near(row, query, key, window)]
        if self.is_causal:
            rules.append(key <= query)
        if self.documents is not None:
            rules.append(self.documents[row, query] == self.documents[row, key])
        if self.is_token is not None:
            rules.append(self.is_token[row, key])
        return functools.reduce(operator.and_, rules)

    def _is_near(self, row: torch.Tensor, query: torch.Tensor, key: torch.Tensor, window: int) -> torch.Tensor:
        positions, index = self.positions, self.index_in_document
        distances = query - key if positions is None else positions[row, query] - positions[row, key]
        near = distances.abs() <= window
        if index is not None:
            query, key = index[row, query], index[row, key]
        for token in self.global_tokens:
            near = near | (query == token) | (key == token)
        return near


def is_visible(mask: torch.Tensor) -> torch.Tensor:
    """Convert a boolean, integer or additive mask to a boolean one: True where a query may attend."""
    if mask.dtype == torch.bool:
        return mask
    return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask != 0


def finite(scores: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Raise scores below the smallest number of a type to it. The softmax of a row of -inf is NaN.

    The gradient of a score that is this number stays, as in Transformers; from PyTorch 2.14 on `clamp` drops it.
    """
    lowest = torch.finfo(dtype).min
    return scores.masked_fill(scores < lowest, lowest)
