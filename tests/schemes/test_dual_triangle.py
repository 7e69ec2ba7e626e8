"""Dual Triangle Attention (Hallee and Gleghorn 2026): each head in halves, one looks back, one ahead."""

import math

import numpy as np
import pytest
import torch
from oracles import array, padding, paper_attention, tiny_attention, tiny_model

from hf_relpos import RelPosBertModel


def paper(q, k, h, i, j):
    """4 heads of 6: the halves of the paper's two heads of 12."""
    sees = j <= i if h < 2 else j >= i
    return q @ k / math.sqrt(6) if sees else -math.inf


def test_equals_the_paper():
    """At real tokens: padding on the right sees no key ahead, and gets zeros here."""
    layer = tiny_attention("dual_triangle", num_attention_heads=4)
    hidden, real = torch.randn(3, 9, 24, dtype=torch.float64), padding([9, 5, 1], 9)
    out, weights = layer(hidden, attention_mask=real[:, None, None, :])
    expected, expected_weights = map(np.nan_to_num, paper_attention(layer, hidden, real, paper))
    assert np.abs(array(out) - expected).max() <= 1e-10 and np.abs(array(weights) - expected_weights).max() <= 1e-10


def test_halves_of_heads_with_a_softmax_each():
    """Written out for H heads of d, whose queries, keys and values are divided in two."""
    layer = tiny_attention("dual_triangle", num_attention_heads=4)
    hidden = torch.randn(2, 7, 24, dtype=torch.float64)
    q, k, v = (each(hidden).view(2, 7, 2, 2, 6) for each in (layer.query, layer.key, layer.value))  # (B, L, H, 2, d/2)
    scores = torch.einsum("bihsc,bjhsc->bhsij", q, k) / math.sqrt(6)
    back = torch.ones(7, 7).tril().bool()
    # heads count on over both halves, and the first of them look back, as in the public code
    sees = torch.stack([back, back, back.T, back.T]).view(2, 2, 7, 7)
    weights = scores.masked_fill(~sees, -math.inf).softmax(-1)
    expected = torch.einsum("bhsij,bjhsc->bihsc", weights, v).flatten(2)
    assert (layer(hidden)[0] - expected).abs().max() <= 1e-10


@pytest.mark.parametrize("heads, back", [(4, 2), (3, 2), (1, 1)])
def test_the_first_half_of_the_heads_looks_back(heads, back):
    layer = tiny_attention("dual_triangle", num_attention_heads=heads)
    weights = layer(torch.randn(1, 6, 24, dtype=torch.float64))[1][0]
    assert (weights[:back].triu(1) == 0).all() and (weights[back:].tril(-1) == 0).all()
    assert (weights.diagonal(dim1=1, dim2=2) > 0).all()


@pytest.mark.parametrize("name", ["dual_triangle", ["dual_triangle", "rope"]], ids=str)
@torch.no_grad()
def test_order_matters(name):
    """Without any other position: a row and the same in another order have other states of the same tokens."""
    model = tiny_model(RelPosBertModel, name, num_hidden_layers=2)
    ids, order = torch.randint(1, 50, (1, 8)), torch.tensor([3, 1, 0, 7, 2, 6, 5, 4])
    states, other = model(ids).last_hidden_state, model(ids[:, order]).last_hidden_state
    assert (states[:, order] - other).abs().max() > 1e-3
