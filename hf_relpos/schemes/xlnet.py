"""XLNet (Yang et al., arXiv 1906.08237, §2.4-2.5): Transformer-XL's form with relative segments."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..attention.context import AttentionContext
from ..attention.formula import Table, Terms
from .scheme import choice
from .transformer_xl import TransformerXL


class XLNet(TransformerXL, name="xlnet"):
    """score = s · [(q_i + u)·k_j + (q_i + v)·W R_{i−j} + (q_i + w)·g_same or different].

    R is the sinusoid of dimension D in concatenated layout. g depends on whether i and j have the same token type. In
    the letters of the formula, A_r = W R_{−r} and c_r = v·A_r; the second relation has the same with g and w. The
    paper's u, v and w are `r_w_bias`, `r_r_bias` and `r_s_bias`, and its W_{k,R} is `r`.

    Without token types, all tokens are in one segment and the term cancels in the softmax. Token types of cached keys
    are not known: a query counts all of them as its own segment.

    Parameters: r (D, H, d); r_w_bias, r_r_bias (H, d); with `segments` r_s_bias (H, d) and seg_embed (2, H, d), row 0
    for the same segment; per layer. Names and shapes are those of the published checkpoints.

    On longer inputs, by its source: as `transformer_xl`.
    """

    summary = "Projected waves of the distance, and terms of segments"
    source = "Yang et al. 2019, arXiv 1906.08237, §2.4-2.5; zihangdai/xlnet modeling.py"
    options = {
        "clamp_len": TransformerXL.options["clamp_len"],
        "segments": choice(True, False, help="the term for the same and for different token types"),
    }

    def build(self, config: Any) -> None:
        super().build(config)
        if self.settings["segments"]:
            self.r_s_bias = nn.Parameter(torch.empty(self.num_heads, self.head_size))
            self.seg_embed = nn.Parameter(torch.empty(2, self.num_heads, self.head_size))

    def add_projection(self, size: int) -> None:
        self.r = nn.Parameter(torch.empty(size, self.num_heads, self.head_size))

    def project_waves(self, sinusoid: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nD,Dhd->nhd", sinusoid, self.r)

    def different(self, context: AttentionContext) -> torch.Tensor:
        """Return 1 where token types of i and j are known to differ, else 0: (B, L, K), or (L, K) without types."""
        device = self.r.device
        types = context.tokens.token_type_ids
        if types is None:
            return torch.zeros(context.query_length, context.key_length, dtype=torch.long, device=device)
        index = torch.arange(context.key_length, device=device) - context.start  # among the tokens of this call
        is_known = (index >= 0) & (index < context.query_length)
        of_keys = types[:, index.clamp(0, context.query_length - 1)]
        return ((types[:, :, None] != of_keys[:, None, :]) & is_known).long()

    def forward(self, context: AttentionContext) -> Terms:
        terms = super().forward(context)
        if not self.settings["segments"]:
            return terms
        relation = self.different(context)
        segments = self.seg_embed.transpose(0, 1).clone()  # (H, 2, d)
        A = Table(segments, row_of=lambda r: r, relation=relation)
        scalars = torch.einsum("hd,hnd->hn", self.r_s_bias, segments)
        c = Table(scalars, row_of=lambda r: r, relation=relation)
        return replace(terms, query_table=(*terms.query_table, A), scaled_bias=(*terms.scaled_bias, c))
