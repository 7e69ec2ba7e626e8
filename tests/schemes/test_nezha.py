"""NEZHA (Wei et al. 2019): Shaw's two terms with one fixed table, the interleaved sinusoid of clip(j − i, ±K) + K.

e_ij = q_i·(k_j + T_r) / √d,   z_i = Σ_j α_ij (v_j + T_r)
"""

import numpy as np
import pytest
import torch
from oracles import golden, layer_error, padding, sine_cosine, tiny_attention, with_vectors

from hf_relpos.schemes import AttentionContext


def interleaved(position):
    return sine_cosine(position, 8).reshape(2, 4).T.reshape(8)


def paper(clip):
    """Score and value."""

    def row(h, i, j):
        return interleaved(max(-clip, min(clip, j - i)) + clip)

    return with_vectors(row, row)


@pytest.mark.parametrize("options, clip, length", [(1, 1, 9), (3, 3, 9), (None, 64, 70)])
def test_equals_the_paper(options, clip, length):
    """By default distances are clipped at 64."""
    layer = tiny_attention("nezha", position_options={"max_relative_position": options} if options else None)
    hidden, real = torch.randn(2, length, 24, dtype=torch.float64), padding([length, 5], length)
    assert layer_error(layer, hidden, real, *paper(clip)) <= 1e-10


CASES = list(golden("nezha")[0]["cases"])


@torch.no_grad()
def parity(case: str) -> float:
    """Largest difference from the original."""
    sizes, tensors = golden("nezha")
    layer = tiny_attention("nezha", dtype=torch.float32, position_options=sizes["cases"][case])
    layer.load_state_dict({name: tensors[name] for name in layer.state_dict()}, strict=True)
    hidden = tensors["hidden_states"]
    out, weights = layer(hidden, attention_mask=padding(sizes["real"], hidden.shape[1])[:, None, None])
    errors = out - tensors[f"{case}.out"], weights - tensors[f"{case}.weights"]
    return max(error.abs().max().item() for error in errors)


def test_tables_of_a_call_are_small():
    """One row per distance, however long the input: the original keeps (512, 512, d) in every layer."""
    layer = tiny_attention("nezha", position_options={"max_relative_position": 4})
    (table,) = layer.distance_embedding(AttentionContext(300, 300)).query_table
    assert tuple(table.rows.shape) == (1, 9, 8)
    assert np.allclose(table.rows[0, 2], interleaved(2), atol=1e-6)
