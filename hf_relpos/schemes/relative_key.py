"""`relative_key` and `relative_key_query`, as in Transformers ≤ 4.57.

The first is Shaw et al. (arXiv 1803.02155) without the value term, the second is method 4 of Huang et al. (arXiv
2009.13658, §3.4). Both index one table E of 2P − 1 rows by i − j + P − 1, so that A_r = E[P − 1 − r];
P = `max_position_embeddings`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from ..attention.context import AttentionContext
from ..attention.formula import Table, Terms
from ..attention.tracing import is_traced
from .scheme import Option, Scheme, choice, is_count


class RelativeKey(Scheme, name="relative_key"):
    """score = s · (q_i·k_j + q_i·A_r). Heads share the table; each layer has its own.

    Parameters: weight (2P − 1, d), the name and shape of Transformers' `distance_embedding`.
    """

    summary = "A vector per distance, multiplied by the query"
    source = "transformers 4.57.6 models/bert; Shaw et al. 2018, arXiv 1803.02155, eq. 4 without values"
    out_of_range = ("clip", "zero")
    extrapolation_claim = "as `shaw`, with a row for every trained distance"
    original = "transformers 4.57.6, models/bert/modeling_bert.py"
    options = {
        "clip": Option(
            default=None,
            help="largest distance with an embedding of its own, 1 … max_position_embeddings − 1; None: all of the "
            "table",
            accepts=lambda value: value is None or is_count(value),
        ),
        "scaling": choice(
            "bert",
            "albert",
            "esm",
            help="which terms 1/√d divides: all (bert), the content only (albert), all but the key side (esm)",
        ),
    }

    def __init__(self, config: Any, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, options)
        self.max_distance = config.max_position_embeddings - 1
        self.clip = self.settings["clip"] if self.settings["clip"] is not None else self.max_distance
        self.weight = nn.Parameter(torch.empty(2 * self.max_distance + 1, self.head_size))

    @classmethod
    def resolve(cls, options: Mapping[str, Any] | None, config: Any) -> dict[str, Any]:
        resolved = super().resolve(options, config)
        max_distance = config.max_position_embeddings - 1
        if resolved["clip"] is not None and resolved["clip"] > max_distance:
            raise ValueError(
                f"position_options['clip'] = {resolved['clip']} reaches past the table, whose largest distance is "
                f"{max_distance} (max_position_embeddings − 1); choose a smaller one, or None for all of the table"
            )
        return resolved

    def init_weights(self, std: float) -> None:
        init.normal_(self.weight, mean=0.0, std=std)

    def rows(self, context: AttentionContext) -> torch.Tensor:
        """Return the rows that offsets of this call use, in ascending order of r, (1, N, d).

        A row of zeros comes last if distances without a term can occur.
        """
        largest = self.largest_distance(context)
        offsets = torch.arange(-largest, largest + 1, device=self.weight.device)
        rows = self.weight[self.max_distance - offsets][None]
        return nn.functional.pad(rows, (0, 0, 0, 1)) if self.has_zero_row(context) else rows

    def largest_distance(self, context: AttentionContext) -> int:
        """Return the largest distance that can occur in this call and has a row of its own."""
        return min(self.clip, max(context.high, -context.low))

    def has_zero_row(self, context: AttentionContext) -> bool:
        """Whether distances without a term can occur in this call. In a graph they can: it serves any length."""
        if self.settings["out_of_range"] != "zero":
            return False
        return is_traced() or max(context.high, -context.low) > self.clip

    def table(self, rows: torch.Tensor, context: AttentionContext) -> Table:
        """Return the table of these rows."""
        largest = self.largest_distance(context)
        if self.has_zero_row(context):
            return Table(rows, row_of=lambda r: torch.where(r.abs() > largest, 2 * largest + 1, r + largest))
        return Table(rows, row_of=lambda r: r.clamp(-largest, largest) + largest)

    def query_side(self, rows: torch.Tensor, context: AttentionContext) -> Table:
        """Return the table A."""
        return self.table(rows / self.scale if self.settings["scaling"] == "albert" else rows, context)

    def forward(self, context: AttentionContext) -> Terms:
        return Terms(query_table=(self.query_side(self.rows(context), context),))


class RelativeKeyQuery(RelativeKey, name="relative_key_query"):
    """score = s · (q_i·k_j + q_i·A_r + k_j·A_r): the same table on both sides."""

    summary = "A vector per distance, multiplied by query and key"
    source = "transformers 4.57.6 models/bert; Huang et al. 2020, arXiv 2009.13658, method 4"
    extrapolation_claim = "robust to inputs longer than trained (question answering)"

    def forward(self, context: AttentionContext) -> Terms:
        rows = self.rows(context)
        key_rows = rows if self.settings["scaling"] == "bert" else rows / self.scale
        return Terms(query_table=(self.query_side(rows, context),), key_table=(self.table(key_rows, context),))
