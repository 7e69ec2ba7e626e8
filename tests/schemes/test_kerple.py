"""KERPLE (Chi, Fan, Ramadge and Rudnicky 2022).

score = s · q_i·k_j − p·log(1 + a·|i − j|)    or    − a·|i − j|^p,    p and a not below 0.01, p ≤ 2 in the second
"""

import math

import pytest
import torch
from oracles import REAL, array, golden, layer_error, tiny_attention

from hf_relpos.attention.context import AttentionContext, LayerInputs


KINDS = ("log", "power")


def paper(layer, kind, inside=False):
    p, a = (array(getattr(layer.shared_distance_embedding, name)).ravel() for name in ("bias_p", "bias_a"))

    def bias(h, r):
        if kind == "log":
            return -max(p[h], 0.01) * math.log(1 + max(a[h], 0.01) * abs(r))
        return -max(a[h], 0.01) * abs(r) ** min(max(p[h], 0.01), 2.0)

    def score(q, k, h, i, j):
        if inside:
            return (q @ k + bias(h, j - i)) / math.sqrt(8)
        return q @ k / math.sqrt(8) + bias(h, j - i)

    return score


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_paper(kind, inside, hidden):
    layer = tiny_attention("kerple", position_options={"kind": kind, "scaled": inside})
    assert layer_error(layer, hidden, REAL, paper(layer, kind, inside)) <= 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_bounds(kind, hidden):
    layer = tiny_attention("kerple", position_options={"kind": kind})
    shared = layer.shared_distance_embedding
    before = torch.tensor([-0.5, 0.8, 2.5], dtype=torch.float64)[:, None, None]
    with torch.no_grad():
        shared.bias_p.copy_(before)
        shared.bias_a.copy_(before.flip(0))
    assert layer_error(layer, hidden, REAL, paper(layer, kind)) <= 1e-10
    # a forward does not touch the parameters, and those out of bounds still learn, unlike after a plain clamp
    assert shared.bias_p.equal(before)
    layer(hidden)[0].square().sum().backward()
    assert (shared.bias_p.grad.abs() > 1e-9).all() and (shared.bias_a.grad.abs() > 1e-9).all()


def test_steep_powers_in_half_precision():
    """−a·r² leaves float16 at r = 256; a row that sees far keys only must stay finite."""
    layer = tiny_attention("kerple", dtype=torch.float16, position_options={"kind": "power"})
    with torch.no_grad():
        layer.shared_distance_embedding.bias_p.fill_(2.0)
        layer.shared_distance_embedding.bias_a.fill_(1.0)
    mask = (torch.arange(300) < 3)[None, None, None]
    out, weights = layer(torch.randn(1, 300, 24).half(), attention_mask=mask)
    assert out.isfinite().all() and weights[..., 3:].abs().max() == 0


def test_initialisation():
    shared = tiny_attention("kerple", hidden_size=240, num_attention_heads=120).shared_distance_embedding
    shared.init_weights(0.02)
    assert 0 <= shared.bias_p.min() and 1.7 < shared.bias_p.max() <= 2 and 0.85 < shared.bias_a.max() <= 1
    assert 0.8 < shared.bias_p.mean() < 1.2 and 0.4 < shared.bias_a.mean() < 0.6


CASES = KINDS


@torch.no_grad()
def parity(kind: str) -> float:
    """Largest difference from the original's scores, relative to those above 1; it gives keys to the right no bias."""
    _, tensors = golden("kerple")
    fields = {"hidden_size": 32, "num_attention_heads": 4, "position_options": {"kind": kind}}
    layer = tiny_attention("kerple", dtype=torch.float32, **fields)
    weights = {name: tensors[f"{kind}.{name}"] for name in ("bias_p", "bias_a")}
    layer.shared_distance_embedding.load_state_dict(weights, strict=True)
    length = tensors["scores"].shape[-1]
    context = AttentionContext(length, length)
    context = AttentionContext(length, length, layer=LayerInputs(shared=layer.shared_distance_embedding(context)))
    bias = layer.distance_embedding(context).bias[0].scalars(context)
    expected = tensors[f"{kind}.out"]
    return ((tensors["scores"] + bias - expected).abs() / expected.abs().clamp(min=1)).tril().max().item()
