"""DeBERTa (He et al. 2021, §3.1) as released.

    score = [q_i·k_j + q_i·K_δ(i,j) + k_j·Q_δ(i,j)] / √(3d),    δ(i, j) = clip(i − j + span, 0, 2·span − 1)

The paper has δ(j, i) in the third term.
"""

import math

import numpy as np
import pytest
import torch
from oracles import REAL, array, golden, layer_error, load_projections, padding, tiny_attention, tiny_model
from transformers import StaticCache

from hf_relpos import RelPosBertLMHeadModel
from hf_relpos.schemes import AttentionContext


PUBLISHED = {"buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm"}  # as v3 has it, but smaller


def bucket(distance: int, buckets: int, max_distance: int) -> int:
    """Logarithmic from buckets/2 on."""
    middle = buckets // 2
    if abs(distance) <= middle:
        return distance
    steps = math.log(abs(distance) / middle) / math.log((max_distance - 1) / middle) * (middle - 1)
    return int(math.copysign(math.ceil(steps - 1e-9) + middle, distance))


def paper(layer, kinds="c2p|p2c", span=16, buckets=None):
    """The released score; `span` is, with `buckets`, the distance from which all are alike."""
    scheme, shared = layer.distance_embedding, layer.shared_distance_embedding
    P = array(shared.rel_embeddings.weight)
    if shared.LayerNorm is not None:
        P = (P - P.mean(-1, keepdims=True)) / np.sqrt(P.var(-1, keepdims=True) + layer.config.layer_norm_eps)
        P = P * array(shared.LayerNorm.weight) + array(shared.LayerNorm.bias)
    sharing = layer.config.position_options.get("share_att_key")
    rows = buckets if buckets else span
    K = Q = None
    if "c2p" in kinds:
        K = P @ array((layer.key if sharing else scheme.pos_key_proj).weight).T
        K = K + array(layer.key.bias) if sharing else K
    if "p2c" in kinds:
        projection = layer.query if sharing else scheme.pos_query_proj
        Q = P @ array(projection.weight).T + array(projection.bias)
    terms = 3 if "c2p" in kinds and "p2c" in kinds else 2

    def delta(i, j):
        distance = bucket(i - j, buckets, span) if buckets else i - j
        return max(0, min(2 * rows - 1, distance + rows))

    def score(q, k, h, i, j):
        head = slice(8 * h, 8 * h + 8)
        total = q @ k
        if K is not None:
            total += q @ K[delta(i, j), head]
        if Q is not None:
            total += k @ Q[delta(i, j), head]
        return total / math.sqrt(8 * terms)

    return score


@pytest.mark.parametrize("kinds", ["c2p|p2c", "c2p", "p2c", ["p2c", "c2p"]], ids=str)
@pytest.mark.parametrize("max_distance", [None, 4])
def test_equals_the_released_form(kinds, max_distance, hidden):
    layer = tiny_attention("deberta", position_options={"pos_att_type": kinds, "max_distance": max_distance})
    span = 16 if max_distance is None else max_distance
    assert layer_error(layer, hidden, REAL, paper(layer, kinds, span)) <= 1e-10


@pytest.mark.parametrize("options", [{"buckets": 8}, PUBLISHED], ids=["own projections", "shared projections"])
@pytest.mark.parametrize("length", [4, 9, 20])
def test_equals_the_second_version(options, length):
    layer = tiny_attention("deberta", position_options=options)
    hidden = torch.randn(1, length, 24, dtype=torch.float64)
    assert layer_error(layer, hidden, padding([length - 1], length), paper(layer, buckets=8)) <= 1e-10


def test_short_inputs_take_the_middle_of_the_table():
    """What v1 cuts off by hand; the rows not taken have no gradient, and cost nothing."""
    layer = tiny_attention("deberta")
    shared = layer.shared_distance_embedding
    embeddings, _ = shared(AttentionContext(5, 5))
    assert torch.equal(embeddings, shared.rel_embeddings.weight[12:21])
    layer(torch.randn(1, 5, 24, dtype=torch.float64))[0].square().sum().backward()
    assert (shared.rel_embeddings.weight.grad.abs().sum(-1) > 0).tolist() == [12 <= row <= 20 for row in range(32)]


@torch.no_grad()
def test_shared_projections_are_those_of_the_moment(hidden):
    """An adapter may put another module in the place of `query`."""

    class Twice(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return 2 * self.inner(x)

    layer = tiny_attention("deberta", position_options=PUBLISHED)
    changed = tiny_attention("deberta", position_options=PUBLISHED)
    changed.load_state_dict(layer.state_dict())
    changed.query = Twice(changed.query)
    layer.query.weight.mul_(2)
    layer.query.bias.mul_(2)
    assert (changed(hidden)[0] - layer(hidden)[0]).abs().max() < 1e-12


def test_dropout_of_the_embeddings(hidden):
    """As released, with the probability of hidden states, in every layer anew."""
    layer = tiny_attention("deberta", hidden_dropout_prob=0.5)
    assert torch.equal(layer(hidden)[0], layer(hidden)[0])
    layer.train()
    assert not torch.equal(layer(hidden)[0], layer(hidden)[0])


@torch.no_grad()
def test_static_cache():
    """It has all of its keys from the beginning, the empty ones too, and counts on the device."""
    model = tiny_model(RelPosBertLMHeadModel, "deberta", position_options=PUBLISHED, is_decoder=True)
    tokens = torch.randint(50, (2, 9))
    cache = StaticCache(config=model.config, max_cache_len=20)
    parts = [model(part, past_key_values=cache, use_cache=True).logits for part in (tokens[:, :5], tokens[:, 5:])]
    assert (torch.cat(parts, dim=1) - model(tokens, use_cache=False).logits).abs().max() < 1e-5


@torch.no_grad()
def original_layer(sizes: dict, settings: dict, found: dict):
    """Our layer with the weights of the original one."""
    heads, size = sizes["num_attention_heads"], sizes["hidden_size"]
    span = settings["max_relative_positions"]
    same = ("pos_att_type", "share_att_key", "norm_rel_ebd")
    options = {name: settings[name] for name in same if name in settings}
    options["max_distance"] = span if span > 0 else settings["max_position_embeddings"]
    options["buckets"] = settings.get("position_buckets")
    fields = {"hidden_size": size, "num_attention_heads": heads, "layer_norm_eps": 1e-7}
    layer = tiny_attention("deberta", position_options=options, **fields)
    if settings["version"] == 1:  # rows of a head side by side, no bias for keys
        weights = found["self.in_proj.weight"].view(heads, 3, -1, size).transpose(0, 1).reshape(3, size, size)
        biases = found["self.q_bias"], torch.zeros(size), found["self.v_bias"]
        key, query = "pos_proj", "pos_q_proj"
    else:
        parts = "query_proj", "key_proj", "value_proj"
        weights = [found[f"self.{part}.weight"] for part in parts]
        biases = [found[f"self.{part}.bias"] for part in parts]
        key, query = "pos_key_proj", "pos_query_proj"
    load_projections(layer, weights, biases)
    scheme, shared = layer.distance_embedding, layer.shared_distance_embedding
    theirs = {name: name.replace("pos_key_proj", key).replace("pos_query_proj", query) for name in scheme.state_dict()}
    scheme.load_state_dict({name: found[f"self.{old}"] for name, old in theirs.items()}, strict=True)
    shared.load_state_dict({name: found[name] for name in shared.state_dict()}, strict=True)
    return layer


CASES = [(case, length) for case, settings in golden("deberta")[0]["cases"].items() for length in settings["lengths"]]


@torch.no_grad()
def parity(case: tuple[str, int]) -> float:
    """Largest difference from the original."""
    sizes, tensors = golden("deberta")
    case, length = case
    found = {name.removeprefix(f"{case}."): tensor for name, tensor in tensors.items() if name.startswith(f"{case}.")}
    layer = original_layer(sizes, sizes["cases"][case], found)
    real = found[f"{length}.real"]
    out, weights = layer(found[f"{length}.hidden_states"], attention_mask=real[:, None, None, :])
    errors = out - found[f"{length}.context"], weights - found[f"{length}.weights"]
    return max(error.abs().max().item() for error in errors)
