"""Rows and columns apart (Bello et al. 2019, eq. 4).

l_ij = q_i·(k_j + r^W_{x_j − x_i} + r^H_{y_j − y_i}) / √d,   r_Δ = 0 for |Δ| ≥ m
"""

import numpy as np
import pytest
import torch
from errors import raises
from oracles import (
    array,
    golden,
    grid_ids,
    layer_error,
    on_grid,
    padding,
    tiny_attention,
    tiny_config,
    tiny_model,
    with_vectors,
)

from hf_relpos import RelPosBertLMHeadModel, RelPosBertModel
from hf_relpos.schemes import attend
from hf_relpos.schemes.registry import build_scheme


def paper(layer, grid, max_distance, out_of_range="zero"):
    """Score and value of one row of the batch, whose grid is (L, 2)."""
    scheme, grid = layer.distance_embedding, grid.tolist()
    tables = array(scheme.height_key_relative_embeddings), array(scheme.width_key_relative_embeddings)

    def vector(h, i, j):
        total = np.zeros(8)
        if min(*grid[i], *grid[j]) < 0:
            return total
        for axis, table in enumerate(tables):
            step = grid[j][axis] - grid[i][axis]
            if out_of_range == "clip":
                step = max(1 - max_distance, min(max_distance - 1, step))
            if abs(step) < max_distance:
                total = total + (table[h] if table.ndim == 3 else table)[step + max_distance - 1]
        return total

    return with_vectors(vector)


@pytest.mark.parametrize("out_of_range", ["zero", "clip"])
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "heads"])
@pytest.mark.parametrize("max_distance", [1, 3, 9])
def test_equals_the_paper(max_distance, per_head, out_of_range):
    options = {"max_relative_position": max_distance, "per_head": per_head, "out_of_range": out_of_range}
    layer = tiny_attention("relative_2d", position_options=options)
    grid, hidden = grid_ids(3, 5, outside=1), torch.randn(1, 16, 24, dtype=torch.float64)
    grid[0, 3], grid[0, 7] = torch.tensor([0, -1]), torch.tensor([-3, 2])  # outside, too
    expected = paper(layer, grid[0], max_distance, out_of_range)
    assert layer_error(layer, hidden, padding([13], 16), *expected, context=on_grid(grid)) <= 1e-10


@torch.no_grad()
def test_every_row_of_the_batch_has_a_grid_of_its_own():
    layer = tiny_attention("relative_2d")
    grids = torch.cat([grid_ids(3, 5, outside=1), grid_ids(5, 3, outside=1)])
    hidden = torch.randn(2, 16, 24, dtype=torch.float64)
    together = layer(hidden, context=on_grid(grids))[0]
    apart = [layer(hidden[row : row + 1], context=on_grid(grids[row : row + 1]))[0] for row in range(2)]
    assert (together - torch.cat(apart)).abs().max() <= 1e-12
    assert (together - layer(hidden, context=on_grid(grids.flip(0)))[0]).abs().max() > 1e-2


@torch.no_grad()
def test_grids_of_any_integer_type_and_place():
    layer, grid = tiny_attention("relative_2d"), grid_ids(3, 5)
    hidden = torch.randn(1, 15, 24, dtype=torch.float64)
    out = layer(hidden, context=on_grid(grid))[0]
    assert torch.equal(layer(hidden, context=on_grid((grid + torch.tensor([40, 7])).int()))[0], out)


CASES = list(golden("relative_2d")[0]["cases"])


@torch.no_grad()
def parity(case: str) -> float:
    """Largest difference from tensor2tensor, on square grids and others."""
    sizes, tensors = golden("relative_2d")
    settings = sizes["cases"][case]
    height, width = settings["height"], settings["width"]
    options = {key: settings[key] for key in ("max_relative_position", "per_head")}
    scheme = build_scheme(tiny_config("relative_2d", position_options=options))
    scheme.load_state_dict({name: tensors[f"{case}.{name}"] for name, _ in scheme.named_parameters()}, strict=True)
    query, key, value, expected = (tensors[f"{case}.{n}"].flatten(2, 3) for n in ("query", "key", "value", "out"))
    context = on_grid(grid_ids(height, width).expand(sizes["batch"], -1, -1))
    mask = padding([height * width, height * width - sizes["hidden"]], height * width)[:, None, None, :]
    out, _ = attend(query, key, value, scheme(context), context, mask)
    return (out - expected).abs().max().item()


@pytest.mark.parametrize("input_scheme", ["absolute", "sinusoidal"])
@torch.no_grad()
def test_beside_positions_of_a_row(input_scheme):
    """A scheme at the input that knows no grid counts the tokens."""
    model, ids = tiny_model(RelPosBertModel, [input_scheme, "relative_2d"]), torch.randint(1, 50, (1, 16))
    grid = grid_ids(3, 5, outside=1)
    counted = model.embeddings(ids, position_ids=torch.arange(16)[None])
    assert torch.equal(model.embeddings(ids, position_ids=grid), counted)
    assert model(ids, position_ids=grid).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("name", ["relative_2d", "hop"])
@torch.no_grad()
def test_no_grid_for_what_is_in_a_cache(name):
    model = tiny_model(RelPosBertLMHeadModel, name, is_decoder=True)
    ids, grid = torch.randint(1, 50, (1, 6)), grid_ids(2, 3)
    cache = model(ids, position_ids=grid, use_cache=True).past_key_values
    with raises(ValueError, "(1, 1, 2)", "use_cache=False"):
        model(ids[:, :1], position_ids=grid[:, :1], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("given", [None, torch.arange(6)[None], torch.zeros(1, 6, 3).long()], ids=str)
@pytest.mark.parametrize("name", ["relative_2d", "hop", "sinusoidal_2d"])
def test_grid_is_asked_for(name, given):
    words = ["(1, 6, 3)"] if given is not None and given.dim() == 3 else []
    with raises(ValueError, "position_ids", "(batch, length, 2)", *words):
        tiny_model(RelPosBertModel, name)(torch.randint(1, 50, (1, 6)), position_ids=given)
