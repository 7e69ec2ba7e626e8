"""Inference on accelerators: the relative shift of one product, a view of its memory, is SDPA's mask.

X = q · Aᵀ by offset has rows of W numbers. Element (i, j) of the bias, at offset j − i, is at i·W + (j − i) + const =
i·(W − 1) + j + const: the same memory, read with rows of W − 1 numbers. W − 1 and const are multiples of 8, as fused
kernels of SDPA need the strides of a mask to be, by rows of zeros beside A. Takes B·H·L·(L + K) numbers.
"""

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from ..call import AttentionCall
from ..formula import content_vectors, total_of
from ..toeplitz import ToeplitzTerms, toeplitz_of, unsupported_by_offset


ALIGNED = 8  # elements


class Strided:
    """A dense bias without a gather, for inference."""

    name = "strided"

    def unsupported(self, call: AttentionCall) -> list[str]:
        """Terms without a Toeplitz form, training, and devices on which another backend is faster."""
        if call.device.type == "cpu":
            return ["it is for devices other than the CPU"]
        reasons = unsupported_by_offset(call)
        if call.is_traced:
            reasons.append("the call is being traced")
        if call.needs_gradients or call.dropout:
            reasons.append("it is for inference")
        if call.terms.value_table or call.terms.allow:
            reasons.append("it adds a bias to the scores, and V and allow are none")
        return reasons

    def run(self, call: AttentionCall) -> tuple[torch.Tensor, None]:
        """The output (B, L, H, d), and None."""
        content, query, key = content_vectors(call.query, call.key, call.terms, call.context)
        mask = call.causal_mask if call.is_causal else call.tensor_mask
        return strided_attention(content, query, key, call.value, toeplitz_of(call), mask), None


def _shifted_bias(
    rows: torch.Tensor, table: torch.Tensor | None, scalars: torch.Tensor | None, columns: int
) -> torch.Tensor:
    """rows_i · table_x + scalars_x at x = j − i + L − 1, a view (B, H, L, columns).

    Args:
        rows: (B, H, L, d).
        table: (H or 1, P, d); None for scalars alone.
        scalars: (H or 1, P), or None.
    """
    _, heads, length, _ = rows.shape
    count = next(each.shape[1] for each in (table, scalars) if each is not None)
    before = -(length - 1) % ALIGNED
    after = (1 - before - count) % ALIGNED
    width = before + count + after
    parts = []
    if table is not None:
        parts.append(torch.matmul(rows, pad(table, (0, 0, before, after)).transpose(-1, -2)))
    if scalars is not None:
        parts.append(pad(scalars, (before, after))[:, None].expand(heads, length, width)[None])
    by_offset = total_of(parts).contiguous()
    strides = (by_offset.stride(0), by_offset.stride(1), width - 1, 1)
    return by_offset.as_strided((by_offset.shape[0], heads, length, columns), strides, length - 1 + before)


def strided_attention(
    content: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    terms: ToeplitzTerms,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """`formula.attend` of Toeplitz terms without V and `allow`; arguments and result as `chunked_attention`'s."""
    length, keys = content.shape[2], key.shape[2]
    bias = None
    if terms.A is not None or terms.c is not None:
        bias = _shifted_bias(query, terms.A, terms.c, keys)
    if terms.B is not None:  # keys as rows, so the table is read backwards
        by_key = _shifted_bias(key, terms.B.flip(1), None, length).transpose(2, 3)
        bias = by_key.contiguous() if bias is None else bias + by_key
    if terms.dense is not None:
        bias = terms.dense if bias is None else bias + terms.dense
    if mask is not None:
        bias = mask if bias is None else torch.where(mask, bias, torch.finfo(bias.dtype).min)
    out = scaled_dot_product_attention(content, key, value, attn_mask=bias, scale=terms.scale)
    return out.transpose(1, 2).contiguous()
