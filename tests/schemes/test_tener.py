"""TENER (Yan et al. 2019), as released.

    score = (q_i + u)·k_j + (q_i + v)·R_{j−i} + k_j·R_{i−j}

with R the sinusoid of size d in tensor2tensor's layout, not projected. The paper has no last term.
"""

import math

import numpy as np
import pytest
import torch
from oracles import array, golden, layer_error, load_projections, padding, tiny_attention


def sinusoid(position: float, width: int = 8) -> np.ndarray:
    """[sin … | cos …] with frequencies from 1 down to 1/10000, both included."""
    angles = [position / 10000 ** (n / (width // 2 - 1)) for n in range(width // 2)]
    return np.array([math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles])


def paper(layer, key_side=True, scale=1.0, clip=math.inf):
    u, v = array(layer.distance_embedding.r_r_bias), array(layer.distance_embedding.r_w_bias)

    def score(q, k, h, i, j):
        r = max(-clip, min(clip, j - i))
        return scale * (((q + u[h]) @ k + (q + v[h]) @ sinusoid(r)) + k @ sinusoid(-r) * key_side)

    return score


@pytest.mark.parametrize("out_of_range, clip", [("extrapolate", math.inf), ("clip", 15)])
@pytest.mark.parametrize("terms", ["code", "paper"])
@pytest.mark.parametrize("scale", [False, True])
def test_equals_the_equation(terms, scale, out_of_range, clip):
    """Past the trained range, too."""
    layer = tiny_attention("tener", position_options={"terms": terms, "scale": scale, "out_of_range": out_of_range})
    expected = paper(layer, key_side=terms == "code", scale=8**-0.5 if scale else 1.0, clip=clip)
    assert layer_error(layer, torch.randn(1, 20, 24, dtype=torch.float64), padding([18], 20), expected) <= 1e-10


@torch.no_grad()
def test_head_of_two():
    """The original divides by zero there."""
    assert tiny_attention("tener", hidden_size=6)(torch.randn(1, 5, 6, dtype=torch.float64))[0].isfinite().all()


CASES = list(golden("tener")[0]["cases"])


@torch.no_grad()
def parity(case: str) -> float:
    """Largest difference from the original."""
    sizes, tensors = golden("tener")
    found = {name.removeprefix(f"{case}."): tensor for name, tensor in tensors.items() if name.startswith(f"{case}.")}
    layer = tiny_attention("tener", position_options=sizes["cases"][case])
    load_projections(layer, found["qkv_linear.weight"].chunk(3))
    layer.distance_embedding.load_state_dict({name: found[name] for name in ("r_r_bias", "r_w_bias")}, strict=True)
    out, weights = layer(found["hidden_states"], attention_mask=found["real"][:, None, None, :])
    errors = out - found["context"], weights - found["weights"]
    return max(error.abs().max().item() for error in errors)
