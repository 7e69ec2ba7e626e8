"""TUPE (Ke et al. 2021, §3), both variants.

    score = [q_i·k_j + (p_i U_Q)·(p_j U_K)] / √(2d) [+ b_bucket(j−i)]

with values of their own in the row and the column of [CLS].
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from errors import raises
from oracles import array, golden, layer_error, padding, tiny_attention, tiny_config, tiny_model

from hf_relpos import AttentionContext, RelPosBertLMHeadModel, RelPosBertModel


REAL = padding([9, 6], 9)


def bucket(r: int) -> int:
    """T5's, 32 buckets up to 128."""
    side, n = (16 if r > 0 else 0), abs(r)
    far = 8 if n < 8 else min(15, 8 + int(math.log(n / 8) / math.log(16) * 8))
    return side + (n if n < 8 else far)


def paper(layer, variant="A", reset="row", rows=(0, 1), depth=2, positions=None, past=None, ids=(16, 32)):
    """The paper's score.

    Args:
        reset: which of row and column has its way at (0, 0); None: [CLS] is a position like others.
        rows: of the table, for scores from [CLS] and to it.
        depth: what multiplies d under the root.
        positions: of every token; its place in the row if not given.
        past: what becomes of positions past the table: "zero", or its last row.
        ids: rows of the relative table from [CLS] and to it.
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
        from_cls, to_cls = i == 0 and reset, j == 0 and reset
        if from_cls and (reset == "row" or not to_cls):
            a = b = rows[0]
            relative = ids[0]
        elif to_cls:
            a = b = rows[1]
            relative = ids[1]
        theta = query[a, head] @ key[b, head]
        if past == "zero" and max(i, j) > last and not (from_cls or to_cls):
            theta = 0.0
        return (q @ k + theta) / math.sqrt(8 * depth) + (bias[relative, h] if bias is not None else 0.0)

    return score


@pytest.mark.parametrize("variant", ["A", "R"])
def test_equals_the_paper(variant, hidden):
    layer = tiny_attention("tupe", position_options={"variant": variant})
    assert layer_error(layer, hidden, REAL, paper(layer, variant)) <= 1e-10


MISTAKES = {
    "no reset": {"reset": None},
    "column goes first": {"reset": "column"},
    "rows exchanged": {"rows": (1, 0)},
    "relative rows exchanged": {"ids": (32, 16)},
    "1/sqrt(d)": {"depth": 1},
    "no relative bias": {"variant": "A"},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_comparison_sees(mistake, hidden):
    layer = tiny_attention("tupe", position_options={"variant": "R"})
    mistaken = paper(layer, **{"variant": "R", **MISTAKES[mistake]})
    assert layer_error(layer, hidden, REAL, mistaken) > 1e-3


@pytest.mark.parametrize("out_of_range", ["clip", "zero"])
def test_past_the_table(out_of_range):
    layer = tiny_attention("tupe", position_options={"variant": "R", "out_of_range": out_of_range})
    hidden = torch.randn(1, 20, 24, dtype=torch.float64)
    assert layer_error(layer, hidden, padding([19], 20), paper(layer, "R", past=out_of_range)) <= 1e-10


def test_positions_of_every_token(hidden):
    """Tokens that do not begin at 0 have no [CLS] among them."""
    layer = tiny_attention("tupe", position_options={"variant": "R"})
    places = [3, 4, 5, 6, 7, 8, 9, 10, 11]
    context = AttentionContext(9, 9, positions=torch.tensor(places)[None].expand(2, -1), max_distance=8)
    assert layer_error(layer, hidden, REAL, paper(layer, "R", positions=places), context=context) <= 1e-10
    assert layer_error(layer, hidden, REAL, paper(layer, "R"), context=context) > 1e-2


@pytest.mark.parametrize("variant", ["A", "R"])
def test_names_and_shapes_of_the_released_code(variant):
    shared = tiny_model(RelPosBertModel, "tupe", position_options={"variant": variant}).encoder.distance_embedding
    shapes = {name: tuple(p.shape) for name, p in shared.state_dict().items()}
    linears = {
        f"pos_{side}_linear.{part}": (24, 24)[: 2 - (part == "bias")] for side in "qk" for part in ("weight", "bias")
    }
    relative = {"relative_attention_bias.weight": (33, 3)} if variant == "R" else {}
    assert shapes == {"pos.weight": (17, 24), "pos_ln.weight": (24,), "pos_ln.bias": (24,), **linears, **relative}


@torch.no_grad()
def test_computed_once_for_all_layers(monkeypatch):
    model = tiny_model(RelPosBertModel, "tupe", position_options={"variant": "R"})
    calls, given = [], []
    model.encoder.distance_embedding.register_forward_hook(lambda module, args, out: calls.append(out))
    scheme = type(model.encoder.layer[0].attention.self.distance_embedding)
    forward = scheme.forward
    monkeypatch.setattr(
        scheme, "forward", lambda self, context: given.append(context.shared) or forward(self, context)
    )
    model(torch.randint(50, (2, 9)))
    assert len(calls) == 1 and len(given) == 1
    assert all(theta is calls[0] for theta in given)
    assert calls[0].shape == (1, 3, 9, 9)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("variant", ["A", "R"])
@torch.no_grad()
def test_packed_documents_are_as_alone(variant, backend):
    """Each has its own [CLS] and begins at position 0, although all positions are consecutive."""
    model = tiny_model(RelPosBertModel, "tupe", backend, position_options={"variant": variant})
    first, second = torch.randint(50, (1, 6)), torch.randint(50, (1, 4))
    packed = model(
        torch.cat([first, second], dim=1), position_ids=torch.cat([torch.arange(6), torch.arange(4)])[None]
    ).last_hidden_state
    assert (packed[:, :6] - model(first).last_hidden_state).abs().max() < 1e-5
    assert (packed[:, 6:] - model(second).last_hidden_state).abs().max() < 1e-5


@pytest.mark.parametrize("variant", ["A", "R"])
@torch.no_grad()
def test_with_a_cache(variant):
    model = tiny_model(RelPosBertLMHeadModel, "tupe", position_options={"variant": variant}, is_decoder=True)
    tokens = torch.randint(50, (2, 18))  # two more than the table has
    whole = model(tokens, use_cache=False).logits
    begun = model(tokens[:, :7], use_cache=True)
    rest = model(tokens[:, 7:], past_key_values=begun.past_key_values, use_cache=True)
    assert (torch.cat([begun.logits, rest.logits], dim=1) - whole).abs().max() < 1e-5


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
        for part in ("weight", "bias"):
            chunks = found[f"{number}.in_proj_{part}"].chunk(3)
            for linear, chunk in zip((layer.query, layer.key, layer.value), chunks, strict=True):
                getattr(linear, part).copy_(chunk)
        out, _ = layer(found[f"{number}.hidden_states"], attention_mask=found["real"][:, None, None, :])
        errors.append(out - found[f"{number}.context"])
    return max(error.abs().max().item() for error in errors)


@pytest.mark.parametrize("variant", CASES)
def test_equals_the_original_code(variant):
    assert parity(variant) <= 1e-12


def test_variant_is_known():
    with raises(ValueError, "position_options['variant']"):
        tiny_config("tupe", position_options={"variant": "B"})
