"""Sandwich (Chi, Fan, Rudnicky and Ramadge 2022).

score = q_i·k_j / √d + (Σ_{n=1}^{d̄/2} cos((i − j) / 10000^{2n/d̄}) − d̄/2) / (8h/H)
"""

import math

import pytest
import torch
from oracles import golden, layer_error, padding, tiny_attention

from hf_relpos.attention.context import AttentionContext


def paper(dim):
    def score(q, k, h, i, j):
        total = sum(math.cos((i - j) / 10000 ** (2 * n / dim)) for n in range(1, 1 + dim // 2))
        return q @ k / math.sqrt(len(q)) + (total - dim / 2) / (8 * (h + 1) / 3)

    return score


@pytest.mark.parametrize("options, dim", [({}, 128), ({"dim": 8}, 8), ({"dim": 2}, 2)])
def test_equals_the_paper(options, dim):
    layer = tiny_attention("sandwich", position_options=options)
    hidden, real = torch.randn(2, 20, 24, dtype=torch.float64), padding([20, 11], 20)
    assert layer_error(layer, hidden, real, paper(dim)) <= 1e-10


CASES = golden("sandwich")[0]["cases"]


def parity(case: tuple[int, int]) -> float:
    """Largest difference from the only public code."""
    heads, dim = case
    layer = tiny_attention("sandwich", hidden_size=2 * heads, num_attention_heads=heads, position_options={"dim": dim})
    context = AttentionContext(24, 24)
    ours = layer.distance_embedding(context).bias[0].scalars(context)
    return (ours - golden("sandwich")[1][f"bias.{heads}.{dim}"]).abs().max().item()
