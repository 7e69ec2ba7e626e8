"""Dual Triangle Attention (Hallee and Gleghorn 2026): each head in halves, one looks back, one ahead."""

import math

import numpy as np
import pytest
import torch
from oracles import array, padding, paper_attention, tiny_attention


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


@pytest.mark.parametrize("heads, back", [(4, 2), (3, 2), (1, 1)])
def test_the_first_half_of_the_heads_looks_back(heads, back):
    layer = tiny_attention("dual_triangle", num_attention_heads=heads)
    weights = layer(torch.randn(1, 6, 24, dtype=torch.float64))[1][0]
    assert (weights[:back].triu(1) == 0).all() and (weights[back:].tril(-1) == 0).all()
    assert (weights.diagonal(dim1=1, dim2=2) > 0).all()
