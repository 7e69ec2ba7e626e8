"""Labelled edges (Shaw, Uszkoreit and Vaswani, arXiv 1803.02155, §3.1), as used by RAT-SQL (arXiv 1911.04942)."""

from typing import Any

import torch
from torch import nn

from ..attention.context import AttentionContext
from ..attention.formula import Table, Terms
from ..host.tracing import may_read
from .scheme import Option, Scheme, SharedScheme, choice, integer


class LabelCheck(SharedScheme):
    """Check of the labels, once per forward. It has no parameters and shares nothing."""

    def forward(self, context: AttentionContext) -> None:
        """Check that every label has a row.

        Raises:
            ValueError: for labels without a row. In graphs and on devices the lookup raises an error of its own.
        """
        labels, count = context.tokens.relation_ids, self.settings["num_relations"]
        if labels is None or not may_read(labels.device) or labels.numel() == 0:
            return
        smallest, largest = (int(label) for label in labels.aminmax())
        if smallest < 0 or largest >= count:
            raise ValueError(
                f"relation_ids has labels from {smallest} to {largest}; with position_options['num_relations'] = "
                f"{count} they go from 0 to {count - 1}"
            )


class Relation(Scheme, name="relation"):
    """score = s · q_i·(k_j + a^K_e), out_i = Σ_j α_ij (v_j + a^V_e), e = e(i, j) the label of the edge from i to j.

    The labels are an input of the model's `forward`: `relation_ids` (B, L, L) of any integer type. They can stand for
    syntax, coreference or links of a schema. With e = clip(j − i, ±k) + k this is Shaw's scheme. Distances have no
    effect unless labels encode them. Labels belong to the tokens of one call, so decoding with a cache is impossible.

    Parameters: key and value, each (num_relations, d), or (H, num_relations, d) with `per_head`; per layer. The row of
    `none_label` is not used.
    """

    summary = "A vector per edge of a graph that you give"
    source = "Shaw et al. 2018, arXiv 1803.02155, §3.1, eq. 3-4 with the edges of a graph"
    out_of_range = ("extrapolate",)
    required_inputs = frozenset({"relation_ids"})
    shared_class = LabelCheck
    options = {
        "num_relations": integer(2, "how many labels there are, 0 … num_relations − 1"),
        "none_label": Option(
            default=0,
            help="the label of pairs without an edge, whose vectors are zero; a label, or None if all have vectors",
            accepts=lambda value: value is None or (type(value) is int and value >= 0),
        ),
        "per_head": choice(False, True, help="tables of their own for each head"),
        "values": choice(True, False, help="a table for the values too"),
    }

    def build(self, config: Any) -> None:
        heads = (self.num_heads,) if self.settings["per_head"] else ()
        shape = (*heads, self.settings["num_relations"], self.head_size)
        self.key = nn.Parameter(torch.empty(shape))
        if self.settings["values"]:
            self.value = nn.Parameter(torch.empty(shape))

    @classmethod
    def complete(cls, settings: dict[str, Any], config: Any) -> None:
        count, none = settings["num_relations"], settings["none_label"]
        if none is not None and count <= max(none, 1):
            raise ValueError(
                f"position_options['num_relations'] = {count} with none_label = {none}: labels go from 0 to "
                "num_relations − 1, and one besides none_label must be left"
            )

    def table(self, rows: torch.Tensor, labels: torch.Tensor) -> Table:
        """Return a table with one row per label; the row of `none_label` is zero."""
        rows = rows.clone()
        if self.settings["none_label"] is not None:
            rows[..., self.settings["none_label"], :] = 0.0
        return Table(rows if rows.dim() == 3 else rows[None], row_of=lambda label: label.long(), relation=labels)

    def forward(self, context: AttentionContext) -> Terms:
        labels = context.tokens.relation_ids
        length, key_length = context.query_length, context.key_length
        if labels is None or labels.dim() != 3 or tuple(labels.shape[1:]) != (length, key_length):
            shape = None if labels is None else tuple(labels.shape)
            raise ValueError(
                f"relation_ids has shape {shape}; {length} tokens that attend to {key_length} need "
                f"(batch, {length}, {key_length}), and with a cache there is no way to give them: use_cache=False"
            )
        V = (self.table(self.value, labels),) if self.settings["values"] else ()
        return Terms(query_table=(self.table(self.key, labels),), value_table=V)
