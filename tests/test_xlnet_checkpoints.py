"""XLNet's checkpoints as encoders: converted, read directly and exported, beside Transformers' own classes."""

import json
from contextlib import nullcontext

import pytest
import torch
import transformers
from safetensors.torch import load_file
from stock import in_float64, random_model

from hf_relpos import convert, export_checkpoint
from hf_relpos.conversion import ConversionError
from hf_relpos.families.registry import FAMILIES
from hf_relpos.models import modeling_relpos_bert


FAMILY = FAMILIES["xlnet"]
SUFFIXES = FAMILY.suffixes
SIZES = {"vocab_size": 50, "d_model": 24, "n_head": 3, "n_layer": 2, "d_inner": 32}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
VARIANTS = {"plain": {}, "clamped, relu, twelve heads": {"clamp_len": 4, "ff_activation": "relu", "n_head": 12}}


def stock(suffix, folder=None, **fields):
    """A stock model, every parameter random, saved if there is a folder."""
    labels = {} if "Question" in suffix else {"num_labels": 4}
    return random_model("xlnet", f"XLNet{suffix}", folder, spread=0.3, **{**SIZES, **labels, **fields})


def ours(suffix, folder, **arguments):
    head = getattr(modeling_relpos_bert, "RelPos" + FAMILY.heads({})[f"XLNet{suffix}"])
    return head.from_pretrained(folder, **arguments).eval()


def batch(padding):
    mask = (torch.arange(12) < torch.tensor([12, 7])[:, None]).long()
    mask = mask.flip(1) if padding == "left" else mask
    return {
        "input_ids": torch.where(mask == 1, torch.randint(6, 50, mask.shape), 5),  # whose embedding ours never train
        "attention_mask": mask,
        "token_type_ids": torch.randint(3, mask.shape),
    }


@pytest.mark.covering(2, every_scheme=False)
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_outputs_and_gradients_are_those_of_the_stock_class(tmp_path, suffix, variant, dtype, padding):
    """At real tokens; there a query of padding sees itself only, and ours what is real."""
    original = stock(suffix, tmp_path, **VARIANTS[variant])
    model = ours(suffix, tmp_path, dtype=dtype)
    inputs = batch(padding)
    real = inputs["attention_mask"].bool()
    with in_float64(original) if dtype == torch.float64 else nullcontext():
        expected, outputs = original(**inputs), model(**inputs)
    total, compared = [0.0, 0.0], 0
    for name, value in expected.items():
        if not isinstance(value, torch.Tensor):
            continue
        compared += 1
        value, other = value[real], outputs[name][real]
        assert (other - value).abs().max() <= TOLERANCE[dtype] * max(1, float(value.abs().max()))
        weights = torch.randn(value.shape, dtype=dtype)
        total = [total[0] + (value * weights).sum(), total[1] + (other * weights).sum()]
    assert compared
    for each in total:
        each.backward()
    config = {**FAMILY.defaults, **SIZES, **VARIANTS[variant]}
    gradients = {name: parameter.grad for name, parameter in original.named_parameters() if parameter.grad is not None}
    own = dict(model.named_parameters())
    compared = 0
    for name, gradient in FAMILY.unpack(config, gradients).items():
        if name.endswith(".attention.output.dense.bias"):  # which stock has not
            continue
        spelled = name.replace("transformer.", "bert.").replace("word_embedding.", "embeddings.word_embeddings.")
        for old, new in {
            "layer_1": "intermediate.dense",
            "layer_2": "output.dense",
            "ff.": "",
            "layer.": "encoder.layer.",
            "rel_attn.layer_norm": "attention.output.LayerNorm",
            "rel_attn": "attention.self.distance_embedding",
            "layer_norm": "output.LayerNorm",
        }.items():
            spelled = spelled.replace(old, new)
        scale = max(1, float(gradient.abs().max()))
        assert (own[spelled].grad - gradient).abs().max() <= TOLERANCE[dtype] * scale
        compared += 1
    assert compared >= 2 * 17


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_converted_and_exported_again(tmp_path, suffix):
    """The converter compares with the stock class; all but `mask_emb`, unused, comes back bit for bit."""
    stock(suffix, tmp_path / "source", clamp_len=5)
    report = convert(tmp_path / "source", tmp_path / "out")
    assert report.position_embedding_type == "xlnet" and report.difference <= 1e-5
    assert export_checkpoint(tmp_path / "out", tmp_path / "back") == f"XLNet{suffix}"
    stored, written = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "back"))
    assert written.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(written[name], tensor) != name.endswith("mask_emb")
    again, info = getattr(transformers, f"XLNet{suffix}").from_pretrained(tmp_path / "back", output_loading_info=True)
    assert again.config.clamp_len == 5 and not info["missing_keys"] and not info["unexpected_keys"]


def test_a_bias_that_was_trained_is_not_lost(tmp_path):
    stock("Model", tmp_path / "source")
    model = ours("Model", tmp_path / "source")
    model.encoder.layer[0].attention.output.dense.bias.data.fill_(1.0)
    with pytest.raises(ConversionError, match=r"attention\.output\.dense\.bias is not zero"):
        export_checkpoint(model, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_the_head_of_its_pretraining_is_left_behind(tmp_path):
    stock("LMHeadModel", tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "out")
    assert report.converted_to == "RelPosBertModel" and report.difference <= 1e-5


REFUSED = {
    "one side": ({"attn_type": "uni"}, "attn_type = 'uni'"),
    "reversed halves": ({"bi_data": True}, "bi_data = True"),
    "shared biases": ({"untie_r": False}, "untie_r = False"),
    "a summary of the last token": ({"architectures": ["XLNetForSequenceClassification"]}, "no counterpart here"),
    "other sizes": ({"n_head": 2, "d_head": 12}, r"rel_attn\..* has shape \(24, 3, 8\).*\(24, 2, 12\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    changes, words = REFUSED[case]
    stock("Model", tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ConversionError, match=words):
        convert(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()
