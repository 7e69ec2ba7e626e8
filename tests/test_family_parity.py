"""Every head of every relative family beside its own class: outputs, gradients, the way back and ONNX.

What is measured is recorded for `scripts/maintenance/family_parity.py`, which writes it down.
"""

import contextlib
import filecmp
import io
import json
from pathlib import Path

import onnxruntime
import pytest
import torch
from oracles import tiny_sizes
from safetensors.torch import load_file
from stock import in_float64, random_model
from torch.export import Dim

from hf_relpos import convert, export_checkpoint
from hf_relpos.families.recognition import recognise
from hf_relpos.families.registry import FAMILIES
from hf_relpos.models import modeling_relpos_bert


BERT_SIZES = tiny_sizes(max_position_embeddings=40)
DEBERTA = {
    **BERT_SIZES,
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": ["c2p", "p2c"],
    "type_vocab_size": 0,
}
FIELDS = {
    "deberta-v2": {**DEBERTA, "position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    "deberta": DEBERTA,
    "roformer": BERT_SIZES,
    "xlnet": {"vocab_size": 50, "d_model": 24, "n_head": 3, "n_layer": 2, "d_inner": 32},
}
HEADS = [
    (kind, name)
    for kind, family in FAMILIES.items()
    if family.read_directly and family.stock is not None
    for name in family.heads(family.defaults)
]
every_head = pytest.mark.parametrize("kind, name", HEADS, ids=[name for _, name in HEADS])
XLNET, ADDED = FAMILIES["xlnet"], ".attention.output.dense.bias"  # which stock XLNet does not have
UNUSED = {"mask_emb", "transformer.mask_emb"}  # by XLNet's encoders; not kept
OUTPUTS = ("last_hidden_state", "logits", "start_logits", "end_logits")


@pytest.fixture
def measured(record_property, kind, name):
    """Takes a figure by its name."""

    def take(**figures):
        record_property("parity", json.dumps({"family": kind, "head": name, **figures}))

    return take


def stock_model(kind, name, folder, **fields):
    fields |= {"is_decoder": True} if "CausalLM" in name else {}
    return random_model(kind, name, folder, **{**FIELDS[kind], **fields})


def our_class(kind, name):
    return getattr(modeling_relpos_bert, f"RelPos{FAMILIES[kind].heads(FAMILIES[kind].defaults)[name]}")


def batch(name):
    """Inputs whose last row is padded on the right, and which of the tokens are real."""
    shape = (3, 2, 11) if name.endswith("MultipleChoice") else (3, 11)
    mask = torch.ones(shape, dtype=torch.long)
    mask[-1, ..., 7:] = 0
    return {"input_ids": torch.randint(6, 50, shape), "attention_mask": mask}, mask.bool()


def outputs_of(model, inputs, real):
    """All that tells, at real tokens, as one vector."""
    outputs = model(**inputs)
    values = [outputs[key] for key in OUTPUTS if outputs.get(key) is not None]
    return torch.cat([(each[real] if each.shape[: real.dim()] == real.shape else each).flatten() for each in values])


def errors(stock, ours, name):
    """Largest difference of the outputs and of the gradients of stock parameters, relative to the largest."""
    inputs, real = batch(name)
    found = []
    for model in (stock, ours):
        model.zero_grad()
        values = outputs_of(model, inputs, real)
        (values * torch.linspace(-1, 1, len(values), dtype=values.dtype)).sum().backward()
        found.append(values.detach())
    spec = recognise(Path(), json.loads(stock.config.to_json_string(use_diff=False)))
    expected, own = (
        {key: torch.zeros_like(each) if each.grad is None else each.grad for key, each in tensors.items()}
        for tensors in (stock.state_dict(keep_vars=True), ours.state_dict(keep_vars=True))
    )
    learned = {key: each for key, each in expected.items() if "embed_positions" not in key}  # fixed sinusoids
    unpacked = {key: each for key, each in spec.unpack(learned).items() if not (spec.family is XLNET and ADDED in key)}
    gradients = {key: own[spec.rename(key, base=ours.base_model is ours)[0]] for key in unpacked}
    largest = max(float(each.abs().max()) for each in unpacked.values())
    worst = max(float((gradients[key] - each).abs().max()) for key, each in unpacked.items())
    return float((found[1] - found[0]).abs().max() / found[0].abs().max()), worst / largest


@every_head
def test_outputs_and_gradients(kind, name, tmp_path, measured):
    stock, ours = stock_model(kind, name, tmp_path), our_class(kind, name)
    single = errors(stock, ours.from_pretrained(tmp_path).eval(), name)
    with in_float64(stock):
        double = errors(stock, ours.from_pretrained(tmp_path, dtype=torch.float64).eval(), name)
    measured(float32=single[0], gradient32=single[1], float64=double[0], gradient64=double[1])
    assert max(single) <= 1e-5 and max(double) <= 1e-9


@pytest.mark.covering(1)
@every_head
def test_converted_and_written_back(kind, name, tmp_path, measured):
    """Every weight that is used, bit for bit, and every field of the configuration."""
    stock_model(kind, name, tmp_path / "stock")
    report = convert(tmp_path / "stock", tmp_path / "ours")
    assert export_checkpoint(tmp_path / "ours", tmp_path / "back") == name
    stock, back = (load_file(tmp_path / folder / "model.safetensors") for folder in ("stock", "back"))
    same = filecmp.cmp(tmp_path / "stock" / "config.json", tmp_path / "back" / "config.json", shallow=False)
    same &= stock.keys() == back.keys() and all(torch.equal(stock[key], back[key]) for key in stock.keys() - UNUSED)
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
    rank = real.dim()
    sizes = {0: Dim("batch"), rank - 1: Dim("length")}
    with contextlib.redirect_stdout(io.StringIO()):
        program = torch.onnx.export(
            model,
            tuple(inputs.values()),
            dynamo=True,
            input_names=list(inputs),
            dynamic_shapes=[sizes, sizes],
            verbose=False,
        )
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    worst = 0.0
    for length in (11, 23):
        ids = torch.randint(6, 50, (*real.shape[:-1], length))
        run = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            expected = model(**run)[0]
        got = torch.from_numpy(session.run(None, {key: value.numpy() for key, value in run.items()})[0])
        worst = max(worst, float((got - expected).abs().max() / expected.abs().max()))
    measured(onnx=worst)
    assert worst <= 1e-5
