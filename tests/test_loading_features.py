"""Ways to make, load and change a model that Transformers and PyTorch offer, for every kind of term."""

import copy

import pytest
import torch
from oracles import extra_inputs, stir, tiny_model
from selection import FEATURE_SCHEMES
from transformers import AutoModel, AutoModelForMaskedLM

from hf_relpos import RelPosBertForMaskedLM, RelPosBertModel


BATCH, LENGTH = 2, 9


def words(name):
    return {"input_ids": torch.randint(1, 50, (BATCH, LENGTH)), **extra_inputs(name, BATCH, LENGTH)}


def assert_same(outputs, expected):
    """Up to rounding, which may depend on where a tensor lies in memory."""
    assert (outputs - expected).abs().max() <= 1e-6 * expected.abs().max()


def first_output(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


@pytest.mark.parametrize("scheme", FEATURE_SCHEMES)
def test_a_model_on_the_meta_device_takes_weights(scheme):
    """Without a tensor of its own: what is computed from lengths is computed in `forward`."""
    model, inputs = tiny_model(RelPosBertForMaskedLM, scheme), words(scheme)
    with torch.device("meta"):
        empty = RelPosBertForMaskedLM(model.config).eval()
    assert all(tensor.is_meta for tensor in empty.state_dict().values()) and not list(empty.buffers())
    assert empty(input_ids=torch.ones(1, 5, dtype=torch.long, device="meta")).logits.shape == (1, 5, 50)
    empty.load_state_dict(model.state_dict(), assign=True)
    assert_same(first_output(empty, inputs), first_output(model, inputs))


@pytest.mark.parametrize("scheme", FEATURE_SCHEMES)
def test_loading_makes_no_weights_to_throw_away(tmp_path, scheme, monkeypatch):
    """It begins on the meta device, and draws no random number."""
    model, inputs = tiny_model(RelPosBertForMaskedLM, scheme), words(scheme)
    model.save_pretrained(tmp_path)
    made = []
    build = RelPosBertModel.__init__

    def keep_devices(self, *args, **kwargs):
        build(self, *args, **kwargs)
        made.extend(parameter.device.type for parameter in self.parameters())

    monkeypatch.setattr(RelPosBertModel, "__init__", keep_devices)
    before = torch.get_rng_state()
    loaded = RelPosBertForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(before, torch.get_rng_state()) and set(made) == {"meta"}
    assert_same(first_output(loaded, inputs), first_output(model, inputs))


# What half a unit in the last place of each weight may change, with the rounding of every layer.
TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 8e-2, torch.float64: 1e-5}


@pytest.mark.parametrize("scheme", FEATURE_SCHEMES)
def test_dtypes(tmp_path, scheme):
    """Loaded, computed and saved in a dtype; each close to float32, relative to the largest logit."""
    model, inputs = tiny_model(RelPosBertForMaskedLM, scheme), words(scheme)
    exact = first_output(model, inputs)
    model.save_pretrained(tmp_path / "float32")
    for dtype, tolerance in TOLERANCES.items():
        loaded = RelPosBertForMaskedLM.from_pretrained(tmp_path / "float32", dtype=dtype)
        assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
        outputs = first_output(loaded, inputs)
        assert outputs.dtype == dtype and outputs.isfinite().all()
        assert (outputs.double() - exact.double()).abs().max() <= tolerance * exact.abs().max(), dtype
        folder = tmp_path / str(dtype)
        loaded.save_pretrained(folder)
        again = RelPosBertForMaskedLM.from_pretrained(folder)
        assert again.dtype == again.config.dtype == dtype
        kept = again.state_dict()
        assert all(torch.equal(kept[name], tensor) for name, tensor in loaded.state_dict().items())


@pytest.mark.parametrize("scheme", FEATURE_SCHEMES)
def test_tied_weights(tmp_path, scheme):
    """In one file and in shards."""
    model, inputs = tiny_model(RelPosBertForMaskedLM, scheme), words(scheme)
    model.save_pretrained(tmp_path / "tied", max_shard_size="10KB")
    assert len(list((tmp_path / "tied").glob("*.safetensors"))) > 2
    loaded = RelPosBertForMaskedLM.from_pretrained(tmp_path / "tied")
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert_same(first_output(loaded, inputs), first_output(model, inputs))
    untied = stir(RelPosBertForMaskedLM(type(model.config)(**model.config.to_dict() | {"tie_word_embeddings": False})))
    untied.eval().save_pretrained(tmp_path / "untied")
    loaded = RelPosBertForMaskedLM.from_pretrained(tmp_path / "untied")
    assert not torch.equal(loaded.get_output_embeddings().weight, loaded.get_input_embeddings().weight)
    assert_same(first_output(loaded, inputs), first_output(untied, inputs))


@pytest.mark.parametrize("scheme", FEATURE_SCHEMES)
def test_resized_embeddings(tmp_path, scheme):
    """More words change nothing for those there were; fewer cut the last ones off."""
    model, inputs = tiny_model(RelPosBertForMaskedLM, scheme), words(scheme)
    before = first_output(model, inputs)
    for size, multiple, expected in ((53, None, 53), (54, 8, 56), (50, None, 50)):
        model.resize_token_embeddings(size, pad_to_multiple_of=multiple)
        assert model.config.vocab_size == expected
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        outputs = first_output(model, inputs)
        assert outputs.shape[-1] == expected
        torch.testing.assert_close(outputs[..., :50], before, rtol=1e-5, atol=1e-5)
        model.save_pretrained(tmp_path / str(size))
        loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / str(size))
        assert_same(first_output(loaded, inputs), outputs)
    inputs["input_ids"] = torch.full((BATCH, LENGTH), 52)
    larger = AutoModel.from_pretrained(tmp_path / "53")
    assert first_output(larger, inputs).isfinite().all()


# The largest part of the hidden states, in norm, that eight-bit weights and activations may cost a tiny random model.
QUANTIZATION_LOSS = 0.08
BY_A_LAYER = ("deberta", "fire", "hop", "log_cpb", "transformer_xl", "tupe")  # terms that a Linear computes


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("scheme", [*FEATURE_SCHEMES, *(name for name in BY_A_LAYER if name not in FEATURE_SCHEMES)])
def test_dynamic_quantization(scheme):
    model, inputs = tiny_model(RelPosBertModel, scheme, hidden_size=48, intermediate_size=64), words(scheme)
    exact = first_output(model, inputs)
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {torch.nn.Linear}, dtype=torch.qint8)
    assert not any(type(module) is torch.nn.Linear for module in quantized.modules())
    loss = (first_output(quantized, inputs) - exact).norm() / exact.norm()
    assert 0 < loss <= QUANTIZATION_LOSS
