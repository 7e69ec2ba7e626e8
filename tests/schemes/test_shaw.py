"""Shaw, Uszkoreit and Vaswani 2018, eq. 3 and 4.

e_ij = x_i W^Q (x_j W^K + a^K_ij)ᵀ / √d,   z_i = Σ_j α_ij (x_j W^V + a^V_ij),   a_ij = w_{clip(j − i, k)}
"""

from functools import partial

import pytest
import torch
from oracles import array, golden, layer_error, padding, tiny_attention, tiny_config, with_vectors

from hf_relpos.schemes import AttentionContext, attend
from hf_relpos.schemes.registry import build_scheme


def paper(layer, clip, out_of_range):
    """Score and value of the paper; "zero" is the case without a term past `clip`."""

    def vector(table, h, i, j):
        if out_of_range == "zero" and abs(j - i) > clip:
            return 0.0
        return array(table[h] if table.dim() == 3 else table)[max(-clip, min(clip, j - i)) + clip]

    tables = layer.distance_embedding
    return with_vectors(partial(vector, tables.key), partial(vector, tables.value))


@pytest.mark.parametrize("out_of_range", ["clip", "zero"])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("clip, length", [(1, 9), (3, 9), (16, 9), (16, 40)])
def test_equals_the_paper(clip, length, per_head, out_of_range):
    options = {"clip": clip, "per_head": per_head, "out_of_range": out_of_range}
    layer = tiny_attention("shaw", position_options=options)
    hidden, real = torch.randn(2, length, 24, dtype=torch.float64), padding([length, 5], length)
    assert layer_error(layer, hidden, real, *paper(layer, clip, out_of_range)) <= 1e-10


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
    scheme = build_scheme(tiny_config("shaw", position_options={**sizes["cases"][case], "per_head": per_head}))
    scheme.load_state_dict({"key": keys, "value": values}, strict=True)
    context = AttentionContext(sizes["length"], sizes["length"])
    mask = padding(sizes["real"], sizes["length"])[:, None, None, :]
    out, _ = attend(*(tensors[name] for name in ("query", "key", "value")), scheme(context), context, mask)
    return (out - tensors[f"{case}.out"]).abs().max().item()
