"""Encoders in half precision on a machine that multiplies float32 faster, or does not."""

import copy
import pickle
import sys

import encoders
import pytest
import torch
from encoders import build, difference, pad_of, tokens
from torch import nn

from hf_relpos import optimize
from hf_relpos.live.half import TWIN
from hf_relpos.products.cpu_gemm import HALF, Library, half_library
from hf_relpos.products.low_precision import HalfLinear


NAMES = ("BERT", "ModernBERT", "Gemma3, two-sided", "T5", "ALBERT", "DeBERTa v1", "DeBERTa v2", "XLNet", "harmonic")
PADDED = torch.arange(40) < torch.tensor([40, 12, 30, 5])[:, None]


@pytest.fixture(autouse=True, params=[10.0])
def rate(request, monkeypatch):
    """Of float32; that of half precision is 1."""
    for module in ("levels", "optimize"):
        own = sys.modules[f"hf_relpos.live.{module}"]
        monkeypatch.setattr(own, "half_library", lambda dtype: Library(1.0, request.param, 1e-3, 1e-7))
    return request.param


def copies_in(model):
    return [vars(part)[TWIN].copy for part in model.modules() if TWIN in vars(part) and vars(part)[TWIN].copy]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_outputs_in_half_precision(name, dtype):
    """In that, and nearer to float64 than Transformers'; with and without padding, and with all hidden states."""
    stock = build(name, dtype)
    ours, exact = copy.deepcopy(stock), copy.deepcopy(stock).double()
    handle = optimize(ours, verify="load")
    for real, others in ((PADDED, {}), (PADDED[:1], {}), (PADDED, {"output_hidden_states": True})):
        inputs = tokens(real, pad_of(stock)) | others
        found, theirs, want = (dict(encoders.tensors_of(model(**inputs))) for model in (ours, stock, exact))
        for key, state in found.items():
            kept = real if state.shape[:2] == real.shape else slice(None)
            error, before = (difference(each[key][kept].double(), want[key][kept]) for each in (found, theirs))
            assert state.dtype == dtype and error <= before
    counts = handle.counts()
    assert copies_in(ours) and all("float32" in level for level in counts.calls) and counts.computed < counts.given


def test_copy_in_float32_follows_the_encoder():
    """Writes, other parts, attributes and dtypes; not in training, nor in copies and pickles; undo frees it."""
    stock, inputs = build("BERT", torch.float16), tokens(PADDED)
    ours = copy.deepcopy(stock)
    handle = optimize(ours, verify="load")
    for model in (ours, stock):
        model(**tokens(PADDED[:1]))[0].float().square().sum().backward()
    pairs = [(mine.grad, own.grad) for mine, own in zip(ours.parameters(), stock.parameters(), strict=True)]
    assert not copies_in(ours) and all(mine is own is None or torch.equal(mine, own) for mine, own in pairs)
    changes = (
        lambda model: model.encoder.layer[1].output.dense.weight.data.mul_(3.0),
        lambda model: model.embeddings.word_embeddings.weight.numpy().__imul__(0.5),
        lambda model: model.encoder.layer[0].attention.output.LayerNorm.bias.add_(1.0),
        lambda model: setattr(model.embeddings.LayerNorm, "eps", 5.0),
        lambda model: model.encoder.layer.append(model.encoder.layer[0]),
        lambda model: model.encoder.layer[0].register_forward_hook(lambda *call: call[2] + 1),
        lambda model: model.float(),
    )
    with torch.no_grad():
        for change in changes:
            before, _, _ = ours(**inputs)[0], change(ours), change(stock)
            found, want = (model(**inputs)[0] for model in (ours, stock))
            assert difference(found[PADDED], want[PADDED]) <= 2e-3 and len(copies_in(ours)) == 1
            assert found.dtype != before.dtype or difference(found[PADDED], before[PADDED]) > 1e-2
    assert not copies_in(copy.deepcopy(ours))
    handle.undo()
    assert not copies_in(ours)


@pytest.mark.parametrize("rate", [10.0, 1.0], indirect=True)
@pytest.mark.parametrize("unpad", [True, "auto", False])
@torch.no_grad()
def test_optimize_by_the_rates_of_half_precision(unpad, rate):
    stock, inputs = build("BERT", torch.float16, "MaskedLM"), tokens(PADDED)
    model = copy.deepcopy(stock)
    handle = optimize(model, unpad=unpad, verify="load")
    assert difference(model(**inputs).logits[PADDED], stock(**inputs).logits[PADDED]) <= 2e-3
    assert bool(copies_in(model)) == (rate > 1) == ("half precision runs in float32" in handle.summary)
    assert any(type(part) is HalfLinear for part in model.modules()) == (rate > 1)
    assert not copies_in(pickle.loads(pickle.dumps(model)))
    handle.undo()
    assert all(type(part) is nn.Linear for part in model.modules() if isinstance(part, nn.Linear))


def test_half_library_measures_errors():
    found = half_library(torch.bfloat16)
    assert found.onednn_error <= 1e-5 < found.torch_error and min(found.onednn_rate, found.torch_rate) > 0
