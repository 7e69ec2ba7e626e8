"""torchao: int8 weights, and int8 activations with them. What is lost is rounding, and its size is stated.

Where a scheme computes terms by linear layers, these are quantised like all others; tables stay as they are.
"""

import copy

import pytest
import torch
from oracles import tiny_model
from selection import FEATURE_SCHEMES, FEW_FEATURE_SCHEMES, with_full
from test_tools_outputs import batch
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_
from transformers import AutoModelForSequenceClassification, TorchAoConfig

from hf_relpos import RelPosBertForSequenceClassification
from hf_relpos.schemes import SCHEMES


EVERY_SCHEME = pytest.mark.parametrize("scheme", FEATURE_SCHEMES)
# Lowest cosine of a token's state to that of the model as it was.
WEIGHTS_ONLY, WITH_ACTIVATIONS = 0.998, 0.99


def model_of(scheme):
    """A model wide enough for torchao's products of int8."""
    return tiny_model(RelPosBertForSequenceClassification, scheme, hidden_size=96, intermediate_size=192)


def linear_layers(model):
    return {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}


@torch.no_grad()
def logits(model, inputs):
    return model(**inputs).logits


@torch.no_grad()
def lowest_cosine(model, other, inputs):
    """Over the real tokens."""
    states = [each.bert(**inputs).last_hidden_state[inputs["attention_mask"].bool()] for each in (model, other)]
    return torch.nn.functional.cosine_similarity(*states, dim=-1).min()


@torch.no_grad()
def rounded(model, quantized):
    """The model with its linear layers rounded as the quantised one has them, each row to at most half a step."""
    model = copy.deepcopy(model)
    for (name, layer), other in zip(linear_layers(model).items(), linear_layers(quantized).values(), strict=True):
        weight = other.weight.dequantize()
        step = layer.weight.abs().amax(-1, keepdim=True) / 127
        assert type(other.weight) is not torch.nn.Parameter, name
        assert ((weight - layer.weight).abs() <= 0.51 * step).all(), name
        layer.weight.copy_(weight)
    return model


@pytest.mark.parametrize("scheme", with_full(FEATURE_SCHEMES, SCHEMES))
def test_int8_weights_lose_their_rounding_only(scheme):
    """The output is that of the same model in float32 with rounded weights."""
    model, inputs = model_of(scheme), batch(scheme, (12, 7))
    quantized = copy.deepcopy(model)
    quantize_(quantized, Int8WeightOnlyConfig())
    expected = rounded(model, quantized)
    torch.testing.assert_close(logits(quantized, inputs), logits(expected, inputs), atol=1e-4, rtol=0)
    assert lowest_cosine(quantized, model, inputs) >= WEIGHTS_ONLY


@EVERY_SCHEME
def test_int8_activations_lose_little(scheme):
    model, inputs = model_of(scheme), batch(scheme, (12, 7))
    quantized = copy.deepcopy(model)
    quantize_(quantized, Int8DynamicActivationInt8WeightConfig())
    rounded(model, quantized)
    assert lowest_cosine(quantized, model, inputs) >= WITH_ACTIVATIONS


@pytest.mark.parametrize("scheme", FEW_FEATURE_SCHEMES)
def test_quantized_while_loading_and_saved(scheme, tmp_path):
    """`quantization_config` of `from_pretrained`; what is saved is quantised and loads to the same outputs."""
    model, inputs = model_of(scheme), batch(scheme, (12, 7))
    model.save_pretrained(tmp_path / "model")
    settings = TorchAoConfig(Int8WeightOnlyConfig())
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", quantization_config=settings)
    quantize_(model, Int8WeightOnlyConfig())
    expected = logits(loaded, inputs)
    torch.testing.assert_close(expected, logits(model, inputs), atol=1e-5, rtol=0)
    loaded.save_pretrained(tmp_path / "quantized")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "quantized")
    assert torch.equal(logits(again, inputs), expected)
    sizes = [(tmp_path / folder / "model.safetensors").stat().st_size for folder in ("model", "quantized")]
    assert sizes[1] < 0.6 * sizes[0]
