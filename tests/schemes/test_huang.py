"""Methods 1 to 3 of Huang et al. 2020; there is no released code of them, the loops are the only reference.

1: e_ij = (q_i·k_j) a_|j−i| / √d     2: e_ij = (q_i·k_j) a_{j−i} / √d     3: e_ij = Σ_c q_ic k_jc a_{j−i,c} / √d
"""

import math

import pytest
import torch
from computed import Computed
from oracles import array, layer_error, padding, tiny_attention, tiny_config
from torch.autograd import gradcheck

from hf_relpos import RelPosBertModel
from hf_relpos.attention.formula import featurewise_scores
from hf_relpos.schemes import AttentionContext, Table, Terms, attend


METHODS = ["huang_m1", "huang_m2", "huang_m3"]


def paper(layer):
    """The score; only method 1 has the same row for r and −r."""
    rows, signed = array(layer.distance_embedding.weight), layer.distance_embedding.name != "huang_m1"

    def score(q, k, h, i, j):
        r = max(-15, min(15, j - i))
        a = rows[r + 15] if signed else rows[abs(r)]
        return (q * a) @ k / math.sqrt(8)

    return score


@pytest.fixture(params=METHODS)
def layer(request):
    layer = tiny_attention(request.param)
    with torch.no_grad():
        layer.distance_embedding.weight.normal_()
    return layer


@pytest.mark.parametrize("length", [9, 24])
def test_equals_the_paper(length, layer):
    """Distances past the table, of 16 rows for a side, are clipped."""
    hidden, real = torch.randn(2, length, 24, dtype=torch.float64), padding([length, 5], length)
    assert layer_error(layer, hidden, real, paper(layer)) <= 1e-10


@pytest.mark.parametrize("name", METHODS)
def test_fresh_models_are_near_plain_attention(name):
    weight = RelPosBertModel(tiny_config(name)).encoder.layer[0].attention.self.distance_embedding.weight
    assert 0.6 < weight.mean() < 1.4 and 0.05 < weight.std() < 0.4  # initializer_range is 0.2


@pytest.mark.parametrize("batched", [False, True], ids=["offsets", "labels"])
@pytest.mark.parametrize("shared", [False, True], ids=["heads", "shared"])
def test_gradients_of_the_gain_by_feature(shared, batched):
    """Against finite differences, and against autograd through the gathered tensor that it avoids."""
    query, key = (torch.randn(2, 3, length, 4, dtype=torch.float64, requires_grad=True) for length in (3, 5))
    rows = torch.randn(1 if shared else 3, 6, 4, dtype=torch.float64, requires_grad=True)
    relation = torch.randint(0, 6, (2, 3, 5) if batched else (3, 5))

    def ours(query, key, rows):
        return featurewise_scores(query, key, Table(rows, lambda r: r, relation), AttentionContext(3, 5))

    assert gradcheck(ours, (query, key, rows))
    gathered = rows[:, relation if batched else relation[None]].transpose(0, 1)  # (1 or B, H or 1, L, K, d)
    expected = torch.einsum("bhic,bhjc,bhijc->bhij", query, key, gathered.expand(2, 3, -1, -1, -1))
    assert (ours(query, key, rows) - expected).abs().max() <= 1e-12
    ahead = torch.randn_like(expected)
    found = torch.autograd.grad(ours(query, key, rows), (query, key, rows), ahead)
    wanted = torch.autograd.grad(expected, (query, key, rows), ahead)
    assert all((one - other).abs().max() <= 1e-12 for one, other in zip(found, wanted, strict=True))


def test_the_gain_by_feature_makes_nothing_of_size_length_times_keys_times_d():
    heads, length, size = 2, 32, 16
    query, key, value = (torch.randn(1, heads, length, size, requires_grad=True) for _ in range(3))
    rows = torch.randn(1, 2 * length - 1, size, requires_grad=True)
    kept = []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with Computed() as seen, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        terms = Terms(feature_gain=Table(rows, lambda r: r + length - 1))
        out, _ = attend(query, key, value, terms, AttentionContext(length, length))
        out.square().sum().backward()
    assert seen.largest <= heads * length * length
    assert sum(kept) <= 8 * heads * length * length  # autograd of the plain sum over features keeps 2d of them
    assert all(tensor.grad.isfinite().all() for tensor in (query, key, value, rows))


def test_half_precision_sums_like_a_matrix_product():
    query, key = (torch.randn(1, 2, 16, 64).to(torch.bfloat16) for _ in range(2))
    table = Table(torch.ones(1, 31, 64), lambda r: r + 15)
    scores = featurewise_scores(query, key, table, AttentionContext(16, 16))
    assert scores.dtype == torch.bfloat16
    exact = query.double() @ key.double().transpose(-1, -2)
    naive = sum(q[..., :, None] * k[..., None, :] for q, k in zip(query.unbind(-1), key.unbind(-1), strict=True))
    assert exact.abs().max() < 64  # where half a unit in the last place is 1/8
    assert (scores - exact).abs().max() <= 0.13 < (naive - exact).abs().max()
