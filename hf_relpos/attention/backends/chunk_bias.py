"""The terms of some queries, heads and keys as the mask of PyTorch's fused attention, a view without a gather.

A block of s queries i with g heads h, in the order in which a layer's projection leaves them, is multiplied with the W
rows of A that belong to its offsets from n keys: rows (i, h) of W numbers, at x = j − i + s − 1. The bias of query i
and key j is at (i·g + h)·W + x = i·(g·W − 1) + h·W + j + const: the same memory, read with steps of g·W − 1, W and 1,
is by pair. A block begins s numbers before the end of the one before, where that has no pair, so that one view is of
all of them.

For forward passes whose probabilities are not kept, where B and V are none: keys would be read across their rows, and
fused attention has no weights for V. Of few keys; else `chunk_products` is as fast or faster, under a window as well,
where fused attention alone takes 1.4 times as long for the blocks of a window of 256 as for pieces of 512 tokens.
"""

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from ..tracing import may_read
from .chunk_products import Inputs
from .chunk_schedule import ALIGNED, ChunkedCall, QueryChunk, rounded_up, vectors_per_block, workspace
from .relative_shift import DistinctColumns, unpadded


# Keys up to which fused attention is the faster way: a chunk is then some rows of the batch. From 128 to 4,096 keys
# it takes 1.0 to 1.2 times as long as products whose softmax is an operation of its own.
MOST_KEYS = 64


def is_bias(call: ChunkedCall, inputs: Inputs) -> bool:
    """Whether the terms of a call are a bias by query, and fused attention is the faster way."""
    others = inputs.B is None and inputs.V is None and call.allow is None
    others = others and call.window_mask is None and inputs.key.shape[2] <= MOST_KEYS
    return others and not call.dropout and may_read(inputs.key.device)


class FusedGroup:
    """The output of some heads of some rows of the batch, chunk by chunk, by fused attention."""

    def __init__(self, call: ChunkedCall, rows: slice, heads: slice, inputs: Inputs):
        self.call, self.rows, self.heads = call, rows, heads
        self.content, self.query, self.key, self.value = (self.of_group(tensor) for tensor in inputs[:4])
        self.dense = None if inputs.dense is None else self.of_group(inputs.dense)
        self.mask = None if call.tensor_mask is None else self.of_group(call.tensor_mask)
        self.most = vectors_per_block(inputs.key.shape[2], inputs.key.device)
        self.margin = self.most  # a block may begin before the first row, and end after the last
        A, c = (None if table is None else self.of_heads(table) for table in (inputs.A, inputs.c))
        self.A = None if A is None else pad(unpadded(A), (0, 0, self.margin, ALIGNED)).transpose(1, 2)
        self.c = None if c is None else pad(c, (self.margin, ALIGNED))
        self.count = 0 if A is None else unpadded(A).shape[1]

    def of_heads(self, table: torch.Tensor) -> torch.Tensor:
        """The part of a table, (H or 1, …), that belongs to these heads."""
        return table if table.shape[0] == 1 else table[self.heads]

    def of_group(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor, (B or 1, H or 1, …), that belongs to these rows and heads: (r or 1, g or 1, …)."""
        tensor = tensor[self.rows] if tensor.shape[0] > 1 else tensor
        return tensor[:, self.heads] if tensor.shape[1] > 1 else tensor

    @staticmethod
    def takes(chunk: QueryChunk) -> bool:
        """Whether all keys of a chunk are one range."""
        return len(chunk.key_ranges) == 1

    def forward(self, chunk: QueryChunk) -> torch.Tensor:
        """What the queries of a chunk get, (r, m, g, d)."""
        begin, count = chunk.key_ranges[0]
        keys, queries = slice(begin, begin + count), slice(chunk.first, chunk.first + chunk.rows)
        bias = self.bias(chunk, queries, keys)
        key, value = self.key[:, :, keys], self.value[:, :, keys]
        scale = self.call.terms.scale
        out = scaled_dot_product_attention(self.content[:, :, queries], key, value, attn_mask=bias, scale=scale)
        return out.transpose(1, 2)

    def bias(self, chunk: QueryChunk, queries: slice, keys: slice) -> torch.Tensor:
        """All of the scores of a chunk but the content, (r or 1, g or 1, m, n)."""
        bias, count = None, keys.stop - keys.start
        if self.A is not None or self.c is not None:
            first = keys.start - self.call.start - chunk.first - self.call.terms.low
            vectors = self.query[:, :, queries].transpose(1, 2)
            bias = self.by_pair(vectors, count, first)
        if self.dense is not None:
            dense = self.dense[:, :, queries, keys]
            bias = dense if bias is None else bias + dense
        if bias is None:
            bias = self.key.new_zeros((1, 1, chunk.rows, count))
        lowest = torch.finfo(bias.dtype).min
        if chunk.is_masked and self.mask is not None:
            mask = self.mask if self.mask.shape[2] == 1 else self.mask[:, :, queries]
            bias = bias.masked_fill(~mask[..., keys], lowest)
        if self.call.causal and self.call.start + chunk.first + 1 < keys.stop:
            positions = torch.arange(queries.start, queries.stop) + self.call.start
            bias = bias.masked_fill(torch.arange(keys.start, keys.stop) > positions[:, None], lowest)
        return bias

    def by_pair(self, vectors: torch.Tensor, others: int, first: int) -> torch.Tensor:
        """q_i · A_{j−i} + c_{j−i}, a view (r, g, m, n); (1, g, m, n) for c alone.

        Args:
            vectors: (r, m, g, d).
            others: n.
            first: the row of the tables of the first query and the first key.
        """
        vectors = vectors[:1] if self.A is None else vectors
        rows, queries, heads, _ = vectors.shape
        size = min(self.most, queries)
        width = rounded_up(others + size)
        step, blocks = size * (heads * width - 1), -(-queries // size)
        row = rounded_up(blocks * step + size)
        memory = workspace("bias", (rows * row,), vectors.dtype, vectors.device)
        for number in range(blocks):
            begin = first - (number + 1) * size + 1
            block = vectors[:, number * size : (number + 1) * size]
            products = memory.as_strided(
                (rows, block.shape[1], heads, width),
                (row, heads * width, width, 1),
                memory.storage_offset() + number * step,
            )
            self.fill(products, block, begin, others + size - 1)
        strides = (row, width, heads * width - 1, 1)
        return memory.as_strided((rows, heads, queries, others), strides, memory.storage_offset() + size - 1)

    def fill(self, products: torch.Tensor, vectors: torch.Tensor, first: int, width: int) -> None:
        """products (r, s, g, W) = vectors (r, s, g, d) times the rows of A from `first` on, plus c; `width` matter."""
        if self.A is not None:
            distinct = DistinctColumns.of(first, width, self.count, self.call.terms.clamped_A)
            begin, end = distinct.aligned
            table = self.A[:, :, self.margin + first + begin : self.margin + first + end]
            into = products[..., begin:end]
            for one, out in zip(vectors, into, strict=True):
                if len(table) == 1:
                    torch.mm(one.reshape(-1, one.shape[-1]), table[0], out=out.flatten(0, 1))
                else:
                    for head, own in enumerate(table):
                        torch.mm(one[:, head], own, out=out[:, head])
            distinct.fill(products)
        if self.c is not None:
            scalars = self.c[:, self.margin + first : self.margin + first + products.shape[-1]]
            products.copy_(scalars) if self.A is None else products.add_(scalars)
