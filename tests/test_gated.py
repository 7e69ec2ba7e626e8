"""The gated feed-forward, and the outputs of MosaicBERT's and JinaBERT's own code (scripts/golden/gated.py)."""

import json
from pathlib import Path

import pytest
import torch
from oracles import padding, tiny_config, tiny_model
from safetensors.torch import load_file

from hf_relpos import RelPosBertConfig, RelPosBertForMaskedLM, RelPosBertModel
from hf_relpos.model.modeling_relpos_bert import HEADS, RelPosBertLayer


FIXTURES = Path(__file__).parent / "fixtures" / "gated"
FOLDERS = sorted(folder.name for folder in FIXTURES.iterdir())
ARCHITECTURES = {head.__name__.removeprefix("RelPosBert"): head for head in HEADS.values()}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
NAMES = {
    "mlp.gated_layers.": "intermediate.dense.",
    "mlp.wo.": "output.dense.",
    "mlp.layernorm.": "output.LayerNorm.",
}
PARTS = ("query", "key", "value")
every_folder = pytest.mark.parametrize("folder", FOLDERS)


def our_names(tensors):
    """What the originals call by other names; spelled out here, since the converter's own rules are under test."""
    ours = {}
    for name, tensor in tensors.items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        if "Wqkv" in name:
            ours |= {name.replace("Wqkv", part): rows for part, rows in zip(PARTS, tensor.chunk(3), strict=True)}
        else:
            ours[name] = tensor
    bias = ours.get("cls.predictions.decoder.bias")  # of MosaicBERT, which has it once
    return ours if bias is None else {"cls.predictions.bias": bias, **ours}


def stored_weights(folder):
    """The weights of a fixture, under the names of the original."""
    path = FIXTURES / folder / "model.safetensors"
    return load_file(path) if path.is_file() else torch.load(path.with_name("pytorch_model.bin"), weights_only=True)


def recorded(folder):
    """What io.safetensors holds: input, output, gradient and cotangent."""
    parts = {"input": {}, "output": {}, "gradient": {}}
    tensors = load_file(FIXTURES / folder / "io.safetensors")
    parts["cotangent"] = tensors.pop("cotangent", None)
    for name, tensor in tensors.items():
        part, _, name = name.partition(".")
        parts[part][name] = tensor
    return parts


def rebuilt(folder, dtype=torch.float64):
    """A model of ours with the weights of a fixture."""
    saved = json.loads((FIXTURES / folder / "config.json").read_text())
    kind = saved.get("feed_forward_type")
    known = RelPosBertConfig.__dataclass_fields__.keys() - {"model_type"}
    fields = {key: value for key, value in saved.items() if key in known}
    fields |= {"position_embedding_type": "alibi", "feed_forward_type": "glu"}
    config = RelPosBertConfig(**fields | {"hidden_act": "relu" if kind == "reglu" else "gelu"})
    (name,) = saved["architectures"]
    model = ARCHITECTURES[name.removeprefix("Jina").removeprefix("Bert")](config).to(dtype).eval()
    model.load_state_dict(our_names(stored_weights(folder)))
    return model


def error(ours, expected, mask):
    """Largest difference at real tokens."""
    if expected.dim() == 3:
        ours, expected = ours[mask], expected[mask]
    return float((ours - expected).abs().max())


@every_folder
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_outputs_are_those_of_the_original_code(folder, dtype):
    model, io = rebuilt(folder, dtype), recorded(folder)
    with torch.no_grad():
        outputs = model(**io["input"])
    mask = io["input"]["attention_mask"].bool()
    assert io["output"]
    for name, expected in io["output"].items():
        assert error(outputs[name], expected, mask) <= TOLERANCE[dtype]


@pytest.mark.parametrize("folder", ["jina-mlm", "mosaic-mlm"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gradients_are_those_of_the_original_code(folder, dtype):
    model, io = rebuilt(folder, dtype), recorded(folder)
    model.tie_weights()
    (model(**io["input"]).logits * io["cotangent"].to(dtype)).sum().backward()
    expected = our_names(io["gradient"])
    ours = dict(model.named_parameters(remove_duplicate=False))
    assert ours.keys() - expected.keys() <= {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    for name, gradient in expected.items():
        scale = float(gradient.abs().max().clamp_min(1))
        assert float((ours[name].grad - gradient).abs().max()) <= TOLERANCE[dtype] * scale


@pytest.mark.parametrize("part", ["gate", "value"])
def test_the_first_half_is_activated(part):
    """With a gate that is 0 everywhere the product is 0; with a value of 0 as well, but the halves are not alike."""
    layer = RelPosBertLayer(tiny_config("alibi", feed_forward_type="glu", hidden_act="relu"))
    gate, value = layer.intermediate.dense.weight.chunk(2)
    hidden = torch.randn(2, 5, 24)
    expected = (hidden @ gate.T).relu() * (hidden @ value.T)
    torch.testing.assert_close(layer.intermediate(hidden), expected)
    with torch.no_grad():
        (gate if part == "gate" else value).neg_()
    assert (layer.intermediate(hidden) - expected).abs().max() > 0.1


def gated(head=RelPosBertForMaskedLM, **overrides):
    return tiny_model(head, "alibi", feed_forward_type="glu", **overrides)


IDS, REAL = torch.arange(18).view(2, 9) + 3, padding([9, 5], 9).long()


def test_parameters_of_a_gated_layer():
    plain, glu = (RelPosBertLayer(tiny_config("alibi", feed_forward_type=kind)) for kind in ("mlp", "glu"))
    assert glu.intermediate.dense.weight.shape == (64, 24) and glu.output.dense.weight.shape == (24, 32)
    assert plain.state_dict().keys() - glu.state_dict().keys() == {"intermediate.dense.bias"}
    assert glu.state_dict().keys() <= plain.state_dict().keys()


def test_dropout_is_on_the_product_alone():
    model = gated(RelPosBertModel, hidden_dropout_prob=0.5).train()
    layer = model.encoder.layer[0]
    inner = layer.intermediate(torch.randn(2, 9, 24))
    assert 0.3 < float((inner == 0).float().mean()) < 0.7
    assert torch.equal(layer.output(inner, torch.zeros(2, 9, 24)), layer.output(inner, torch.zeros(2, 9, 24)))


def test_chunked_feed_forward():
    model = gated()
    expected = model(IDS, REAL).logits
    for layer in model.bert.encoder.layer:
        layer.chunk_size_feed_forward = 3
    torch.testing.assert_close(model(IDS, REAL).logits, expected)


def test_unpadded_layers():
    model = gated()
    expected = model(IDS, REAL).logits[REAL.bool()]
    model.config.unpad_inputs = True
    torch.testing.assert_close(model(IDS, REAL).logits[REAL.bool()], expected)


def test_gradient_checkpointing_of_gated_layers():
    model = gated().train()

    def gradients():
        model.zero_grad()
        model(IDS, REAL, labels=IDS).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    plain = gradients()
    model.gradient_checkpointing_enable()
    again = gradients()
    assert all(torch.allclose(plain[name], again[name], atol=3e-6) for name in plain)


def test_saved_and_loaded(tmp_path):
    model = gated()
    model.save_pretrained(tmp_path)
    loaded = RelPosBertForMaskedLM.from_pretrained(tmp_path)
    assert loaded.config.feed_forward_type == "glu"
    assert torch.equal(loaded(IDS, REAL).logits, model(IDS, REAL).logits)


def test_a_gated_checkpoint_is_not_read_as_a_plain_one(tmp_path):
    gated().save_pretrained(tmp_path)
    with pytest.raises((ValueError, RuntimeError), match=r"intermediate\.dense|mismatched"):
        RelPosBertForMaskedLM.from_pretrained(tmp_path, feed_forward_type="mlp")


def test_exported_and_compiled():
    model = gated(num_hidden_layers=1)
    expected = model(IDS, REAL).logits
    length = torch.export.Dim("length", min=2, max=16)
    program = torch.export.export(
        model,
        (IDS,),
        {"attention_mask": REAL},
        dynamic_shapes={"input_ids": {1: length}, "attention_mask": {1: length}},
    )
    torch.testing.assert_close(program.module()(IDS, attention_mask=REAL).logits, expected)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(IDS, REAL).logits, expected)


def test_every_process_of_tensor_parallelism_has_the_same_rows_of_both_halves():
    """What `packed_colwise` gives the process of rank r: rows of W and the same rows of V; and its columns of W₂."""
    config = tiny_config("alibi", feed_forward_type="glu")
    assert config.base_model_tp_plan["encoder.layer.*.intermediate.dense"] == "packed_colwise"
    assert tiny_config("alibi").base_model_tp_plan["encoder.layer.*.intermediate.dense"] == "colwise"
    assert "base_model_tp_plan" not in config.to_dict()


@pytest.mark.parametrize("value", ["geglu", "GLU", 1, None])
def test_an_unknown_feed_forward_type_is_refused(value):
    with pytest.raises(Exception, match=r"feed_forward_type"):
        tiny_config("alibi", feed_forward_type=value)


def test_the_parameter_count_knows_the_gate():
    """2·D·I of a plain layer are below the limit, 3·D·I of a gated one above it."""
    sizes = {"hidden_size": 2**18, "num_attention_heads": 2**8, "intermediate_size": 1_300_000, "num_hidden_layers": 1}
    tiny_config("alibi", **sizes)
    with pytest.raises(ValueError, match="intermediate_size = 1300000"):
        tiny_config("alibi", feed_forward_type="glu", **sizes)
