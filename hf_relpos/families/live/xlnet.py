"""Accelerated XLNet as an encoder: one stream, attention in both directions, with or without memory (`mems`)."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

from ...attention.context import AttentionContext
from ...attention.formula import Terms, toeplitz_table
from .attention import attend_as_stock, is_worthwhile


class AcceleratedXLNetRelativeAttention(XLNetRelativeAttention):
    """XLNet's attention with our backends."""

    def forward(
        self,
        h: torch.Tensor,
        g: torch.Tensor | None,
        attn_mask_h: torch.Tensor | None,
        attn_mask_g: torch.Tensor | None,
        r: torch.Tensor,
        seg_mat: torch.Tensor | None,
        mems: torch.Tensor | None = None,
        target_mapping: torch.Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor | None, ...]:
        """As stock, whose code runs for short inputs and for the two streams of the pretraining objective (`g`)."""
        keys = torch.cat([mems, h], dim=0) if mems is not None and mems.dim() > 1 else h
        (length, batch), key_length = h.shape[:2], keys.shape[0]
        if g is not None or not is_worthwhile(self, length, key_length, batch, self.n_head):
            return super().forward(h, g, attn_mask_h, attn_mask_g, r, seg_mat, mems, target_mapping, output_attentions)
        query = torch.einsum("ibh,hnd->bnid", h, self.q)
        key = torch.einsum("ibh,hnd->bnid", keys, self.k)
        value = torch.einsum("ibh,hnd->bnid", keys, self.v)
        context = AttentionContext(length, key_length, key_length - length, device=h.device, dtype=query.dtype)
        visible = None
        if attn_mask_h is not None:
            visible = (attn_mask_h == 0).permute(2, 3, 0, 1)  # (B, 1, L, K)
            visible = None if visible.device.type == "cpu" and bool(visible.all()) else visible
        out, weights = attend_as_stock(
            self,
            query,
            key,
            value,
            self.terms(context, query, r, seg_mat),
            context,
            visible,
            self.dropout.p,
            output_attentions,
        )
        out = out.unflatten(-1, (self.n_head, -1)).transpose(0, 1)  # (L, B, H, d)
        result = (self.post_attention(h, out), None)
        return result if weights is None else (*result, weights.permute(2, 3, 0, 1))

    def terms(
        self, context: AttentionContext, query: torch.Tensor, r: torch.Tensor, seg_mat: torch.Tensor | None
    ) -> Terms:
        """A, u and c, and a dense bias if there are token types.

        The dense bias is the difference of the segment terms (q_i + w)·s_0 and (q_i + w)·s_1, for pairs of different
        types: a term that is equal for all keys of a query cancels in the softmax.

        Args:
            query: (B, H, L, d).
            r: (K + L, B or 1, D), for distances K, K − 1, …, 1 − L. The rows of a batch differ in dropout only; the
                first row is used.
            seg_mat: (L, K, B, 2), one-hot: whether the token types differ; or None.
        """
        rows = torch.einsum("nD,Dhd->hnd", r[1:, 0].to(self.r.dtype), self.r)  # (H, N, d)
        scalars = torch.einsum("hd,hnd->hn", self.r_r_bias, rows)
        terms = Terms(
            scale=self.scale,
            query_table=(toeplitz_table(rows, context),),
            content_bias=self.r_w_bias,
            scaled_bias=(toeplitz_table(scalars, context),),
        )
        if seg_mat is None:
            return terms
        step = (self.seg_embed[1] - self.seg_embed[0])[..., None]  # (H, d, 1)
        by_query = self.scale * torch.matmul(query + self.r_s_bias[:, None], step)  # (B, H, L, 1)
        differ = seg_mat[..., 1].permute(2, 0, 1)[:, None]  # (B, 1, L, K)
        return replace(terms, dense=(by_query * differ.to(by_query.dtype),))


def other_uses(model: nn.Module) -> list[str]:
    """Reasons to skip a model."""
    config: Any = model.config
    reasons = []
    if config.attn_type != "bi":
        reasons.append(f"attn_type = {config.attn_type!r}: it attends to the left only")
    if config.bi_data:
        reasons.append("bi_data = True: half of a batch runs backwards")
    return reasons
