"""Inference without kernels of our own: the bias by pairs is a strided view of one product, and SDPA's mask.

X = q · Aᵀ by offset, rows of W numbers. Element (i, j) of the bias, at offset j − i, is at i·W + (j − i) + const =
i·(W − 1) + j + const: the same memory, read with rows of W − 1 numbers. W − 1 and const are multiples of 8, as fused
kernels of SDPA want the strides of a mask, by rows of zeros beside A. Takes B·H·L·(L + K) numbers.
"""

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from .lowering import NormalForm


ALIGNED = 8  # elements


def _by_pairs(rows: torch.Tensor, table: torch.Tensor | None, scalars: torch.Tensor | None, columns: int):
    """rows_i · table_x + scalars_x at x = j − i + rows − 1, a view (B, H, rows, columns)."""
    _, heads, length, _ = rows.shape
    places = (table if table is not None else scalars).shape[1]
    before = -(length - 1) % ALIGNED
    after = (1 - before - places) % ALIGNED
    width = before + places + after
    by_offset = None
    if table is not None:
        by_offset = torch.matmul(rows, pad(table, (0, 0, before, after)).transpose(-1, -2))
    if scalars is not None:
        padded = pad(scalars, (before, after))[:, None]
        by_offset = padded.expand(heads, length, width)[None].contiguous() if by_offset is None else by_offset + padded
    by_offset = by_offset.contiguous()
    strides = (by_offset.stride(0), by_offset.stride(1), width - 1, 1)
    return by_offset.as_strided((by_offset.shape[0], heads, length, columns), strides, length - 1 + before)


def strided_attention(
    content: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    form: NormalForm,
    start: int = 0,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """`formula.attend` of a normal form without V and `allow`, arguments and result as `chunked_attention`'s."""
    length, keys = content.shape[2], key.shape[2]
    bias = None
    if form.A is not None or form.c is not None:
        bias = _by_pairs(query, form.A, form.c, keys)
    if form.B is not None:  # keys as rows, so the table is read backwards
        by_key = _by_pairs(key, form.B.flip(1), None, length).transpose(2, 3)
        bias = by_key.contiguous() if bias is None else bias + by_key
    if form.dense is not None:
        bias = form.dense if bias is None else bias + form.dense
    if causal:
        places = torch.arange(start, start + length, device=content.device)
        mask = torch.arange(keys, device=content.device) <= places[:, None]
    if mask is not None:
        bias = mask if bias is None else torch.where(mask, bias, torch.finfo(bias.dtype).min)
    out = scaled_dot_product_attention(content, key, value, attn_mask=bias, scale=form.scale)
    return out.transpose(1, 2).contiguous()
