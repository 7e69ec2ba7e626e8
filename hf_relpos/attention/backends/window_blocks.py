"""An attention window by blocks of queries, for backends that compute any term but hold whole matrices of scores.

A block is a separate call: some queries, the keys that any of them sees, and the small mask of these pairs. Its
context holds the indices of these keys, so that offsets, relations and dense biases are those of the pairs, and only
the rows of a table that occur are read. The forward keeps only its inputs. The backward computes each block again and
leaves its gradients, so that memory holds the scores of one block. A second derivative is
an error.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...host.tracing import first_order_only, is_traced, is_transformed
from ..call import AttentionCall, Backend
from ..formula import Table, content_vectors, map_tables
from ..sliding_window import SlidingWindowMask


QUERIES = 128  # queries of a block
# Calls with fewer keys than this many times a block's are computed whole: blocks would overlap as much.
FEWEST = 4


class Part(NamedTuple):
    """A block: its queries, the indices of its keys (n,), and the mask of these pairs, boolean (1 or B, 1, m, n)."""

    queries: slice
    keys: torch.Tensor
    mask: torch.Tensor


def is_for_blocks(call: AttentionCall) -> bool:
    """Whether a call has the mask of a window, and is long enough for blocks to take less work."""
    mask = call.mask
    if not isinstance(mask, SlidingWindowMask) or call.output_weights or is_traced() or is_transformed():
        return False
    return mask.key_length > FEWEST * (QUERIES + 2 * mask.window)


class ByBlocks:
    """A backend that computes any term, with long calls under a window by blocks."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.name = backend.name

    def unsupported(self, call: AttentionCall) -> list[str]:
        """Return the reasons of the backend itself."""
        return self.backend.unsupported(call)

    def reads_window_only(self, call: AttentionCall) -> bool:
        """Whether the call is long enough for blocks, which read only the keys in the window."""
        return is_for_blocks(call)

    def run(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output (B, L, H, d) and the attention weights, or None if there are none, as by blocks."""
        if not is_for_blocks(call):
            return self.backend.run(call)
        _, query, key = content_vectors(call.query, call.key, call.terms, call.context)
        terms = replace(call.terms, rotate=None, rotate_key=None)
        call = replace(call, query=query, key=key, terms=terms, shared=None)
        seed = int(torch.randint(1 << 62, ())) if call.dropout else 0
        return _Blocks.apply(call, self.backend, seed, *_tensors(call)), None


def parts(call: AttentionCall) -> list[Part]:
    """Return the blocks of a call that `is_for_blocks`, made once for all layers."""
    mask = call.mask
    assert isinstance(mask, SlidingWindowMask), "it is_for_blocks"

    def make() -> list[Part]:
        found = []
        for block in mask.blocks(slice(None), QUERIES):
            queries, keys = slice(block.first, block.first + block.queries), mask.keys_of(block)
            visible = mask.visible(queries, keys)
            # a query without keys gets all of them: else its output is a mean in one backend and NaN in another
            found.append(Part(queries, keys, visible | ~visible.any(-1, keepdim=True)))
        return found

    return mask.once(("parts", QUERIES), make)


class Selection(NamedTuple):
    """The part of a tensor that a block reads: some of its queries, and some entries of a dimension.

    Attributes:
        queries: a slice of the last dimension but one; None means all.
        dim: the dimension of `entries`.
        entries: indices without repetition; None means all.
    """

    queries: slice | None = None
    dim: int = 0
    entries: torch.Tensor | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor that the block reads."""
        own = tensor if self.queries is None else tensor[..., self.queries, :]
        return own if self.entries is None else own.index_select(self.dim, self.entries)

    def add(self, total: torch.Tensor, part: torch.Tensor) -> None:
        """Add `part` to that part of another tensor."""
        own = total if self.queries is None else total[..., self.queries, :]
        if self.entries is None:
            own += part
        else:
            own.index_add_(self.dim, self.entries, part.to(own.dtype))


def _tensors(call: AttentionCall) -> list[torch.Tensor]:
    """Return the query, the key, the value, and every tensor of the terms that may have a gradient: no relations."""
    terms = call.terms
    rows = [table.rows for table in terms.all_tables]
    bias = [] if terms.content_bias is None else [terms.content_bias]
    return [call.query, call.key, call.value, *rows, *terms.dense, *bias]


def _with_tensors(call: AttentionCall, tensors: Iterable[torch.Tensor]) -> AttentionCall:
    """Return a call with others in the place of its `_tensors`."""
    query, key, value, *rest = tensors
    left = iter(rest)
    terms = map_tables(call.terms, lambda table: Table(next(left), table.row_of, table.relation))
    dense = tuple(next(left) for _ in terms.dense)
    terms = replace(terms, dense=dense, content_bias=next(left, None))
    return replace(call, query=query, key=key, value=value, terms=terms)


def _block_of(call: AttentionCall, part: Part) -> tuple[AttentionCall, list[Selection]]:
    """Return the call of a block, and what it has of each of the `_tensors` of the whole call."""
    context = replace(
        call.context,
        query_length=part.queries.stop - part.queries.start,
        key_length=part.keys.shape[0],
        start=int(call.context.start) + part.queries.start,
        keys=part.keys,
        kept=None,
    )
    queries, pairs = Selection(part.queries), Selection(part.queries, -1, part.keys)
    keys = Selection(dim=2, entries=part.keys)
    of_tables: list[Selection] = []

    def of_block(table: Table) -> Table:
        table = replace(table, relation=None if table.relation is None else pairs.of(table.relation))
        if table.rows.shape[1] <= part.keys.shape[0]:
            of_tables.append(Selection())
            return table
        used = table.index(context).unique()
        of_tables.append(Selection(dim=1, entries=used))
        rows = of_tables[-1].of(table.rows)
        return Table(rows, lambda relation: torch.searchsorted(used, table.row_of(relation)), table.relation)

    terms = map_tables(call.terms, of_block)
    terms = replace(terms, dense=tuple(map(pairs.of, terms.dense)))
    query, key, value = queries.of(call.query), keys.of(call.key), keys.of(call.value)
    block = replace(call, query=query, key=key, value=value, terms=terms, context=context, mask=part.mask)
    of_bias = [] if terms.content_bias is None else [Selection()]
    return block, [queries, keys, keys, *of_tables, *(pairs for _ in terms.dense), *of_bias]


class _Blocks(torch.autograd.Function):
    """`ByBlocks` for a call without a rotation, and its `_tensors`."""

    @staticmethod
    def forward(ctx: Any, call: AttentionCall, backend: Backend, seed: int, *tensors: torch.Tensor) -> torch.Tensor:
        query = tensors[0]
        ctx.save_for_backward(*tensors)
        # without the tensors, which the graph saves itself and would otherwise hold twice
        ctx.call = _with_tensors(call, [query.new_empty(0)] * len(tensors))
        ctx.backend, ctx.seed = backend, seed
        kind = query.device.type
        ctx.autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        call, found = _with_tensors(call, tensors), []
        for number, part in enumerate(parts(call)):
            with _random(call, seed + number, query.device):
                found.append(backend.run(_block_of(call, part)[0])[0])
        return torch.cat(found, dim=1)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[3:]
        call = _with_tensors(ctx.call, tensors)
        totals = [
            torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)) if needs else None
            for tensor, needs in zip(tensors, needed, strict=True)
        ]
        enabled, dtype = ctx.autocast
        for number, part in enumerate(parts(call)):
            block, selections = _block_of(call, part)
            own = [each.detach().requires_grad_(needs) for each, needs in zip(_tensors(block), needed, strict=True)]
            with (
                torch.enable_grad(),
                torch.autocast(d_out.device.type, dtype=dtype, enabled=enabled),
                _random(call, ctx.seed + number, d_out.device),
            ):
                out, _ = ctx.backend.run(_with_tensors(block, own))
            leaves = [leaf for leaf in own if leaf is not None and leaf.requires_grad]
            torch.autograd.backward(out, d_out[:, part.queries], inputs=leaves)  # of nothing else
            for selection, total, leaf in zip(selections, totals, own, strict=True):
                if total is not None and leaf.grad is not None:
                    selection.add(total, leaf.grad)
        gradients = [
            None if total is None else total.to(tensor.dtype) for total, tensor in zip(totals, tensors, strict=True)
        ]
        return None, None, None, *gradients


@contextlib.contextmanager
def _random(call: AttentionCall, seed: int, device: torch.device) -> Iterator[None]:
    """Draw random numbers from a seed, for calls with dropout, and restore the caller's random state at the end."""
    if not call.dropout:
        yield
        return
    # only for this device: torch.manual_seed would seed all other devices as well
    module: Any = torch if device.type == "cpu" else torch.get_device_module(device)
    seed_generator = torch.default_generator.manual_seed if device.type == "cpu" else module.manual_seed
    chosen = module.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with chosen:
        state = module.get_rng_state()
        try:
            seed_generator(seed)
            yield
        finally:
            module.set_rng_state(state)
