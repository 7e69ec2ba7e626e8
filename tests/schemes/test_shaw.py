"""Shaw, Uszkoreit and Vaswani 2018, eq. 3 and 4.

e_ij = x_i W^Q (x_j W^K + a^K_ij)ᵀ / √d,   z_i = Σ_j α_ij (x_j W^V + a^V_ij),   a_ij = w_{clip(j − i, k)}
"""

import math

import pytest
import torch
from errors import raises
from oracles import array, golden, layer_error, padding, tiny_attention, tiny_config

from hf_relpos import AttentionContext, attend
from hf_relpos.schemes.registry import build_scheme


def paper(layer, clip, keys="key", values="value", sign=1):
    """Score and value of the paper; `sign` −1 turns the offset round."""
    a_key = array(getattr(layer.distance_embedding, keys))
    a_value = array(getattr(layer.distance_embedding, values))

    def row(i, j):
        return max(-clip, min(clip, sign * (j - i))) + clip

    def score(q, k, h, i, j):
        return q @ (k + a_key[row(i, j)]) / math.sqrt(8)

    def value(v, h, i, j):
        return v + a_value[row(i, j)]

    return score, value


@pytest.mark.parametrize("clip", [1, 3, 16])
def test_equals_the_paper(clip):
    layer = tiny_attention("shaw", position_options={"clip": clip})
    scheme = layer.distance_embedding
    assert tuple(scheme.key.shape) == tuple(scheme.value.shape) == (2 * clip + 1, 8)
    hidden, real = torch.randn(2, 9, 24, dtype=torch.float64), padding([9, 5], 9)
    assert layer_error(layer, hidden, real, *paper(layer, clip)) <= 1e-10
    # the comparison must see the other sign, the tables exchanged, and the value side left out
    assert layer_error(layer, hidden, real, *paper(layer, clip, sign=-1)) > 1e-2
    assert layer_error(layer, hidden, real, *paper(layer, clip, keys="value", values="key")) > 1e-2
    assert layer_error(layer, hidden, real, paper(layer, clip)[0]) > 1e-2


def test_clips_distances():
    layer = tiny_attention("shaw", position_options={"clip": 3})
    hidden, real = torch.randn(1, 24, 24, dtype=torch.float64), padding([24], 24)
    assert layer_error(layer, hidden, real, *paper(layer, 3)) <= 1e-10
    assert layer_error(layer, hidden, real, *paper(layer, 2)) > 1e-2  # rows 1 … 5 of 0 … 6: not the same clip


def test_default_clip_and_long_input():
    layer = tiny_attention("shaw")
    assert layer.distance_embedding.key.shape[0] == 33
    hidden, real = torch.randn(1, 40, 24, dtype=torch.float64), padding([38], 40)
    assert layer_error(layer, hidden, real, *paper(layer, 16)) <= 1e-10


@pytest.mark.parametrize("clip", [0, -2, None, True, 1.5, "8"])
def test_clip_is_a_positive_integer(clip):
    with raises(ValueError, "position_options['clip']"):
        tiny_attention("shaw", position_options={"clip": clip})


CASES = [("near", False), ("near", True), ("far", False), ("far", True), ("heads", True)]


@torch.no_grad()
def parity(case: tuple[str, bool]) -> float:
    """Largest difference from tensor2tensor, whose tables are shared by the heads.

    The case `heads` is a call of it for every head.
    """
    sizes, tensors = golden("shaw")
    case, per_head = case
    keys, values = (tensors[f"{case}.relative_positions_{side}"] for side in ("keys", "values"))
    if per_head and keys.dim() == 2:
        keys, values = (table.expand(sizes["heads"], -1, -1) for table in (keys, values))
    options = {**sizes["cases"][case], "per_head": per_head}
    scheme = build_scheme(tiny_config("shaw", position_options=options))
    scheme.load_state_dict({"key": keys, "value": values}, strict=True)
    context = AttentionContext(sizes["length"], sizes["length"])
    mask = padding(sizes["real"], sizes["length"])[:, None, None, :]
    out, _ = attend(*(tensors[name] for name in ("query", "key", "value")), scheme(context), context, mask)
    return (out - tensors[f"{case}.out"]).abs().max().item()


@pytest.mark.parametrize("case", CASES)
def test_equals_the_original_code(case):
    assert parity(case) <= 2e-6


def test_tables_for_each_head():
    layer = tiny_attention("shaw", position_options={"clip": 3, "per_head": True})
    scheme = layer.distance_embedding
    assert tuple(scheme.key.shape) == tuple(scheme.value.shape) == (3, 7, 8)
    key, value = array(scheme.key), array(scheme.value)
    hidden, real = torch.randn(2, 9, 24, dtype=torch.float64), padding([9, 5], 9)

    def error(head):
        def score(q, k, h, i, j):
            return q @ (k + key[head(h), max(-3, min(3, j - i)) + 3]) / math.sqrt(8)

        def averaged(v, h, i, j):
            return v + value[head(h), max(-3, min(3, j - i)) + 3]

        return layer_error(layer, hidden, real, score, averaged)

    assert error(lambda h: h) <= 1e-10
    assert error(lambda h: 2 - h) > 1e-2
