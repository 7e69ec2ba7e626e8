"""`attend` against the loop over pairs, its gradients, and the memory it takes."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from computed import Computed
from oracles import array, formula_by_loop, padding, uncompiled
from torch.autograd import gradcheck

from hf_relpos.attention.call import AttentionCall
from hf_relpos.attention.dispatch import BY_NAME, run_attention
from hf_relpos.attention.formula import TABLE_FIELDS
from hf_relpos.attention.toeplitz import to_toeplitz
from hf_relpos.schemes import AttentionContext, Table, Terms, attend


BATCH, HEADS, SIZE, SCALE = 2, 3, 4, 0.37
LETTERS = ("A", "B", "u", "c", "c_outer", "V")
# of Terms, by the letters that tests are named after
FIELDS = {**TABLE_FIELDS, "u": "content_bias", "c_outer": "bias"}
COMBINATIONS = [frozenset(some) for n in range(len(LETTERS) + 1) for some in itertools.combinations(LETTERS, n)]
ALL = frozenset(LETTERS)


def combination_id(chosen) -> str:
    return "+".join(letter for letter in LETTERS if letter in chosen) or "none"


def clipped(max_distance):
    """Offset to row: clip to ±reach, from 0."""
    return lambda r: r.clamp(-max_distance, max_distance) + max_distance


# Three maps from offsets to rows, as tensors and as plain integers; rows 7, 5 and 4.
MAPS = [
    (7, clipped(3), lambda r: max(-3, min(3, r)) + 3),
    (5, lambda r: r % 5, lambda r: r % 5),  # neither monotone nor symmetric
    (4, lambda r: (r > 0).long() * 2 + (r.abs() > 2).long(), lambda r: (r > 0) * 2 + (abs(r) > 2)),
]


def random_tensor(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def random_terms(chosen, shared: bool, tables: int = 1, rotate=None):
    """The chosen terms at random, as Terms and as plain functions for the loop.

    Args:
        shared: one table for all heads instead of one per head.
        tables: how many tables each letter has, each with a map of its own.
    """
    heads = 1 if shared else HEADS
    terms, plain = {}, {}
    for place, letter in enumerate(LETTERS):
        if letter not in chosen:
            continue
        if letter == "u":
            terms[FIELDS["u"]] = random_tensor(HEADS, SIZE)
            plain["u"] = array(terms[FIELDS["u"]])
            continue
        made = []
        for number in range(tables):
            count, row_of, row = MAPS[(place + number) % len(MAPS)]
            rows = random_tensor(heads, count) if letter in ("c", "c_outer") else random_tensor(heads, count, SIZE)
            made.append((Table(rows, row_of), array(rows), row))
        terms[FIELDS[letter]] = tuple(table for table, _, _ in made)

        def look_up(h, r, made=made):
            return sum(rows[0 if shared else h][row(r)] for _, rows, row in made)

        plain[letter] = look_up
    return Terms(scale=SCALE, rotate=rotate, **terms), plain


def compare(terms, plain, length, keys, start=0, mask=None, plain_mask=None, plain_rotate=None, as_tensor=False):
    """Run both; the largest difference must be rounding."""
    query = random_tensor(BATCH, HEADS, length, SIZE)
    key, value = random_tensor(BATCH, HEADS, keys, SIZE), random_tensor(BATCH, HEADS, keys, SIZE)
    context = AttentionContext(length, keys, torch.tensor([start]) if as_tensor else start)
    out, weights = attend(query, key, value, terms, context, mask)
    expected_out, expected_weights = formula_by_loop(
        array(query), array(key), array(value), SCALE, **plain, mask=plain_mask, rotate=plain_rotate, start=start
    )
    assert out.shape == expected_out.shape and weights.shape == expected_weights.shape
    assert np.abs(array(out) - expected_out).max() <= 1e-12
    assert np.abs(array(weights) - expected_weights).max() <= 1e-12


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per-head"])
@pytest.mark.parametrize("chosen", COMBINATIONS, ids=combination_id)
def test_every_combination_of_terms(chosen, shared):
    compare(*random_terms(chosen, shared), length=4, keys=6)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per-head"])
def test_several_tables_for_one_letter_are_summed(shared):
    compare(*random_terms(ALL, shared, tables=3), length=5, keys=5)


def test_several_hiding_tables_must_agree():
    past = Table(torch.tensor([[True, True, False]]), lambda r: r.sign() + 1)
    near = Table(torch.tensor([[False, True]]), lambda r: (r.abs() <= 2).long())
    terms, plain = random_terms(frozenset("A"), shared=True)
    terms = dataclasses.replace(terms, allow=(past, near))
    compare(terms, plain, length=6, keys=6, plain_mask=lambda b, h, i, j: 0.0 if -2 <= j - i <= 0 else -math.inf)
    context, query = AttentionContext(6, 6), random_tensor(BATCH, HEADS, 6, SIZE)
    visible = to_toeplitz(terms, context, query).allow[0]
    assert visible.tolist() == [-2 <= r <= 0 for r in range(-5, 6)]


@pytest.mark.parametrize("as_tensor", [False, True], ids=["int", "tensor"])
@pytest.mark.parametrize("length, keys, start", [(1, 1, 0), (1, 9, 8), (3, 8, 5), (3, 9, 5), (9, 3, 0), (2, 12, 4)])
def test_lengths_and_start(length, keys, start, as_tensor):
    compare(*random_terms(ALL, shared=False), length=length, keys=keys, start=start, as_tensor=as_tensor)


def turn(vectors, positions):
    """Turn the two halves of each vector by an angle that grows with the position."""
    angle = positions.to(vectors.dtype)[:, None] * 0.3
    left, right = vectors.chunk(2, dim=-1)
    return torch.cat([left * angle.cos() - right * angle.sin(), left * angle.sin() + right * angle.cos()], dim=-1)


def plain_turn(vector, position):
    cos, sin, half = math.cos(0.3 * position), math.sin(0.3 * position), len(vector) // 2
    left, right = vector[:half], vector[half:]
    return np.concatenate([left * cos - right * sin, left * sin + right * cos])


@pytest.mark.parametrize("as_tensor", [False, True], ids=["int", "tensor"])
@pytest.mark.parametrize("start", [0, 4])
@pytest.mark.parametrize("chosen", [frozenset(), frozenset("ABu"), ALL], ids=combination_id)
def test_rotation(chosen, start, as_tensor):
    terms, plain = random_terms(chosen, shared=True, rotate=turn)
    compare(terms, plain, length=3, keys=7, start=start, plain_rotate=plain_turn, as_tensor=as_tensor)


MASKS = {
    "padding": lambda: padding([6, 4], 6)[:, None, None],
    "causal": lambda: torch.ones(6, 6, dtype=torch.bool).tril()[None, None],
    # different for every head and query; the key at the query's own place is always seen
    "any": lambda: (torch.rand(BATCH, HEADS, 6, 6) < 0.5) | torch.eye(6, dtype=torch.bool),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("floor", [None, torch.finfo(torch.float64).min, -math.inf], ids=["boolean", "min", "inf"])
def test_masks(kind, floor):
    """Hidden keys by a boolean, at the lowest number or at −∞; other numbers are added as they are."""
    mask = allowed = MASKS[kind]().expand(BATCH, HEADS, 6, 6)
    added = torch.zeros(allowed.shape, dtype=torch.float64)
    if floor is not None:
        added = torch.randn(allowed.shape, dtype=torch.float64)
        mask = added.masked_fill(~allowed, floor)

    def plain_mask(b, h, i, j):
        return added[b, h, i, j].item() if allowed[b, h, i, j] else -math.inf

    compare(*random_terms(ALL, shared=False), length=6, keys=6, mask=mask, plain_mask=plain_mask)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("size", [1, 20])  # large scores can keep a row finite that small ones do not
def test_hidden_rows_are_finite(size, backend, kind, dtype):
    """Also where the lowest number plus score, or plus c' = −100 at every key of a row, would overflow to −∞."""
    module = torch.nn.Module().eval()
    module.is_causal = False
    low = Table(torch.full((1, 1), -100.0), torch.zeros_like)
    terms = dataclasses.replace(random_terms(ALL, shared=False)[0], bias=(low,))
    vectors = [(size * torch.randn(BATCH, HEADS, 5, SIZE)).to(dtype) for _ in range(3)]
    mask = torch.zeros(BATCH, 1, 5, 5, dtype=torch.bool)
    mask[0] = True
    if kind == "additive":
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    call = AttentionCall(*vectors, terms, AttentionContext(5, 5), mask, layer=module)
    out, weights = run_attention(backend, call)
    assert out.dtype == dtype and out.isfinite().all()
    assert weights is None or (weights.dtype == dtype and weights.isfinite().all())


def test_dropout_drops_weights_on_both_sides():
    """The weights that come back are those used, for v and for V alike."""
    terms, plain = random_terms(ALL, shared=False)
    query, key, value = (random_tensor(1, HEADS, 6, SIZE) for _ in range(3))
    context = AttentionContext(6, 6)
    _, undropped = attend(query, key, value, terms, context)
    out, weights = attend(query, key, value, terms, context, dropout=0.5)
    kept = weights != 0
    assert 0.2 < kept.double().mean() < 0.8
    assert (weights[kept] - 2 * undropped[kept]).abs().max() <= 1e-12
    vectors = array(value)[0]
    for h, i in itertools.product(range(HEADS), range(6)):
        expected = sum(weights[0, h, i, j].item() * (vectors[h, j] + plain["V"](h, j - i)) for j in range(6))
        assert np.abs(array(out)[0, h, i] - expected).max() <= 1e-12


@pytest.mark.parametrize("rotate", [None, turn], ids=["still", "rotated"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per-head"])
def test_gradients_by_finite_differences(shared, rotate):
    """All terms at once: query, key, value, u and every table."""
    terms, _ = random_terms(ALL, shared, rotate=rotate)
    fields = [FIELDS[letter] for letter in LETTERS if letter != "u"]
    rows = [getattr(terms, field)[0].rows for field in fields]
    maps = [getattr(terms, field)[0].row_of for field in fields]
    inputs = [random_tensor(1, HEADS, length, SIZE) for length in (3, 5, 5)] + [terms.content_bias, *rows]
    mask = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    mask[..., 1, 3:] = False

    def run(query, key, value, u, *rows):
        tables = {field: (Table(table, row_of),) for field, table, row_of in zip(fields, rows, maps, strict=True)}
        context = AttentionContext(3, 5, start=2)
        return attend(query, key, value, Terms(scale=SCALE, content_bias=u, rotate=rotate, **tables), context, mask)

    assert gradcheck(run, [tensor.detach().requires_grad_() for tensor in inputs])


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per-head"])
@pytest.mark.parametrize("backend", [name for name in ("sdpa", "flex_attention") if name in BY_NAME])
@pytest.mark.parametrize("chosen", [chosen for chosen in COMBINATIONS if "V" not in chosen], ids=combination_id)
def test_backends_lower_every_combination(chosen, backend, shared):
    """Also where the bias is the same for every row of the batch, or for every head."""
    module = torch.nn.Module().eval()
    module.is_causal = False
    terms, _ = random_terms(chosen, shared)
    query, key, value = (random_tensor(BATCH, HEADS, length, SIZE).float() for length in (3, 5, 5))
    context = AttentionContext(3, 5, start=2)
    expected, _ = attend(query, key, value, terms, context)
    with torch.no_grad(), uncompiled():
        got, _ = run_attention(backend, AttentionCall(query, key, value, terms, context, layer=module))
    assert (got - expected.transpose(1, 2)).abs().max() <= 1e-5


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per-head"])
def test_nothing_of_size_length_times_keys_times_d(shared):
    """Forward and backward stay within B·H·L·max(K, R) elements, where a gathered table has L·K·d."""
    batch, heads, length, size = 1, 2, 64, 32
    rows = 2 * length - 1
    table_heads = 1 if shared else heads

    def table(*tail):
        return (Table(torch.randn(table_heads, rows, *tail, requires_grad=True), lambda r: r + length - 1),)

    query, key, value = (torch.randn(batch, heads, length, size, requires_grad=True) for _ in range(3))
    tables = {field: table(size) for field in ("query_table", "key_table", "value_table")}
    tables |= {field: table() for field in ("scaled_bias", "bias")}
    terms = Terms(scale=size**-0.5, content_bias=torch.randn(heads, size, requires_grad=True), **tables)
    limit = batch * heads * length * max(length, rows)
    with Computed() as seen:
        out, _ = attend(query, key, value, terms, AttentionContext(length, length))
        out.square().sum().backward()
    assert query.grad is not None and terms.value_table[0].rows.grad is not None
    assert seen.largest <= limit
