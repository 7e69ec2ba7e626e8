"""The gated feed-forward; outputs of MosaicBERT's and JinaBERT's own code (scripts/maintenance/golden/gated.py)."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from folders import assert_not_converted, edit, edit_tensors
from oracles import padding, tiny_model
from safetensors.torch import load_file

from hf_relpos import (
    RelPosBertConfig,
    RelPosBertForMaskedLM,
    RelPosBertModel,
    convert,
    export_checkpoint,
    patch_transformers,
)
from hf_relpos.models.modeling_relpos_bert import HEADS


FIXTURES = Path(__file__).parent / "fixtures" / "gated"
FOLDERS = sorted(folder.name for folder in FIXTURES.iterdir())
ARCHITECTURES = {head.__name__.removeprefix("RelPosBert"): head for head in HEADS.values()}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
NAMES = {"mlp.gated_layers.": "intermediate.dense.", "mlp.wo.": "output.dense.", "mlp.layernorm.": "output.LayerNorm."}
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


def record(record_property, folder, figure, dtype, value):
    """For `scripts/maintenance/family_parity.py`."""
    family = f"{folder.split('-')[0]}bert"
    (head,) = json.loads((FIXTURES / folder / "config.json").read_text())["architectures"]
    bits = {torch.float64: 64, torch.float32: 32}[dtype]
    record_property("parity", json.dumps({"family": family, "head": head, f"{figure}{bits}": value}))


@every_folder
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_outputs_are_those_of_the_original_code(folder, dtype, record_property):
    model, io = rebuilt(folder, dtype), recorded(folder)
    with torch.no_grad():
        outputs = model(**io["input"])
    mask = io["input"]["attention_mask"].bool()
    assert io["output"]
    for name, expected in io["output"].items():
        worst = error(outputs[name], expected, mask)
        record(record_property, folder, "float", dtype, worst / float(expected.abs().max()))
        assert worst <= TOLERANCE[dtype]


@pytest.mark.parametrize("folder", ["jina-mlm", "mosaic-mlm"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gradients_are_those_of_the_original_code(folder, dtype, record_property):
    model, io = rebuilt(folder, dtype), recorded(folder)
    model.tie_weights()
    (model(**io["input"]).logits * io["cotangent"].to(dtype)).sum().backward()
    expected = our_names(io["gradient"])
    ours = dict(model.named_parameters(remove_duplicate=False))
    assert ours.keys() - expected.keys() <= {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    worst = {name: float((ours[name].grad - gradient).abs().max()) for name, gradient in expected.items()}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    record(record_property, folder, "gradient", dtype, max(worst.values()) / largest)
    for name, gradient in expected.items():
        assert worst[name] <= TOLERANCE[dtype] * float(gradient.abs().max().clamp_min(1))


def gated(head=RelPosBertForMaskedLM, **overrides):
    return tiny_model(head, "alibi", feed_forward_type="glu", **overrides)


REAL = padding([9, 5], 9).long()
IDS = (torch.arange(18).view(2, 9) + 3) * REAL


@pytest.mark.usefixtures("any_padding")
def test_the_same_by_chunks_without_padding_and_recomputed():
    model = gated().train()

    def found():
        model.zero_grad()
        outputs = model(IDS, REAL, labels=IDS.masked_fill(REAL == 0, -100))
        outputs.loss.backward()
        return [outputs.logits[REAL.bool()], *(parameter.grad.clone() for parameter in model.parameters())]

    def in_chunks(size):
        for layer in model.bert.encoder.layer:
            layer.chunk_size_feed_forward = size

    expected = found()
    in_chunks(3)
    assert all(torch.allclose(*pair, atol=3e-6) for pair in zip(found(), expected, strict=True))
    in_chunks(0)
    model.config.unpad_inputs = True
    assert all(torch.allclose(*pair, atol=3e-6) for pair in zip(found(), expected, strict=True))
    model.gradient_checkpointing_enable()
    assert all(torch.allclose(*pair, atol=3e-6) for pair in zip(found(), expected, strict=True))


def test_a_gated_checkpoint_is_not_read_as_a_plain_one(tmp_path):
    gated().save_pretrained(tmp_path)
    with pytest.raises((ValueError, RuntimeError), match=r"intermediate\.dense|mismatched"):
        RelPosBertForMaskedLM.from_pretrained(tmp_path, feed_forward_type="mlp")


# --- the families


def source(tmp_path, folder, **changes):
    """A copy of a fixture with other fields in config.json; None removes."""
    copy = shutil.copytree(FIXTURES / folder, tmp_path / folder)
    return edit(copy, **changes)


def silent(folder):
    """Fields by which a configuration tells what it is; without them the tensors alone do."""
    if folder == "jina-reglu":  # which no tensor tells from geglu
        return {"position_embedding_type": None}
    return dict.fromkeys(("alibi_starting_size", "feed_forward_type", "position_embedding_type"))


def assert_same(model, expected):
    assert model.config.feed_forward_type == "glu" and model.config.position_embedding_type == "alibi"
    assert model.config.hidden_act == expected.config.hidden_act
    state = model.state_dict()
    assert state.keys() == expected.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in expected.state_dict().items())


@pytest.mark.covering(1)
@every_folder
@pytest.mark.parametrize("told", ["by its configuration", "by its tensors"])
def test_read_directly_and_under_the_patch(tmp_path, folder, told):
    copy = source(tmp_path, folder, **(silent(folder) if told == "by its tensors" else {}))
    expected = rebuilt(folder, torch.float32)
    assert_same(type(expected).from_pretrained(copy), expected)
    stock = getattr(transformers, type(expected).__name__.removeprefix("RelPos"))
    auto = next(getattr(transformers, name) for name, head in HEADS.items() if head is type(expected))
    with patch_transformers():
        for door in (stock, auto):
            model = door.from_pretrained(copy)
            assert type(model) is type(expected)
            assert_same(model, expected)


PUBLISHED = {
    "attn_implementation": "torch",
    "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
    "emb_pooler": "mean",
    "model_max_length": 8192,
    "torch_dtype": "float16",
}


@pytest.mark.parametrize("attn_implementation", [None, "eager"])
def test_fields_of_published_configurations(tmp_path, attn_implementation):
    """A backend and a pooler of its own code, which no code here reads."""
    copy = source(tmp_path, "jina-reranker", **PUBLISHED)
    expected = rebuilt("jina-reranker", torch.float16)
    backend = {"attn_implementation": attn_implementation} if attn_implementation else {}
    with patch_transformers():
        patched = transformers.AutoModelForSequenceClassification.from_pretrained(copy, **backend)
    for model in (patched, type(expected).from_pretrained(copy, **backend)):
        assert_same(model, expected)
        assert model.config._attn_implementation == (attn_implementation or "relpos")


def test_a_new_head_with_the_labels_of_the_caller(tmp_path):
    for copy in (FIXTURES / "jina-model", source(tmp_path, "mosaic-model", **silent("mosaic-model"))):
        with patch_transformers():
            model = transformers.AutoModelForSequenceClassification.from_pretrained(copy, num_labels=5)
        assert model.classifier.out_features == 5 and model.config.feed_forward_type == "glu"
    config = RelPosBertConfig.from_pretrained(FIXTURES / "jina-reglu")
    assert (config.feed_forward_type, config.hidden_act, config.position_embedding_type) == ("glu", "relu", "alibi")


@every_folder
@pytest.mark.parametrize("told", ["by its configuration", "by its tensors"])
def test_converted_and_exported_to_the_original_layout(tmp_path, folder, told):
    """Bit for bit the weights that `our_names` puts into our model, whose outputs are tested above, and back.

    Of tied tensors one name is enough, as in files that Transformers writes.
    """
    copy = source(tmp_path, folder, **(silent(folder) if told == "by its tensors" else {}))
    report = convert(copy, tmp_path / "out", allow_pickle=True)
    expected = rebuilt(folder, torch.float32)
    assert report.converted_to == type(expected).__name__ and report.position_embedding_type == "alibi"
    assert report.difference is None and any("outputs were not compared" in note for note in report.notes)
    assert not [step for step in report.steps if step.kind != "reused"]
    model = type(expected).from_pretrained(tmp_path / "out")
    assert_same(model, expected)
    leftovers = {"alibi_starting_size", "emb_pooler", "alibi_scaling", "_absolute_table"}
    assert not leftovers & model.config.to_dict().keys()
    saved = json.loads((FIXTURES / folder / "config.json").read_text())
    assert export_checkpoint(tmp_path / "out", tmp_path / "back") == saved["architectures"][0]
    stored, written = stored_weights(folder), load_file(tmp_path / "back" / "model.safetensors")
    assert stored.keys() - written.keys() <= {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert written and all(torch.equal(tensor, stored[name]) for name, tensor in written.items())
    fields = json.loads((tmp_path / "back" / "config.json").read_text())
    unknown = silent(folder).keys() - {"feed_forward_type"} if told == "by its tensors" else {"alibi_starting_size"}
    for name in saved.keys() - unknown:
        assert fields.get(name) == saved[name]
    assert_same(type(expected).from_pretrained(tmp_path / "back"), expected)


def test_jina_with_bert_s_own_feed_forward(tmp_path):
    """`original`, the default of its code: BERT's names and ALiBi."""
    model = tiny_model(RelPosBertModel, "alibi")
    model.save_pretrained(tmp_path / "source")
    saved = {"model_type": "bert", "position_embedding_type": "alibi", "feed_forward_type": "original"}
    report = convert(edit(tmp_path / "source", **saved, architectures=["JinaBertModel"]), tmp_path / "out")
    assert report.converted_to == "RelPosBertModel"
    loaded = RelPosBertModel.from_pretrained(tmp_path / "out")
    assert loaded.config.feed_forward_type == "mlp"
    assert torch.equal(loaded(IDS, REAL).last_hidden_state, model(IDS, REAL).last_hidden_state)


@torch.no_grad()
def test_the_variant_for_code_computes_its_equations():
    """jina-bert-v2-qk-post-norm, as text-embeddings-inference computes it (models/jina_code.rs)."""
    model = gated(RelPosBertModel, extra_attention_norms=True).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer = model.encoder.layer[0]
    own, out = layer.attention.self, layer.attention.output
    states = torch.randn(1, 9, 24, dtype=torch.float64)
    query, key = own.layer_norm_q(own.query(states)), own.layer_norm_k(own.key(states))
    query, key, value = (each.view(9, 3, -1).transpose(0, 1) for each in (query, key, own.value(states)))
    distance = (torch.arange(9)[None] - torch.arange(9)[:, None]).abs()
    slopes = torch.tensor([2**-4, 2**-8, 2**-2], dtype=torch.float64)  # ALiBi's for three heads (Press et al. 2021)
    scores = query @ key.mT / query.shape[-1] ** 0.5 - slopes[:, None, None] * distance
    attended = (scores.softmax(-1) @ value).transpose(0, 1).reshape(1, 9, 24)
    inner = out.second_norm(out.LayerNorm(out.dense(attended) + states) + states)
    gate, up = layer.intermediate.dense(inner).chunk(2, dim=-1)
    expected = layer.output.LayerNorm(layer.output.dense(torch.nn.functional.gelu(gate) * up) + inner)
    found = layer(states)
    torch.testing.assert_close(found if isinstance(found, torch.Tensor) else found[0], expected, rtol=1e-9, atol=1e-9)


TABLE, JOINT = "embeddings.position_embeddings.weight", "encoder.layer.0.attention.self.Wqkv.weight"
# Of a folder, fields of its configuration, or the name of a tensor and its new shape, and what the error names.
REFUSED = [
    ("jina-model", {"feed_forward_type": "swiglu"}, ["feed_forward_type = 'swiglu'", "'geglu'"]),
    ("jina-model", {"alibi_scaling": 2}, ["alibi_scaling = 2"]),  # the slopes of a fork
    ("jina-model", {"position_embedding_type": "relative_key"}, ["correct config.json"]),
    ("jina-mlm", {"hidden_act": "relu"}, ["hidden_act = 'relu': the feed-forward of JinaBertForMaskedLM has 'gelu'"]),
    ("mosaic-model", (TABLE, (16, 24)), [TABLE]),
    ("mosaic-model", (JOINT, (60, 24)), ["Wqkv.weight has shape (60, 24)", "(72, 24)"]),
    ("mosaic-model", {"architectures": ["BertForQuestionAnswering"]}, ["no counterpart here"]),
    ("mosaic-mlm", {"layer_norm_eps": 1e-5}, ["layer_norm_eps = 1e-05: the head of BertForMaskedLM has 1e-12"]),
]


@pytest.mark.parametrize("folder, change, names", REFUSED)
def test_refused(tmp_path, folder, change, names):
    copy = source(tmp_path, folder, **(change if isinstance(change, dict) else {}))
    if isinstance(change, tuple):
        with edit_tensors(copy) as tensors:
            tensors[change[0]] = torch.zeros(change[1])
    assert_not_converted(copy, tmp_path / "out", *names, allow_pickle=True)
