"""Augmented queries, keys and values: with the features of Fourier tables the formula has only its content term.

With α_w = q_i·a_w + a_w^c and β_w = q_i·b_w + b_w^c, the terms A and c of a pair are

    Σ_w α cos ω(j − i) + β sin ω(j − i) = Σ_w (α cos ωi − β sin ωi) cos ωj + (α sin ωi + β cos ωi) sin ωj,

2W features beside the query, which are (α, β) turned by ωi, times 2W beside the key, (cos ωj, sin ωj). B is the same
with (k_j·a_w, k_j·b_w), turned by −ωj, beside the key. Of V, attention averages 2W further columns of the value,
(cos ωj, sin ωj), and these averages, turned by −ωi, are what its coefficients multiply:

    Σ_j α_ij cos ω(j − i) = cos ωi (Σ_j α_ij cos ωj) + sin ωi (Σ_j α_ij sin ωj).

So heads of d become heads of d + 4W, or d + 2W without B or with B alone, and any attention whatever computes them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .call import AttentionCall, Finish
from .formula import TABLE_FIELDS, content_scale, total_of
from .fourier_tables import FourierTable, phases


Phases = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, (N, 1, W) or (B, N, 1, W)


def with_fourier_features(call: AttentionCall) -> tuple[AttentionCall, Finish] | None:
    """A call with its Fourier tables as features of wider heads, (B, H, L, d + …).

    Not all terms fit beside them: other tables of vectors do not, nor Fourier tables of other frequencies, nor gains,
    which would multiply the features.

    Returns:
        The call, and the function that makes (B, L, H, d) of its output. None without such tables, and where some term
        does not fit.
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
    size, context, value_tables = call.value.shape[-1], call.context, fourier["V"]
    query, key, value = _augmented_vectors(call, fourier)
    rest = replace(terms, **others, content_bias=None, rotate=None, scale=content_scale(call.query, terms))
    value_size = size + (2 * len(next(iter(frequencies))) if value_tables else 0)
    augmented = replace(call, query=query, key=key, value=value, value_size=value_size, terms=rest, shared=None)

    def finish(out: torch.Tensor) -> torch.Tensor:
        content = out[..., :size]  # backends return all features or only these (`AttentionCall.value_size`)
        if not value_tables:
            return content
        cosines, sines = _phases(value_tables[0], context.query_positions(out.device), out)
        averages = out[..., size : size + 2 * cosines.shape[-1]]
        coefficients = total_of([table.coefficients for table in value_tables]).to(out.dtype)
        return content + _by_head(_turned(averages, (cosines, -sines)), coefficients).to(out.dtype)

    return augmented, finish


def _augmented_vectors(
    call: AttentionCall, fourier: dict[str, tuple[FourierTable, ...]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q̂ + u, k̂ and v with their features, of one width, as fused kernels need.

    (B, H, N, …) as any of them, but the heads of a token lie side by side in memory, as projections leave them and
    fused kernels return them.
    """
    terms, context, query, key, device = call.terms, call.context, call.query, call.key, call.query.device
    if terms.rotate is not None:
        query = terms.rotate(query, context.query_positions(device))
        key = terms.rotate(key, context.key_positions(device))
    content = query if terms.content_bias is None else query + terms.content_bias[:, None].to(query.dtype)
    content, query, key, value = (vectors.transpose(1, 2) for vectors in (content, query, key, call.value))
    some = next(table for tables in fourier.values() for table in tables)
    of_queries = _phases(some, context.query_positions(device), query)
    of_keys = _phases(some, context.key_positions(device), query)
    queries, keys, values = [content], [key], [value]
    if fourier["A"] or fourier["c"]:
        pairs = [_products(query, table) for table in fourier["A"]]
        pairs += [table.coefficients.to(query.dtype) for table in fourier["c"]]
        queries.append(_turned(total_of(pairs), of_queries))
        keys.append(torch.cat(of_keys, dim=-1))
    if fourier["B"]:
        pairs = [_products(key, table) for table in fourier["B"]]
        queries.append(torch.cat([of_queries[0], -of_queries[1]], dim=-1))
        keys.append(_turned(total_of(pairs), (of_keys[0], -of_keys[1])))
    if fourier["V"]:
        values.append(torch.cat(of_keys, dim=-1))
    width = max(sum(part.shape[-1] for part in parts) for parts in (queries, values))
    return _beside(queries, width), _beside(keys, width), _beside(values, width)


def _phases(table: FourierTable, positions: torch.Tensor, like: torch.Tensor) -> Phases:
    """Cosines and sines at positions (N,) or (B, N); in float32 at least."""
    precise = torch.promote_types(like.dtype, torch.float32)
    return phases(positions[..., None], table.frequencies, precise)


def _products(vectors: torch.Tensor, table: FourierTable) -> torch.Tensor:
    """α and β: vectors (B, N, H, d) to (B, N, H, 2W)."""
    return _by_head(vectors, table.coefficients.to(vectors.dtype).transpose(-1, -2))


def _by_head(vectors: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Vectors (B, N, H, x) times matrices (H or 1, x, y): (B, N, H, y).

    One product for each head and all tokens: heads come first, which copies nothing where they lie side by side.
    """
    batch, tokens, heads, _ = vectors.shape
    if matrices.shape[0] == 1:
        return torch.matmul(vectors, matrices[0])
    by_head = vectors.permute(2, 0, 1, 3).flatten(1, 2)
    return torch.bmm(by_head, matrices).view(heads, batch, tokens, -1).permute(1, 2, 0, 3)


def _turned(pairs: torch.Tensor, by: Phases) -> torch.Tensor:
    """(x, y), (…, 2W), to (x cos − y sin, y cos + x sin), computed in the dtype of the phases."""
    cosines, sines = by
    x, y = pairs.to(cosines.dtype).chunk(2, dim=-1)
    return torch.cat([x * cosines - y * sines, y * cosines + x * sines], dim=-1).to(pairs.dtype)


def _beside(parts: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Vectors (B, N, H, d), features that expand to (B, N, H, …), and zeros up to a width: (B, H, N, width)."""
    first = parts[0]
    features = [part.to(first.dtype).expand(*first.shape[:-1], -1) for part in parts[1:]]
    missing = width - sum(part.shape[-1] for part in parts)
    if missing:
        features.append(first.new_zeros(()).expand(*first.shape[:-1], missing))
    return torch.cat([first, *features], dim=-1).transpose(1, 2)
