"""Fourier tables: their rows are sums of cosines and sines of the offset, so that plain attention can compute them.

    A_r = Σ_w a_w cos ω_w r + b_w sin ω_w r,     r = j − i

A cosine of a difference is a sum of products of functions of i and of j. Such a term is therefore a product of
features of the query and of the key. A backend may also read the rows by offset, as usual.

All frequencies are multiples of 2π / 2^24. Phases are reduced by integer arithmetic, so that those of far tokens are
as exact as those of near ones, in any dtype and on any device. Far from position 0, a float32 product would be off by
as much as rounding changes a position.

With α_w = q_i·a_w + a_w^c and β_w = q_i·b_w + b_w^c, the terms A and c of a pair are

    Σ_w α cos ω(j − i) + β sin ω(j − i) = Σ_w (α cos ωi − β sin ωi) cos ωj + (α sin ωi + β cos ωi) sin ωj,

that is, 2W further features of the query, which are (α, β) rotated by ωi, times 2W further features of the key,
(cos ωj, sin ωj). B is the same with further features of the key (k_j·a_w, k_j·b_w), rotated by −ωj. For V, the value
gets 2W further columns (cos ωj, sin ωj). Attention averages them, and the coefficients of V multiply these averages
after a rotation by −ωi:

    Σ_j α_ij cos ω(j − i) = cos ωi (Σ_j α_ij cos ωj) + sin ωi (Σ_j α_ij sin ωj).

So heads of d become heads of d + 4W, or d + 2W without B or with B alone, and any attention can compute them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..host.tracing import is_traced
from .call import AttentionCall, Finish
from .context import AttentionContext, precise
from .formula import TABLE_FIELDS, Clipped, Table, content_scale, content_vectors, total_of


TURN = 1 << 24  # steps of a full turn; a float32 can represent every one of them
HIGHEST = 0.85 * TURN / 2  # at π, sines would vanish at every offset


def geometric(count: int, period: int) -> tuple[int, ...]:
    """Return frequencies at equal ratios, from 2π / `period` up to 0.85 π, in steps of 2π / 2^24.

    Args:
        count: the number of frequencies; a single one is the slowest.
        period: from 4 to 2^24.
    """
    slowest = TURN / period
    ratio = HIGHEST / slowest
    return tuple(round(slowest * ratio ** (number / max(count - 1, 1))) for number in range(count))


def phases(
    positions: torch.Tensor, frequencies: tuple[int, ...], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cos ω_w p and sin ω_w p.

    Args:
        positions: p, integers of any shape, which may be negative.
        frequencies: W frequencies from `geometric`.
        dtype: float32 or float64.

    Returns:
        Two tensors (…, W).
    """
    steps = positions[..., None] * torch.tensor(frequencies, device=positions.device)
    steps = torch.remainder(steps + TURN // 2, TURN) - TURN // 2  # from −half a turn, where floats are most precise
    angles = steps.to(dtype) * (2 * torch.pi / TURN)
    return angles.cos(), angles.sin()


# A rotation of each plane of vectors (…, 2W) by its angle: the factors of each component and of its partner, (…, 2W).
Turn = tuple[torch.Tensor, torch.Tensor]


def turn_of(cosines: torch.Tensor, sines: torch.Tensor, halves: bool = False) -> Turn:
    """Return a rotation for `turned`.

    Args:
        cosines, sines: of the angle of each plane, (…, W).
        halves: whether planes are components n and n + W, instead of 2n and 2n + 1.
    """
    dim = -2 if halves else -1
    return torch.stack([cosines, cosines], dim).flatten(-2), torch.stack([-sines, sines], dim).flatten(-2)


def turned(vectors: torch.Tensor, turn: Turn, halves: bool = False) -> torch.Tensor:
    """Rotate each plane (x, y) of vectors (…, 2W) to (x cos − y sin, y cos + x sin)."""
    width = vectors.shape[-1]
    partners = vectors.roll(width // 2, -1) if halves else vectors.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(vectors * turn[0], partners, turn[1])


def interleaved(vectors: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a copy with x_0, y_0, x_1, y_1, … along a dimension of x_0, x_1, …, y_0, y_1, …."""
    return vectors.unflatten(dim, (2, -1)).transpose(dim, dim + 1).flatten(dim, dim + 1)


class FourierTable(Table):
    """A table of W cosines and sines of the offset. Its rows are computed whenever they are read.

    Attributes:
        coefficients: (H or 1, 2W, d) for A, B and V; (H or 1, 2W) for c: of each cosine and sine in turn. They are a
            copy of those given, of which those of the cosines come first, then those of the sines.
        frequencies: W frequencies from `geometric`.
        context: the context of the call, whose offsets are the rows.
    """

    coefficients: torch.Tensor
    frequencies: tuple[int, ...]
    context: AttentionContext

    def __init__(self, coefficients: torch.Tensor, frequencies: tuple[int, ...], context: AttentionContext) -> None:
        # Table is frozen, and these are not among its fields
        object.__setattr__(self, "coefficients", interleaved(coefficients, 1))
        object.__setattr__(self, "frequencies", frequencies)
        object.__setattr__(self, "context", context)

    @property
    def device(self) -> torch.device:
        return self.coefficients.device

    @property
    def rows(self) -> torch.Tensor:
        """The rows, one for each offset of the call."""
        dtype = precise(self.coefficients.dtype)
        offsets = self.context.offsets(self.coefficients.device)
        basis = torch.stack(phases(offsets, self.frequencies, dtype), dim=-1).flatten(-2)  # (P, 2W)
        coefficients = self.coefficients.to(dtype)
        if coefficients.dim() == 2:
            return torch.matmul(coefficients, basis.T)
        return torch.matmul(basis, coefficients)

    @property
    def row_of(self) -> Clipped:
        """The row of each offset."""
        return Clipped(self.context.low)


class Phases(NamedTuple):
    """Of the angles ω p of positions, (N, 1, …) or (B, N, 1, …).

    Attributes:
        there, back: rotations by the angles, and by their negatives: complex numbers, or for `turned`.
        features, of_back: cosines and sines of them, interleaved, (…, 2W).
    """

    there: torch.Tensor | Turn
    back: torch.Tensor | Turn
    features: torch.Tensor
    of_back: torch.Tensor

    @classmethod
    def of(cls, positions: torch.Tensor, frequencies: tuple[int, ...], dtype: torch.dtype) -> "Phases":
        """Those of positions (N,) or (B, N), in float32 or float64."""
        cosines, sines = phases(positions[..., None], frequencies, dtype)
        both = [torch.stack([cosines, each], -1).flatten(-2) for each in (sines, -sines)]
        if is_traced():  # complex numbers are for no graph
            return cls(turn_of(cosines, sines), turn_of(cosines, -sines), *both)
        return cls(torch.complex(cosines, sines), torch.complex(cosines, -sines), *both)


def with_fourier_features(call: AttentionCall) -> tuple[AttentionCall, Finish] | None:
    """Turn the Fourier tables of a call into features of wider heads, (B, H, L, d + …).

    Some terms cannot be combined with these features: other tables of vectors, Fourier tables of other frequencies,
    and gains, which would multiply the features.

    Returns:
        The new call, and the function that makes (B, L, H, d) of its output. None if the call has no Fourier tables,
        or has a term that cannot be combined with them.
    """
    terms = call.terms
    fourier: dict[str, tuple[FourierTable, ...]] = {}
    others: dict[str, Any] = {}
    for letter, field in TABLE_FIELDS.items():
        tables = getattr(terms, field)
        fourier[letter] = tuple(table for table in tables if isinstance(table, FourierTable))
        others[field] = tuple(table for table in tables if not isinstance(table, FourierTable))
    frequencies = {table.frequencies for tables in fourier.values() for table in tables}
    vectors = others["query_table"] or others["key_table"] or others["value_table"]
    if len(frequencies) != 1 or vectors or terms.gain or terms.feature_gain is not None:
        return None
    size, value_tables = call.value.shape[-1], fourier["V"]
    of_queries, of_keys = _phases_of(call, frequencies.pop())
    query, key, value = _augmented_vectors(call, fourier, of_queries, of_keys)
    others |= {"content_bias": None, "rotate": None, "rotate_key": None}
    rest = replace(terms, **others, scale=content_scale(call.query, terms))
    value_size = size + (of_keys.features.shape[-1] if value_tables else 0)
    augmented = replace(call, query=query, key=key, value=value, value_size=value_size, terms=rest, shared=None)

    def finish(out: torch.Tensor) -> torch.Tensor:
        if not value_tables:  # backends return all features or fewer (`AttentionCall.value_size`)
            return out[..., :size]
        content, averages, *_ = out.tensor_split([size, value_size], dim=-1)
        coefficients = total_of([table.coefficients for table in value_tables]).to(out.dtype)
        return content + _by_head(_turned(averages, of_queries.back), coefficients).to(out.dtype)

    return augmented, finish


def _augmented_vectors(
    call: AttentionCall, fourier: dict[str, tuple[FourierTable, ...]], of_queries: Phases, of_keys: Phases
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q̂ + u, k̂ and v with their features, padded to one width, as fused kernels need.

    The shape is (B, H, N, …), but in memory the heads of a token are adjacent, as projections leave them and fused
    kernels return them.
    """
    content, query, key = content_vectors(call.query, call.key, call.terms, call.context)
    content, query, key, value = (vectors.transpose(1, 2) for vectors in (content, query, key, call.value))
    queries, keys, values = [content], [key], [value]
    if fourier["A"] or fourier["c"]:
        pairs = [_products(query, table) for table in fourier["A"]]
        pairs += [table.coefficients.to(query.dtype) for table in fourier["c"]]
        queries.append(_turned(total_of(pairs), of_queries.there))
        keys.append(of_keys.features)
    if fourier["B"]:
        pairs = [_products(key, table) for table in fourier["B"]]
        queries.append(of_queries.of_back)
        keys.append(_turned(total_of(pairs), of_keys.back))
    if fourier["V"]:
        values.append(of_keys.features)
    width = max(sum(part.shape[-1] for part in parts) for parts in (queries, values))
    return _beside(queries, width), _beside(keys, width), _beside(values, width)


def _phases_of(call: AttentionCall, frequencies: tuple[int, ...]) -> tuple[Phases, Phases]:
    """Return rotations by the phases of the queries' and of the keys' positions, in float32 at least."""
    context, device, dtype = call.context, call.query.device, precise(call.query.dtype)

    def of(positions: torch.Tensor) -> Phases:
        """Once for all layers, in each of which they would take many small kernels."""
        found: tuple[Phases, torch.Tensor] = context.once(
            (frequencies, dtype, id(positions)),  # which are kept, too: their id is of no other
            lambda: (Phases.of(positions, frequencies, dtype), positions),
        )
        return found[0]

    return of(context.query_positions(device)), of(context.key_positions(device))


def _products(vectors: torch.Tensor, table: FourierTable) -> torch.Tensor:
    """Compute α and β: vectors (B, N, H, d) to (B, N, H, 2W)."""
    return _by_head(vectors, table.coefficients.to(vectors.dtype).transpose(-1, -2))


def _by_head(vectors: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Multiply vectors (B, N, H, x) by matrices (H or 1, x, y): (B, N, H, y).

    There is one product per head, over all tokens. Heads come first; this copies nothing if they are adjacent.
    """
    batch, tokens, heads, _ = vectors.shape
    if matrices.shape[0] == 1:
        return torch.matmul(vectors, matrices[0])
    by_head = vectors.permute(2, 0, 1, 3).flatten(1, 2)
    return torch.bmm(by_head, matrices).view(heads, batch, tokens, -1).permute(1, 2, 0, 3)


def _turned(pairs: torch.Tensor, by: torch.Tensor | Turn) -> torch.Tensor:
    """Rotate pairs (…, 2W) in float32 at least."""
    precisely = pairs.to(precise(pairs.dtype))
    if isinstance(by, torch.Tensor):
        places = (precisely.storage_offset(), *precisely.stride()[:-1])
        if precisely.stride(-1) != 1 or any(place % 2 for place in places):  # halves of a complex number
            precisely = precisely.contiguous()
        planes = torch.view_as_complex(precisely.unflatten(-1, (-1, 2)))
        return torch.view_as_real(planes * by).flatten(-2).to(pairs.dtype)
    return turned(precisely, by).to(pairs.dtype)


def _beside(parts: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Concatenate vectors (B, N, H, d), features that expand to (B, N, H, …) and zero padding: (B, H, N, width)."""
    first = parts[0]
    features = [part.to(first.dtype).expand(*first.shape[:-1], -1) for part in parts[1:]]
    missing = width - sum(part.shape[-1] for part in parts)
    if missing:
        features.append(first.new_zeros(()).expand(*first.shape[:-1], missing))
    return torch.cat([first, *features], dim=-1).transpose(1, 2)
