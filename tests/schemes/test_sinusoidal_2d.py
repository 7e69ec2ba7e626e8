"""Sinusoids of rows and columns (Parmar et al. 2018, tensor2tensor): [sin y | cos y | sin x | cos x | nothing]."""

import math

import numpy as np
import pytest
import torch
from oracles import array, golden, grid_ids, tiny_config, tiny_model

from hf_relpos import RelPosBertLMHeadModel, RelPosBertModel


def paper(y, x, width):
    scales, found = width // 4, []
    if y < 0 or x < 0:
        return np.zeros(width)
    for coordinate in (y, x):
        angles = [coordinate / 10000 ** (n / max(scales - 1, 1)) for n in range(scales)]
        found += [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
    return np.array(found + [0.0] * (width % 4))


def vectors(grid, width, dtype=torch.float64, **options):
    """What is added to the word embeddings, (B, L, D)."""
    config = tiny_config("sinusoidal_2d", position_options=options, hidden_size=width, num_attention_heads=1)
    module = RelPosBertModel(config).embeddings.position_embeddings
    return module(grid, torch.zeros(*grid.shape[:2], width, dtype=dtype), None)


@pytest.mark.parametrize("width", [6, 8, 10, 24, 27])
def test_equals_the_paper(width):
    grid = torch.cat([grid_ids(3, 5, outside=2), torch.randint(-1, 100, (1, 17, 2))])
    got = array(vectors(grid, width))
    assert np.abs(got - np.array([[paper(y, x, width) for y, x in row] for row in grid.tolist()])).max() <= 1e-10
    assert np.abs(array(vectors(grid, width, amplitude=0.25)) - got / 4).max() <= 1e-12


CASES = list(golden("sinusoidal_2d")[0]["cases"])


def parity(case: str) -> float:
    """Largest difference from the original where that is a number; grids that are not square, too."""
    sizes, tensors = golden("sinusoidal_2d")
    sizes, expected = sizes["cases"][case], tensors[case]
    got = vectors(grid_ids(sizes["height"], sizes["width"]), sizes["hidden_size"], torch.float32)[0]
    assert got.isfinite().all()
    if sizes["hidden_size"] < 8:  # the original divides by zero
        assert expected[1:, 1:, :4].isnan().all()
        return 0.0
    return (got - expected.flatten(0, 1)).abs().max().item()


@torch.no_grad()
def test_decoding_with_a_cache():
    model = tiny_model(RelPosBertLMHeadModel, "sinusoidal_2d", is_decoder=True)
    ids, grid = torch.randint(1, 50, (2, 15)), grid_ids(3, 5).expand(2, -1, -1)
    first = model(ids[:, :9], position_ids=grid[:, :9], use_cache=True)
    then = model(ids[:, 9:], position_ids=grid[:, 9:], past_key_values=first.past_key_values, use_cache=True).logits
    assert (then - model(ids, position_ids=grid).logits[:, 9:]).abs().max() <= 1e-5
