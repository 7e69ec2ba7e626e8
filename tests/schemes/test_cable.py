"""CABLE (Veisi et al. 2025): a bias of −|z_i − z_j|, z being the sum of softplus(w_h·x_l + b_h) over l ≤ i.

With gate="key" the key-gated bias of GRAPE (Zhang et al. 2025), −softplus(ω_h)·m_h·|r|·softplus(u_h·k_j/√d).
"""

import math

import pytest
import torch
from oracles import (
    array,
    golden,
    layer_error,
    load_projections,
    padding,
    paper_attention,
    tiny_attention,
    tiny_config,
    tiny_model,
    uncompiled,
)
from torch.nn.attention.flex_attention import create_block_mask

from hf_relpos import RelPosBertForMaskedLM, RelPosBertModel
from hf_relpos.schemes.scheme import SCHEMES, Scheme


def steps_of(layer, hidden):
    """softplus(w_h·x_l + b_h) of one row, (L, H)."""
    sums = array(layer.distance_embedding.h_attn(hidden))
    return [[math.log1p(math.exp(x)) for x in token] for token in sums]


@torch.no_grad()
def test_equals_the_paper():
    """In an encoder: the distance to the left, and to the right the same."""
    layer, hidden = tiny_attention("cable"), torch.randn(1, 9, 24, dtype=torch.float64)
    steps = steps_of(layer, hidden[0])

    def paper(q, k, h, i, j):
        return q @ k / math.sqrt(8) - sum(step[h] for step in steps[min(i, j) + 1 : max(i, j) + 1])

    assert layer_error(layer, hidden, padding([6], 9), paper) <= 1e-10


@torch.no_grad()
def test_equals_forget_gates_in_a_decoder():
    """FoX: Σ log σ(f_l) over j < l ≤ i, where f is −(w·x + b)."""
    layer, hidden = tiny_attention("cable", is_decoder=True), torch.randn(1, 7, 24, dtype=torch.float64)
    gates = layer.distance_embedding.h_attn
    forget = torch.sigmoid(-(hidden[0] @ gates.weight.T + gates.bias))

    def fox(q, k, h, i, j):
        return q @ k / math.sqrt(8) + float(forget[j + 1 : i + 1, h].log().sum()) if j <= i else -math.inf

    expected, _ = paper_attention(layer, hidden, padding([7], 7), fox)
    assert abs(array(layer(hidden)[0]) - expected).max() <= 1e-10


CASES = [(original, backend) for original in ("cable", "grape") for backend in ("eager", "sdpa")]


@torch.no_grad()
def parity(case: tuple[str, str]) -> float:
    """Largest difference from the output of an original: CABLE's, or attention with the bias of GRAPE."""
    original, backend = case
    _, tensors = golden(original)
    layer, hidden, expected = (as_cable if original == "cable" else as_grape)(tensors)
    layer.config._attn_implementation = backend
    return (layer(hidden)[0] - expected).abs().max().item()


def as_cable(tensors):
    """A layer with the parameters of the original, whose products are not scaled; its input, and the output."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "is_decoder": True}
    layer = tiny_attention("cable", dtype=torch.float32, **sizes)
    query, key, value = zip(tensors["c_attn.weight"].chunk(3), tensors["c_attn.bias"].chunk(3), strict=True)
    load_projections(layer, *zip([math.sqrt(8) * each for each in query], key, value, strict=True))
    layer.distance_embedding.h_attn.load_state_dict({part: tensors[f"h_attn.{part}"] for part in ("weight", "bias")})
    return layer, tensors["hidden"], tensors["out"]


def as_grape(tensors):
    """The same; u·k is a linear map of the layer's inputs, here the keys of the fixture. It is causal."""
    _, length, heads, size = tensors["keys"].shape
    options = {"position_options": {"gate": "key"}, "hidden_size": heads * size, "num_attention_heads": heads}
    layer = tiny_attention("cable", dtype=torch.float32, is_decoder=True, **options)
    scheme, hidden = layer.distance_embedding, tensors["keys"].flatten(2)
    unit = torch.nn.functional.normalize(tensors["u"], dim=-1) / math.sqrt(size)
    scheme.h_attn.weight.copy_(torch.block_diag(*unit[:, None]))
    scheme.h_attn.bias.zero_()
    scheme.omega.copy_(tensors["omega"])
    q, k, v = (of(hidden).unflatten(-1, (heads, size)).transpose(1, 2) for of in (layer.query, layer.key, layer.value))
    to_the_right = ~torch.ones(length, length).tril().bool()
    scores = (q @ k.mT / math.sqrt(size) + tensors["bias"]).masked_fill(to_the_right, -math.inf)
    return layer, hidden, (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


@torch.no_grad()
def test_the_gates_of_cached_keys_are_kept():
    options = {"position_options": {"gate": "key"}, "is_decoder": True}
    model, ids = tiny_model(RelPosBertForMaskedLM, "cable", "eager", **options), torch.randint(1, 50, (2, 9))
    whole = model.bert(ids).last_hidden_state
    first = model.bert(ids[:, :5], use_cache=True)
    rest = model.bert(ids[:, 5:], past_key_values=first.past_key_values).last_hidden_state
    assert (torch.cat([first.last_hidden_state, rest], 1) - whole).abs().max() <= 1e-5


@pytest.mark.parametrize(  # r of gate="key" is one of positions, which padding between tokens takes
    ("gate", "kept"),
    [*((gate, kept) for gate in ("path", "key") for kept in ("000111111", "111111000")), ("path", "110011011")],
)
@pytest.mark.parametrize("backend", ["eager", "relpos", "sdpa"])
@torch.no_grad()
def test_padding_anywhere_changes_nothing(backend, kept, gate):
    options = {"position_options": {"gate": gate}}
    model, ids = tiny_model(RelPosBertForMaskedLM, "cable", backend, **options), torch.randint(1, 50, (1, 9))
    mask = torch.tensor([[int(each) for each in kept]])
    alone = model(ids[mask.bool()][None]).logits[0]
    assert (model(ids, attention_mask=mask).logits[mask.bool()] - alone).abs().max() <= 1e-5


@torch.no_grad()
def test_a_block_mask_is_taken():
    model, ids = tiny_model(RelPosBertForMaskedLM, "cable", "flex_attention"), torch.randint(1, 50, (1, 9))
    near = create_block_mask(lambda b, h, i, j: (i - j).abs() <= 2, None, None, 9, 9, device="cpu")
    offsets = torch.arange(9)[:, None] - torch.arange(9)
    with uncompiled():
        out = model(ids, attention_mask=near).logits
    model.set_attn_implementation("eager")
    assert (model(ids, attention_mask=(offsets.abs() <= 2)[None, None]).logits - out).abs().max() <= 1e-5


@torch.no_grad()
def test_numbers_without_parameters_are_of_each_layer(monkeypatch):
    """Terms of schemes without parameters are otherwise made once, before there are any states."""
    kind = type("Norms", (SCHEMES["cable"],), {"__init__": Scheme.__init__}, name="norms")
    kind.token_numbers = lambda self, states: states.norm(dim=-1, keepdim=True).expand(-1, -1, self.num_heads)
    monkeypatch.setitem(SCHEMES, "norms", SCHEMES.pop("norms"))
    assert not RelPosBertModel(tiny_config("norms")).shares_terms
    assert tiny_model(RelPosBertModel, "norms")(torch.randint(1, 50, (2, 6))).last_hidden_state.isfinite().all()


def test_two_schemes_with_numbers_of_tokens_are_refused(monkeypatch):
    monkeypatch.setitem(SCHEMES, "other", type("Other", (SCHEMES["cable"],), {}, name="other"))
    with pytest.raises(ValueError, match="two schemes with `token_numbers`"):
        tiny_config(["cable", "other"])
