"""Polar positions (Gopalakrishnan et al. 2025, eq. 6).

score = Σ_c softplus(q_c) softplus(k_c) cos(r θ_c + δ_c) / √d,    θ_c = base^(−c/d)
"""

import math

import numpy as np
import pytest
import torch
from oracles import REAL, array, golden, layer_error, tiny_attention

from hf_relpos.attention.context import AttentionContext
from hf_relpos.schemes import attend


@pytest.mark.parametrize("start, base", [("uniform", 10000.0), ("zero", 30)])
@torch.no_grad()
def test_equals_the_paper(start, base, hidden):
    layer = tiny_attention("pope", position_options={"base": base, "start": start})
    bias = layer.distance_embedding.bias
    assert bias.mean() == pytest.approx(-math.pi if start == "uniform" else 0, abs=1.5)
    angles, shifts = base ** -(np.arange(8) / 8), array(bias.normal_(-3, 3)).clip(-2 * math.pi, 0)  # some are outside

    def paper(q, k, h, i, j):
        return (np.logaddexp(0, q) * np.logaddexp(0, k) * np.cos((j - i) * angles + shifts[h])).sum() / math.sqrt(8)

    assert layer_error(layer, hidden, REAL, paper) <= 1e-10
    assert layer_error(layer, hidden, REAL, lambda q, k, h, i, j: paper(q, k, h, j, i)) >= 1e-3


CASES = golden("pope")[0]["bases"]


def parity(base: int) -> float:
    """Largest difference from the original, in float64."""
    _, tensors = golden("pope")
    scheme = tiny_attention("pope", position_options={"base": base}).distance_embedding
    scheme.load_state_dict({"bias": tensors["bias"]}, strict=True)
    context = AttentionContext(7, 7, dtype=torch.float64)
    out, _ = attend(*(tensors[name] for name in ("query", "key", "value")), scheme(context), context)
    return (out - tensors[f"{base}.out"]).abs().max().item()
