"""Dual Triangle Attention (Hallee and Gleghorn 2026): each head in halves, one looks back, one ahead."""

import math

import pytest
import torch
from oracles import layer_error, padding, tiny_attention


def paper(q, k, h, i, j):
    """4 heads of 6: the halves of the paper's two heads of 12."""
    sees = j <= i if h < 2 else j >= i
    return q @ k / math.sqrt(6) if sees else -math.inf


def test_equals_the_paper():
    layer = tiny_attention("dual_triangle", num_attention_heads=4)
    hidden, real = torch.randn(3, 9, 24, dtype=torch.float64), padding([9, 5, 1], 9)
    assert layer_error(layer, hidden, real, paper) <= 1e-10


@pytest.mark.parametrize("name, first", [("disan", 0), ("dual_triangle", 1)])
@pytest.mark.parametrize("heads, back", [(4, 2), (3, 2), (1, 1)])
def test_the_first_half_of_the_heads_looks_back(heads, back, name, first):
    """And the others ahead; `first` is the smallest distance that is hidden."""
    weights = tiny_attention(name, num_attention_heads=heads)(torch.randn(1, 6, 24, dtype=torch.float64))[1][0]
    assert (weights[:back].triu(first) == 0).all() and (weights[back:].tril(-first) == 0).all()
