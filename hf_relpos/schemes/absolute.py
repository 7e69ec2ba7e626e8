"""Learned absolute positions, as in BERT (Devlin et al., arXiv 1810.04805). They add nothing inside attention."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .scheme import Scheme, look_up


class LearnedPositions(nn.Embedding):
    """BERT's table of absolute positions, (P, D).

    Args:
        out_of_range: "error" or "clip": how positions from P on are treated.
    """

    def __init__(self, num_positions: int, dim: int, out_of_range: str) -> None:
        super().__init__(num_positions, dim)
        self.out_of_range = out_of_range

    def check_length(self, total: int) -> None:
        """Check that the table covers a row of `total` tokens.

        Raises:
            ValueError: if total > P, unless `out_of_range` is "clip".
        """
        if self.out_of_range == "error" and total > self.num_embeddings:
            raise ValueError(
                f"the input has {total} tokens, and absolute positions end at max_position_embeddings = "
                f"{self.num_embeddings}; truncate it, or convert the model to a purely relative scheme"
            )

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Look up the rows of positions, (…, L) to (…, L, D)."""
        if self.out_of_range == "clip":
            position_ids = position_ids.clamp(max=self.num_embeddings - 1)
        return look_up(super().forward, position_ids, "position_ids", "max_position_embeddings", self.num_embeddings)


class Absolute(Scheme, name="absolute"):
    """BERT's own positions, the baseline: x_i = LayerNorm(word + type + p_i), with one table (P, D) at the input.

    On longer inputs, by its source: limited to P tokens; `clip` only avoids the error.
    """

    summary = "A vector per position, added to the words, as in BERT"
    source = "Devlin et al. 2018, arXiv 1810.04805"
    out_of_range = ("error", "clip")
    original = "BertModel of the installed transformers"
    learned_input_table = True

    @classmethod
    def input_module(cls, config: Any, settings: Mapping[str, Any]) -> nn.Module | None:
        return LearnedPositions(config.max_position_embeddings, config.input_size, settings["out_of_range"])
