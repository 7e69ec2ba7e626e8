"""Attention in chunks of queries. Relative terms cost little more than absolute attention; memory is linear in length.

This is plain PyTorch with exact gradients of all inputs and tables. Every sum has a fixed order. Only the inputs of
the forward are kept (and the probabilities of a short call), and dropout is replayed from a seed. Buffers are kept
between calls, since new pages cost as much as the arithmetic. A second derivative is an error; `eager` has one.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

from ....host.tracing import first_order_only, is_traced
from ....products.cpu_gemm import bmm_library, fast_bmm, multiplies_bfloat16
from ...call import AttentionCall, toeplitz_of
from ...formula import content_vectors
from ...sliding_window import SlidingWindowMask
from ...toeplitz import ToeplitzTerms, toeplitz_unsupported
from .chunks import ChunkedCall, QueryChunk, groups, schedule
from .products import Gradients, HeadGroup, Inputs
from .relative_shift import padded


DTYPES = (torch.float32, torch.bfloat16, torch.float64)
# Calls with fewer scores, B·H·L·K, are too short for chunks to pay (scripts/benchmarks/bench_attention.py). With
# tables of vectors a half is enough under dropout. Without it a quarter is, if oneDNN is faster: PyTorch's own
# products make SDPA's bias.
FEWEST_SCORES = 1 << 19
# Training keeps the probabilities of a call up to so many bytes of scores: one row of 512 tokens, 12 heads has 12 MB.
KEPT = 1 << 24
# Dropout is drawn in units of 2^−16. A larger one is refused.
MAX_DROPOUT = 1 - 2**-8


class Chunked:
    """`formula.attend` in chunks of queries, on the CPU."""

    name = "chunked"

    def unsupported(self, call: AttentionCall) -> list[str]:
        """Refuse other devices, terms without a Toeplitz form, graphs, and calls that are faster elsewhere."""
        if is_traced():  # before sizes are read, since the graph would then depend on them
            return ["the call is being traced, and chunks depend on the data at hand"]
        if call.device.type != "cpu":
            return ["chunks are for the CPU"]
        # with dropout, a window or fast products, it is faster than sdpa even without relative terms
        fast = call.dtype == torch.float32 and bmm_library().is_used
        alone = call.dropout > 0 or isinstance(call.mask, SlidingWindowMask) or fast
        # what a seed draws must not depend on a measurement
        share = 2 if call.dropout else 4 if fast else 1
        fewest = FEWEST_SCORES // share if call.terms.query_table or call.terms.key_table else FEWEST_SCORES
        reasons = {
            "only eager returns attention weights": call.output_weights,
            "the mask is not a boolean tensor that broadcasts to (B, H, L, K)": not _is_readable(call),
            "there are no terms beside the content, and sdpa is faster": call.terms.only_content and not alone,
            f"dropout = {call.dropout} is too close to 1": call.dropout > MAX_DROPOUT,
            f"it does not compute in {call.dtype}": call.dtype not in DTYPES,
            f"there are fewer than {fewest:,} scores, B·H·L·K, too few for chunks to pay": call.scores < fewest,
        }
        found = [reason for reason, holds in reasons.items() if holds]
        return toeplitz_unsupported(call.terms, call.context) + found

    def reads_window_only(self, call: AttentionCall) -> bool:
        """Return True: every chunk reads only the keys in the window."""
        return True

    def run(self, call: AttentionCall) -> tuple[torch.Tensor, None]:
        """Return the output (B, L, H, d), contiguous, and None.

        Queries with no visible key average all keys, or those of their chunk. Dropout is rounded to a multiple of
        2^−16.
        """
        content, query, key = content_vectors(call.query, call.key, call.terms, call.context)
        value, terms = call.value[..., : call.value_size], toeplitz_of(call)
        if call.dtype == torch.bfloat16 and not multiplies_bfloat16():
            same = query is content
            content, key, value = content.float(), key.float(), value.float()
            query = content if same else query.float()
            terms = terms.to(torch.float32)
        start, drop = int(call.context.start), round(call.dropout * 65536)
        window = call.mask if isinstance(call.mask, SlidingWindowMask) else None
        chunked_call = ChunkedCall(
            terms=terms.without_tensors(),
            start=start,
            mask=call.tensor_mask if window is None else None,
            window=window,
            causal=call.is_causal,
            dropout=drop,
            seed=int(torch.randint(1 << 62, ())) if drop else 0,
            has_backward=torch.is_grad_enabled(),
            far=far_offsets(content, key, terms, start) if window is None else None,
        )
        tables = (terms.query_table, terms.key_table, terms.value_table)
        A, B, V = (None if table is None else padded(table.rows) for table in tables)
        inputs = Inputs(content, query, key, value, A, B, terms.bias, V, terms.dense)
        return _Chunked.apply(chunked_call, *inputs).to(call.dtype), None


def _is_readable(call: AttentionCall) -> bool:
    """Whether the mask is one that chunks read: none, that of a window, or a boolean one of the pairs."""
    mask = call.mask
    if mask is None or isinstance(mask, SlidingWindowMask):
        return True
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        return False
    return mask.dim() == 4 and mask.shape[3] == call.key.shape[2]


def far_offsets(content: torch.Tensor, key: torch.Tensor, terms: ToeplitzTerms, start: int = 0) -> torch.Tensor | None:
    """Return the offsets at which keys weigh nothing for any query that sees its own key, as with ALiBi's bias.

    Softmax weights a key by at most exp(score_ij − score_ii). The difference is that of the biases, and of content
    scores, which is at most s (|q_i| max_j |k_j − k̄| − q_i·(k_i − k̄)) for the mean key k̄. All keys that are left out
    together have less than a sixteenth of a rounding error of a row's weights. Without them no weight is subnormal as
    long as content differs by less than about 20; with subnormal numbers some processors take many times as long.

    Returns:
        Boolean (H or 1, P); None if no contents leave any out, or if the scores are more than content and a bias.
    """
    bias, own = terms.bias, -terms.low
    if bias is None or any(each is not None for each in (terms.query_table, terms.key_table, terms.dense)):
        return None
    if terms.allow is not None and not bool(terms.allow[:, own].all()):
        return None
    length, keys = content.shape[2], key.shape[2]
    below = (bias[:, own, None] - bias).detach()
    depth = math.log(16 * keys / torch.finfo(bias.dtype).eps)
    if not bool((below > depth).any()):
        return None
    precise = torch.promote_types(content.dtype, torch.float32)
    content, key = content.detach().to(precise), key.detach().to(precise)
    key = key - key.mean(2, keepdim=True)
    of_own = (content * key[:, :, start : start + length]).sum(-1)
    spread = terms.scale * (content.norm(dim=-1) * key.norm(dim=-1).amax(-1, keepdim=True) - of_own).amax((0, 2))
    return below > depth + (spread if len(below) > 1 else spread.amax(0, keepdim=True))[:, None]


def _groups(call: ChunkedCall, inputs: Inputs) -> Iterator[tuple[HeadGroup, list[QueryChunk]]]:
    """Yield groups of rows and heads, and their chunks."""
    (batch, heads, length, _), keys = inputs.content.shape, inputs.key.shape[2]
    row_groups, head_groups = groups(call, batch, heads, length, keys)
    for rows in row_groups:
        chunks = None
        for group_heads in head_groups:
            if chunks is None or call.far is not None:
                chunks = schedule(call, rows, group_heads, length, keys)
            yield HeadGroup(call, rows, group_heads, inputs), chunks


class _Chunked(torch.autograd.Function):
    """The output (B, L, H, d) of a call, from its `Inputs`."""

    @staticmethod
    def forward(ctx: Any, call: ChunkedCall, *tensors: Any) -> torch.Tensor:
        inputs = Inputs(*tensors)
        content, value = inputs.content, inputs.value
        batch, heads, length, _ = content.shape
        out = content.new_empty(batch, length, heads, value.shape[3])
        generator = torch.Generator("cpu").manual_seed(call.seed) if call.dropout else None
        is_short = batch * heads * length * value.shape[2] * content.element_size() <= KEPT
        kept: list[torch.Tensor] | None = [] if is_short and call.has_backward and any(ctx.needs_input_grad) else None
        with torch.autocast("cpu", enabled=False), fast_bmm(content):
            for group, chunks in _groups(call, inputs):
                for chunk in chunks:
                    into = out[group.rows, chunk.first : chunk.first + chunk.rows, group.heads]
                    into.copy_(group.forward(chunk, generator, kept))
        ctx.save_for_backward(*inputs, *(kept or ()))
        ctx.same, ctx.call = inputs.query is content, call
        return out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, call = ctx.saved_tensors, ctx.call
        inputs, kept = Inputs(*saved[: len(Inputs._fields)]), iter(saved[len(Inputs._fields) :])
        if ctx.same:
            inputs = inputs._replace(query=inputs.content)
        keys = inputs.key.shape[2]
        total = Gradients(inputs, needs_dense=ctx.needs_input_grad[-1])  # the last of the inputs
        d_key, d_value = torch.empty_like(inputs.key), torch.empty_like(inputs.value)
        generator = torch.Generator("cpu").manual_seed(call.seed) if call.dropout else None
        with torch.autocast("cpu", enabled=False), fast_bmm(inputs.content):
            for group, chunks in _groups(call, inputs):
                total.start_group(group)
                for chunk in chunks:
                    group.backward(chunk, generator, d_out.transpose(1, 2), total, next(kept, None))
                d_key[group.rows, group.heads] = group.by_row(total.key)[:, :, :keys]
                d_value[group.rows, group.heads] = group.by_row(total.value)[:, :, :keys]
        return None, total.content, total.query, d_key, d_value, *total.of_terms(inputs)
