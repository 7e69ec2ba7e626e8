"""The general scheme: the formula with free tables, on rows or on knots with linear interpolation between them.

e_ij = (q_i·k_j + q_i·A_r + k_j·B_r + c_r) / √d,   z_i = Σ_j α_ij (v_j + V_r),   r = clip(j − i, ±max_distance)
"""

from functools import partial

import numpy as np
import pytest
import torch
from oracles import array, layer_error, padding, tiny_attention, with_vectors

from hf_relpos.schemes.tables import knots


def interpolated(rows, at, r):
    """Row of offset r, (H or 1, …), by np.interp on each number of the table."""
    flat = rows.reshape(rows.shape[0], rows.shape[1], -1)
    out = [[np.interp(r, at, head[:, column]) for column in range(flat.shape[2])] for head in flat]
    return np.array(out).reshape(rows.shape[0], *rows.shape[2:])


def paper(layer):
    scheme = layer.distance_embedding
    tables = {letter: array(rows) for letter, rows in scheme.named_parameters()}

    def row(letter, h, i, j):
        if letter not in tables:
            return 0.0
        row = interpolated(tables[letter], scheme.knots, j - i)
        return row[h % row.shape[0]]

    return with_vectors(*(partial(row, letter) for letter in "AVBc"))


@pytest.mark.parametrize("storage", ["knots", "rows"])
@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("terms", ["ABcV", "A", "B", "c", "V", "BA"])
def test_equals_the_formula(terms, per_head, storage):
    options = {"terms": terms, "per_head": per_head, "storage": storage}
    layer = tiny_attention("tables", position_options={**options, "max_distance": 7, "dense": 2, "per_octave": 1})
    hidden, real = torch.randn(2, 11, 24, dtype=torch.float64), padding([11, 6], 11)  # past max_distance, too
    assert layer_error(layer, hidden, real, *paper(layer)) <= 1e-10


@pytest.mark.parametrize("given", [(511, 16, 4), (7, 2, 1), (1, 16, 4), (16, 16, 4), (17, 16, 4)])
def test_knots(given):
    offsets, (max_distance, dense, _) = knots(*given), given
    assert offsets == sorted(set(offsets)) and offsets == [-offset for offset in reversed(offsets)]
    assert offsets[-1] == max_distance
    near = min(dense, max_distance)
    assert set(range(-near, near + 1)) <= set(offsets)
    if max_distance == 511:  # 33 near ones, and 4 for each of the 5 octaves on both sides
        assert len(offsets) == 33 + 2 * 4 * 5


@pytest.mark.parametrize("out_of_range", ["clip", "zero"])
def test_past_the_range(out_of_range):
    layer = tiny_attention("tables", position_options={"max_distance": 5, "terms": "A", "out_of_range": out_of_range})
    scheme = layer.distance_embedding
    rows = scheme.expand(scheme.A, torch.tensor([-9, -5, 5, 6]))
    assert torch.equal(rows[:, 1], scheme.A[:, 0]) and torch.equal(rows[:, 2], scheme.A[:, -1])
    if out_of_range == "zero":
        assert rows[:, [0, 3]].abs().max() == 0
    else:
        assert torch.equal(rows[:, 0], scheme.A[:, 0]) and torch.equal(rows[:, 3], scheme.A[:, -1])
