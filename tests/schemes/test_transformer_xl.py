"""Transformer-XL (Dai et al. 2019, §3.3), bidirectional.

score = [q_i·k_j + q_i·W R_{i−j} + u·k_j + v·W R_{i−j}] / √d,    R the sinusoid of the model size D, sin | cos
"""

import math

import pytest
import torch
from oracles import array, golden, layer_error, load_projections, padding, sine_cosine, tiny_attention


def paper(layer, clamp):
    """The paper's score; `clamp` is the largest distance with an embedding of its own."""
    scheme = layer.distance_embedding
    W, u, v = array(scheme.r_net.weight), array(scheme.r_w_bias), array(scheme.r_r_bias)

    def score(q, k, h, i, j):
        relation = (W @ sine_cosine(max(-clamp, min(clamp, i - j)), 24))[8 * h : 8 * h + 8]
        return ((q + u[h]) @ k + (q + v[h]) @ relation) / math.sqrt(8)

    return score


CLAMPS = [({}, math.inf), ({"clamp_len": 1}, 1), ({"clamp_len": 4}, 4), ({"out_of_range": "clip"}, 15)]


@pytest.mark.parametrize("options, clamp", CLAMPS, ids=str)
def test_equals_the_paper(options, clamp):
    """Past the trained range, too."""
    layer = tiny_attention("transformer_xl", position_options=options)
    hidden, real = torch.randn(2, 30, 24, dtype=torch.float64), padding([28, 5], 30)
    assert layer_error(layer, hidden, real, paper(layer, clamp)) <= 1e-10


@torch.no_grad()
def original_layer(sizes: dict, tensors: dict, clamp: int):
    """Our layer with the weights of the original one, which has no biases in its projections."""
    fields = {"hidden_size": sizes["d_model"], "num_attention_heads": sizes["n_head"]}
    fields["position_options"] = {"clamp_len": clamp if clamp > 0 else None}
    layer = tiny_attention("transformer_xl", dtype=torch.float32, **fields)
    load_projections(layer, tensors["qkv_net.weight"].chunk(3))
    tables = {name: tensors[name] for name in ("r_net.weight", "r_w_bias", "r_r_bias")}
    layer.distance_embedding.load_state_dict(tables, strict=True)
    return layer


CASES = list(golden("attention", "transformer_xl")[0]["cases"])


@torch.no_grad()
def parity(case: str) -> float:
    """Largest difference from the original.

    It sees a memory before the queries, and no future: run all of it, hide the future, drop the memory.
    """
    sizes, tensors = golden("attention", "transformer_xl")
    settings = sizes["cases"][case]
    memory = settings["mlen"]
    layer = original_layer(sizes, tensors, settings["clamp_len"])
    hidden = tensors[f"{case}.hidden_states"].transpose(0, 1)
    if memory:
        hidden = torch.cat([tensors[f"{case}.mems"].transpose(0, 1), hidden], dim=1)
    causal = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril()[None, None]
    out, weights = layer(hidden, attention_mask=causal)
    expected = tensors[f"{case}.context"].transpose(0, 1), tensors[f"{case}.attn_prob"].permute(2, 3, 0, 1)
    errors = out[:, memory:] - expected[0], weights[:, :, memory:] - expected[1]
    return max(error.abs().max().item() for error in errors)
