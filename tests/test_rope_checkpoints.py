"""RoFormer's checkpoints: converted, and read directly, beside Transformers' own classes."""

import json
from contextlib import nullcontext

import pytest
import torch
import transformers
from oracles import tiny_sizes
from safetensors.torch import load_file, save_file
from stock import in_float64, random_model

from hf_relpos import RelPosBertModel, convert, export_checkpoint
from hf_relpos.conversion import ConversionError
from hf_relpos.families.registry import FAMILIES
from hf_relpos.families.roformer import position_table
from hf_relpos.host.declarations import ROFORMER_CAUSAL_MASK
from hf_relpos.models import modeling_relpos_bert


FAMILY = FAMILIES["roformer"]
# some releases of Transformers have a decoder without a causal mask, which is refused
SUFFIXES = [name for name in FAMILY.suffixes if name != "ForCausalLM" or ROFORMER_CAUSAL_MASK.lack() is None]
SIZES = tiny_sizes(max_position_embeddings=20)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
# as other shapes: heads of two, embeddings of another width, another activation
VARIANTS = {
    "plain": {},
    "narrow embeddings": {"embedding_size": 10},
    "relu, twelve heads": {"hidden_act": "relu", "num_attention_heads": 12, "type_vocab_size": 3},
}


def stock(suffix, folder=None, **fields):
    """A stock model, every parameter random, saved if there is a folder."""
    labels = {} if suffix == "ForQuestionAnswering" else {"num_labels": 4}
    fields = {**SIZES, "is_decoder": suffix == "ForCausalLM", **labels, **fields}
    return random_model("roformer", f"RoFormer{suffix}", folder, spread=0.3, **fields)


def ours(suffix, folder, **arguments):
    return getattr(modeling_relpos_bert, "RelPos" + FAMILY.heads({})[f"RoFormer{suffix}"]).from_pretrained(
        folder, **arguments
    )


def batch(config):
    mask = (torch.arange(12) < torch.tensor([12, 7])[:, None]).long()
    ids, types = torch.randint(1, 50, mask.shape), torch.randint(config.type_vocab_size, mask.shape)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


@pytest.mark.covering(2, every_scheme=False)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_outputs_and_gradients_are_those_of_the_stock_class(tmp_path, suffix, variant, dtype):
    original = stock(suffix, tmp_path, **VARIANTS[variant])
    model = ours(suffix, tmp_path, dtype=dtype).eval()
    inputs = batch(original.config)
    with in_float64(original) if dtype == torch.float64 else nullcontext():
        expected, outputs = original(**inputs), model(**inputs)
    total = [torch.zeros((), dtype=dtype), torch.zeros((), dtype=dtype)]
    compared = 0
    for name, value in expected.items():
        if not isinstance(value, torch.Tensor):
            continue
        compared += 1
        assert (outputs[name] - value).abs().max() <= TOLERANCE[dtype] * max(1, float(value.abs().max()))
        weights = torch.randn(value.shape, dtype=dtype)
        total = [total[0] + (value * weights).sum(), total[1] + (outputs[name] * weights).sum()]
    assert compared
    for each in total:
        each.backward()
    own = {name: parameter.grad for name, parameter in original.named_parameters() if parameter.grad is not None}
    spec_names = {name: to_ours(name, suffix) for name in own if "embed_positions" not in name}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, our_name in spec_names.items():
        scale = max(1, float(own[name].abs().max()))
        assert (gradients[our_name] - own[name]).abs().max() <= TOLERANCE[dtype] * scale


def to_ours(name, suffix):
    """The name of a parameter here; spelled out, since the rules are under test."""
    name = name.removeprefix("roformer.")
    name = name.replace("embeddings_project", "embeddings.embeddings_project")
    if suffix == "Model":
        return name
    if suffix == "ForSequenceClassification" and name.startswith("classifier.dense"):
        return name.replace("classifier.dense", "bert.pooler.dense")
    name = name.replace("classifier.out_proj", "classifier")
    return f"bert.{name}" if name.startswith(("embeddings", "encoder")) else name


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_converted_and_exported_again(tmp_path, suffix):
    """The converter compares with the stock class; what is exported is what was converted, bit for bit."""
    stock(suffix, tmp_path / "source", embedding_size=10)
    report = convert(tmp_path / "source", tmp_path / "out")
    assert report.position_embedding_type == "rope" and report.difference <= 1e-5
    created = {step.target for step in report.of_kind("created")}
    assert all("pooler" in name for name in created)
    assert export_checkpoint(tmp_path / "out", tmp_path / "back") == f"RoFormer{suffix}"
    stored, written = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "back"))
    assert written.keys() == stored.keys() and all(torch.equal(written[name], stored[name]) for name in stored)
    again, info = getattr(transformers, f"RoFormer{suffix}").from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert again.config.embedding_size == 10 and not info["missing_keys"] and not info["unexpected_keys"]


def test_the_table_is_that_of_the_stock_class():
    table = stock("Model", max_position_embeddings=300).encoder.embed_positions.weight
    assert torch.equal(position_table(300, 8), table)


def test_longer_than_the_table(tmp_path):
    stock("Model", tmp_path)
    model = RelPosBertModel.from_pretrained(tmp_path).eval()
    assert model(torch.randint(1, 50, (1, 64))).last_hidden_state.isfinite().all()


def test_a_decoder_that_sees_the_future_is_refused(tmp_path, monkeypatch):
    stock("ForCausalLM", tmp_path / "source")
    monkeypatch.delattr("transformers.models.roformer.modeling_roformer.create_causal_mask", raising=False)
    with pytest.raises(ConversionError, match="sees the tokens to come in this release"):
        convert(tmp_path / "source", tmp_path / "out")


def other_table(tensors):
    tensors["encoder.embed_positions.weight"] = torch.randn(20, 8)


@pytest.mark.parametrize(
    "changes, change, words",
    [
        ({"rotary_value": True}, None, "rotary_value = True.*AutoModel of Transformers reads it"),
        ({"architectures": ["RoFormerForMultipleChoice"]}, None, "RoFormerForMultipleChoice.*no counterpart here"),
        ({}, other_table, "embed_positions.weight: not RoFormer's sinusoids"),
    ],
    ids=["rotated values", "multiple choice", "another table"],
)
def test_refused(tmp_path, changes, change, words):
    stock("Model", tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    if change is not None:
        tensors = load_file(tmp_path / "source" / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConversionError, match=words):
        convert(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()
