"""T5 (Raffel et al. 2019, §2.1), and MPNet, which has the same bias on scaled scores.

score = s · q_i·k_j + b^h_{bucket(j − i)},    s = 1 in T5, 1/√d in MPNet
"""

import math

import pytest
import torch
from oracles import array, golden, layer_error, load_projections, padding, tiny_attention

from hf_relpos.schemes.encodings import t5_bucket


def bucket(r, buckets, max_distance, causal=False):
    """Half of the buckets of a side hold one distance each, the other half ranges that grow by a constant factor."""
    first = 0
    if not causal:
        buckets //= 2
        first = buckets if r > 0 else 0
    n = max(-r, 0) if causal else abs(r)
    exact = buckets // 2
    if n >= exact:
        share = math.log(n / exact) / math.log(max_distance / exact)
        n = min(exact + math.floor(share * (buckets - exact) + 1e-9), buckets - 1)
    return first + n


def paper(layer, scale, **how):
    bias = array(layer.shared_distance_embedding.relative_attention_bias.weight)

    def score(q, k, h, i, j):
        return scale * (q @ k) + bias[bucket(j - i, **how), h]

    return score


@pytest.mark.parametrize("buckets, reach, causal", [(32, 128, False), (8, 10, False), (4, 2, False), (6, 9, True)])
@pytest.mark.parametrize("scaling, scale", [("bert", 1 / math.sqrt(8)), ("t5", 1.0)])
def test_equals_the_paper(scaling, scale, buckets, reach, causal):
    how = {"buckets": buckets, "max_distance": reach}
    layer = tiny_attention("t5", is_decoder=causal, position_options={"scaling": scaling, **how})
    hidden, real = torch.randn(2, 24, 24, dtype=torch.float64), padding([24, 17], 24)
    assert layer_error(layer, hidden, real, paper(layer, scale, causal=causal, **how)) <= 1e-10


def test_buckets_of_the_original():
    """Far distances too, and the edges, where the logarithm is a whole number up to rounding."""
    _, tensors = golden("t5")
    r = torch.arange(-300, 301)
    assert t5_bucket(r, 32, 128).equal(tensors["buckets.encoder"])
    assert t5_bucket(r, 32, 128).equal(tensors["buckets.mpnet"])
    assert t5_bucket(r, 32, 128, bidirectional=False).equal(tensors["buckets.decoder"])
    assert t5_bucket(r, 16, 40).equal(tensors["buckets.encoder-16-40"])
    assert 16 not in t5_bucket(r, 32, 128)  # the bucket of r = +0
    assert [bucket(int(x), 32, 128) for x in r] == t5_bucket(r, 32, 128).tolist()


CASES = [("encoder", "t5"), ("decoder", "t5"), ("mpnet", "bert")]


@torch.no_grad()
def parity(case: tuple[str, str]) -> float:
    """Largest difference from the original."""
    sizes, tensors = golden("t5")
    name, scaling = case
    fields = {"is_decoder": name == "decoder", "position_options": {"scaling": scaling}}
    layer = tiny_attention("t5", dtype=torch.float32, **fields)
    biases = [tensors.get(f"{name}.{letter}.bias", torch.zeros(24)) for letter in "qkv"]
    load_projections(layer, [tensors[f"{name}.{letter}.weight"] for letter in "qkv"], biases)
    weight = tensors[f"{name}.relative_attention_bias.weight"]
    layer.shared_distance_embedding.load_state_dict({"relative_attention_bias.weight": weight}, strict=True)
    hidden = tensors["hidden_states"]
    mask = padding([hidden.shape[1], sizes["length"]], hidden.shape[1])[:, None, None, :]
    if name == "decoder":
        mask = mask & torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril()
    return (layer(hidden, attention_mask=mask)[0] - tensors[f"{name}.out"]).abs().max().item()
