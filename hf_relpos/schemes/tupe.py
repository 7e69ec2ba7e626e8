"""TUPE (Ke, He and Liu, arXiv 2006.15595, §3): untied absolute positions, with [CLS] untied from them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..attention.context import AttentionContext
from ..attention.formula import Terms
from ..host.tracing import is_traced
from .encodings import t5_bucket
from .scheme import Scheme, SharedScheme, choice


BUCKETS, MAX_DISTANCE = 32, 128
# rows of the relative table that no bucket uses: bidirectional bucketing never gives BUCKETS // 2
FROM_CLS, TO_CLS = BUCKETS // 2, BUCKETS


class TupePositions(SharedScheme):
    """θ of all heads, and b for variant "R".

    Parameters: pos.weight (P + 1, D); pos_ln; pos_q_linear and pos_k_linear, D to D with bias; variant "R"
    relative_attention_bias.weight (33, H). Names and shapes are those of the released code.
    """

    def __init__(self, config: Any, settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        self.positions = config.max_position_embeddings
        self.scale = Tupe.scale_of(settings, config)
        size = config.hidden_size
        self.pos = nn.Embedding(self.positions + 1, size)
        self.pos_ln = nn.LayerNorm(size)
        self.pos_q_linear = nn.Linear(size, size)
        self.pos_k_linear = nn.Linear(size, size)
        relative = settings["variant"] == "R"
        self.relative_attention_bias = nn.Embedding(BUCKETS + 1, self.num_heads) if relative else None

    def project(self, linear: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        """Project the embeddings of row numbers (…, N) to vectors (…, H, N, d)."""
        vectors = linear(self.pos_ln(self.pos(rows)))
        return vectors.unflatten(-1, (self.num_heads, -1)).transpose(-2, -3)

    def forward(self, context: AttentionContext) -> torch.Tensor:
        """Return θ + b, (1 or B, H, L, K).

        Raises:
            ValueError: for negative positions, which have no row. Compiled or traced code does not check this.
        """
        device = context.device
        if context.positions is not None and not is_traced() and not context.positions.of_keys.is_meta:
            lowest = int(context.positions.of_keys.min())
            if lowest < 0:
                raise ValueError(
                    f"position_ids has numbers from {lowest} on; the scheme 'tupe' has rows for positions from 0 on: "
                    "give no negative ones"
                )
        i, j = context.query_positions(device), context.key_positions(device)  # (L,) and (K,), or both (B, L)
        query = self.project(self.pos_q_linear, i.clamp(max=self.positions - 1) + 1)
        key = self.project(self.pos_k_linear, j.clamp(max=self.positions - 1) + 1)
        theta = self.scale * torch.matmul(query, key.transpose(-1, -2))  # (…, H, L, K)
        i, j = i[..., None, :, None], j[..., None, None, :]
        if self.settings["out_of_range"] == "zero":
            theta = theta * ((i < self.positions) & (j < self.positions))
        rows = torch.arange(2, device=device)
        own = self.project(self.pos_q_linear, rows) * self.project(self.pos_k_linear, rows)
        from_cls, to_cls = (self.scale * own.sum(-1)).T[..., None, None]  # (H, 1, 1) each
        theta = torch.where(i == 0, from_cls, torch.where(j == 0, to_cls, theta))
        if self.relative_attention_bias is not None:
            bucket = t5_bucket(j - i, BUCKETS, MAX_DISTANCE)
            bucket = torch.where(i == 0, FROM_CLS, torch.where(j == 0, TO_CLS, bucket))  # (…, 1, L, K)
            theta = theta + self.relative_attention_bias(bucket).squeeze(-4).movedim(-1, -3)
        return theta if theta.dim() == 4 else theta[None]


class Tupe(Scheme, name="tupe"):
    """score = s · q_i·k_j + θ_ij [+ b_bucket(r)], s = 1/√(2d), θ_ij = s · (p_i U_Q)·(p_j U_K).

    Scores of [CLS], the token at position 0, have two values of their own: θ_i0 = s · (p' U_Q)(p' U_K) for all i, and
    θ_0j = s · (p'' U_Q)(p'' U_K) for all j, which takes precedence at (0, 0). p'' is row 0 of the table `pos`, p_i is
    row i + 1, and p' is row 1, the same as p_0, as in the released code. Variant "R" adds the buckets of T5, unscaled,
    with two more rows for [CLS].

    θ and b belong to the encoder (`TupePositions`) and are computed once for all layers. In packed rows, every
    document has its own [CLS].
    """

    summary = "Scores of positions, separate from those of words"
    source = "Ke et al. 2021, arXiv 2006.15595, §3; guolinke/TUPE transformer_sentence_encoder.py"
    out_of_range = ("clip", "zero")
    zero_init_is_identity = False  # because of the scale
    uses_absolute_positions = True
    shared_class = TupePositions
    options = {"variant": choice("A", "R", help="absolute positions alone, or with T5's relative bias")}

    @classmethod
    def scale_of(cls, settings: Mapping[str, Any], config: Any) -> float:
        return (2 * config.hidden_size // config.num_attention_heads) ** -0.5

    def forward(self, context: AttentionContext) -> Terms:
        return Terms(scale=self.scale, dense=(context.layer.shared,))
