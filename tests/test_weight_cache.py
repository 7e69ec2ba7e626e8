"""Copies of weights that layers keep, rounded or packed, follow each change of the weight."""

import copy
import importlib
import pickle

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from transformers import BertConfig, BertModel

import hf_relpos
from hf_relpos.host.torch import has_packed_weights
from hf_relpos.products import cpu_gemm, low_precision
from hf_relpos.products.cpu_gemm import FastLinear
from hf_relpos.products.low_precision import Bfloat16Linear, Int8Linear
from hf_relpos.products.weight_cache import ATTRIBUTE, WHOLE, sample_of


ROWS = 64  # of a call that reads packed weights
SIZES = dict(vocab_size=200, num_hidden_layers=2, num_attention_heads=4)

pytestmark = pytest.mark.skipif(not has_packed_weights(), reason="this PyTorch does not pack weights")


@pytest.fixture(autouse=True)
def packed(monkeypatch):
    """Weights are packed on any machine."""
    for module in (cpu_gemm, low_precision, importlib.import_module("hf_relpos.live.optimize")):
        monkeypatch.setattr(module, "packed_rows", lambda *dtype: ROWS)


def adapter(weight, rank=4):
    return torch.randn(weight.shape[0], rank) @ torch.randn(rank, weight.shape[1]) / 10


def swapped(layer):
    layer.weight.data[[3, 200]] = layer.weight.data[[200, 3]]


CHANGES = {
    "a merged adapter": lambda layer: layer.weight.data.add_(adapter(layer.weight)),
    "a merged adapter of some columns": lambda layer: layer.weight.data[:, 7:9].add_(adapter(layer.weight[:, 7:9])),
    "another tensor in its place": lambda layer: setattr(layer.weight, "data", layer.weight.data + 1),
    "an average": lambda layer: layer.weight.data.lerp_(torch.randn_like(layer.weight), 1e-3),
    "a small step": lambda layer: layer.weight.data.sub_(torch.randn_like(layer.weight).sign() * 1e-6),
    "a row": lambda layer: layer.weight.data[211].add_(1),
    "a row through numpy": lambda layer: layer.weight.detach().numpy()[5].__iadd__(1),
    "a column": lambda layer: layer.weight.data[:, 299].mul_(-1),
    "two rows swapped": swapped,
    "other strides": lambda layer: setattr(layer.weight, "data", layer.weight.data.t()),
    "an assigned state": lambda layer: layer.load_state_dict({"weight": layer.weight + 1}, strict=False, assign=True),
    "swapped tensors": lambda layer: torch.utils.swap_tensors(layer.weight, nn.Parameter(layer.weight + 1)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("made", ["plainly", "transposed", "in inference mode"])
@pytest.mark.parametrize("kind", [FastLinear, Bfloat16Linear, Int8Linear])
def test_cached_weights_follow_a_change(kind, made, change):
    with torch.inference_mode() if made == "in inference mode" else torch.no_grad():
        layer, rows = kind(300, 300).eval(), torch.randn(6, 300)
        if made == "transposed":
            layer.weight = nn.Parameter(layer.weight.t().contiguous().t())
        for _ in range(3):
            before = layer(rows)
        value = vars(layer)[ATTRIBUTE][2]
        assert value.layout == torch._mkldnn if kind is not Int8Linear else value.matrix.dtype == torch.int8
        CHANGES[change](layer)
        fresh = kind(300, 300).eval()
        fresh.weight, fresh.bias = nn.Parameter(layer.weight.clone()), layer.bias  # in the same layout
        for _ in range(3):  # with the plain weight, which is then packed
            torch.testing.assert_close(layer(rows), fresh(rows), rtol=1e-6, atol=2e-6)
        assert not torch.equal(layer(rows), before)


@torch.no_grad()
def test_cached_weights_of_small_layers_follow_a_single_element():
    assert 256 * 256 == WHOLE
    layer, rows = Int8Linear(256, 256).eval(), torch.randn(6, 256)
    before = layer(rows)
    layer.weight.data[37, 91] += 10
    assert not torch.equal(layer(rows), before)


@given(rows=st.integers(1, 900), columns=st.integers(1, 900), transposed=st.booleans())
def test_sample_of_has_each_row_and_each_column(rows, columns, transposed):
    shape = (columns, rows) if transposed else (rows, columns)
    numbers = torch.arange(rows * columns).view(shape)
    taken = sample_of(numbers.t() if transposed else numbers)
    assert len(taken) <= max(WHOLE, rows + columns)
    assert len(taken.div(shape[1], rounding_mode="floor").unique()) == shape[0]
    assert len((taken % shape[1]).unique()) == shape[1]


@torch.no_grad()
def test_refresh_drops_cached_weights():
    config = BertConfig(**{**SIZES, "hidden_size": 264, "intermediate_size": 264})
    model, ids = BertModel(config).eval(), torch.arange(20)[None]
    handle = hf_relpos.optimize(model, dtype="bfloat16")
    before = model(ids)[0]
    weight = model.encoder.layer[0].output.dense.weight
    sampled = set(sample_of(torch.arange(weight.numel()).view(weight.shape)).tolist())
    unseen = next(at for at in range(weight.numel()) if at not in sampled)
    weight.data.view(-1)[unseen] = 100.0
    assert torch.equal(model(ids)[0], before)
    handle.refresh()
    after = model(ids)[0]
    assert not torch.equal(after, before)
    weight.view(-1)[unseen] = -100.0  # PyTorch counts this write
    assert not torch.equal(model(ids)[0], after)


def is_packed(layer):
    return vars(layer).get(ATTRIBUTE, (None,) * 3)[2] is not None


def test_fast_linear_packs_in_the_second_call_of_few_rows():
    layer, rows = FastLinear(96, 160), torch.randn(ROWS + 1, 96)
    with torch.no_grad():
        for _ in range(3):
            layer(rows)
        assert not is_packed(layer)
        layer(rows[:8])
        assert not is_packed(layer)
        for few in (rows[:8], rows[:1], rows[:ROWS].view(2, -1, 96)):
            torch.testing.assert_close(layer(few), nn.functional.linear(few, layer.weight, layer.bias))
            assert is_packed(layer)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert ATTRIBUTE not in vars(copied) and torch.equal(copied.weight, layer.weight)


def test_fast_linear_does_not_pack_while_it_learns():
    layer, rows = FastLinear(96, 160), torch.randn(8, 96)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    for _ in range(4):
        layer(rows).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(layer(rows), nn.functional.linear(rows, layer.weight, layer.bias))
        assert not is_packed(layer)


@torch.no_grad()
def test_optimize_reports_packed_weights_and_undo_releases_them():
    model, ids = BertModel(BertConfig(**SIZES, hidden_size=64, intermediate_size=128)).eval(), torch.arange(20)[None]
    expected = model(ids)[0]
    handle = hf_relpos.optimize(model)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for _ in range(3):
        torch.testing.assert_close(model(ids)[0], expected)
    assert all(map(is_packed, layers[:-1]))  # the last is the pooler
    assert f"up to {ROWS} tokens" in handle.products and "refresh()" in str(handle)
    assert f"{sum(layer.weight.nbytes for layer in layers) / 1e6:.3g} MB" in handle.products
    handle.undo()
    assert not any(ATTRIBUTE in vars(module) for module in model.modules())
