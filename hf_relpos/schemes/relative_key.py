"""`relative_key` and `relative_key_query`, as in Transformers ≤ 4.57.

The first is Shaw et al. (arXiv 1803.02155) without the value term, the second is method 4 of Huang et al. (arXiv
2009.13658, §3.4). Both index one table E of 2P − 1 rows by i − j + P − 1, so that A_r = E[P − 1 − r];
P = `max_position_embeddings`.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..attention.context import AttentionContext
from ..attention.formula import Table, Terms
from .scheme import Scheme, choice, clipped_table, integer


class RelativeKey(Scheme, name="relative_key"):
    """score = s · (q_i·k_j + q_i·A_r). Heads share the table; each layer has its own.

    Parameters: weight (2P − 1, d), the name and shape of Transformers' `distance_embedding`.

    On longer inputs, by its source: as `shaw`, with a row for every trained distance.
    """

    summary = "A vector per distance, multiplied by the query"
    source = "transformers 4.57.6 models/bert; Shaw et al. 2018, arXiv 1803.02155, eq. 4 without values"
    out_of_range = ("clip", "zero")
    original = "transformers 4.57.6, models/bert/modeling_bert.py"
    options = {
        "clip": integer(
            None,
            "largest distance with an embedding of its own, at most max_position_embeddings − 1",
            none="all of the table",
        ),
        "scaling": choice(
            "bert",
            "albert",
            "esm",
            help="which terms 1/√d divides: all (bert), the content only (albert), all but the key side (esm)",
        ),
    }

    def build(self, config: Any) -> None:
        self.max_distance = config.max_position_embeddings - 1
        self.clip = self.settings["clip"] if self.settings["clip"] is not None else self.max_distance
        self.weight = nn.Parameter(torch.empty(2 * self.max_distance + 1, self.head_size))

    @classmethod
    def complete(cls, settings: dict[str, Any], config: Any) -> None:
        max_distance = config.max_position_embeddings - 1
        if settings["clip"] is not None and settings["clip"] > max_distance:
            raise ValueError(
                f"position_options['clip'] = {settings['clip']} reaches past the table, whose largest distance is "
                f"{max_distance} (max_position_embeddings − 1); choose a smaller one, or None for all of the table"
            )

    def table(self, context: AttentionContext, scaled: bool) -> Table:
        """Return the table A of the distances of this call; if its scores are not to be divided by √d, √d · A."""
        largest = min(self.clip, max(context.high, -context.low))
        rows = self.weight[self.max_distance - largest : self.max_distance + largest + 1]
        rows, out_of_range = rows if scaled else rows / self.scale, self.settings["out_of_range"]
        return clipped_table(rows, -largest, largest, out_of_range, descending=True)

    def forward(self, context: AttentionContext) -> Terms:
        return Terms(query_table=(self.table(context, scaled=self.settings["scaling"] != "albert"),))


class RelativeKeyQuery(RelativeKey, name="relative_key_query"):
    """score = s · (q_i·k_j + q_i·A_r + k_j·A_r): the same table on both sides.

    On longer inputs, by its source: robust to inputs longer than trained (question answering).
    """

    summary = "A vector per distance, multiplied by query and key"
    source = "transformers 4.57.6 models/bert; Huang et al. 2020, arXiv 2009.13658, method 4"

    def forward(self, context: AttentionContext) -> Terms:
        key_side = self.table(context, scaled=self.settings["scaling"] == "bert")
        return replace(super().forward(context), key_table=(key_side,))
