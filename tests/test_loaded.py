"""`verify_weights` on models that a load has left wrong in five ways, and on sound ones."""

import time

import pytest
import torch
import transformers
from errors import raises
from folders import edit, edit_tensors
from oracles import tiny_model, tiny_sizes
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, BertConfig, BertForMaskedLM, BertModel, PreTrainedConfig, PreTrainedModel

import hf_relpos
from hf_relpos import RelPosBertModel, verify_weights


SIZES = tiny_sizes(hidden_size=32, num_attention_heads=2, max_position_embeddings=64)


class BrokenConfig(PreTrainedConfig):
    model_type = "broken_by_a_test"
    way: str = ""


class Layer(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.dense, self.scale = nn.Linear(8, 8), nn.Parameter(torch.full((8,), 2.0))
        if way in ("buffer", "overwritten", "persistent"):
            self.register_buffer("table", torch.arange(8.0), persistent=way == "persistent")
        if way == "attribute":
            self.table = torch.arange(8.0)
        if way == "random":
            self.expert = nn.Linear(8, 8)


class Broken(PreTrainedModel):
    """A model that a load by Transformers 5 leaves wrong in one way."""

    config_class = BrokenConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(Layer(config.way) for _ in range(2))
        self.post_init()

    def _init_weights(self, module):
        if self.config.way == "overwritten" and isinstance(module, Layer):
            module.scale.data.fill_(1.0)  # does not ask whether it was loaded


WAYS = {
    # way: tensors without a place in the file, tensors that are found, words of cause and remedy
    "buffer": ((), "table", ("uninitialised", "initialize_buffers(model)")),
    "attribute": ((), "table", ("uninitialised", "initialize_buffers(model)")),
    "persistent": (("table",), "table", ("uninitialised", "initialize_buffers(model)")),
    "overwritten": ((), "scale", ("_init_weights", "verify_weights(model, repair=True)")),
    "random": (("expert",), "expert", ("started at random", "in no file")),
}


def saved(folder, way, left_out=()):
    model = Broken(BrokenConfig(way=way))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    kept = {name: value for name, value in model.state_dict().items() if not any(each in name for each in left_out)}
    model.save_pretrained(folder, state_dict=kept)
    return model


@pytest.mark.parametrize("way", WAYS)
def test_check_loaded_names_cause_and_remedy(way, tmp_path, monkeypatch):
    allocate = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: t if (t := allocate(*a, **k)).is_meta else t.fill_(7))
    left_out, named, words = WAYS[way]
    before = saved(tmp_path, way, left_out)
    model = Broken.from_pretrained(tmp_path)
    found = verify_weights(model)
    wrong = {name: str(each) for name, each in found.items() if named in name}
    assert len(wrong) == (4 if way == "random" else 2)
    assert all(word in text for text in wrong.values() for word in words)
    if way == "overwritten":
        assert {name for name in found if name.endswith("table")} and torch.all(model.layers[0].scale == 1)
    else:
        assert wrong.keys() == found.keys()
    left = verify_weights(model, repair=True)
    assert set(left) == ({name for name in wrong} if way == "random" else set())
    assert verify_weights(model) == left
    if way != "random":
        assert all(torch.equal(now, value) for now, value in zip(model.parameters(), before.parameters(), strict=True))
        assert all(torch.equal(layer.table, torch.arange(8.0)) for layer in model.layers if hasattr(layer, "table"))


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"dtype": torch.float64}], ids=str)
@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "deberta-v2", "modernbert", "nomic_bert", "esm"])
def test_check_loaded_sound_models(kind, options, tmp_path):
    """Tied weights, shards, tensors that the loader renames and splits, other dtypes."""
    config = transformers.AutoConfig.for_model(kind, **SIZES, pad_token_id=0, mask_token_id=4)
    model = transformers.AutoModelForMaskedLM.from_config(config)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, **options)
    assert verify_weights(loaded) == {} == verify_weights(loaded.half())
    parameter = next(p for name, p in loaded.named_parameters() if p.dim() == 2)
    parameter.data[0, 0] += 1
    assert [each.cause for each in verify_weights(loaded).values()] == ["changed since it was loaded"]


def test_check_loaded_renamed_keys(tmp_path):
    """A file of TensorFlow's names without the head's prefix, a tied head; a file of another name."""
    model = BertForMaskedLM(BertConfig(**SIZES))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {n.replace("LayerNorm.weight", "LayerNorm.gamma"): t for n, t in tensors.items()}
    tensors = {n.replace("LayerNorm.bias", "LayerNorm.beta"): t for n, t in tensors.items()}
    save_file({**tensors, "bert.embeddings.position_ids": torch.arange(9)[None]}, tmp_path / "model.safetensors")
    loaded = BertForMaskedLM.from_pretrained(tmp_path)
    assert verify_weights(loaded) == {}
    body = AutoModel.from_pretrained(tmp_path)
    assert set(verify_weights(body)) == {"pooler.dense.weight", "pooler.dense.bias"}
    with raises(ValueError, "nowhere", "source"):
        verify_weights(loaded, "nowhere/at-all")
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    assert verify_weights(loaded, tmp_path / "other.safetensors") == {}
    with raises(ValueError, str(tmp_path), "source"):
        verify_weights(loaded)
    with raises(ValueError, "BertModel", "source"):
        verify_weights(BertModel(BertConfig(**SIZES)))


def test_check_loaded_what_has_no_place(tmp_path):
    """Experts in the file, and a class without: nomic-embed-text-v2-moe. Layers that the configuration lacks."""
    model = AutoModel.from_config(transformers.NomicBertConfig(**SIZES, pad_token_id=0))
    model.save_pretrained(tmp_path)
    expert = "encoder.layers.1.mlp.experts.mlp.w1"
    with edit_tensors(tmp_path) as tensors:
        for name in [name for name in tensors if "layers.1.mlp" in name]:
            del tensors[name]
        tensors[expert] = torch.ones(8, 8)
    edit(tmp_path, auto_map={"AutoModel": "someone/code--modeling.NomicBertModel"})
    loaded = transformers.NomicBertModel.from_pretrained(tmp_path)
    found = verify_weights(loaded)
    assert len(found) == 4 and expert in str(found["layers.1.mlp.up_proj.weight"])
    assert all("trust_remote_code=True" in each.remedy for each in found.values())
    shorter = transformers.NomicBertModel.from_pretrained(tmp_path, num_hidden_layers=1)
    found = verify_weights(shorter)
    assert found and all(name.startswith("layers.1.") for name in found)


def test_check_loaded_own_models(tmp_path):
    tiny_model(RelPosBertModel, "t5").save_pretrained(tmp_path / "own")
    own = AutoModel.from_pretrained(tmp_path / "own")
    assert verify_weights(own) == {}
    model = transformers.RoFormerModel(transformers.RoFormerConfig(**SIZES, embedding_size=32))
    model.save_pretrained(tmp_path / "other")
    ours = RelPosBertModel.from_pretrained(tmp_path / "other")
    assert {name for name in verify_weights(ours) if "pooler" not in name} == set()
    ours.encoder.layer[0].output.dense.weight.data.zero_()
    assert "encoder.layer.0.output.dense.weight" in verify_weights(ours)


@pytest.mark.slow
def test_check_loaded_takes_no_second_copy_and_little_time(tmp_path):
    BertModel(BertConfig(vocab_size=30522)).save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path)
    start = time.process_time()
    assert hf_relpos.verify_weights(model) == {}
    assert time.process_time() - start < 2
