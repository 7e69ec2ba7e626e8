"""PEFT: adapters on the default layers, tables trained beside them, merged, saved and loaded again."""

import pytest
import torch
import transformers
from oracles import tiny_model
from packaging.version import Version
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, get_peft_model
from selection import FEATURE_SCHEMES
from stock import random_model
from test_tools_outputs import batch
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from hf_relpos import RelPosBertForSequenceClassification


EVERY_SCHEME = pytest.mark.parametrize("scheme", FEATURE_SCHEMES)
BESIDE = ["classifier", "distance_embedding"]  # what is trained beside the adapter


def tables(model):
    """The parameters of the scheme, by name."""
    return {name: value for name, value in model.named_parameters() if "distance_embedding." in name}


def labelled(scheme):
    return {**batch(scheme, (9, 5, 7, 3)), "labels": torch.tensor([0, 1, 0, 1])}


@torch.no_grad()
def logits(model, inputs):
    return model.eval()(**inputs).logits


def trained(base, inputs):
    """A model with an adapter, its tables trained as well, after three steps."""
    config = LoraConfig(task_type="SEQ_CLS", r=4, lora_dropout=0.0, modules_to_save=BESIDE)
    model = get_peft_model(base, config).train()
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()
    return model


@pytest.mark.covering(1, every_scheme=False)
@pytest.mark.parametrize("method", [LoraConfig, IA3Config])
@EVERY_SCHEME
def test_default_targets_are_those_of_bert(scheme, method):
    ours = tiny_model(RelPosBertForSequenceClassification, scheme)
    sizes = {key: getattr(ours.config, key) for key in ("hidden_size", "num_attention_heads", "intermediate_size")}
    stock = BertForSequenceClassification(BertConfig(num_hidden_layers=2, vocab_size=50, **sizes))
    adapted = []
    for model in (ours, stock):
        names = {name for name, _ in get_peft_model(model, method(task_type="SEQ_CLS")).named_parameters()}
        adapted.append({name for name in names if "lora_" in name or "ia3_" in name})
    assert adapted[0] == adapted[1] and adapted[0]


@EVERY_SCHEME
def test_tables_are_trained_beside_the_adapter(scheme):
    """They have the gradients of full fine-tuning, since a fresh adapter changes nothing; the base stays."""
    inputs = labelled(scheme)
    plain = tiny_model(RelPosBertForSequenceClassification, scheme)
    expected_logits = logits(plain, inputs)
    plain(**inputs).loss.backward()
    expected = {name: value.grad.clone() for name, value in tables(plain).items()}
    plain.zero_grad()
    before = {name: value.detach().clone() for name, value in plain.named_parameters()}
    model = get_peft_model(plain, LoraConfig(task_type="SEQ_CLS", modules_to_save=BESIDE))
    torch.testing.assert_close(logits(model, inputs), expected_logits)
    model(**inputs).loss.backward()
    found = {name.removeprefix("base_model.model."): value for name, value in model.named_parameters()}
    for name, gradient in expected.items():
        path, _, parameter = name.rpartition("distance_embedding.")
        copy = found[f"{path}distance_embedding.modules_to_save.default.{parameter}"]
        assert copy.requires_grad
        torch.testing.assert_close(copy.grad, gradient, atol=1e-6, rtol=1e-5)
    torch.optim.SGD((each for each in model.parameters() if each.requires_grad), lr=1.0).step()
    base = model.unload()
    assert dict(base.named_parameters()).keys() == before.keys()
    for name, value in base.named_parameters():
        changed = not torch.equal(value, before[name])
        if not any(f"{part}." in name for part in BESIDE):
            assert not changed, name
        elif name in expected and not torch.equal(before[name] - expected[name], before[name]):
            assert changed, name


@pytest.mark.covering(1, every_scheme=False)
@EVERY_SCHEME
def test_adapter_is_saved_and_loaded(scheme, tmp_path):
    inputs = labelled(scheme)
    base = tiny_model(RelPosBertForSequenceClassification, scheme)
    base.save_pretrained(tmp_path / "base")
    before = logits(base, inputs)
    model = trained(base, inputs)
    expected = logits(model, inputs)
    assert (before - expected).abs().max() > 1e-3, "training changed nothing"
    model.save_pretrained(tmp_path / "adapter")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    torch.testing.assert_close(logits(again, inputs), before)
    loaded = PeftModel.from_pretrained(again, tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded, inputs), expected)
    if Version(transformers.__version__) < Version("5.23"):
        return  # `load_adapter` of 5.14 leaves the modules to save as they were, those of stock BERT too
    by_transformers = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    by_transformers.load_adapter(str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(by_transformers, inputs), expected)


@pytest.mark.covering(1, every_scheme=False)
@EVERY_SCHEME
def test_adapter_is_merged_and_the_model_saved(scheme, tmp_path):
    """The merged model is an ordinary checkpoint, which needs no PEFT."""
    inputs = labelled(scheme)
    model = trained(tiny_model(RelPosBertForSequenceClassification, scheme), inputs)
    expected = logits(model, inputs)
    merged = model.merge_and_unload()
    assert type(merged) is RelPosBertForSequenceClassification
    torch.testing.assert_close(logits(merged, inputs), expected, atol=1e-5, rtol=0)
    merged.save_pretrained(tmp_path)
    loaded, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(logits(loaded, inputs), logits(merged, inputs))


@pytest.mark.covering(1, every_scheme=False)
@EVERY_SCHEME
def test_layers_of_the_scheme_are_adapted_like_any_other(scheme):
    """With `target_modules="all-linear"` every adapted layer counts, those that make terms of positions as well."""
    inputs = labelled(scheme)
    config = LoraConfig(task_type="SEQ_CLS", target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(tiny_model(RelPosBertForSequenceClassification, scheme), config)
    model(**inputs).loss.backward()
    silent = [name for name, each in model.named_parameters() if "lora_" in name and not each.grad.any()]
    assert not silent
    expected = logits(model, inputs)
    torch.testing.assert_close(logits(model.merge_and_unload(), inputs), expected, atol=1e-5, rtol=0)


def test_an_adapter_of_another_family_names_its_base(tmp_path):
    sizes = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3}
    random_model("roformer", "RoFormerModel", tmp_path / "base", intermediate_size=20, **sizes)
    base = RelPosBertForSequenceClassification.from_pretrained(tmp_path / "base")
    assert base.name_or_path == base.bert.name_or_path == base.config.name_or_path == str(tmp_path / "base")
    get_peft_model(base, LoraConfig(task_type="SEQ_CLS")).save_pretrained(tmp_path / "adapter")
    assert PeftConfig.from_pretrained(tmp_path / "adapter").base_model_name_or_path == str(tmp_path / "base")
