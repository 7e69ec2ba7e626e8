"""Sinusoids of rows and columns (Parmar et al. 2018, tensor2tensor): [sin y | cos y | sin x | cos x | nothing]."""

import math

import numpy as np
import pytest
import torch
from errors import raises
from oracles import array, golden, grid_ids, layer_error, padding, tiny_attention, tiny_config, tiny_model

from hf_relpos import RelPosBertForMaskedLM, RelPosBertLMHeadModel, RelPosBertModel


def paper(y, x, width, steps=None):
    """One vector; `steps`, the divisor of the exponents, makes a mistake that the comparison must see."""
    scales, found = width // 4, []
    if y < 0 or x < 0:
        return np.zeros(width)
    for coordinate in (y, x):
        angles = [coordinate / 10000 ** (n / (steps or max(scales - 1, 1))) for n in range(scales)]
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

    def error(how=lambda y, x: (y, x), steps=None):
        expected = [[paper(*how(y, x), width, steps) for y, x in row] for row in grid.tolist()]
        return np.abs(got - np.array(expected)).max()

    assert error() <= 1e-10
    assert error(lambda y, x: (x, y)) > 1e-1
    if width >= 8:  # with one frequency there is no step
        assert error(steps=width // 4) > 1e-2  # the exponents of the paper before
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


@pytest.mark.parametrize("case", CASES)
def test_equals_the_original_code(case):
    assert parity(case) <= 1e-6


def test_features_after_the_last_multiple_of_four_have_no_position():
    got = vectors(grid_ids(3, 5), 10)
    assert not got[..., 8:].any() and got[..., :8].abs().amax((0, 1)).min() > 0


@torch.no_grad()
def test_tokens_outside_the_grid():
    """A zero vector, whichever coordinate is negative and by how much."""
    model = tiny_model(RelPosBertModel, "sinusoidal_2d").double()
    grid = torch.tensor([[[-1, -1], [-1, 3], [2, -7], [0, 0]]])
    embeddings, ids = model.embeddings, torch.randint(1, 50, (1, 4))
    plain = embeddings.LayerNorm(embeddings.word_embeddings(ids) + embeddings.token_type_embeddings.weight[0])
    apart = (embeddings(ids, position_ids=grid) - plain).abs().amax(-1)[0]
    assert apart[:3].max() <= 1e-12 and apart[3] > 1e-2


def test_attention_has_no_position():
    layer = tiny_attention("sinusoidal_2d")
    hidden = torch.randn(2, 9, 24, dtype=torch.float64)
    assert layer_error(layer, hidden, padding([9, 5], 9), lambda q, k, h, i, j: q @ k / math.sqrt(8)) <= 1e-10


@pytest.mark.parametrize("ids", [None, torch.arange(6)[None]], ids=["none", "of a row"])
def test_rows_and_columns_are_asked_for(ids):
    model = tiny_model(RelPosBertModel, "sinusoidal_2d")
    with raises(ValueError, "position_ids", "(batch, length, 2)"):
        model(torch.randint(1, 50, (1, 6)), position_ids=ids)


@torch.no_grad()
def test_decoding_with_a_cache():
    model = tiny_model(RelPosBertLMHeadModel, "sinusoidal_2d", is_decoder=True)
    ids, grid = torch.randint(1, 50, (2, 15)), grid_ids(3, 5).expand(2, -1, -1)
    first = model(ids[:, :9], position_ids=grid[:, :9], use_cache=True)
    then = model(ids[:, 9:], position_ids=grid[:, 9:], past_key_values=first.past_key_values, use_cache=True).logits
    assert (then - model(ids, position_ids=grid).logits[:, 9:]).abs().max() <= 1e-5


@torch.no_grad()
def test_backends_and_padding_agree():
    model, ids = tiny_model(RelPosBertModel, "sinusoidal_2d"), torch.randint(1, 50, (2, 16))
    grid, mask = grid_ids(3, 5, outside=1).expand(2, -1, -1), padding([16, 11], 16).long()
    fused = model(ids, attention_mask=mask, position_ids=grid).last_hidden_state
    alone = model(ids[1:, :11], position_ids=grid[1:, :11]).last_hidden_state
    assert (alone - fused[1:, :11]).abs().max() <= 1e-5
    model.set_attn_implementation("eager")
    plain = model(ids, attention_mask=mask, position_ids=grid).last_hidden_state
    assert ((fused - plain) * mask[..., None]).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_parameter_learns(dtype):
    model = tiny_model(RelPosBertForMaskedLM, "sinusoidal_2d").to(dtype).train()
    ids = torch.randint(1, 50, (2, 16))
    model(ids, position_ids=grid_ids(3, 5, outside=1), labels=ids).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
