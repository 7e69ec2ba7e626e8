"""Accelerated XLNet as an encoder: one stream, attention in both directions, without earlier memory (`mems`)."""

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..attention.context import AttentionContext
from ..attention.formula import Terms, toeplitz_table
from ..attention.unpadding import Batch, take_batch
from ..products.cpu_gemm import linear
from .arguments import wants
from .attention import attend_to_batch, split_heads
from .substitute import stock_file


class Model:
    """XLNet's encoder, whose layers get a batch in place of the mask, and states (1, T, D) or (B, L, D)."""

    def forward(self: Any, *args: Any, **given: Any) -> Any:
        """As stock; for a batch, whose arguments come by name, with an output that is no tuple."""
        batch = take_batch()
        if batch is None:
            return super().forward(*args, **given)  # type: ignore[misc]
        group = batch.groups[0]
        if batch.indices is None and group.mask is not None:  # padding that stays sees its own key
            own_keys = torch.eye(group.length, dtype=torch.bool, device=group.mask.device)
            batch = replace(batch, groups=(replace(group, mask=group.mask | own_keys),))
        vectors: Any = given.get("inputs_embeds")
        tokens: Any = given.get("input_ids")
        states = self.dropout(self.word_embedding(tokens) if vectors is None else vectors)
        distances = self.relative_positional_encoding(group.length, group.length, bsz=1, device=states.device)
        distances = self.dropout(distances)
        segments = None
        if given.get("token_type_ids") is not None:
            kinds = given["token_type_ids"].expand(states.shape[:2])[..., None]
            types = kinds.unique()
            segments = (kinds == types).to(self.dtype) if len(types) > 1 else None  # (1, T, S)
        seen = [states]
        for layer in self.layer:
            # layers treat (1, T, D) as any (L, B, D)
            seen.append(layer(seen[-1], None, batch, None, distances, segments)[0])
        memory = None
        if wants(self, given, "use_mems"):
            memory = tuple(self.cache_mem(each.transpose(0, 1), None) for each in seen[:-1])
        hidden_states = tuple(seen) if wants(self, given, "output_hidden_states") else None
        return stock_file(self).XLNetModelOutput(self.dropout(seen[-1]), memory, hidden_states)


class RelativeAttention:
    """XLNet's attention with our backends."""

    def forward(
        self: Any,
        h: torch.Tensor,
        g: torch.Tensor | None,
        attn_mask_h: torch.Tensor | Batch | None,
        attn_mask_g: torch.Tensor | None,
        r: torch.Tensor,
        seg_mat: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As stock, whose code runs unless there is a batch in place of the first mask; then h is (1, T or B, L, D).

        The segment term is a part of the content product: for every type of token there is a feature, 1 in keys of
        this type, and in such queries what the score of keys of the same segment lacks.

        Args:
            r: (2·L, 1, D), of the longest row.
            seg_mat: (1, T or B, L, S), one-hot; None if all tokens have the same type.
        """
        if not isinstance(attn_mask_h, Batch):
            return super().forward(h, g, attn_mask_h, attn_mask_g, r, seg_mat, *args, **kwargs)  # type: ignore[misc]
        query, key, value = (
            projected(h, weight).unflatten(-1, (self.n_head, -1)) for weight in (self.q, self.k, self.v)
        )
        terms = self.terms(attn_mask_h.groups[0].context, r)
        if seg_mat is not None:
            kinds = seg_mat[:, :, None]  # (1, T, 1, S)
            # the term of a key of another segment, less that of the same segment, before the scale, (1, T, H, 1)
            step = (self.seg_embed[1] - self.seg_embed[0])[..., None]  # (H, d, 1)
            steps = torch.matmul(query.transpose(1, 2) + self.r_s_bias[:, None], step).transpose(1, 2)
            query = torch.cat([query, -steps * kinds], dim=-1)
            key = torch.cat([key, kinds.expand(-1, -1, self.n_head, -1)], dim=-1)
            missing = (0, seg_mat.shape[-1])
            (table,) = terms.query_table
            table = replace(table, rows=nn.functional.pad(table.rows, missing))
            terms = replace(terms, query_table=(table,), content_bias=nn.functional.pad(self.r_w_bias, missing))
        vectors = [each.flatten(2) for each in (query, key, value)]
        out = attend_to_batch(self, attn_mask_h, vectors, functools.partial(split_heads, self.n_head), terms)
        return self.layer_norm(self.dropout(linear(out, self.o.flatten(1))) + h), None

    def terms(self: Any, context: AttentionContext, r: torch.Tensor) -> Terms:
        """A, u and c.

        Args:
            r: (2·L, 1, D), for distances L, L − 1, …, 1 − L.
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
    """Multiply vectors, (…, D), by a weight of Transformers' module, (D, H, d): (…, H·d)."""
    return linear(vectors, weight.flatten(1).t())
