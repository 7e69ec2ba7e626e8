"""Linear layers in int8 and the gate of `optimize(dtype="int8")`."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from errors import raises
from fuzzing import strided
from hypothesis import given, strategies as st
from torch import nn
from torch.func import functional_call
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    DebertaV2Config,
    DebertaV2Model,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
)

import hf_relpos
from hf_relpos.demo import CHECKPOINT
from hf_relpos.host.torch import has_packed_int8
from hf_relpos.live import precision
from hf_relpos.products import low_precision
from hf_relpos.products.cpu_gemm import FastLinear
from hf_relpos.products.low_precision import (
    KINDS,
    Bfloat16Linear,
    Int8Linear,
    Int8Rates,
    multiply_int8,
    pack_rounded,
    round_weight,
)
from hf_relpos.products.weight_cache import ATTRIBUTE


SIZES = dict(vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
DISENTANGLED = dict(relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8, share_att_key=True)


def layer_and_rows():
    rows = torch.randn(6, 96)
    rows[2] *= 1000  # a token with large values must cost the others nothing
    return Int8Linear(96, 160).eval(), rows


def classifier():
    return BertForSequenceClassification(BertConfig(**SIZES, num_labels=3)).eval()


@torch.no_grad()
def test_a_graph_rounds_the_weight_in_every_call():
    layer, rows = layer_and_rows()
    graph = torch.compile(layer, backend="eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(graph(rows), layer(rows))
        layer.weight.mul_(-0.5)


def test_every_token_has_its_own_scale():
    layer, rows = layer_and_rows()
    with torch.no_grad():
        exact, found = nn.functional.linear(rows, layer.weight, layer.bias), layer(rows)
        assert ((found - exact).norm(dim=-1) / exact.norm(dim=-1)).max() <= 0.02
        assert torch.equal(layer(rows[None, :1])[0], found[:1])  # and what others hold changes no number
        assert layer(rows[:0]).shape == (0, 160) and layer(torch.zeros(2, 96)).isfinite().all()
    assert not torch.equal(found, exact)


@pytest.mark.parametrize("kind", [Bfloat16Linear, Int8Linear])
@given(data=st.data())
@torch.no_grad()
def test_low_precision_of_any_strides(kind, data):
    """As of contiguous tensors: the products get copies of what they would read past."""
    size, features = (data.draw(st.sampled_from([1, 3, 8])) for _ in range(2))
    rows = strided(data.draw, *data.draw(st.sampled_from([(1,), (2, 3), (9,), (), (0,)])), size)
    layer, plain = kind(size, features), kind(size, features)
    layer.weight, layer.bias = (nn.Parameter(strided(data.draw, *shape)) for shape in ((features, size), (features,)))
    plain.load_state_dict(layer.state_dict())
    for _ in range(3):  # the weight is kept from the first call or the second on
        torch.testing.assert_close(layer(rows), plain(rows.contiguous()), rtol=2e-2, atol=2e-2)


@torch.no_grad()
def test_rounded_weights_are_kept_in_inference_alone():
    layer, rows = layer_and_rows()
    layer.__class__ = Bfloat16Linear
    assert layer(rows).dtype == torch.float32
    assert ATTRIBUTE in vars(layer) and ATTRIBUTE not in vars(copy.deepcopy(layer))
    of_weight = lambda weight: functional_call(layer, {"weight": weight}, rows)  # noqa: E731
    _, tangent = torch.func.jvp(of_weight, *[(layer.weight,)] * 2)
    expected = rows @ layer.weight.t()
    assert (tangent - expected).norm() <= 0.02 * expected.norm()
    with torch.enable_grad():
        layer(rows).sum().backward()
    bound = 2**-7 * rows.abs().sum(0)  # rows and sums are each rounded to bfloat16, by up to 2⁻⁸
    assert ((layer.weight.grad - rows.sum(0)).abs() <= bound).all()


def test_with_gradients_it_computes_in_float32():
    layer, rows = layer_and_rows()
    out = layer(rows)
    assert torch.allclose(out, nn.functional.linear(rows, layer.weight, layer.bias), rtol=1e-4, atol=1e-3)
    out.sum().backward()
    assert torch.allclose(layer.weight.grad, rows.sum(0).expand(160, -1), rtol=1e-4, atol=1e-2)


def test_the_report_measures_agreement():
    model = classifier()
    names = set(model.state_dict())
    inputs = {"input_ids": torch.randint(5, 200, (4, 12))}
    with torch.no_grad():
        before = model(**inputs).logits
        handle = hf_relpos.optimize(model, dtype="int8", sample=inputs)
        after = model(**inputs).logits
    found = handle.agreement
    cosines = nn.functional.cosine_similarity(before, after)
    assert found.rows == 4 and found.cosine == pytest.approx(float(cosines.mean()), abs=1e-6) and found.cosine > 0.99
    assert found.least == pytest.approx(float(cosines.min()), abs=1e-6)
    assert found.decisions == float((before.argmax(1) == after.argmax(1)).double().mean())
    assert not torch.equal(before, after) and set(model.state_dict()) == names
    assert "12 linear layers in int8" in str(handle) and str(found) in str(handle) and handle.linear == 2
    handle.undo()
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, before)
    assert not any("_rounded" in vars(module) for module in model.modules())
    for chosen, least, most in (("float32", 0.0, 1e-5), ("bfloat16", 1e-5, 0.1)):
        with hf_relpos.optimize(model, chosen, sample=inputs) as handle:
            assert least <= handle.agreement.largest < most and str(handle.agreement) in str(handle)
            assert all(seconds > 0 for seconds in handle.agreement.seconds) and " s before" in str(handle)


def test_a_layer_that_does_harm_stays_in_float32(monkeypatch):
    """A feature a thousand times as large as the others takes all steps of its token's scale.

    The sample is random tokens, which have to fit into a short table of positions.
    """
    model = BertModel(BertConfig(**SIZES | {"max_position_embeddings": 40})).eval()
    with torch.no_grad():
        model.encoder.layer[1].output.dense.weight[:, 0] = 0.0
        model.encoder.layer[1].intermediate.dense.bias[0] = 3000.0
    handle = hf_relpos.optimize(model, dtype="int8")
    assert "encoder.layer.1.output.dense" in handle.agreement.in_float32
    assert not isinstance(model.encoder.layer[1].output.dense, Int8Linear)
    assert isinstance(model.encoder.layer[0].output.dense, Int8Linear)
    assert handle.agreement.cosine >= 0.995 and handle.agreement.decisions is None
    assert "random tokens" in str(handle) and not model.training


def test_refused():
    model = classifier()
    with raises(ValueError, "dtype", "'int4'", "int8"):
        hf_relpos.optimize(model, dtype="int4")
    with raises(ValueError, "sample", "tokenizer"):
        hf_relpos.optimize(model, dtype="int8", sample=["a text"])
    with raises(ValueError, "int8", "PreTrainedModel"):
        hf_relpos.optimize(nn.Linear(3, 3), dtype="int8")


def state_of(model):
    """What `optimize` changes of a model, by module."""
    return [(type(each), each.training, {*vars(each)}, [*each._forward_pre_hooks]) for each in model.modules()]


@pytest.mark.parametrize("call", range(4))
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_optimize_interrupted_leaves_the_model(precision, call, monkeypatch):
    model, calls = DebertaV2Model(DebertaV2Config(**SIZES, **DISENTANGLED)).train(), count()
    model.encoder.layer[1].eval()
    embedding = nn.functional.embedding

    def interrupt(*args, **kwargs):
        if next(calls) == call:
            raise KeyboardInterrupt
        return embedding(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "embedding", interrupt)
    before = state_of(model)
    with pytest.raises(KeyboardInterrupt):
        hf_relpos.optimize(model, precision, sample={"input_ids": torch.arange(5, 25)[None]})
    assert state_of(model) == before


def test_optimize_interrupted_while_it_changes_modules(monkeypatch):
    model = DebertaV2Model(DebertaV2Config(**SIZES, **DISENTANGLED))
    before = state_of(model)
    for name in ("_linear_layers", "take_padding_out", "rates_of"):
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(sys.modules["hf_relpos.live.optimize"], name, lambda *given: 1 / 0)
            hf_relpos.optimize(model)
        assert state_of(model) == before


def test_optimize_leaves_calls_and_training_of_other_threads_alone():
    """A model that another thread trains is measured meanwhile: no hook fires there, and no flag changes."""
    model, inputs, stop, seen = classifier().train(), {"input_ids": torch.arange(5, 25)[None]}, Event(), set()

    def train():
        while not stop.is_set() or not seen:
            model(**inputs).logits.sum().backward()
            seen.update((module.training, len(module._forward_hooks)) for module in model.modules())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with ThreadPoolExecutor(1) as pool:
        try:
            running = pool.submit(train)
            for _ in range(5):
                hf_relpos.optimize(model, dtype="int8", unpad=False, sample=inputs).undo()
        finally:
            stop.set()
            sys.setswitchinterval(interval)
        running.result()
    assert seen == {(True, 0)}


@torch.no_grad()
def test_sample_of_an_encoder_decoder():
    sizes = dict(d_model=32, d_ff=48, d_kv=8, num_heads=4, num_layers=2, decoder_start_token_id=0)
    model, ids = T5ForConditionalGeneration(T5Config(vocab_size=60, **sizes)).eval(), torch.arange(5, 25)[None]
    for extra in ({}, {"labels": ids[:, :7]}, {"decoder_input_ids": ids[:, :7]}):
        with hf_relpos.optimize(model, dtype="int8", sample={"input_ids": ids, **extra}) as handle:
            assert handle.agreement.rows == 1 and 0.99 < handle.agreement.cosine < 1 - 1e-9


def test_agreement_has_a_line_for_states_at_padding():
    model = BertModel(BertConfig(**SIZES)).eval()
    mask = (torch.arange(20) < torch.tensor([[20], [3]])).long()
    ids = torch.arange(5, 45).view(2, 20) * mask
    with hf_relpos.optimize(model, sample={"input_ids": ids, "attention_mask": mask}) as handle:
        assert handle.agreement.largest < 1e-5 and 0.1 < handle.agreement.padding <= 1.5
        assert "padding" in str(handle).splitlines()[-1]
    with hf_relpos.optimize(model, unpad=False, sample={"input_ids": ids, "attention_mask": mask}) as handle:
        assert handle.agreement.padding < 1e-5
    with hf_relpos.optimize(model, sample={"input_ids": ids}) as handle:
        assert handle.agreement.padding is None and "padding" not in str(handle.agreement)


class Around(nn.Module):
    """A model with a tokenizer at some attribute."""

    def __init__(self, **attributes):
        super().__init__()
        self.inner = BertModel.from_pretrained(CHECKPOINT)
        vars(self).update(attributes)


def test_sample_of_texts_finds_the_tokenizer():
    """One text is one row, and no text is refused."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    for model in (
        pipeline("fill-mask", model=BertForMaskedLM.from_pretrained(CHECKPOINT), tokenizer=tokenizer),
        Around(processor=tokenizer),
        Around(processor=SimpleNamespace(tokenizer=tokenizer)),
        Around(data_processor=SimpleNamespace(transformer_tokenizer=tokenizer)),
        Around(tokenize=lambda texts: {**tokenizer(texts, return_tensors="pt", padding=True), "modality": "text"}),
    ):
        for sample, rows in ((["the ship lay", "at anchor"], 2), ("the ship lay at anchor", 1)):
            with hf_relpos.optimize(model, sample=sample) as handle:
                assert f"on {rows} sequences of the given texts" in str(handle)
        with raises(ValueError, "sample", "at least one text"):
            hf_relpos.optimize(model, sample=[])


@pytest.mark.skipif(not has_packed_int8(), reason="this PyTorch has no packed weights in int8")
@pytest.mark.parametrize("shape", [(9, 40, 24), (1, 1, 1), (3, 1, 8), (1, 8, 1)])
@torch.no_grad()
def test_packed_int8_has_the_numbers_of_int_mm(shape, monkeypatch):
    monkeypatch.setattr(low_precision, "BLOCK", 64)  # several blocks of the first shape
    count, size, features = shape
    rows, weight, bias = torch.randn(count, size), torch.randn(features, size), torch.randn(features)
    expected = multiply_int8(rows, round_weight(weight), bias)
    torch.testing.assert_close(multiply_int8(rows, pack_rounded(weight), bias), expected)


SLOW = Int8Rates(float32=100.0, int8=60.0, is_packed=True)


def test_int8_slower_than_float32_is_refused(monkeypatch):
    for module in (precision, sys.modules["hf_relpos.live.optimize"]):
        monkeypatch.setattr(module, "int8_rates", lambda: SLOW)
    model, inputs = classifier(), {"input_ids": torch.arange(5, 25)[None]}
    with hf_relpos.optimize(model, dtype="int8", sample=inputs) as handle:
        assert "int8 is slower than float32" in str(handle) and handle.agreement.largest < 1e-5
        assert not any(isinstance(module, Int8Linear) for module in model.modules())
    with hf_relpos.optimize(model, dtype="auto", sample=inputs) as handle:
        assert [line.partition(":")[0] for line in handle.choices.splitlines()] == ["float32", "bfloat16", "int8"]


@pytest.mark.parametrize("fastest", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("disagrees", [False, True])
def test_auto_takes_the_fastest_precision_that_agrees(monkeypatch, fastest, disagrees):
    if disagrees:
        monkeypatch.setattr(precision, "LEAST_COSINE", 1 - 1e-9)
    for module in (low_precision, precision):
        monkeypatch.setattr(module, "int8_rates", lambda: Int8Rates(1.0, 3.0, has_packed_int8()))
    monkeypatch.setattr(precision, "seconds_of", lambda runs, rounds: {name: 1 + (name != fastest) for name in runs})
    model, inputs = classifier(), {"input_ids": torch.arange(5, 25)[None]}
    handle = hf_relpos.optimize(model, dtype="auto", sample=inputs)
    taken = "float32" if disagrees and fastest == "bfloat16" else fastest
    [line] = [line for line in str(handle).splitlines() if "; taken" in line]
    assert line.startswith(taken)
    kinds = {type(module) for module in model.bert.encoder.modules() if isinstance(module, nn.Linear)}
    exact = disagrees and fastest == "int8"  # all layers stay in float32 then
    assert (KINDS.get(taken, FastLinear) in kinds) != exact and handle.choices.count("\n") == 2
