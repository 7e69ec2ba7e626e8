"""Sandwich (Chi, Fan, Rudnicky and Ramadge 2022).

score = q_i·k_j / √d + (Σ_{n=1}^{d̄/2} cos((i − j) / 10000^{2n/d̄}) − d̄/2) / (8h/H)
"""

import math

import pytest
import torch
from errors import raises
from oracles import golden, layer_error, padding, tiny_attention

from hf_relpos.attention.context import AttentionContext


def bias(r, h, heads, dim, first=1):
    total = sum(math.cos(r / 10000 ** (2 * n / dim)) for n in range(first, first + dim // 2))
    return (total - dim / 2) / (8 * (h + 1) / heads)


def paper(dim, heads=3, **mistake):
    def score(q, k, h, i, j):
        return q @ k / math.sqrt(len(q)) + bias(i - j, h, heads, dim, **mistake)

    return score


@pytest.mark.parametrize("options, dim", [({}, 128), ({"dim": 8}, 8), ({"dim": 2}, 2)])
def test_equals_the_paper(options, dim):
    layer = tiny_attention("sandwich", position_options=options)
    assert not list(layer.distance_embedding.parameters())
    hidden, real = torch.randn(2, 20, 24, dtype=torch.float64), padding([20, 11], 20)
    assert layer_error(layer, hidden, real, paper(dim)) <= 1e-10
    if dim > 2:  # the only wave of dim = 2 is too long to matter here
        # the sum starts at n = 1, not at 0, and the heads are those of the model
        assert layer_error(layer, hidden, real, paper(dim, first=0)) > 1e-3
        assert layer_error(layer, hidden, real, paper(dim, heads=12)) > 1e-3


def test_known_values():
    layer = tiny_attention("sandwich", hidden_size=96, num_attention_heads=12)
    context = AttentionContext(17, 17)
    rows = layer.distance_embedding(context).bias[0].rows
    assert rows.shape == (12, 33)
    assert rows[:, 16].abs().max() == 0  # distance 0
    assert rows[0, 0].item() == pytest.approx(-33.511, abs=1e-3)
    assert rows.equal(rows.flip(1))  # symmetric


CASES = golden("sandwich")[0]["cases"]


def parity(case: tuple[int, int]) -> float:
    """Largest difference from the only public code."""
    heads, dim = case
    layer = tiny_attention("sandwich", hidden_size=2 * heads, num_attention_heads=heads, position_options={"dim": dim})
    context = AttentionContext(24, 24)
    ours = layer.distance_embedding(context).bias[0].scalars(context)
    return (ours - golden("sandwich")[1][f"bias.{heads}.{dim}"]).abs().max().item()


@pytest.mark.parametrize("case", CASES)
def test_equals_the_original_code(case):
    assert parity(case) <= 2e-5


@pytest.mark.parametrize("dim", [0, 3, -2, True, "128", 8.0])
def test_dim_is_even(dim):
    with raises(ValueError, "position_options['dim']"):
        tiny_attention("sandwich", position_options={"dim": dim})
