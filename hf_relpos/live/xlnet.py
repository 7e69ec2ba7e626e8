"""Accelerated XLNet as an encoder: one stream, attention in both directions, with or without memory (`mems`)."""

import functools
import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..attention.context import AttentionContext
from ..attention.cpu_gemm import linear
from ..attention.formula import Terms, toeplitz_table
from ..attention.unpadding import RowGroup, UnpaddedBatch
from ..host.live import XLNetModel, XLNetModelOutput, XLNetRelativeAttention
from .attention import attend_as_stock, offsets_of, prefer_backend, rate_of, split_heads
from .batch import take_batch
from .foreign import is_stock


ARGUMENTS = tuple(inspect.signature(XLNetModel.forward).parameters)[1:]


class AcceleratedXLNetModel(XLNetModel):
    """`XLNetModel` without padding. Its tokenizer pads on the left."""

    @functools.wraps(XLNetModel.forward)  # callers look at its signature
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As stock."""
        batch = take_batch()
        if batch is None:
            return super().forward(*args, **kwargs)
        given = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        vectors: Any = given.get("inputs_embeds")
        tokens: Any = given.get("input_ids")
        states = self.word_embedding(tokens) if vectors is None else vectors
        states = self.dropout(states)
        longest = batch.groups[0].length
        distances = self.relative_positional_encoding(longest, longest, bsz=1, device=states.device)
        distances = self.dropout(distances)
        segments = None
        if given.get("token_type_ids") is not None:
            kinds = given["token_type_ids"][..., None]
            types = kinds.unique()
            segments = (kinds == types).to(self.dtype) if len(types) > 1 else None  # (1, T, S)
        for layer in self.layer:
            # layers treat (1, T, D) as any (L, B, D)
            states = layer(states, None, batch, None, distances, segments)[0]
        return XLNetModelOutput(last_hidden_state=self.dropout(states))


# `save_pretrained` of a model by itself writes this name as the architecture.
AcceleratedXLNetModel.__name__ = XLNetModel.__name__


class AcceleratedXLNetRelativeAttention(XLNetRelativeAttention):
    """XLNet's attention with our backends."""

    def forward(
        self,
        h: torch.Tensor,
        g: torch.Tensor | None,
        attn_mask_h: torch.Tensor | UnpaddedBatch | None,
        attn_mask_g: torch.Tensor | None,
        r: torch.Tensor,
        seg_mat: torch.Tensor | None,
        mems: torch.Tensor | None = None,
        target_mapping: torch.Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor | None, ...]:
        """As stock, whose code runs for short inputs and for the two streams of the pretraining objective (`g`)."""
        if isinstance(attn_mask_h, UnpaddedBatch):
            return self.add_to(h, self.attend_unpadded(h, attn_mask_h, r, seg_mat)), None
        keys = torch.cat([mems, h], dim=0) if mems is not None and mems.dim() > 1 else h
        (length, batch), key_length = h.shape[:2], keys.shape[0]
        long = prefer_backend(self, length, key_length, batch, self.n_head)
        if g is not None or not long or not is_stock(self):
            return super().forward(h, g, attn_mask_h, attn_mask_g, r, seg_mat, mems, target_mapping, output_attentions)
        query, key, value = (
            split_heads(projected(vectors, weight).transpose(0, 1), self.n_head)
            for vectors, weight in ((h, self.q), (keys, self.k), (keys, self.v))
        )
        context = AttentionContext(length, key_length, key_length - length, device=h.device, dtype=query.dtype)
        visible = None
        if attn_mask_h is not None:
            visible = (attn_mask_h == 0).permute(2, 3, 0, 1)  # (B, 1, L, K)
            visible = None if visible.device.type == "cpu" and bool(visible.all()) else visible
        terms = self.terms(context, r)
        if seg_mat is not None:
            # the difference for other segments: a term that is equal for all keys of a query cancels in the softmax
            by_query = self.scale * self.segment_steps(query)  # (B, H, L, 1)
            differ = seg_mat[..., 1].permute(2, 0, 1)[:, None]  # (B, 1, L, K)
            terms = replace(terms, dense=(by_query * differ.to(by_query.dtype),))
        dropout = rate_of(self.dropout)
        out, weights = attend_as_stock(self, query, key, value, terms, visible, dropout, output_attentions, context)
        result = (self.add_to(h, out.transpose(0, 1)), None)
        return result if weights is None else (*result, weights.permute(2, 3, 0, 1))

    def add_to(self, h: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """As stock's `post_attention`, of (L, B, H, d) or (L, B, H·d)."""
        return self.layer_norm(self.dropout(linear(attended.flatten(2), self.o.flatten(1))) + h)

    def attend_unpadded(
        self, h: torch.Tensor, batch: UnpaddedBatch, r: torch.Tensor, segments: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of a batch without padding, (1, T, H·d).

        The segment term is a part of the content product: for every type of token there is a feature, 1 in keys of
        this type, and in such queries what the score of keys of the same segment lacks.

        Args:
            h: (1, T, D).
            r: (2·L, 1, D), of the longest row.
            segments: (1, T, S), one-hot; None if all tokens have the same type.
        """
        query, key, value = (
            projected(h, weight).unflatten(-1, (self.n_head, -1)) for weight in (self.q, self.k, self.v)
        )
        terms = self.terms(offsets_of(h, batch.groups[0].length), r)
        if segments is not None:
            kinds = segments[:, :, None]  # (1, T, 1, S)
            steps = self.segment_steps(query.transpose(1, 2)).transpose(1, 2)
            query = torch.cat([query, -steps * kinds], dim=-1)
            key = torch.cat([key, kinds.expand(-1, -1, self.n_head, -1)], dim=-1)
            missing = (0, segments.shape[-1])
            (table,) = terms.query_table
            table = replace(table, rows=nn.functional.pad(table.rows, missing))
            terms = replace(terms, query_table=(table,), content_bias=nn.functional.pad(self.r_w_bias, missing))

        def attend(group: RowGroup, *rows: torch.Tensor) -> torch.Tensor:
            query, key, value = (split_heads(each, self.n_head) for each in rows)
            return attend_as_stock(self, query, key, value, terms, group.visible, rate_of(self.dropout))[0]

        return batch.by_group(attend, *(each.flatten(2) for each in (query, key, value)))

    def segment_steps(self, query: torch.Tensor) -> torch.Tensor:
        """The term of a key of another segment, less that of the same segment, before the scale, (B, H, L, 1).

        Args:
            query: (B, H, L, d).
        """
        step = (self.seg_embed[1] - self.seg_embed[0])[..., None]  # (H, d, 1)
        return torch.matmul(query + self.r_s_bias[:, None], step)

    def terms(self, context: AttentionContext, r: torch.Tensor) -> Terms:
        """A, u and c.

        Args:
            r: (K + L, B or 1, D), for distances K, K − 1, …, 1 − L. The rows of a batch differ in dropout only; the
                first row is used.
        """
        rows = projected(r[1:, 0].to(self.r.dtype), self.r).unflatten(-1, (self.n_head, -1)).transpose(0, 1)
        scalars = torch.einsum("hd,hnd->hn", self.r_r_bias, rows)
        return Terms(
            scale=self.scale,
            query_table=(toeplitz_table(rows, context),),
            content_bias=self.r_w_bias,
            scaled_bias=(toeplitz_table(scalars, context),),
        )


def projected(vectors: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Vectors, (…, D), times a weight of stock's, (D, H, d): (…, H·d)."""
    return linear(vectors, weight.flatten(1).t())
