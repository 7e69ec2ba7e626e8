"""Music Transformer (Huang et al., arXiv 1809.04281, §3.4), causal and two-sided, as in tensor2tensor."""

from typing import Any

import torch
from torch import nn

from ..attention.context import AttentionContext
from ..attention.formula import Table, Terms
from .scheme import Scheme, choice, clipped_table, integer


class Music(Scheme, name="music"):
    """score = s · q_i·(k_j + E_r) for |r| < m. Keys further away have no term, while Shaw clips their distance.

    The paper is causal: its table has m rows, the last one for the token itself, and keys to the right have no term.
    tensor2tensor also has a two-sided table, 2m − 1 rows in ascending order of r, for models that see both sides. With
    `values`, a second table is added to the values, as in Shaw.

    Parameters: key_relative_embeddings and value_relative_embeddings, each (H, m or 2m − 1, d), or (m or 2m − 1, d)
    without `per_head`; per layer. Names, shapes and initialisation are tensor2tensor's.

    On longer inputs, by its source: generates pieces longer than those it was trained on (causal).
    """

    summary = "A vector per head and distance, multiplied by the query"
    source = (
        "Huang et al. 2018, arXiv 1809.04281, §3.4; tensor2tensor dot_product_self_attention_relative_v2 and "
        "dot_product_unmasked_self_attention_relative_v2"
    )
    out_of_range = ("zero", "clip")
    options = {
        "max_relative_position": integer(None, "m, distances below it have a term", none="max_position_embeddings"),
        "per_head": choice(True, False, help="a table for each head (False is heads_share_relative_embedding)"),
        "values": choice(False, True, help="a table for the values too (add_relative_to_values)"),
        "causal": choice(None, True, False, help="the table that looks left only; None: in decoders"),
    }

    def build(self, config: Any) -> None:
        self.max_distance = (self.settings["max_relative_position"] or config.max_position_embeddings) - 1
        causal = self.settings["causal"]
        self.causal = config.is_decoder if causal is None else causal
        heads = (self.num_heads,) if self.settings["per_head"] else ()
        shape = (*heads, self.max_distance * (1 if self.causal else 2) + 1, self.head_size)
        self.key_relative_embeddings = nn.Parameter(torch.empty(shape))
        if self.settings["values"]:
            self.value_relative_embeddings = nn.Parameter(torch.empty(shape))

    def init_weights(self, std: float) -> None:
        super().init_weights(self.head_size**-0.5)

    def table(self, rows: torch.Tensor) -> Table:
        """Return the table of the keys to both sides; with `causal` those to the right have a row of zeros."""
        high = 1 if self.causal else self.max_distance
        rows = nn.functional.pad(rows, (0, 0, 0, 1)) if self.causal else rows
        return clipped_table(rows, -self.max_distance, high, self.settings["out_of_range"])

    def forward(self, context: AttentionContext) -> Terms:
        V = (self.table(self.value_relative_embeddings),) if self.settings["values"] else ()
        return Terms(query_table=(self.table(self.key_relative_embeddings),), value_table=V)
