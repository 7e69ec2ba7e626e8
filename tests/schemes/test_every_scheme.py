"""What must hold for the layer of any scheme: finite numbers, and gradients that finite differences confirm."""

import pytest
import torch
from oracles import extra_offsets, padding, tiny_attention
from torch.autograd import gradcheck
from torch.func import functional_call

from hf_relpos import SCHEMES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("mask", ["boolean", "additive"])
@pytest.mark.parametrize("name", SCHEMES)
def test_finite_also_where_every_key_is_hidden(name, mask, dtype):
    layer = tiny_attention(name, dtype=dtype)
    hidden = (4 * torch.randn(2, 12, 24)).to(dtype).requires_grad_()
    allowed = padding([7, 0], 12)[:, None, None, :]
    if mask == "additive":
        allowed = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    out, weights = layer(hidden, attention_mask=allowed, context=extra_offsets(name, 2, 12))
    out.float().square().sum().backward()
    assert out.dtype == dtype
    assert out.isfinite().all() and weights.isfinite().all()
    assert hidden.grad.isfinite().all()
    for parameter_name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), parameter_name


@pytest.mark.parametrize("name", SCHEMES)
def test_gradients_by_finite_differences(name):
    layer = tiny_attention(name, hidden_size=12, max_position_embeddings=4)
    names = [name for name, _ in layer.named_parameters() if "distance_embedding" in name]
    tensors = [layer.get_parameter(name) for name in names]
    hidden = torch.randn(1, 5, 12, dtype=torch.float64, requires_grad=True)
    mask, context = padding([4], 5)[:, None, None, :], extra_offsets(name, 1, 5)

    def run(hidden, *tensors):
        return functional_call(layer, dict(zip(names, tensors, strict=True)), (hidden, mask, None, context))[0]

    assert gradcheck(run, (hidden, *tensors))


@pytest.mark.parametrize("name", SCHEMES)
def test_describes_itself(name):
    scheme = SCHEMES[name]
    assert scheme.name == name and scheme.source and scheme.out_of_range
    for option in scheme.options.values():
        assert option.help and option.accepts(option.default)
    assert not list(tiny_attention(name).distance_embedding.buffers())


@pytest.mark.parametrize("name", [name for name in SCHEMES if SCHEMES[name].zero_is_neutral])
def test_zero_is_neutral(name):
    """With its parameters at zero the layer is a plain one, and at least one of them has a gradient to leave by."""
    layer, plain = tiny_attention(name), tiny_attention("absolute")
    plain.load_state_dict({key: value for key, value in layer.state_dict().items() if "distance" not in key})
    parameters = [parameter for name, parameter in layer.named_parameters() if "distance_embedding" in name]
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
    hidden, mask = torch.randn(2, 8, 24, dtype=torch.float64), padding([8, 6], 8)[:, None, None, :]
    out, _ = layer(hidden, attention_mask=mask, context=extra_offsets(name, 2, 8))
    assert (out - plain(hidden, attention_mask=mask)[0]).abs().max() <= 1e-12
    out.square().sum().backward()
    assert not parameters or any(parameter.grad.abs().max() > 1e-6 for parameter in parameters)
