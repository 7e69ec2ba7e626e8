"""Every head of every relative family beside its own class: outputs, gradients, the way back and ONNX.

DeBERTa has more options, in test_deberta_checkpoints.py. What is measured is recorded for
`scripts/maintenance/family_parity.py`, which writes it down.
"""

import filecmp
import json

import pytest
import torch
from folders import assert_not_converted, edit, edit_tensors
from oracles import onnx_program, onnx_runner, tiny_sizes
from safetensors.torch import load_file
from stock import errors, in_float64, random_model
from test_deberta_checkpoints import BOTH

from hf_relpos import convert, export_checkpoint
from hf_relpos.conversion import ConversionError
from hf_relpos.families.registry import FAMILIES
from hf_relpos.families.roformer import position_table
from hf_relpos.host.declarations import ROFORMER_CAUSAL_MASK
from hf_relpos.models import modeling_relpos_bert


BERT_SIZES = tiny_sizes(max_position_embeddings=40)
DEBERTA = {**BERT_SIZES, **BOTH, "type_vocab_size": 0, "cls_dropout": 0.3, "pooler_dropout": 0.2, "legacy": False}
FIELDS = {
    "deberta-v2": {**DEBERTA, "position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    "deberta": DEBERTA,
    "roformer": {**BERT_SIZES, "embedding_size": 10, "num_attention_heads": 12, "hidden_act": "relu"},
    "xlnet": {"vocab_size": 50, "d_model": 24, "n_head": 3, "n_layer": 2, "d_inner": 32, "ff_activation": "relu"},
}
HEADS = [
    (kind, name)
    for kind, family in FAMILIES.items()
    if family.read_directly and family.stock is not None
    for name in family({}).heads()
    # some releases of Transformers have a decoder without a causal mask, which is refused
    if name != "RoFormerForCausalLM" or ROFORMER_CAUSAL_MASK.lack() is None
]
every_head = pytest.mark.parametrize("kind, name", HEADS, ids=[name for _, name in HEADS])
UNUSED = {"mask_emb", "transformer.mask_emb"}  # by XLNet's encoders; not kept


@pytest.fixture
def measured(record_property, kind, name):
    """Takes a figure by its name."""

    def take(**figures):
        record_property("parity", json.dumps({"family": kind, "head": name, **figures}))

    return take


def stock_model(kind, name, folder, **fields):
    fields |= {"is_decoder": True} if "CausalLM" in name else {}
    fields |= {"clamp_len": 4} if name == "XLNetForTokenClassification" else {}
    fields |= {"summary": "mine"} if "Question" in name else {"num_labels": 4}
    return random_model(kind, name, folder, **{**FIELDS[kind], **fields})


def our_class(kind, name):
    return getattr(modeling_relpos_bert, f"RelPos{FAMILIES[kind]({}).heads()[name]}")


def batch(name):
    """Inputs, one row padded on the left and one on the right, and which of the tokens are real."""
    shape = (3, 2, 11) if name.endswith("MultipleChoice") else (3, 11)
    mask = torch.ones(shape, dtype=torch.long)
    mask[-1, ..., 7:] = 0
    if not name.endswith(("SequenceClassification", "MultipleChoice", "CausalLM")):  # of the first token
        mask[1, ..., :4] = 0
    ids = torch.where(mask == 1, torch.randint(6, 50, shape), 0 if "XLNet" not in name else 5)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.randint(2, shape)}, mask.bool()


@every_head
def test_outputs_and_gradients(kind, name, tmp_path, measured):
    stock, ours = stock_model(kind, name, tmp_path), our_class(kind, name)
    inputs, real = batch(name)
    single = errors(stock, ours.from_pretrained(tmp_path).eval(), inputs, real)
    with in_float64(stock):
        double = errors(stock, ours.from_pretrained(tmp_path, dtype=torch.float64).eval(), inputs, real)
    measured(float32=single[0], gradient32=single[1], float64=double[0], gradient64=double[1])
    assert max(single) <= 1e-5 and max(double) <= 1e-9


@pytest.mark.covering(1)
@every_head
def test_converted_and_written_back(kind, name, tmp_path, measured):
    """Every weight that is used, bit for bit, and every field of the configuration."""
    stock_model(kind, name, tmp_path / "stock")
    report = convert(tmp_path / "stock", tmp_path / "ours")
    assert {step.kind for step in report.steps if step.target and "pooler" not in step.target} == {"reused"}
    same = True
    for source in (tmp_path / "ours", our_class(kind, name).from_pretrained(tmp_path / "stock")):
        back = tmp_path / f"back of {type(source).__name__}"
        assert export_checkpoint(source, back) == name
        same &= filecmp.cmp(tmp_path / "stock" / "config.json", back / "config.json", shallow=False)
        theirs, written = (load_file(folder / "model.safetensors") for folder in (tmp_path / "stock", back))
        same &= theirs.keys() == written.keys()
        same &= all(torch.equal(theirs[key], written[key]) for key in theirs.keys() - UNUSED)
    measured(converted=report.difference, back=same)
    assert same


@pytest.mark.full
@every_head
def test_onnx(kind, name, tmp_path, measured):
    """The graph is run by onnxruntime at the length of the recording and at another one."""
    stock_model(kind, name, tmp_path, num_hidden_layers=1)
    model = our_class(kind, name).from_pretrained(tmp_path).eval()
    model.config.use_cache = False
    inputs, real = batch(name)
    by_onnx, worst = onnx_runner(onnx_program(model, inputs)), 0.0
    for length in (11, 23):
        ids = torch.randint(6, 50, (*real.shape[:-1], length))
        run = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.ones_like(ids)}
        with torch.no_grad():
            expected = model(**run)[0]
        worst = max(worst, float((by_onnx(**run) - expected).abs().max() / expected.abs().max()))
    measured(onnx=worst)
    assert worst <= 1e-5


def other_sinusoids(folder):
    with edit_tensors(folder) as tensors:
        tensors["encoder.embed_positions.weight"] = torch.randn(40, 2)


REFUSED = [
    ("XLNetModel", {"attn_type": "uni"}, "attn_type = 'uni'"),
    ("XLNetModel", {"bi_data": True}, "bi_data = True"),
    ("XLNetModel", {"untie_r": False}, "untie_r = False"),
    ("XLNetModel", {"n_head": 2, "d_head": 12}, r"rel_attn\..* has shape \(24, 3, 8\).*\(24, 2, 12\)"),
    ("RoFormerModel", {"rotary_value": True}, "rotary_value = True"),
    ("RoFormerModel", {"architectures": ["RoFormerForMultipleChoice"]}, "RoFormerForMultipleChoice.*no counterpart"),
    ("RoFormerModel", other_sinusoids, "embed_positions.weight: not RoFormer's sinusoids"),
]


@pytest.mark.parametrize("name, change, words", REFUSED, ids=[words.partition(" ")[0] for *_, words in REFUSED])
def test_refused(tmp_path, name, change, words):
    source = tmp_path / "source"
    stock_model(name.removesuffix("Model").lower(), name, source)
    change(source) if callable(change) else edit(source, **change)
    assert_not_converted(source, tmp_path / "out", match=words)


def test_a_bias_of_xlnet_that_was_trained_is_not_lost(tmp_path):
    stock_model("xlnet", "XLNetModel", tmp_path / "source")
    model = our_class("xlnet", "XLNetModel").from_pretrained(tmp_path / "source")
    model.encoder.layer[0].attention.output.dense.bias.data.fill_(1.0)
    with pytest.raises(ConversionError, match=r"attention\.output\.dense\.bias was trained"):
        export_checkpoint(model, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_the_pretraining_head_of_xlnet_is_left_behind(tmp_path):
    stock_model("xlnet", "XLNetLMHeadModel", tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "out")
    assert report.converted_to == "RelPosBertModel" and report.difference <= 1e-5
    unknown = FAMILIES["xlnet"]({}).rename("layer.0.rel_attn.adapter", base=True)
    assert unknown == ["encoder.layer.0.rel_attn.adapter"]  # no table of distances


def test_the_table_of_roformer_and_beyond_its_end(tmp_path):
    table = stock_model("roformer", "RoFormerModel", tmp_path).encoder.embed_positions.weight
    assert torch.equal(position_table(*table.shape), table)
    model = our_class("roformer", "RoFormerModel").from_pretrained(tmp_path).eval()
    assert model(torch.randint(1, 50, (1, 64))).last_hidden_state.isfinite().all()


def test_a_roformer_decoder_that_sees_the_future_is_refused(tmp_path, monkeypatch):
    stock_model("roformer", "RoFormerForCausalLM", tmp_path / "source")
    monkeypatch.delattr("transformers.models.roformer.modeling_roformer.create_causal_mask", raising=False)
    wanted = "in this release of Transformers it sees the tokens to come"
    assert_not_converted(tmp_path / "source", tmp_path / "out", wanted)
