"""The Toeplitz form: what has none, and what rows and layers share. Its scores are tested in test_chunked.py."""

from dataclasses import replace

import pytest
import torch
from oracles import ON_TOKENS, extra_context, tiny_config
from test_formula import ALL, clipped, random_terms

from hf_relpos import explain_backend
from hf_relpos.attention.call import AttentionCall, SharedTerms, toeplitz_of
from hf_relpos.attention.context import Positions
from hf_relpos.attention.toeplitz import TABLES, to_toeplitz, toeplitz_unsupported
from hf_relpos.schemes import AttentionContext, Table, Terms
from hf_relpos.schemes.registry import build_scheme


HEADS, SIZE = 3, 4


@pytest.mark.parametrize("name", ON_TOKENS)
def test_every_scheme_on_tokens(name):
    """Has the form, so that long inputs are computed in chunks, or says why not."""
    said = explain_backend(tiny_config(name, max_position_embeddings=700), 2, 700)
    # without terms sdpa is faster on some machines
    left = [line for line in said.splitlines() if "not chunked" in line and "no terms" not in line]
    reasons = {"xlnet": "another relation than the offset"}
    reasons |= dict.fromkeys(("huang_m1", "huang_m2", "huang_m3"), "a gain multiplies")
    assert name in reasons if left else name not in reasons
    assert all(reasons[name] in line for line in left)


@pytest.mark.parametrize("name", ["hop", "relation", "relative_2d"])
def test_other_relations_have_no_form(name):
    context = extra_context(name, 1, 6)
    terms = build_scheme(tiny_config(name))(context)
    assert "another relation than the offset" in toeplitz_unsupported(terms, context)[0]


def test_unsupported():
    table = Table(torch.zeros(1, 5), clipped(2))
    gaps = AttentionContext(3, 3, positions=Positions(torch.tensor([[0, 2, 3]]), 3))
    assert "gaps" in toeplitz_unsupported(Terms(scaled_bias=(table,)), gaps)[0]
    assert not toeplitz_unsupported(Terms(dense=(torch.zeros(1, 1, 3, 3),)), gaps)
    assert "gain" in toeplitz_unsupported(Terms(gain=(table,)), AttentionContext(3, 3))[0]
    other = Table(torch.zeros(1, 2), lambda r: r, relation=torch.zeros(3, 3).long())
    reasons = toeplitz_unsupported(Terms(scaled_bias=(table, other)), AttentionContext(3, 3))
    assert reasons == ["c depends on another relation than the offset"]


@pytest.mark.parametrize("max_distance, length, tails", [(2, 6, (4, 4)), (5, 6, (1, 1)), (9, 4, (1, 1))])
def test_tails_are_those_of_the_map(max_distance, length, tails):
    rows = torch.zeros(1, 2 * max_distance + 1, SIZE)  # all equal, and yet only the clipped ones are one row
    table, given = (
        Table(rows, clipped(max_distance)),
        (AttentionContext(length, length), torch.zeros(1, 1, length, SIZE)),
    )
    assert to_toeplitz(Terms(query_table=(table,)), *given).query_table.clamped == tails
    whole = Table(rows, torch.zeros_like)
    form = to_toeplitz(Terms(query_table=(whole,)), AttentionContext(3, 3), torch.zeros(1, 1, 3, SIZE))
    assert form.query_table.clamped == (5, 1)
    both = Terms(query_table=(table, Table(rows, clipped(max_distance - 1))))
    assert to_toeplitz(both, *given).query_table.clamped == tails


def test_terms_that_layers_share_follow_the_dtype_of_a_call():
    """A layer in another dtype than the first makes arrays of its own; the others get the one that was made."""
    terms, _ = random_terms(frozenset("A"), shared=True)
    context = AttentionContext(5, 5)
    shared = SharedTerms(terms, None, context, torch.empty(0, SIZE))
    for dtype in (torch.float32, torch.float64):
        query = torch.randn(1, HEADS, 5, SIZE, dtype=dtype)
        call = AttentionCall(query, query, query, terms, context, shared=shared)
        assert toeplitz_of(call).query_table.rows.dtype == dtype
        assert (toeplitz_of(call) is toeplitz_of(call)) == (dtype == torch.float32)


@pytest.mark.parametrize("length", [1, 3, 9])
@pytest.mark.parametrize("max_distance", [2, 6, 20])
def test_shorter_rows_take_over_the_form_of_the_longest(max_distance, length):
    terms, _ = random_terms(ALL, shared=False, tables=2)
    table = Table(torch.rand(HEADS, 2 * max_distance + 1, SIZE).double(), clipped(max_distance))
    terms = replace(terms, query_table=(table,), allow=(Table(torch.rand(1, 41) < 0.5, clipped(20)),))
    whole, own = AttentionContext(12, 12), AttentionContext(length, length)
    shared, query = SharedTerms(terms, None, whole, table.rows), torch.zeros(1, HEADS, length, SIZE).double()
    assert shared.holds_for(own) and not shared.holds_for(AttentionContext(13, 13))
    found = toeplitz_of(AttentionCall(query, query, query, terms, own, shared=shared))
    expected = to_toeplitz(terms, own, query)
    assert found.low == expected.low and torch.equal(found.bias, expected.bias)
    assert torch.equal(found.allow, expected.allow)
    for name in TABLES:
        rows, other = getattr(found, name), getattr(expected, name)
        assert torch.equal(rows.rows, other.rows)
        left, right = rows.clamped
        assert (rows.rows[:, :left] == rows.rows[:, :1]).all() and (rows.rows[:, -right:] == rows.rows[:, -1:]).all()
        assert left + right >= sum(other.clamped) or max(rows.clamped) == rows.rows.shape[1]


def test_terms_of_pairs_and_of_positions_are_not_taken_over():
    terms, _ = random_terms(frozenset("A"), shared=True)
    own, gaps = AttentionContext(3, 3), AttentionContext(3, 3, positions=Positions(torch.tensor([[0, 2, 3]]), 3))
    like, whole = torch.empty(0, SIZE), AttentionContext(5, 5)
    assert not SharedTerms(terms, None, whole, like).holds_for(gaps)
    assert not SharedTerms(terms, None, replace(gaps, query_length=5), like).holds_for(own)
    assert not SharedTerms(replace(terms, dense=(torch.zeros(1, 1, 5, 5),)), None, whole, like).holds_for(own)
