"""Positions of hierarchical opacity propagation (Li et al. 2020), as its code has them.

score = q_i·k_j / √d + q_i·(P_|Δy| + P_|Δx|),  P_δ = W S_e + b,  e = max(R − δ, 0),  S_e the sinusoid of e, sin | cos
"""

import math

import numpy as np
import pytest
import torch
from oracles import array, golden, grid_ids, layer_error, on_grid, padding, sine_cosine, tiny_attention, tiny_config

from hf_relpos.attention.formula import position_scores
from hf_relpos.schemes.registry import build_scheme


def paper(layer, grid, radius):
    """The score of one row of the batch, whose grid is (L, 2)."""
    linear, grid = layer.distance_embedding.pos_embed_linear, grid.tolist()
    W, b = array(linear.weight), array(linear.bias)

    def score(q, k, h, i, j):
        content = q @ k / math.sqrt(8)
        if min(*grid[i], *grid[j]) < 0:
            return content
        position = 0.0
        for axis in (0, 1):
            distance = abs(grid[j][axis] - grid[i][axis])
            position += q @ (W @ sine_cosine(max(radius - distance, 0), 8) + b)
        return content + position

    return score


GRID, SMALL = grid_ids(3, 5, outside=1), [(1, 1), (1, 9), (2, 2)]  # the original needs grids of twice the radius


@pytest.mark.parametrize("radius, grid", [(1, GRID), (3, GRID), *((7, grid_ids(*size)) for size in SMALL), (7, GRID)])
def test_equals_the_paper(radius, grid):
    layer, length = tiny_attention("hop", position_options={"radius": radius}), grid.shape[1]
    hidden, score = torch.randn(2, length, 24, dtype=torch.float64), paper(layer, grid[0], radius)
    real = padding([length, length - length // 4], length)
    assert layer_error(layer, hidden, real, score, context=on_grid(grid.expand(2, -1, -1))) <= 1e-10


CASES = list(golden("hop")[0]["cases"])


@torch.no_grad()
def parity(case: str) -> float:
    """Largest difference from the scores of the original, (H, n, N)."""
    sizes, tensors = golden("hop")
    settings, heads = sizes["cases"][case], sizes["heads"]
    fields = {"hidden_size": heads * sizes["size"], "num_attention_heads": heads}
    scheme = build_scheme(tiny_config("hop", position_options={"radius": settings["radius"]}, **fields))
    linear = {f"pos_embed_linear.{name}": tensors[f"{case}.{name}"] for name in ("weight", "bias")}
    scheme.load_state_dict(linear, strict=True)
    context, query = on_grid(grid_ids(settings["height"], settings["width"])), tensors[f"{case}.query"][None]
    scores = position_scores(query, query, scheme(context), context)[0, :, tensors[f"{case}.queries"]]
    return (scores - tensors[f"{case}.scores"]).abs().max().item()


def test_begins_as_the_original_does():
    linear = tiny_attention("hop", initializer_range=100.0).distance_embedding.pos_embed_linear
    assert np.abs(array(linear.weight)).max() <= math.sqrt(6 / 16) + 0.6  # Xavier, and the noise of `stir`
    assert np.abs(array(linear.bias)).max() <= 0.6
