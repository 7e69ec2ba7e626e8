"""The Toeplitz form: the same scores from tables by offset, and what has none."""

from dataclasses import replace

import pytest
import torch
from oracles import ON_TOKENS, extra_inputs, stir, tiny_config
from test_formula import ALL, COMBINATIONS, clipped, combination_id, random_terms

from hf_relpos import AttentionContext, Table, Terms
from hf_relpos.attention.call import AttentionCall, SharedTerms, toeplitz_of
from hf_relpos.attention.context import LayerInputs, Positions, TokenInputs
from hf_relpos.attention.formula import position_scores, position_values
from hf_relpos.attention.toeplitz import TABLES, to_toeplitz, toeplitz_unsupported
from hf_relpos.schemes.registry import build_scheme, build_shared


HEADS, SIZE = 3, 4


def by_pair(rows, context):
    """Rows by offset, (h, P, …), as rows by pair, (h, L, K, …)."""
    return rows[:, context.matrix(rows.device) - context.low]


def scores_of(form, query, key, context):
    """All of the score but the content, from the Toeplitz form, by plain products of every pair."""
    total = torch.zeros(())
    if form.query_table is not None:
        total = total + (query[..., :, None, :] * by_pair(form.query_table.rows, context)).sum(-1)
    if form.key_table is not None:
        total = total + (key[..., None, :, :] * by_pair(form.key_table.rows, context)).sum(-1)
    if form.bias is not None:
        total = total + by_pair(form.bias, context)
    return total if form.dense is None else total + form.dense


@pytest.mark.parametrize("length, keys, start", [(5, 5, 0), (1, 9, 8), (3, 8, 5), (3, 9, 5)])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per-head"])
@pytest.mark.parametrize("chosen", [chosen for chosen in COMBINATIONS if len(chosen) in (1, 6)], ids=combination_id)
def test_scores_and_values_are_the_formulas(chosen, shared, length, keys, start):
    """Three tables for each letter, each with a map of its own."""
    terms, _ = random_terms(chosen, shared, tables=3)
    query = torch.randn(2, HEADS, length, SIZE, dtype=torch.float64)
    key = torch.randn(2, HEADS, keys, SIZE, dtype=torch.float64)
    context = AttentionContext(length, keys, start)
    assert not toeplitz_unsupported(terms, context)
    form = to_toeplitz(terms, context, query)
    expected = position_scores(query, key, terms, context)
    if expected is not None:
        assert (scores_of(form, query, key, context) - expected).abs().max() <= 1e-12
    assert (form.query_table is None, form.key_table is None, form.value_table is None) == (
        not terms.query_table,
        not terms.key_table,
        not terms.value_table,
    )
    if terms.value_table:
        weights = torch.rand(2, HEADS, length, keys, dtype=torch.float64)
        values = (weights[..., None] * by_pair(form.value_table.rows, context)).sum(-2)
        assert (values - position_values(weights, terms, context)).abs().max() <= 1e-12


@pytest.mark.parametrize("name", ON_TOKENS)
def test_every_scheme_on_tokens(name):
    """Each fresh layer either has the form, with the scores of its terms, or says why not."""
    config = tiny_config(name)
    scheme, shared = build_scheme(config), build_shared(config)
    for module in scheme.modules():
        if hasattr(module, "init_weights"):
            module.init_weights(0.2)
    layer = LayerInputs(None, torch.rand(1, 3, 20), torch.nn.Linear(24, 24), torch.nn.Linear(24, 24))
    context = AttentionContext(20, 20, layer=layer)
    if shared is not None:
        stir(shared).init_weights(0.2)
        context = replace(context, layer=layer._replace(shared=shared(context)))
    terms = scheme(context)
    query, key = torch.randn(1, 3, 20, 8), torch.randn(1, 3, 20, 8)
    if reasons := toeplitz_unsupported(terms, context):
        assert (name == "xlnet" and "relation" in reasons[0]) or (name.startswith("huang") and "gain" in reasons[0])
        return
    form = to_toeplitz(terms, context, query)
    expected = position_scores(query, key, terms, context)
    if expected is not None:
        assert (scores_of(form, query, key, context) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["hop", "relation", "relative_2d"])
def test_other_relations_have_no_form(name):
    inputs = extra_inputs(name, 1, 6)
    context = AttentionContext(
        6, 6, tokens=TokenInputs(grid=inputs.get("position_ids"), relation_ids=inputs.get("relation_ids"))
    )
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
    form = to_toeplitz(
        Terms(query_table=(Table(rows, clipped(max_distance)),)),
        AttentionContext(length, length),
        torch.zeros(1, 1, length, SIZE),
    )
    assert form.query_table.clamped == tails
    whole = Table(rows, torch.zeros_like)
    form = to_toeplitz(Terms(query_table=(whole,)), AttentionContext(3, 3), torch.zeros(1, 1, 3, SIZE))
    assert form.query_table.clamped == (5, 1)
    both = Terms(query_table=(Table(rows, clipped(max_distance)), Table(rows, clipped(max_distance - 1))))
    form = to_toeplitz(both, AttentionContext(length, length), torch.zeros(1, 1, length, SIZE))
    assert form.query_table.clamped == tails


def test_gradients_reach_the_tables():
    """Through clipping, sums and the scale, those of the formula."""
    terms, _ = random_terms(ALL, shared=False, tables=2)
    tables = [*terms.query_table, *terms.key_table, *terms.scaled_bias, *terms.bias]
    rows = [table.rows.requires_grad_() for table in tables]
    query, key = torch.randn(2, HEADS, 5, SIZE).double(), torch.randn(2, HEADS, 5, SIZE).double()
    context, weights = AttentionContext(5, 5), torch.randn(2, HEADS, 5, 5).double()
    got = torch.autograd.grad(
        (scores_of(to_toeplitz(terms, context, query), query, key, context) * weights).sum(), rows
    )
    expected = torch.autograd.grad((position_scores(query, key, terms, context) * weights).sum(), rows)
    assert all((one - other).abs().max() <= 1e-12 for one, other in zip(got, expected, strict=True))


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
