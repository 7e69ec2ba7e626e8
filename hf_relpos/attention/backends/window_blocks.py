"""An attention window by blocks of queries, for backends that compute any term but hold whole matrices of scores.

A block is a separate call: some queries, the keys that any of them sees, and the small mask of these pairs. Its
context holds the indices of these keys, so that offsets, relations and dense biases are those of the pairs, and only
the rows of a table that occur are read. The forward keeps only its inputs. The backward computes each block again and
leaves its gradients, so that memory holds the scores of one block. A second derivative is
an error.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..call import AttentionCall, Backend
from ..context import AttentionContext
from ..formula import ALL_TABLES, Table, Terms
from ..sliding_window import SlidingWindowMask
from ..tracing import first_order_only, is_traced, is_transformed


QUERIES = 128  # queries of a block
# Calls with fewer keys than this many times a block's are computed whole: blocks would overlap as much.
FEWEST = 4

Run = Callable[[AttentionCall], torch.Tensor]  # computes the output (B, L, H, d) of a block


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


def run_by_blocks(call: AttentionCall, run: Run) -> torch.Tensor:
    """Compute the output (B, L, H, d) of a call that `is_for_blocks`.

    Args:
        run: computes a call whose mask is a tensor.
    """
    context, terms, query, key = call.context, call.terms, call.query, call.key
    if terms.rotate is not None:
        query = terms.rotate(query, context.query_positions(query.device))
        key = terms.rotate(key, context.key_positions(key.device))
        terms = replace(terms, rotate=None)
    leaves = _leaves(terms)
    call = replace(call, terms=terms, shared=None)
    seed = int(torch.randint(1 << 62, ())) if call.dropout else 0
    out: torch.Tensor = _Blocks.apply(call, run, seed, query, key, call.value, *leaves)
    return out


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
        if is_for_blocks(call):
            return run_by_blocks(call, lambda block: self.backend.run(block)[0]), None
        return self.backend.run(call)


def parts(mask: SlidingWindowMask) -> list[Part]:
    """Return the blocks of a mask, made once for all layers."""
    key = ("parts", QUERIES)
    if key not in mask.cached:
        found = []
        for block in mask.blocks(slice(None), QUERIES):
            queries, keys = slice(block.first, block.first + block.queries), mask.keys_of(block)
            visible = mask.visible(queries, keys)
            # a query without keys gets all of them: else its output is a mean in one backend and NaN in another
            found.append(Part(queries, keys, visible | ~visible.any(-1, keepdim=True)))
        mask.cached[key] = found
    made: list[Part] = mask.cached[key]
    return made


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


def _leaves(terms: Terms) -> list[torch.Tensor]:
    """Return every tensor of the terms that may have a gradient: all but relations."""
    rows = [table.rows for table in terms.all_tables]
    return [*rows, *terms.dense, *([] if terms.content_bias is None else [terms.content_bias])]


def _with_leaves(terms: Terms, tables: Sequence[Table], rest: Sequence[torch.Tensor]) -> Terms:
    """Return the terms with other tables and, after the tables in the order of `_leaves`, other tensors."""
    left = iter(tables)
    changed: dict[str, Any] = {name: tuple(next(left) for _ in getattr(terms, name)) for name in ALL_TABLES}
    if terms.feature_gain is not None:
        changed["feature_gain"] = next(left)
    changed["dense"] = tuple(rest[: len(terms.dense)])
    changed["content_bias"] = None if terms.content_bias is None else rest[-1]
    return replace(terms, **changed)


def _block_context(whole: AttentionContext, part: Part) -> AttentionContext:
    return replace(
        whole,
        query_length=part.queries.stop - part.queries.start,
        key_length=part.keys.shape[0],
        start=int(whole.start) + part.queries.start,
        keys=part.keys,
    )


def _selections(call: AttentionCall, part: Part, tensors: Sequence[torch.Tensor]) -> list[Selection]:
    """Return what a block reads of query, key, value and `_leaves`."""
    keys, context = Selection(dim=2, entries=part.keys), _block_context(call.context, part)
    selections = [Selection(part.queries), keys, keys]
    for table, rows in zip(call.terms.all_tables, tensors[3:], strict=False):
        used = None
        if rows.shape[1] > part.mask.shape[-1]:
            used = Table(rows, table.row_of, _relation(table, part)).index(context).unique()
        selections.append(Selection(dim=1, entries=used))
    selections += [Selection(part.queries, -1, part.keys) for _ in call.terms.dense]
    return selections + [Selection()] * (len(tensors) - len(selections))


def _relation(table: Table, part: Part) -> torch.Tensor | None:
    """Return the relation of a block's pairs."""
    whole = table.relation
    return None if whole is None else whole[..., part.queries, :].index_select(-1, part.keys)


def _block_call(
    call: AttentionCall, part: Part, selections: Sequence[Selection], own: Sequence[torch.Tensor]
) -> AttentionCall:
    """Return the call of a block, given what it reads of query, key, value and `_leaves`."""
    query, key, value, *leaves = own
    tables = []
    for table, rows, selection in zip(call.terms.all_tables, leaves, selections[3:], strict=False):
        tables.append(Table(rows, _row_among(selection.entries, table.row_of), _relation(table, part)))
    terms = _with_leaves(call.terms, tables, leaves[len(tables) :])
    context = _block_context(call.context, part)
    return replace(call, query=query, key=key, value=value, terms=terms, context=context, mask=part.mask)


def _row_among(
    used: torch.Tensor | None, row_of: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the map to the rows of a table of which only the rows `used`, in ascending order, are left."""
    return row_of if used is None else lambda relation: torch.searchsorted(used, row_of(relation))


class _Blocks(torch.autograd.Function):
    """`run_by_blocks` for rotated vectors and `_leaves`."""

    @staticmethod
    def forward(ctx: Any, call: AttentionCall, run: Run, seed: int, *tensors: torch.Tensor) -> torch.Tensor:
        query = tensors[0]
        ctx.save_for_backward(*tensors)
        ctx.call, ctx.run, ctx.seed = _without_tensors(call), run, seed
        kind = query.device.type
        ctx.autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        mask = call.mask
        assert isinstance(mask, SlidingWindowMask), "it is_for_blocks"
        out = None
        for number, part in enumerate(parts(mask)):
            selections = _selections(call, part, tensors)
            own = [selection.of(tensor) for selection, tensor in zip(selections, tensors, strict=True)]
            with _random(call, seed + number, query.device):
                block = run(_block_call(call, part, selections, own))
            if out is None:
                out = block.new_empty(block.shape[0], query.shape[2], *block.shape[2:])
            out[:, part.queries] = block
        assert out is not None, "there are queries"
        return out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, tensors = ctx.call, ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        totals = [
            torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)) if needs else None
            for tensor, needs in zip(tensors, needed, strict=True)
        ]
        enabled, dtype = ctx.autocast
        with torch.enable_grad(), torch.autocast(d_out.device.type, dtype=dtype, enabled=enabled):
            for number, part in enumerate(parts(call.mask)):
                selections = _selections(call, part, tensors)
                own = [
                    selection.of(tensor).detach().requires_grad_(needs)
                    for selection, tensor, needs in zip(selections, tensors, needed, strict=True)
                ]
                with _random(call, ctx.seed + number, d_out.device):
                    out = ctx.run(_block_call(call, part, selections, own))
                leaves = [leaf for leaf in own if leaf.requires_grad]
                found = iter(torch.autograd.grad(out, leaves, d_out[:, part.queries], allow_unused=True))
                for selection, total in zip(selections, totals, strict=True):
                    if total is None:
                        continue
                    gradient = next(found)
                    if gradient is not None:
                        selection.add(total, gradient)
        gradients = [
            None if total is None else total.to(tensor.dtype) for total, tensor in zip(totals, tensors, strict=True)
        ]
        return None, None, None, *gradients


def _without_tensors(call: AttentionCall) -> AttentionCall:
    """Return a copy without tensors. The graph saves these itself, and would otherwise hold them twice."""
    empty = call.query.new_empty(0)
    tables = [Table(empty, table.row_of, table.relation) for table in call.terms.all_tables]
    terms = _with_leaves(call.terms, tables, [empty] * (len(call.terms.dense) + 1))
    return replace(call, query=empty, key=empty, value=empty, terms=terms)


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
