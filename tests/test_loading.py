"""`from_pretrained` never leaves weights of the encoder to chance, and says what a file looks like that would."""

import contextlib
import json
import logging
import shutil

import pytest
import torch
import transformers
from errors import raises
from folders import assert_not_converted, edit, edit_tensors
from huggingface_hub import save_torch_state_dict
from launching import run_code
from oracles import tiny_sizes
from safetensors.torch import load_file, save_file
from test_legacy import LEGACY, check_old_outputs
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertModel,
)

import hf_relpos
from hf_relpos import (
    RelPosBertConfig,
    RelPosBertForMaskedLM,
    RelPosBertForSequenceClassification,
    RelPosBertLMHeadModel,
    RelPosBertModel,
    patch_transformers,
)
from hf_relpos.conversion import ConversionError, convert
from hf_relpos.evaluation import load_encoder, load_model
from hf_relpos.families.registry import FAMILIES, LAYOUTS, layout_of, model_types
from hf_relpos.models.modeling_relpos_bert import HEADS


SIZES = tiny_sizes()
MASKED_LM = LEGACY / "relative_key_query" / "BertForMaskedLM"


def written(folder, tensors, **fields):
    """A folder of these tensors and of the configuration of a BERT."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", **SIZES, **fields}))
    return folder


def tensors(scheme="alibi", head=RelPosBertModel, **fields):
    """Weights of a tiny model of ours."""
    torch.manual_seed(0)
    return head(RelPosBertConfig(**SIZES, position_embedding_type=scheme, **fields)).state_dict()


def jina():
    """JinaBERT v2: BERT's names, but for a gated feed-forward; no table of positions."""
    return load_file(LEGACY.parent / "gated" / "jina-model" / "model.safetensors")


def jina_code():
    """JinaBERT v2's variant for code: other names, LayerNorms on queries and keys, two more in each layer."""
    code, size = {}, SIZES["hidden_size"]
    names = {"gated_layers": "up_gated_layer", "mlp.wo": "mlp.down_layer", "mlp.layernorm": "layer_norm_2"}
    for name, tensor in jina().items():
        for old, new in names.items():
            name = name.replace(old, new)
        code[name] = tensor
    for number in range(SIZES["num_hidden_layers"]):
        for norm in ("attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1"):
            code[f"encoder.layer.{number}.{norm}.weight"] = torch.ones(size)
            code[f"encoder.layer.{number}.{norm}.bias"] = torch.zeros(size)
    return code


# --- encoders that would be random


@pytest.mark.parametrize("stored", ["one file", "shards"])
@pytest.mark.parametrize("scheme", ["alibi", None], ids=["alibi", "config says nothing"])
def test_the_variant_of_jinabert_for_code_is_read_through_every_door(tmp_path, scheme, stored):
    """Two loads would give two answers."""
    code, fields = jina_code(), {} if scheme is None else {"position_embedding_type": scheme}
    folder = written(tmp_path / "source", code, **fields)
    if stored == "shards":
        (folder / "model.safetensors").unlink()
        save_torch_state_dict(code, folder, max_shard_size="20KB")
    expected = RelPosBertModel.from_pretrained(folder)
    assert expected.config.extra_attention_norms and expected.config.is_gated
    with patch_transformers():
        models = [door.from_pretrained(folder) for door in (BertModel, AutoModel, AutoModelForSequenceClassification)]
    report = convert(folder, tmp_path / "out")
    assert not report.of_kind("dropped")
    models.append(RelPosBertModel.from_pretrained(tmp_path / "out"))
    for model in models:
        found = model.base_model.state_dict()
        for name, tensor in expected.state_dict().items():
            assert "pooler" in name or torch.equal(found[name], tensor)
    assert hf_relpos.export_checkpoint(expected, tmp_path / "again") == "JinaBertModel"
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert (len([*folder.glob("model*.safetensors")]) > 1) == (stored == "shards")
    assert again.keys() == code.keys() and all(torch.equal(again[name], tensor) for name, tensor in code.items())


WAYS = [{}, {"device_map": "cpu"}, {"device_map": "auto"}, {"dtype": torch.bfloat16}]
DOORS = [(AutoModel.from_pretrained, arguments) for arguments in WAYS]
DOORS += [(door, {}) for door in (AutoModelForMaskedLM.from_pretrained, RelPosBertModel.from_pretrained, load_encoder)]


@pytest.mark.parametrize("door, arguments", DOORS)
def test_our_own_format_is_checked_as_well(tmp_path, door, arguments):
    folder = written(tmp_path, jina(), model_type="relpos_bert", position_embedding_type="alibi")
    with pytest.raises(ValueError, match="JinaBERT"):
        door(folder, **arguments)


def test_weights_given_as_a_state_dict():
    config = RelPosBertConfig(**SIZES, position_embedding_type="alibi")
    with pytest.raises(ValueError, match="state_dict: the weights lack 12 of"):
        RelPosBertModel.from_pretrained(None, config=config, state_dict=jina())
    loaded = RelPosBertModel.from_pretrained(None, config=config, state_dict=tensors())
    assert all(torch.equal(tensor, tensors()[name]) for name, tensor in loaded.state_dict().items())
    fresh = RelPosBertModel.from_pretrained(None, config=config, state_dict={})  # none on purpose, as in Transformers
    assert all(parameter.isfinite().all() for parameter in fresh.parameters())


OTHERS = {
    "DebertaV2ForMaskedLM": "DeBERTa v2 or v3",
    "DebertaForMaskedLM": "DeBERTa v1",
    "XLNetModel": "XLNet",
    "RoFormerForMaskedLM": "RoFormer",
    "ModernBertModel": "ModernBERT",
    "DistilBertModel": "DistilBERT",
    "AlbertModel": "ALBERT",
    "MPNetModel": "MPNet",
    **dict.fromkeys(("RobertaForMaskedLM", "XLMRobertaForMaskedLM", "CamembertForMaskedLM"), "RoBERTa"),
    "ElectraForPreTraining": "ELECTRA",
    "ErnieForMaskedLM": "ERNIE",
}


@pytest.mark.parametrize("architecture, name", OTHERS.items(), ids=OTHERS)
def test_layouts_of_other_architectures_are_recognised(tmp_path, architecture, name):
    """By the names that Transformers' own class saves, under a configuration that claims to be a BERT."""
    model_class = getattr(transformers, architecture)
    fields = {"dim": 24, "n_heads": 3, "n_layers": 2, "hidden_dim": 32, "d_model": 24, "n_layer": 2, "n_head": 3}
    own = {key: fields[key] for key in fields if key in model_class.config_class.attribute_map.values()}
    sizes = {key: size for key, size in SIZES.items() if key not in model_class.config_class.attribute_map}
    if architecture == "XLNetModel":
        del sizes["max_position_embeddings"]
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    stock = model_class(model_class.config_class(**{**sizes, **own, **special, "embedding_size": 24}))
    folder = written(tmp_path / "source", stock.state_dict(), position_embedding_type="relative_key")
    with pytest.raises(ValueError, match=f"The weights look like {name}") as error:
        RelPosBertModel.from_pretrained(folder)
    assert f"'{stock.config.model_type}'" in str(error.value)
    assert layout_of(stock.state_dict()).name == name
    converts = stock.config.model_type in FAMILIES
    assert ("hf-relpos convert" in str(error.value)) == converts
    assert_not_converted(folder, tmp_path / "out", f"look like {name}")


def test_layouts_name_what_reads_them():
    """Every family but BERT's has one, of a known `model_type`; BERT's own names are no other's layout."""
    read = {kind for layout in LAYOUTS for kind in model_types(layout)}
    assert read == {family.marks if family.told_by_tensors else name for name, family in FAMILIES.items()}
    assert read - {"nezha", "new", "gte"} <= set(CONFIG_MAPPING)  # the oldest supported Transformers has no `gte`
    for head in HEADS.values():
        assert layout_of(tensors("tables", head)) is None
    nezha = load_file(LEGACY.parent / "families" / "nezha" / "model.safetensors")
    assert model_types(layout_of(nezha)) == ["nezha"]


@pytest.mark.parametrize("prefix", ["backbone.", "model.bert.", "_orig_mod."])
def test_a_prefix_is_named_and_can_be_taken_off(tmp_path, prefix):
    weights = tensors("shaw")
    fields = {"position_embedding_type": "shaw", "model_type": "relpos_bert"}
    folder = written(tmp_path, {prefix + name: tensor for name, tensor in weights.items()}, **fields)
    for door in (RelPosBertModel, RelPosBertForMaskedLM):
        with pytest.raises(ValueError, match="Its names have a prefix; pass key_mapping=") as error:
            door.from_pretrained(folder)
        mapping = eval(str(error.value).partition("pass key_mapping=")[2].partition(" to remove it")[0])
        loaded = door.from_pretrained(folder, key_mapping=mapping).base_model.state_dict()
        assert all(torch.equal(tensor, weights[name]) for name, tensor in loaded.items())


def test_more_layers_than_the_file_has(tmp_path):
    folder = written(tmp_path, tensors(), position_embedding_type="alibi", num_hidden_layers=3)
    words = "encoder.layer.2.* num_hidden_layers = 3, but the file has 2; correct"
    with pytest.raises(ValueError, match=words):
        RelPosBertModel.from_pretrained(folder)
    with patch_transformers(), pytest.raises(ValueError, match=words):
        AutoModel.from_pretrained(folder)
    for number in (1, 2):
        assert len(RelPosBertModel.from_pretrained(folder, num_hidden_layers=number).encoder.layer) == number
    # the way out that the message names
    model = RelPosBertModel(RelPosBertConfig.from_pretrained(folder))
    assert model.load_state_dict(tensors(), strict=False).missing_keys


@pytest.mark.parametrize("scheme", ["shaw", "deberta", "alibi"])
def test_fewer_layers_must_be_asked_for(tmp_path, scheme):
    """The start of a smaller student: the tables of the other layers are left out with these."""
    weights = tensors(scheme)
    fields = {"model_type": "relpos_bert", "position_embedding_type": scheme}
    folder = written(tmp_path, weights, **fields)
    model = RelPosBertModel.from_pretrained(folder, num_hidden_layers=1)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    written(tmp_path, weights, **fields, num_hidden_layers=1)
    with raises(ValueError, "num_hidden_layers = 1", "encoder.layer.1."):
        RelPosBertModel.from_pretrained(folder)
    assert len(RelPosBertModel.from_pretrained(folder, num_hidden_layers=1).encoder.layer) == 1


def test_who_asks_for_the_missing_names_gets_them(tmp_path):
    folder = written(tmp_path, jina(), position_embedding_type="alibi")
    _, info = RelPosBertModel.from_pretrained(folder, output_loading_info=True)
    assert "encoder.layer.0.intermediate.dense.weight" in info["missing_keys"]
    with patch_transformers():
        _, info = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert "encoder.layer.0.intermediate.dense.weight" in info["missing_keys"]


def test_other_sizes_are_for_heads_vocabularies_and_tables(tmp_path):
    folder = written(tmp_path, tensors(), position_embedding_type="alibi")
    wrong = {"hidden_size": 2 * SIZES["hidden_size"], "ignore_mismatched_sizes": True}
    with pytest.raises(ValueError, match=r"tensors of the encoder do not have the size .*\(24,\) instead of \(48,\)"):
        RelPosBertModel.from_pretrained(folder, **wrong)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):  # as in Transformers
        RelPosBertModel.from_pretrained(folder, vocab_size=SIZES["vocab_size"] + 3)
    larger = RelPosBertModel.from_pretrained(folder, vocab_size=SIZES["vocab_size"] + 3, ignore_mismatched_sizes=True)
    assert larger.embeddings.word_embeddings.num_embeddings == SIZES["vocab_size"] + 3
    config = RelPosBertConfig(**SIZES, position_embedding_type="alibi", num_labels=4)
    RelPosBertForSequenceClassification(config).save_pretrained(tmp_path / "head")
    fewer = {"num_labels": 2, "ignore_mismatched_sizes": True}
    other = RelPosBertForSequenceClassification.from_pretrained(tmp_path / "head", **fewer)
    assert other.classifier.out_features == 2


LOST = [
    ("shaw", "encoder.layer.1.output.dense.bias", ["lack 1 of", "Restore the file"]),
    ("shaw", "embeddings.word_embeddings.weight", ["lack 1 of", "Restore the file"]),
    ("shaw", "embeddings.token_type_embeddings.weight", ["lack 1 of", "Restore the file"]),
    ("shaw", "encoder.layer.1.attention.self.distance_embedding", ["'shaw' requires tables, but the weights lack"]),
    *((shared, "encoder.distance_embedding", [f"'{shared}' requires tables"]) for shared in ("t5", "tupe")),
]


@pytest.mark.parametrize("kind", ["relpos_bert", "bert"])
@pytest.mark.parametrize("scheme, name, words", LOST)
def test_a_file_that_lost_something(tmp_path, scheme, name, words, kind):
    """`bert`: as if stock Transformers had loaded and saved it."""
    kept = {each: tensor for each, tensor in tensors(scheme).items() if not each.startswith(name)}
    folder = written(tmp_path, kept, model_type=kind, position_embedding_type=scheme)
    with raises(ValueError, name, *words):
        RelPosBertModel.from_pretrained(folder)


def test_tables_that_the_configuration_has_no_place_for(tmp_path):
    """A configuration that lost its field, beside weights that have their tables."""
    edit(shutil.copytree(MASKED_LM, tmp_path, dirs_exist_ok=True), position_embedding_type=None)
    words = r"have distance tables \(bert\.encoder\.layer\.0.*does not use; set it in config\.json"
    with pytest.raises(ValueError, match=words):
        RelPosBertForMaskedLM.from_pretrained(tmp_path)
    with patch_transformers(), pytest.raises(ValueError, match=words):
        AutoModelForMaskedLM.from_pretrained(tmp_path)
    model = RelPosBertForMaskedLM.from_pretrained(tmp_path, position_embedding_type="relative_key_query")
    check_old_outputs(model, MASKED_LM)
    dropped = RelPosBertForMaskedLM.from_pretrained(MASKED_LM, position_embedding_type="alibi")
    assert dropped.config.position_embedding_type == "alibi"


# --- what is only reported


@pytest.mark.parametrize("head", HEADS.values(), ids=lambda head: head.__name__)
@pytest.mark.parametrize("saved", [RelPosBertModel, RelPosBertForMaskedLM, RelPosBertForSequenceClassification])
def test_new_heads_are_reported(tmp_path, saved, head):
    """Of any head into any other; the encoder is the saved one, and a classifier of another size is new."""
    weights = tensors("shaw", saved)
    folder = written(tmp_path, weights, model_type="relpos_bert", position_embedding_type="shaw")
    model, info = head.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True)
    assert not [name for name in info["missing_keys"] if "embeddings." in name or "encoder." in name]
    body = {name.removeprefix("bert."): tensor for name, tensor in weights.items()}
    loaded = model.base_model.state_dict()
    assert all(torch.equal(tensor, body[name]) for name, tensor in loaded.items() if "pooler." not in name)


FRESH = {
    "a scheme": ({"position_embedding_type": "shaw"}, "distance_embedding"),
    "two schemes": ({"position_embedding_type": ["t5", "shaw"]}, "distance_embedding"),
    "another table": ({"absolute_position_embeddings": True}, "position_embeddings"),
    "cross-attention": ({"is_decoder": True, "add_cross_attention": True}, "crossattention"),
    "options": ({"position_embedding_type": "relative_key", "position_options": {}}, "distance_embedding"),
}


@pytest.mark.parametrize("fields, part", FRESH.values(), ids=FRESH)
@pytest.mark.parametrize("through", ["keywords", "auto", "config"])
def test_what_the_caller_asks_for_is_new(tmp_path, warnings_heard, through, fields, part):
    folder = written(tmp_path, tensors(), model_type="relpos_bert", position_embedding_type="alibi")
    head = RelPosBertLMHeadModel if "is_decoder" in fields else RelPosBertModel
    if through == "config":
        config = RelPosBertConfig.from_pretrained(folder, **fields)
        model, info = head.from_pretrained(folder, config=config, output_loading_info=True)
    else:
        auto = {head: auto for auto, head in HEADS.items()}[head]
        door = getattr(transformers, auto) if through == "auto" else head
        model, info = door.from_pretrained(folder, output_loading_info=True, **fields)
    body = [name for name in info["missing_keys"] if "embeddings." in name or "encoder." in name]
    assert body and all(part in name for name in body) and any(part in message for message in warnings_heard)
    assert isinstance(model, head)


def test_stock_weights_take_a_scheme_by_name(tmp_path):
    BertForMaskedLM(BertConfig(**SIZES)).save_pretrained(tmp_path)
    config = RelPosBertConfig.from_bert(BertConfig.from_pretrained(tmp_path), position_embedding_type="shaw")
    for arguments in ({"position_embedding_type": "shaw"}, {"config": config}):
        model = RelPosBertForMaskedLM.from_pretrained(tmp_path, **arguments)
        assert model.config.position_embedding_type == "shaw"
    weights = load_file(tmp_path / "model.safetensors")
    assert RelPosBertForMaskedLM.from_pretrained(None, config=config, state_dict=weights) is not None


@pytest.mark.parametrize("kept", ["decoder", "embeddings"])
def test_either_name_of_tied_weights(tmp_path, kept):
    weights = tensors("shaw", RelPosBertForMaskedLM)
    left_out = "cls.predictions.decoder.weight" if kept == "embeddings" else "bert.embeddings.word_embeddings.weight"
    expected = weights.pop(left_out)
    folder = written(tmp_path, weights, model_type="relpos_bert", position_embedding_type="shaw")
    model = RelPosBertForMaskedLM.from_pretrained(folder)
    assert torch.equal(model.bert.embeddings.word_embeddings.weight, expected)
    if kept == "decoder":  # of which the encoder alone knows nothing
        with pytest.raises(ValueError, match=r"lack 1 of .*word_embeddings"):
            RelPosBertModel.from_pretrained(folder)


def test_a_subfolder_is_loaded_and_checked(tmp_path):
    inside = written(tmp_path / "inside", tensors("t5"), model_type="relpos_bert", position_embedding_type="t5")
    assert RelPosBertModel.from_pretrained(tmp_path, subfolder="inside").config.position_embedding_type == "t5"
    (inside / "model.safetensors").write_bytes(b"short")
    with raises(ValueError, inside / "model.safetensors"):
        RelPosBertModel.from_pretrained(tmp_path, subfolder="inside")


@pytest.mark.parametrize("arguments", WAYS, ids=str)
def test_ways_to_load(tmp_path, arguments):
    folder = written(tmp_path, tensors("t5"), model_type="relpos_bert", position_embedding_type="t5")
    loaded = AutoModel.from_pretrained(folder, **arguments).state_dict()
    assert all(torch.equal(tensor, tensors("t5")[name].to(tensor.dtype)) for name, tensor in loaded.items())


@pytest.mark.parametrize("door, beside", [(AutoModel, False), (RelPosBertModel, False), (RelPosBertModel, True)])
def test_adapters_on_a_checkpoint(tmp_path, door, beside):
    """An adapter's folder names its base model, whose weights are checked as without it."""
    from peft import LoraConfig, get_peft_model

    fields = {"model_type": "relpos_bert", "position_embedding_type": "shaw"}
    base = written(tmp_path / "base", tensors("shaw"), **fields)
    adapted = get_peft_model(AutoModel.from_pretrained(base), LoraConfig(target_modules=["query"]))
    adapted.save_pretrained(tmp_path / "adapter")
    if beside:  # the base model's own files
        (tmp_path / "adapter" / "config.json").write_bytes((base / "config.json").read_bytes())
        (tmp_path / "adapter" / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes())
    model = door.from_pretrained(tmp_path / "adapter")
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        expected = adapted(ids).last_hidden_state
        torch.testing.assert_close(model(ids).last_hidden_state, expected, rtol=0, atol=1e-6)
    for folder in (base, tmp_path / "adapter"):
        if (folder / "model.safetensors").exists():
            written(folder, jina(), **fields | {"position_embedding_type": "alibi"})
    with pytest.raises(ValueError, match="weights lack 12 of"):
        door.from_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize("kind", ["deberta", "roberta"])
def test_a_stock_configuration_of_another_family(tmp_path, kind):
    """The checkpoint's own, whether it would be read without one or not."""
    sizes = {name: size for name, size in SIZES.items() if name != "max_position_embeddings"}
    model = AutoModel.from_config(CONFIG_MAPPING[kind](**sizes))
    model.save_pretrained(tmp_path)
    with raises(TypeError, "RelPosBertConfig", type(model.config).__name__):
        RelPosBertModel.from_pretrained(tmp_path, config=AutoConfig.from_pretrained(tmp_path))


def test_a_model_saved_with_adapters_in_it(tmp_path):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(RelPosBertModel(RelPosBertConfig(**SIZES)), LoraConfig(target_modules=["query"]))
    weights = model.base_model.model.state_dict()
    folder = written(tmp_path, weights, model_type="relpos_bert", position_embedding_type="relative_key")
    with pytest.raises(ValueError, match="adapters of PEFT in it; merge"):
        RelPosBertModel.from_pretrained(folder)


KERNEL = "somebody/attention"


def _patched(folder):
    with hf_relpos.patch_transformers():
        return AutoModel.from_pretrained(folder, position_embedding_type="harmonic")


# All that reads config.json and makes a model.
LOADS_OF_A_KERNEL = {
    "our class": RelPosBertModel.from_pretrained,
    "AutoModel": AutoModel.from_pretrained,
    "stock": lambda folder: RelPosBertModel.from_pretrained(folder, config=BertConfig.from_pretrained(folder)),
    "from_bert": lambda folder: RelPosBertModel(RelPosBertConfig.from_bert(BertConfig.from_pretrained(folder))),
    "patched": _patched,
    "json": lambda folder: RelPosBertModel(RelPosBertConfig.from_json_file(folder / "config.json")),
    "evaluation": load_model,
    "convert": lambda folder: convert(folder, folder.with_name("converted")),
    "export": lambda folder: hf_relpos.export_checkpoint(folder, folder.with_name("exported")),
}


WAYS_BY_KIND = [
    ("relpos_bert", ("our class", "AutoModel", "json", "evaluation")),
    ("bert", ("our class", "stock", "from_bert", "patched", "evaluation", "convert")),
    ("deberta-v2", ("our class", "evaluation", "convert", "export")),
]


@pytest.mark.parametrize("kind, ways", WAYS_BY_KIND)
def test_a_file_chooses_no_kernel_to_download(tmp_path, monkeypatch, caplog, kind, ways):
    fetched = []
    monkeypatch.setattr(transformers.modeling_utils, "lazy_import_flash_attention", lambda *a, **k: fetched.append(a))
    source = tmp_path / "source"
    if kind == "relpos_bert":
        RelPosBertModel(RelPosBertConfig(**SIZES, position_embedding_type="t5")).save_pretrained(source)
    else:
        AutoModel.from_config(AutoConfig.for_model(kind, **SIZES)).save_pretrained(source)
    edit(source, attn_implementation=KERNEL)
    for way in ways:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            try:
                LOADS_OF_A_KERNEL[way](source)
            except ConversionError as error:
                assert KERNEL not in str(error)
        assert not fetched, way
        assert KERNEL in caplog.text and "attn_implementation" in caplog.text, way
    with contextlib.suppress(ValueError):  # nothing is imported here, so that Transformers may not know it
        RelPosBertModel.from_pretrained(source, attn_implementation=KERNEL)
    assert fetched == [(KERNEL,)]


@pytest.mark.parametrize("kind", ["bert", "deberta-v2"])
def test_the_bias_of_an_untied_head_of_old_transformers(kind, tmp_path):
    """Up to 4.57 one tensor was saved for two names, whatever tie_word_embeddings said; v5 alone leaves zeros."""
    sizes = {**SIZES, "relative_attention": True, "pos_att_type": ["c2p"]} if kind != "bert" else SIZES
    stock = AutoModelForMaskedLM.from_config(AutoConfig.for_model(kind, **sizes, tie_word_embeddings=False))
    head = stock.cls.predictions
    with torch.no_grad():
        head.bias.normal_()
        getattr(head, "decoder", head).bias.copy_(head.bias)
    stock.save_pretrained(tmp_path)
    with edit_tensors(tmp_path) as tensors:
        del tensors["cls.predictions.decoder.bias"]
    model = RelPosBertForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(model.cls.predictions.decoder.bias, head.bias)
    ids = torch.arange(4, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(ids).logits, stock.eval()(ids).logits, rtol=1e-4, atol=1e-5)


LIGHT = """
import json, sys

from transformers import AutoModel
import hf_relpos
from hf_relpos import RelPosBertModel

def rooms():
    return sorted({name.split(".")[1] for name in sys.modules if name.startswith("hf_relpos.")})

for load in (RelPosBertModel.from_pretrained, AutoModel.from_pretrained):
    load(sys.argv[1])
own, others = rooms(), sorted({"typer", "rich", "datasets"} & set(sys.modules))
RelPosBertModel.from_pretrained(sys.argv[2])
print(json.dumps([own, others, rooms()]))
"""


@pytest.mark.slow
def test_loading_is_light(tmp_path):
    """Of our own folder neither families nor the converter are imported."""
    RelPosBertModel(RelPosBertConfig(**SIZES, position_embedding_type="shaw")).save_pretrained(tmp_path / "ours")
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path / "stock")
    done = run_code(LIGHT, tmp_path / "ours", tmp_path / "stock")
    rooms = ["attention", "checkpoints", "deferred", "deprecation", "files", "host", "models", "products"]
    rooms += ["registration", "schemes", "version"]
    assert json.loads(done.stdout.splitlines()[-1]) == [rooms, [], sorted([*rooms, "families"])]
