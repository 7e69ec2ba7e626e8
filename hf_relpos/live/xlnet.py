"""XLNet as an encoder: one stream, attention in both directions, with or without memory (`mems`)."""

from typing import Any

import torch
from torch import nn
from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

from ..model.context import AttentionContext
from ..model.formula import Table, Terms, toeplitz_table
from .attention import attend_as_stock


class AcceleratedXLNetRelativeAttention(XLNetRelativeAttention):
    """XLNet's attention by terms."""

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
        """As stock; the two streams of the pretraining objective (`g`) are left to it."""
        if g is not None:
            return super().forward(h, g, attn_mask_h, attn_mask_g, r, seg_mat, mems, target_mapping, output_attentions)
        keys = torch.cat([mems, h], dim=0) if mems is not None and mems.dim() > 1 else h
        query = torch.einsum("ibh,hnd->bnid", h, self.q)
        key = torch.einsum("ibh,hnd->bnid", keys, self.k)
        value = torch.einsum("ibh,hnd->bnid", keys, self.v)
        context = AttentionContext(
            h.shape[0], keys.shape[0], start=keys.shape[0] - h.shape[0], device=h.device, dtype=query.dtype
        )
        visible = None
        if attn_mask_h is not None:
            visible = (attn_mask_h == 0).permute(2, 3, 0, 1)  # (B, 1, L, K)
            visible = None if visible.device.type == "cpu" and _hides_nothing(visible) else visible
        out, weights = attend_as_stock(
            self,
            query,
            key,
            value,
            self.terms(context, r, seg_mat),
            context,
            visible,
            self.dropout.p,
            output_attentions,
        )
        out = out.unflatten(-1, (self.n_head, -1)).transpose(0, 1)  # (L, B, H, d)
        result = (self.post_attention(h, out), None)
        return result if weights is None else (*result, weights.permute(2, 3, 0, 1))

    def terms(self, context: AttentionContext, r: torch.Tensor, seg_mat: torch.Tensor | None) -> Terms:
        """A, u and c, and the terms of the segments where there are token types.

        Args:
            r: (K + L, B or 1, D), of distances K, K − 1, …, 1 − L; the rows of a batch differ in dropout alone, and
                that of the first one is taken.
            seg_mat: (L, K, B, 2), one-hot: whether the token types differ; or None.
        """
        rows = torch.einsum("nD,Dhd->hnd", r[1:, 0].to(self.r.dtype), self.r)  # (H, N, d)
        A = [toeplitz_table(rows, context)]
        c = [toeplitz_table(torch.einsum("hd,hnd->hn", self.r_r_bias, rows), context)]
        if seg_mat is not None:
            differ = seg_mat[..., 1].permute(2, 0, 1).long()  # (B, L, K)
            segments = self.seg_embed.transpose(0, 1)  # (H, 2, d)
            A.append(Table(segments, row_of=lambda relation: relation, relation=differ))
            scalars = torch.einsum("hd,hnd->hn", self.r_s_bias, segments)
            c.append(Table(scalars, row_of=lambda relation: relation, relation=differ))
        return Terms(scale=self.scale, A=tuple(A), u=self.r_w_bias, c=tuple(c))


def _hides_nothing(visible: torch.Tensor) -> bool:
    return not torch.compiler.is_compiling() and bool(visible.all())


def other_uses(model: nn.Module) -> list[str]:
    """Why a model stays as it is."""
    config: Any = model.config
    reasons = []
    if config.attn_type != "bi":
        reasons.append(f"attn_type = {config.attn_type!r}: it attends to the left only")
    if config.bi_data:
        reasons.append("bi_data = True: half of a batch runs backwards")
    return reasons
