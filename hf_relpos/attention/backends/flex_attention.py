"""PyTorch's FlexAttention: products are looked up and added to the scores, without a dense bias.

A query table of R rows becomes one product q·Aᵀ, (B, H, L, R), and a key table one product k·Bᵀ, (B, H, K, R).
`score_mod` adds their entries at the row of the pair's offset, so that the compiled kernel holds no tensor of size
B·H·L·K. Masks and hidden keys become a `mask_mod`, and the kernel skips blocks that it hides entirely.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention

from ...host.torch import at_least_graphs
from ...host.tracing import is_traced
from ..call import AttentionCall
from ..formula import content_scale, content_vectors, map_tables, position_scores
from ..masks import finite
from ..sliding_window import SlidingWindowMask
from ..toeplitz import OffsetTable, to_toeplitz
from .sdpa import unsupported_as_bias


# Dtypes that the compiled kernel supports.
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SMALLEST_HEAD = 16
# Scores, B·H·L·K, up to which sdpa is faster on an H100, with and without gradients (docs/results/benchmarks/gpu.md).
# Beyond, sdpa's bias of B·H·L·K takes memory, with gradients in each layer.
FEW_SCORES = {True: 1 << 25, False: 1 << 27}
HAS_TRITON = importlib.util.find_spec("triton") is not None  # asked here: in a call it would break a traced graph
# The most graphs in one process. Every combination of terms and masks, and every change of a size, needs one.
GRAPHS = 64
# For the kernels that need more shared memory than the device has with PyTorch's own choice: blocks loaded ahead.
FEWER_STAGES = {"num_stages": 1}

ScoreMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class FlexAttention:
    """Fused attention with a `score_mod`, compiled on CUDA. Other devices run PyTorch's unfused reference."""

    name = "flex_attention"

    def unsupported(self, call: AttentionCall) -> list[str]:
        """Refuse gains, value tables and dropout; by default also devices other than CUDA, and some calls on CUDA."""
        reasons = unsupported_as_bias(call)
        if call.terms.value_table:
            reasons.append("it never holds the attention weights, which the value-side term V needs")
        if any(table.relation is not None for table in call.terms.allow):
            reasons.append("it hides keys by their offset alone")
        if call.dropout:
            reasons.append("it has no dropout")
        if not call.by_name and not isinstance(call.mask, BlockMask):
            reasons += _reasons_by_default(call)
        return reasons

    def run(self, call: AttentionCall) -> tuple[torch.Tensor, None]:
        """Return the output (B, L, H, d), and None. A query that sees no key gets zeros."""
        content, query, key = content_vectors(call.query, call.key, call.terms, call.context)
        score_mod, mask_mod = _modifications(call, query, key)
        block_mask, scale = _block_mask(call, mask_mod), content_scale(query, call.terms)
        if is_traced():
            out: Any = flex_attention(content, key, call.value, score_mod, block_mask, scale)
        else:
            # Off CUDA, PyTorch itself traces its unfused reference. Without a trace, tensors that `score_mod` captures
            # would get no gradients.
            attention: Any = _fitting if query.device.type == "cuda" else flex_attention
            with at_least_graphs(GRAPHS):
                out = attention(content, key, call.value, score_mod, block_mask, scale)
        return out.transpose(1, 2).contiguous(), None


def _reasons_by_default(call: AttentionCall) -> list[str]:
    """Return the reasons why `relpos` does not take this backend for a call that it could compute."""
    if call.device.type != "cuda":
        return ["by default it is for CUDA alone"]
    reasons = []
    if is_traced():
        reasons.append("the call is being traced")
    elif call.query.shape[-1] < SMALLEST_HEAD:
        reasons.append(f"its kernel needs heads of {SMALLEST_HEAD} or more")
    elif call.scores <= FEW_SCORES[call.needs_gradients]:
        reasons.append(f"sdpa is faster up to {FEW_SCORES[call.needs_gradients]:,} scores")
    if call.dtype not in DTYPES:
        reasons.append(f"its kernel does not compute in {call.dtype}")
    if not HAS_TRITON:
        reasons.append("its kernel needs Triton")
    if call.terms.only_content:
        reasons.append("there are no terms beside the content, and sdpa is faster")
    if isinstance(call.mask, SlidingWindowMask):
        reasons.append("it would make the mask of all pairs from that of the window")
    return reasons


_large: set[tuple[Any, ...]] = set()  # dtype, size of heads, and terms that are missing, of kernels that do not fit


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def _fitting(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: ScoreMod | None, *others: Any
) -> Any:
    """`flex_attention`, compiled; with fewer stages where PyTorch finds that its kernel does not fit the device."""
    terms = () if score_mod is None else tuple(each.cell_contents is None for each in score_mod.__closure__ or ())
    kind = (query.dtype, query.shape[-1], *terms)
    attention = functools.partial(_compiled(), query, key, value, score_mod, *others)
    if kind not in _large:
        try:
            return attention()
        except RuntimeError as error:
            if "num_stages" not in str(error):
                raise
            _large.add(kind)
    return attention(kernel_options=FEWER_STAGES)


def _modifications(
    call: AttentionCall, query: torch.Tensor, key: torch.Tensor
) -> tuple[ScoreMod | None, MaskMod | None]:
    """Return the `score_mod` that adds the terms and the `mask_mod` of hidden keys, or None for one that does nothing.

    Args:
        query: q̂, (B, H, L, d), rotated if the scheme rotates.
        key: k̂, (B, H, K, d), rotated if the scheme rotates.
    """
    context, (batch, heads, length, _), keys = call.context, query.shape, key.shape[2]
    by_offset = map_tables(call.terms, lambda table: table if table.relation is None else None)
    by_pair = map_tables(call.terms, lambda table: None if table.relation is None else table)
    form = to_toeplitz(replace(by_offset, dense=()), context, query, by_row=True)
    dense = position_scores(query, key, by_pair, context)
    if isinstance(call.mask, torch.Tensor) and call.mask.dtype != torch.bool:
        dense = finite(call.mask if dense is None else dense + call.mask, query.dtype)
    # the difference of these is the offset of a pair, as an address in the arrays by offset
    of_key = context.key_positions(query.device).expand(batch, -1)
    of_query = (context.query_positions(query.device) + context.low).expand(batch, -1)
    query_products, query_row = _products(query, form.query_table)
    key_products, key_row = _products(key, form.key_table)
    bias = None if form.bias is None else form.bias.expand(heads, -1)
    dense = None if dense is None else dense.expand(batch, heads, length, keys)
    allow = None if form.allow is None else form.allow.expand(heads, -1)

    def score_mod(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor
    ) -> torch.Tensor:
        offset = of_key[b, j] - of_query[b, i]
        if query_products is not None:
            score = score + query_products[b, h, i, offset if query_row is None else query_row[offset]]
        if key_products is not None:
            score = score + key_products[b, h, j, offset if key_row is None else key_row[offset]]
        if bias is not None:
            score = score + bias[h, offset]
        return score if dense is None else score + dense[b, h, i, j]

    def mask_mod(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        assert allow is not None, "it is not returned without"
        return allow[h, of_key[b, j] - of_query[b, i]]

    adds = any(each is not None for each in (query_products, key_products, bias, dense))
    return score_mod if adds else None, None if allow is None else mask_mod


def _products(vectors: torch.Tensor, table: OffsetTable | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return products of vectors (B, H, L, d) with a table's rows, (B, H, L, N), and the row of each offset."""
    return (None, None) if table is None else (torch.matmul(vectors, table.rows.transpose(-1, -2)), table.row_of)


def _block_mask(call: AttentionCall, allow: MaskMod | None) -> BlockMask | None:
    """Return the pairs that the mask and the scheme (`allow`) let through; None means all.

    The mask of a window is made once for all layers if the scheme hides nothing.
    """
    (batch, heads, length, _), keys, device = call.query.shape, call.key.shape[2], call.query.device
    mask = call.mask if isinstance(call.mask, BlockMask | SlidingWindowMask) else call.tensor_mask
    if isinstance(mask, BlockMask) and allow is None:
        return mask
    if isinstance(mask, SlidingWindowMask) and allow is None:
        window = _window_mod(mask)
        return mask.once("flex", lambda: create_block_mask(window, batch, None, length, keys, device))
    parts: list[MaskMod] = [] if allow is None else [allow]
    if isinstance(mask, BlockMask):
        parts.append(mask.mask_mod)
    elif isinstance(mask, SlidingWindowMask):
        parts.append(_window_mod(mask))
    elif mask is not None and mask.dtype == torch.bool:
        visible = mask.expand(batch, heads, length, keys)
        parts.append(lambda b, h, i, j: visible[b, h, i, j])
    elif mask is None and call.is_causal:
        start = call.context.start
        parts.append(lambda b, h, i, j: j <= i + start)
    if not parts:
        return None
    by_row = mask is not None or call.context.positions is not None
    by_head = allow is not None or (isinstance(mask, torch.Tensor) and mask.shape[1] > 1)
    return create_block_mask(
        and_masks(*parts), batch if by_row else None, heads if by_head else None, length, keys, device
    )


def _window_mod(mask: SlidingWindowMask) -> MaskMod:
    return lambda b, h, i, j: mask.sees(b, i + mask.start, j, mask.window)
