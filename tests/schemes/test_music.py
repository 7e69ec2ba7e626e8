"""Music Transformer (Huang et al. 2018), with the causal table of the paper and the two-sided one of tensor2tensor.

e_ij = q_i·(k_j + E_r) / √d,   z_i = Σ_j α_ij (v_j [+ E'_r]),   E_r = 0 for |r| ≥ m
"""

from functools import partial

import numpy as np
import pytest
import torch
from oracles import REAL, array, golden, layer_error, padding, tiny_attention, tiny_config, with_vectors

from hf_relpos.schemes import AttentionContext, attend
from hf_relpos.schemes.registry import build_scheme


def paper(layer, max_distance, causal, out_of_range="zero"):
    """Score and value."""
    scheme = layer.distance_embedding
    tables = [array(table) for table in scheme.parameters()]

    def vector(table, h, i, j):
        r = j - i
        if (causal and r > 0) or (out_of_range == "zero" and abs(r) >= max_distance):
            return np.zeros(8)
        row = max(1 - max_distance, min(max_distance - 1, r)) + max_distance - 1
        return (table[h] if table.ndim == 3 else table)[row]

    return with_vectors(*(partial(vector, table) for table in tables))


@pytest.mark.parametrize("out_of_range", ["zero", "clip"])
@pytest.mark.parametrize("per_head", [True, False], ids=["heads", "shared"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("max_distance, values", [(4, False), (4, True), (1, True), (12, True)])
def test_equals_the_paper(max_distance, values, causal, per_head, out_of_range, hidden):
    options = {"max_relative_position": max_distance, "values": values, "causal": causal}
    layer = tiny_attention("music", position_options={**options, "per_head": per_head, "out_of_range": out_of_range})
    assert layer_error(layer, hidden, REAL, *paper(layer, max_distance, causal, out_of_range)) <= 1e-10


def test_by_default_decoders_look_left_and_encoders_both_ways():
    schemes = {is_decoder: build_scheme(tiny_config("music", is_decoder=is_decoder)) for is_decoder in (False, True)}
    shapes = {is_decoder: tuple(each.key_relative_embeddings.shape) for is_decoder, each in schemes.items()}
    assert shapes == {False: (3, 31, 8), True: (3, 16, 8)}


CASES = list(golden("music")[0]["cases"])


@torch.no_grad()
def parity(case: str) -> float:
    """Largest difference from the original."""
    sizes, tensors = golden("music")
    settings = sizes["cases"][case]
    scheme = build_scheme(tiny_config("music", position_options=settings))
    names = [name for name, _ in scheme.named_parameters()]
    scheme.load_state_dict({name: tensors[f"{case}.{name}"] for name in names}, strict=True)
    length = sizes["length"]
    mask = padding(sizes["real"], length)[:, None, None, :]
    if settings["causal"]:
        mask = mask & torch.ones(length, length, dtype=torch.bool).tril()
    context = AttentionContext(length, length)
    out, _ = attend(*(tensors[name] for name in ("query", "key", "value")), scheme(context), context, mask)
    return (out - tensors[f"{case}.out"]).abs().max().item()
