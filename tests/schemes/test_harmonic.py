"""Sums of waves: pair by pair, as features of wider heads on every backend, far from the beginning, in half precision.

A_r = Σ_w a_w cos ω_w r + b_w sin ω_w r, likewise B, c, V, in
e_ij = (q_i·k_j + q_i·A_r + k_j·B_r + c_r) / √d,   z_i = Σ_j α_ij (v_j + V_r),   r = j − i.
There is no original: the reference is this formula pair by pair, in NumPy and float64.
"""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from oracles import (
    array,
    attention_by_loop,
    layer_error,
    padding,
    tiny_attention,
    tiny_config,
    tiny_model,
    uncompiled,
    with_vectors,
)
from torch import nn

from hf_relpos import RelPosBertConfig, RelPosBertModel, explain_backend
from hf_relpos.attention.backends import chunked
from hf_relpos.attention.backends.chunked import Chunked
from hf_relpos.attention.call import AttentionCall
from hf_relpos.attention.context import Positions
from hf_relpos.attention.dispatch import choose, run_attention
from hf_relpos.attention.formula import TABLE_FIELDS, attend
from hf_relpos.attention.fourier import FourierTable, geometric, with_fourier_features
from hf_relpos.products.cpu_gemm import Library
from hf_relpos.schemes import AttentionContext, Terms


HEADS, SIZE, WAVES, PERIOD, KEYS = 3, 8, 3, 23, 9
BACKENDS = ["eager", "relpos", "sdpa", "flex_attention"]
TERMS = ["ABcV", "A", "B", "c", "V", "AcV", "Bc"]
STEP = 2 * math.pi / 2**24


def frequencies(waves=WAVES, period=PERIOD):
    """Geometric, from 2π / period to 0.85 π, each the nearest multiple of 2π / 2^24."""
    return np.round(np.geomspace(2 * math.pi / period, 0.85 * math.pi, waves) / STEP) * STEP


def row(coefficients, h, r, waves):
    """Σ_w a_w cos ω_w r + b_w sin ω_w r, of a head; coefficients that heads share are there once."""
    own, count = coefficients[h % len(coefficients)], len(waves)
    return sum(own[w] * math.cos(waves[w] * r) + own[count + w] * math.sin(waves[w] * r) for w in range(count))


def coefficients(letters, heads=HEADS, dtype=torch.float64):
    shapes = {letter: (heads, 2 * WAVES) if letter == "c" else (heads, 2 * WAVES, SIZE) for letter in letters}
    return {letter: torch.randn(shape, dtype=torch.float64).to(dtype) for letter, shape in shapes.items()}


def terms_of(tensors, context, **others):
    waves = geometric(WAVES, PERIOD)
    tables = {TABLE_FIELDS[letter]: (FourierTable(each, waves, context),) for letter, each in tensors.items()}
    return Terms(**tables, **others)


def call_of(tensors, table, context, content_bias=None, **settings):
    """A call of queries, keys and values of a layer that is not causal by itself."""
    layer = nn.Module().eval()
    layer.is_causal = False
    terms = terms_of(table, context, content_bias=content_bias)
    return AttentionCall(*tensors, terms, context, layer=layer, **settings)


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("terms", TERMS)
def test_equals_the_formula(terms, per_head):
    options = {"terms": terms, "per_head": per_head, "waves": 4, "period": 40}
    layer, waves = tiny_attention("harmonic", position_options=options), frequencies(4, 40)
    tables = {letter: array(each) for letter, each in layer.distance_embedding.named_parameters()}

    def term(letter, h, i, j):
        return row(tables[letter], h, j - i, waves) if letter in tables else 0.0

    hidden, real = torch.randn(2, KEYS, 24, dtype=torch.float64), padding([9, 6], KEYS)
    assert layer_error(layer, hidden, real, *with_vectors(*(partial(term, letter) for letter in "AVBc"))) <= 1e-10


class Case:
    """A call with q, k, v at random, and what hides keys; its pair (i, j) has the offset p_j − p_i."""

    def __init__(self, name, letters="ABcV", heads=HEADS):
        index = torch.arange(KEYS)
        self.start, self.positions, self.causal = 0, index.expand(2, -1), False
        self.visible = torch.ones(2, 1, KEYS, KEYS, dtype=torch.bool)
        fields = {}
        if name == "padding":
            self.visible = padding([9, 5], KEYS)[:, None, None, :].expand(-1, -1, KEYS, -1)
        elif name == "window":
            self.visible = ((index[:, None] - index).abs() <= 2).expand(2, 1, -1, -1)
        elif name == "causal":
            self.visible, self.causal = (index[:, None] >= index).expand(2, 1, -1, -1), True
        elif name == "packed":
            documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 2, 2, 2]])
            self.visible = (documents[:, :, None] == documents[:, None, :])[:, None]
        elif name == "gaps":
            self.positions = torch.tensor([[0, 1, 5, 6, 7, 20, 21, 40, 41], [3, 4, 5, 6, 30, 31, 32, 33, 39]])
            fields = {"positions": Positions(self.positions, 41)}
        elif name == "memory":
            self.start = 5
            self.visible = self.visible[:, :, self.start :]
        queries = KEYS - self.start
        self.context = AttentionContext(queries, KEYS, self.start, dtype=torch.float64, **fields)
        self.tensors = [torch.randn(2, HEADS, count, SIZE, dtype=torch.float64) for count in (queries, KEYS, KEYS)]
        self.coefficients = coefficients(letters, heads)
        self.u = torch.randn(HEADS, SIZE, dtype=torch.float64)

    def call(self):
        hidden = {"mask": None if self.causal else self.visible, "is_causal": self.causal}
        return call_of(self.tensors, self.coefficients, self.context, self.u, **hidden)

    def by_pair(self):
        """The formula in NumPy, (B, L, H, d)."""
        q, k, v = map(array, self.tensors)
        tables, u, waves = {key: array(each) for key, each in self.coefficients.items()}, array(self.u), frequencies()

        def score(b, h, i, j):
            if not self.visible[b, 0, i - self.start, j]:
                return -math.inf
            query, r = q[b, h, i - self.start], int(self.positions[b, j] - self.positions[b, i])
            total = (query + u[h]) @ k[b, h, j]
            total += query @ row(tables["A"], h, r, waves) + k[b, h, j] @ row(tables["B"], h, r, waves)
            return (total + row(tables["c"], h, r, waves)) / math.sqrt(SIZE)

        def value(b, h, i, j):
            return v[b, h, j] + row(tables["V"], h, int(self.positions[b, j] - self.positions[b, i]), waves)

        out, _ = attention_by_loop(score, value, 2, HEADS, KEYS - self.start, KEYS, self.start)
        return out.transpose(0, 2, 1, 3)


CASES = ["plain", "padding", "window", "causal", "packed", "gaps", "memory"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_every_backend_equals_the_formula_pair_by_pair(name, backend):
    for heads in (HEADS, 1):
        case = Case(name, heads=heads)
        call = case.call()
        if backend == "flex_attention":  # causality is a mask there, too
            call = replace(call, mask=case.visible, is_causal=False)
        with uncompiled():
            out, _ = run_attention(backend, call)
        assert out.shape == (2, KEYS - case.start, HEADS, SIZE)
        assert np.abs(array(out) - case.by_pair()).max() <= 1e-10


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_rows(name):
    """Of q, k, v, u and all coefficients; eager reads rows, the others features."""
    case, found = Case(name), {}
    leaves = [each.requires_grad_() for each in (*case.tensors, case.u, *case.coefficients.values())]
    gradient = torch.randn(2, KEYS - case.start, HEADS, SIZE, dtype=torch.float64)
    for backend in ("eager", "relpos", "sdpa"):
        out, _ = run_attention(backend, case.call())
        found[backend] = torch.autograd.grad(out, leaves, gradient)
    for backend in ("relpos", "sdpa"):
        for got, expected in zip(found[backend], found["eager"], strict=True):
            assert (got - expected).abs().max() <= 1e-10


def test_dropout_leaves_out_values_and_their_waves_together():
    """Weights are dropped alike from the same seed, whichever way the terms are computed."""
    call = Case("padding").call()
    outputs = []
    augmented, finish = with_fourier_features(call)
    for each in (call, augmented):
        torch.manual_seed(3)
        outputs.append(attend(each.query, each.key, each.value, each.terms, each.context, each.mask, 0.3)[0])
    assert (finish(outputs[1].transpose(1, 2)) - outputs[0].transpose(1, 2)).abs().max() <= 1e-10


def test_chunks_take_the_features_under_dropout(none_too_short):
    call = replace(Case("padding").call(), dropout=0.3)
    assert choose(call)[0].name == Chunked.name
    torch.manual_seed(0)
    mean = sum(run_attention("relpos", call)[0] for _ in range(1000)) / 1000
    exact = run_attention("relpos", replace(call, dropout=0.0))[0]
    assert (mean - exact).abs().max() <= 0.3 and (mean - exact).abs().mean() <= 0.03


@pytest.mark.parametrize("heads", [64, 32])
@pytest.mark.parametrize("rate, taken", [(90.0, "sdpa"), (200.0, "chunked")])
def test_long_rows_are_plain_attention_and_no_table_is_made(rate, taken, heads, monkeypatch):
    """By the backend that is faster for it, which the rate of oneDNN's products decides."""
    monkeypatch.setattr(chunked, "bmm_library", lambda: Library(100.0, rate, 1e-7, 1e-7))
    config = RelPosBertConfig(position_embedding_type="harmonic", num_attention_heads=768 // heads)
    said = explain_backend(config, batch=4, length=2048, gradients=True)
    assert said.startswith(f"attn_implementation='relpos' takes {taken}")
    monkeypatch.setattr(FourierTable, "rows", property(lambda table: pytest.fail("the rows are made")))
    run_attention("relpos", Case("padding").call())


@pytest.mark.parametrize("other", ["alibi", "t5", "disan", "transformer_xl", "relative_key", "shaw", "huang_m1"])
def test_beside_other_schemes(other):
    """With a bias or hidden keys as features; as rows beside tables of vectors and a gain."""
    model = tiny_model(RelPosBertModel, ["harmonic", other], "eager").double()
    ids, mask = torch.randint(5, 50, (2, 11)), padding([11, 7], 11).long()
    expected = model(ids, attention_mask=mask).last_hidden_state
    model.set_attn_implementation("relpos")
    assert ((model(ids, attention_mask=mask).last_hidden_state - expected) * mask[..., None]).abs().max() <= 1e-10


@pytest.mark.parametrize("shift", [1_000, 1_000_000])
@pytest.mark.parametrize("backend", ["eager", "relpos"])
def test_far_positions_are_as_exact_as_near_ones(backend, shift):
    """In float32, where a phase of a million tokens has no exact digit after the point."""
    tensors = [torch.randn(1, HEADS, KEYS, SIZE) for _ in range(3)]
    table, outputs = coefficients("ABcV", dtype=torch.float32), []
    for first in (0, shift):
        context = AttentionContext(KEYS, KEYS, positions=Positions(torch.arange(first, first + KEYS)[None], KEYS))
        outputs.append(run_attention(backend, call_of(tensors, table, context))[0])
    assert (outputs[1] - outputs[0]).abs().max() <= 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_features_lose_no_more_than_rows(dtype):
    """Error of outputs against float64, times that of eager in the same dtype."""
    torch.manual_seed(1)
    length = 200
    context = AttentionContext(length, length)
    tensors = [torch.randn(2, HEADS, length, SIZE).to(dtype) for _ in range(3)]
    table = {letter: (0.3 * each).to(dtype) for letter, each in coefficients("ABcV").items()}

    def run(backend, kind):
        rows = {letter: each.to(kind) for letter, each in table.items()}
        return run_attention(backend, call_of([each.to(kind) for each in tensors], rows, context))[0].double()

    exact = run("eager", torch.float64)
    errors = {backend: (run(backend, dtype) - exact).square().mean().sqrt() for backend in ("eager", "relpos")}
    assert errors["relpos"] <= 1.5 * errors["eager"]


def test_fresh_tables_are_as_large_as_those_of_other_schemes():
    config = tiny_config("harmonic", initializer_range=0.1, position_options={"waves": 8}, hidden_size=384)
    scheme = RelPosBertModel(config).encoder.layer[0].attention.self.distance_embedding
    assert 0.09 <= scheme(AttentionContext(64, 64)).query_table[0].rows.std() <= 0.11


def test_frequencies():
    assert np.allclose(np.array(geometric(5, 40)) * STEP, frequencies(5, 40), atol=1e-12)
    assert geometric(1, 64) == (2**24 // 64,)
    config = tiny_config("harmonic", max_position_embeddings=128)
    (slowest, *_, fastest) = RelPosBertModel(config).encoder.layer[0].attention.self.distance_embedding.frequencies
    assert slowest == 2**24 // 256 and abs(fastest * STEP - 0.85 * math.pi) <= STEP
