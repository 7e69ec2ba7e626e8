"""TUPE (Ke et al. 2021, §3), both variants.

    score = [q_i·k_j + (p_i U_Q)·(p_j U_K)] / √(2d) [+ b_bucket(j−i)]

with values of their own in the row and the column of [CLS].
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles import REAL, array, golden, layer_error, load_projections, padding, tiny_attention, tiny_model

from hf_relpos import RelPosBertModel
from hf_relpos.attention.context import Positions
from hf_relpos.schemes import AttentionContext


def bucket(r: int) -> int:
    """T5's, 32 buckets up to 128."""
    side, n = (16 if r > 0 else 0), abs(r)
    far = 8 if n < 8 else min(15, 8 + int(math.log(n / 8) / math.log(16) * 8))
    return side + (n if n < 8 else far)


def paper(layer, variant="A", positions=None, past=None):
    """The paper's score.

    Args:
        positions: of every token; its place in the row if not given.
        past: what becomes of positions past the table: "zero", or its last row.
    """
    shared = layer.shared_distance_embedding
    table = array(shared.pos.weight)
    last = len(table) - 2
    norm = (table - table.mean(-1, keepdims=True)) / np.sqrt(table.var(-1, keepdims=True) + 1e-5)
    norm = norm * array(shared.pos_ln.weight) + array(shared.pos_ln.bias)
    query = norm @ array(shared.pos_q_linear.weight).T + array(shared.pos_q_linear.bias)
    key = norm @ array(shared.pos_k_linear.weight).T + array(shared.pos_k_linear.bias)
    bias = array(shared.relative_attention_bias.weight) if variant == "R" else None

    def score(q, k, h, i, j):
        i, j = (i, j) if positions is None else (positions[i], positions[j])
        head = slice(8 * h, 8 * h + 8)
        a, b = 1 + min(i, last), 1 + min(j, last)
        relative = bucket(j - i)
        if i == 0:
            a, b, relative = 0, 0, 16
        elif j == 0:
            a, b, relative = 1, 1, 32
        theta = query[a, head] @ key[b, head]
        if past == "zero" and max(i, j) > last and min(i, j) > 0:
            theta = 0.0
        return (q @ k + theta) / math.sqrt(16) + (bias[relative, h] if bias is not None else 0.0)

    return score


@pytest.mark.parametrize("variant", ["A", "R"])
@pytest.mark.parametrize("out_of_range", ["clip", "zero"])
@pytest.mark.parametrize("length", [9, 20])
def test_equals_the_paper(length, out_of_range, variant):
    """Within the table and past it."""
    layer = tiny_attention("tupe", position_options={"variant": variant, "out_of_range": out_of_range})
    hidden, real = torch.randn(2, length, 24, dtype=torch.float64), padding([length, 5], length)
    assert layer_error(layer, hidden, real, paper(layer, variant, past=out_of_range)) <= 1e-10


def test_positions_of_every_token(hidden):
    """Tokens that do not begin at 0 have no [CLS] among them."""
    layer = tiny_attention("tupe", position_options={"variant": "R"})
    places = [3, 4, 5, 6, 7, 8, 9, 10, 11]
    context = AttentionContext(9, 9, positions=Positions(torch.tensor(places)[None].expand(2, -1), 8))
    assert layer_error(layer, hidden, REAL, paper(layer, "R", positions=places), context=context) <= 1e-10


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("variant", ["A", "R"])
@torch.no_grad()
def test_packed_documents_are_as_alone(variant, backend):
    """Each has its own [CLS] and begins at position 0, although all positions are consecutive."""
    model = tiny_model(RelPosBertModel, "tupe", backend, position_options={"variant": variant})
    first, second = torch.randint(50, (1, 6)), torch.randint(50, (1, 4))
    positions = torch.cat([torch.arange(6), torch.arange(4)])[None]
    packed = model(torch.cat([first, second], dim=1), position_ids=positions).last_hidden_state
    assert (packed[:, :6] - model(first).last_hidden_state).abs().max() < 1e-5
    assert (packed[:, 6:] - model(second).last_hidden_state).abs().max() < 1e-5


@torch.no_grad()
def test_start_on_the_device():
    """A static cache gives the number of cached tokens as a tensor."""
    shared = tiny_attention("tupe", position_options={"variant": "R"}).shared_distance_embedding
    context = AttentionContext(2, 9, 4)
    assert torch.equal(shared(context), shared(replace(context, start=torch.tensor([4]))))
    assert (shared(context) - shared(AttentionContext(9, 9))[:, :, 4:6]).abs().max() <= 1e-12


CASES = list(golden("tupe")[0]["cases"])


@torch.no_grad()
def parity(variant: str) -> float:
    """Largest difference from the original."""
    sizes, tensors = golden("tupe")
    layers = sizes.pop("layers")
    del sizes["cases"]
    found = {key.removeprefix(f"{variant}."): tensor for key, tensor in tensors.items() if key.startswith(variant)}
    layer = tiny_attention("tupe", position_options={"variant": variant}, **sizes)
    shared = layer.shared_distance_embedding
    shared.load_state_dict({name: found[name] for name in shared.state_dict()}, strict=True)
    length = found["real"].shape[1]
    errors = [shared(AttentionContext(length, length))[0] - found["bias"]]
    for number in range(layers):
        load_projections(layer, *(found[f"{number}.in_proj_{part}"].chunk(3) for part in ("weight", "bias")))
        out, _ = layer(found[f"{number}.hidden_states"], attention_mask=found["real"][:, None, None, :])
        errors.append(out - found[f"{number}.context"])
    return max(error.abs().max().item() for error in errors)
