"""XLNet (Yang et al. 2019, §2.4-2.5), bidirectional.

score = [q_i·k_j + q_i·W R_{i−j} + u·k_j + v·W R_{i−j} + (q_i + w)·g_ij] / √d,    g_ij = g_0 in one segment, else g_1
"""

import math

import pytest
import torch
from oracles import array, golden, layer_error, load_projections, padding, sine_cosine, tiny_attention, tiny_model

from hf_relpos import RelPosBertModel
from hf_relpos.attention.context import TokenInputs
from hf_relpos.schemes import AttentionContext


TYPES = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 0, 0]])


def paper(layer, types, clamp):
    """The paper's score.

    Args:
        types: (1, L) or None: no segments.
        clamp: largest distance with an embedding of its own.
    """
    scheme = layer.distance_embedding
    W, u, v = array(scheme.r), array(scheme.r_w_bias), array(scheme.r_r_bias)

    def score(q, k, h, i, j):
        relation = sine_cosine(max(-clamp, min(clamp, i - j)), 24) @ W[:, h]
        total = (q + u[h]) @ k + (q + v[h]) @ relation
        if types is not None:
            segment = array(scheme.seg_embed)[0 if types[0, i] == types[0, j] else 1, h]
            total += (q + array(scheme.r_s_bias)[h]) @ segment
        return total / math.sqrt(8)

    return score


def segmented(length, types):
    return AttentionContext(length, length, tokens=TokenInputs(token_type_ids=types))


TWO = torch.arange(20)[None] // 12


@pytest.mark.parametrize(
    "options, types, seen, clamp",
    [
        ({"clamp_len": 4}, TWO, TWO, 4),
        ({"out_of_range": "clip"}, TWO, TWO, 15),
        ({}, TWO, TWO, math.inf),
        ({}, None, None, math.inf),
        ({}, torch.ones_like(TWO), None, math.inf),
        ({"segments": False}, TWO, None, math.inf),
    ],
    ids=["clamped", "clipped", "two segments", "none", "ones", "not read"],
)
def test_equals_the_paper(options, types, seen, clamp):
    """Past the trained range, too; `seen` are the segments that differ."""
    layer, hidden = tiny_attention("xlnet", position_options=options), torch.randn(2, 20, 24, dtype=torch.float64)
    expected, context = paper(layer, seen, clamp), segmented(20, types)
    assert layer_error(layer, hidden, padding([18, 5], 20), expected, context=context) <= 1e-10


@pytest.mark.parametrize("static", [False, True])
def test_cached_keys_are_in_the_segment_of_every_query(static):
    """Only the types of the two new tokens are known, places 3 and 4; a static cache has room for a sixth."""
    types = torch.tensor([[0, 1]])
    start, keys = (torch.tensor([3]), 6) if static else (3, 5)
    context = AttentionContext(2, keys, start, tokens=TokenInputs(token_type_ids=types))
    relation = tiny_attention("xlnet").distance_embedding.different(context)
    expected = torch.tensor([[[0, 0, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0]]])
    assert relation.tolist() == expected[..., :keys].tolist()


@torch.no_grad()
def test_token_types_reach_the_layers():
    model = tiny_model(RelPosBertModel, "xlnet")
    model.embeddings.token_type_embeddings.weight[1] = model.embeddings.token_type_embeddings.weight[0]
    tokens, types = torch.randint(50, (2, 9)), TYPES.expand(2, -1)
    plain = model(tokens).last_hidden_state
    assert (model(tokens, token_type_ids=types).last_hidden_state - plain).abs().max() > 1e-3
    assert (model(tokens, token_type_ids=types * 0 + 1).last_hidden_state - plain).abs().max() < 1e-5


CASES = list(golden("xlnet")[0]["cases"])


@torch.no_grad()
def parity(case: str) -> float:
    """Largest difference from the original.

    It has its memory before the queries: run all of it and drop what the memory's queries give.
    """
    sizes, tensors = golden("xlnet")
    clamp, memory = sizes["cases"][case]["clamp_len"], sizes["cases"][case]["mlen"]
    layer = tiny_attention("xlnet", position_options={"clamp_len": clamp if clamp > 0 else None})
    load_projections(layer, [tensors[name].flatten(1).T for name in "qkv"])
    names = [name for name, _ in layer.distance_embedding.named_parameters()]
    layer.distance_embedding.load_state_dict({name: tensors[name] for name in names}, strict=True)
    found = {name.removeprefix(f"{case}."): tensor for name, tensor in tensors.items() if name.startswith(case)}
    length = found["hidden_states"].shape[1]
    mask, context = found["real"][:, None, None, :], segmented(length, found["token_type_ids"])
    out, weights = layer(found["hidden_states"], attention_mask=mask, context=context)
    errors = out[:, memory:] - found["context"], weights[:, :, memory:] - found["attn_prob"]
    return max(error.abs().max().item() for error in errors)
