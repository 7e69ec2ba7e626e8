"""Conversion against stock BERT: what is kept, what is refused, and that a failure leaves nothing behind."""

import copy
import dataclasses
import errno
import json
import shutil
from pathlib import Path

import folders
import pytest
import torch
import transformers
from folders import assert_not_converted, contents, edit_tensors
from oracles import stir, tiny_sizes
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from test_sources import pickled
from transformers import AutoTokenizer, BertConfig, BertTokenizer

from hf_relpos.conversion import METHODS, ConversionError, ConversionReport, convert, verify
from hf_relpos.conversion.build import build_teacher
from hf_relpos.conversion.pipeline import APPLY
from hf_relpos.families.names import is_scheme
from hf_relpos.models.modeling_relpos_bert import HEADS, RelPosBertPreTrainedModel
from hf_relpos.models.saved_code import remote_code
from hf_relpos.schemes import SCHEMES
from hf_relpos.schemes.scheme import Option, is_count, is_number


FIXTURES = Path(__file__).parent / "fixtures"
WORDS, LENGTH, POSITIONS = 60, 9, 20
TABLE = "embeddings.position_embeddings.weight"
AUTO = {head.__name__.removeprefix("RelPos"): auto for auto, head in HEADS.items()}
LEARNABLE = {name: each for name, each in SCHEMES.items() if each.zero_init_is_identity and not each.required_inputs}
RELATIVE = [name for name in LEARNABLE if name != "absolute"]
every_head = pytest.mark.parametrize("architecture", AUTO)
ABSOLUTE_METHODS = [name for name, method in METHODS.items() if method.from_absolute and not method.from_relative]
# Of those, the ones whose result is relative and is had without text.
UNTAUGHT = [name for name in ABSOLUTE_METHODS if not METHODS[name].learns]
TO_RELATIVE = [name for name in UNTAUGHT if not METHODS[name].unsupported_reason(SCHEMES["relative_key"])]
every_scheme = pytest.mark.parametrize("scheme", RELATIVE)


def bert(architecture="BertModel", dtype=torch.float32, **overrides):
    """A tiny stock BERT, every parameter of which has an effect."""
    sizes = tiny_sizes(vocab_size=WORDS, max_position_embeddings=POSITIONS)
    sizes["is_decoder"] = architecture == "BertLMHeadModel"
    return stir(getattr(transformers, architecture)(BertConfig(**sizes | overrides)), 0.3).eval().to(dtype)


def saved(folder, architecture="BertModel", **overrides):
    """A tiny stock BERT and the folder it was saved to."""
    model = bert(architecture, **overrides)
    model.save_pretrained(folder)
    return model, folder


def written(folder, tensors, config, architectures=("BertModel",), **fields):
    """A folder with exactly these tensors and the configuration, changed where `fields` say so; None removes."""
    folder.mkdir()
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    content = {**config.to_dict(), "architectures": list(architectures), **fields}
    content = {key: value for key, value in content.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def inputs(architecture="BertModel", length=LENGTH):
    """A padded batch."""
    shape = (2, 3, length) if architecture == "BertForMultipleChoice" else (2, length)
    mask = torch.ones(shape, dtype=torch.long)
    mask[-1, ..., length - 3 :] = 0
    batch = {"input_ids": torch.randint(1, WORDS, shape), "token_type_ids": torch.randint(0, 2, shape)}
    batch["attention_mask"] = mask
    return {**batch, "use_cache": False} if architecture == "BertLMHeadModel" else batch


@torch.inference_mode()
def assert_same_outputs(one, other, batch, tolerance=1e-6, names=None):
    """Every output agrees, or those of these names, here and there, relative to its largest value; float32."""
    wanted, found = one(**batch), other(**batch)
    assert names or wanted.keys() == found.keys()
    for name, its in names or zip(wanted, wanted, strict=True):
        difference = (wanted[name] - found[its]).abs().max() / wanted[name].abs().max()
        assert difference <= tolerance, f"{name}: {difference}"


def load(architecture, folder):
    """By the Auto class, as a user would."""
    return getattr(transformers, AUTO[architecture]).from_pretrained(folder).eval()


def converted(folder, architecture="BertModel", changes=None, **arguments):
    """A tiny stock BERT with these fields changed, what it is converted to, and the report."""
    stock, source = saved(folder / "stock", architecture, **changes or {})
    report = convert(source, folder / "out", **arguments)
    return stock, load(architecture, folder / "out"), report


def assert_equal_tensors(one, other):
    """Same names, types and bits."""
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]), name


def stock_tensors(model):
    """Those of a result that stock BERT has, too."""
    return {name: tensor for name, tensor in model.state_dict().items() if not is_scheme(name)}


# --- what the methods promise


@every_head
def test_keep_equals_the_source(tmp_path, architecture):
    """Its outputs, and its tensors, bit for bit."""
    stock, model, report = converted(tmp_path, architecture, method="keep")
    assert type(model).__name__ == report.converted_to == "RelPos" + architecture
    assert model.config.absolute_position_embeddings and report.difference <= 1e-12
    assert_same_outputs(stock, model, inputs(architecture))
    assert_equal_tensors(stock_tensors(model), stock.state_dict())
    assert {step.target for step in report.steps if step.kind != "created"} == stock.state_dict().keys()


@every_head
def test_drop_equals_the_source_with_its_mean_position_everywhere(tmp_path, architecture):
    stock, model, report = converted(tmp_path, architecture, method="drop")
    assert model.base_model.embeddings.position_embeddings is None and report.difference is None
    with torch.no_grad():
        table = stock.base_model.embeddings.position_embeddings.weight
        table.copy_(table.mean(0, keepdim=True).expand_as(table))
        assert model(**inputs(architecture, length=3 * POSITIONS))[0].isfinite().all()  # there is no limit on length
    assert_same_outputs(stock, model, inputs(architecture), tolerance=3e-6)


@every_scheme
@pytest.mark.parametrize("method", TO_RELATIVE)
def test_every_scheme_starts_at_zero_and_can_be_trained(tmp_path, scheme, method):
    stock, model, _ = converted(tmp_path, "BertForMaskedLM", position_embedding_type=scheme, method=method)
    assert model.config.position_embedding_type == scheme
    parameters = {name: parameter for name, parameter in model.named_parameters() if is_scheme(name)}
    assert parameters and not any(parameter.any() for parameter in parameters.values())
    if method == "keep":
        assert_same_outputs(stock, model, inputs())
    batch = inputs()
    model.train()(**batch, labels=batch["input_ids"]).loss.backward()
    reached = {name for name, parameter in parameters.items() if parameter.grad is not None and parameter.grad.any()}
    for layer in range(len(model.bert.encoder.layer)):
        own = {name for name in parameters if f".layer.{layer}." in name}
        assert reached & own if own else reached  # without any of its own it has those that all layers share


def test_keep_with_cross_attention(tmp_path):
    stock, model, _ = converted(tmp_path, "BertLMHeadModel", {"add_cross_attention": True})
    batch = {**inputs("BertLMHeadModel"), "encoder_hidden_states": torch.randn(2, 5, 24)}
    assert_same_outputs(stock, model, batch)


def test_what_a_method_is_given(tmp_path, monkeypatch):
    """The teacher computes what the source computes; texts, options and seed arrive; details reach the report."""
    stock, source = saved(tmp_path / "stock", "BertForMaskedLM")

    def apply(model, conversion):
        assert not any(parameter.any() for name, parameter in model.named_parameters() if is_scheme(name))
        assert_same_outputs(stock, build_teacher(conversion), inputs())
        assert conversion.spec.folder == source.resolve()
        found = {"texts": list(conversion.texts), "seed": conversion.seed}
        conversion.details.update(found | vars(conversion.options))
        return {}

    options = {"rounds": Option(3, "a positive integer", is_count), "ridge": Option(1.0, "a number", is_number)}
    monkeypatch.setitem(METHODS, "drop", dataclasses.replace(METHODS["drop"], learns=True, options=options))
    monkeypatch.setitem(APPLY, "drop", apply)
    given = {"texts": ["a cat"], "method_options": {"rounds": 5}, "seed": 7}
    report = convert(source, tmp_path / "out", method="drop", **given)
    assert report.details == {"texts": ["a cat"], "seed": 7, "rounds": 5, "ridge": 1.0}
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["details"] == report.details


# --- names, in both directions


def test_drop_keeps_every_reused_tensor(tmp_path):
    stock, model, report = converted(tmp_path, "BertForPreTraining", method="drop")
    restored, original = stock_tensors(model), stock.state_dict()
    reused = {step.target for step in report.of_kind("reused")}
    assert original.keys() - reused == {"bert." + TABLE, "bert.embeddings.token_type_embeddings.weight"}
    assert_equal_tensors({name: restored[name] for name in reused}, {name: original[name] for name in reused})


def gamma_beta(tensors):
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    return {
        next((name.replace(new, old) for new, old in names.items() if name.endswith(new)), name): tensor
        for name, tensor in tensors.items()
    }


def prefix(text):
    return lambda tensors: {text + name: tensor for name, tensor in tensors.items()}


def without(*names):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def with_position_ids(tensors):
    return {**tensors, "bert.embeddings.position_ids": torch.arange(POSITIONS)[None]}


DECODER, WORD_TABLE = "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"
BIASES = "cls.predictions.decoder.bias", "cls.predictions.bias"
LAYOUTS = {
    "as-saved": ("BertForPreTraining", without(DECODER, BIASES[0])),
    "untied": ("BertForMaskedLM", without()),
    "all-names": ("BertForPreTraining", without()),
    "gamma-beta": ("BertForPreTraining", gamma_beta),
    "module": ("BertForPreTraining", prefix("module.")),
    "model-gamma-beta": ("BertForMaskedLM", lambda tensors: prefix("model.")(gamma_beta(tensors))),
    "no-decoder": ("BertForMaskedLM", without(DECODER)),
    "no-word-table": ("BertForMaskedLM", without(WORD_TABLE)),
    "no-decoder-bias": ("BertForMaskedLM", without(BIASES[0])),
    "no-predictions-bias": ("BertForMaskedLM", without(BIASES[1])),
    "position-ids": ("BertForTokenClassification", with_position_ids),
    "head-bare": ("BertForTokenClassification", lambda t: {n.removeprefix("bert."): x for n, x in t.items()}),
    "base-bare": ("BertModel", without()),
    "base-prefixed": ("BertModel", prefix("bert.")),
    "base-module-prefixed": ("BertModel", prefix("module.bert.")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, layout):
    architecture, change = LAYOUTS[layout]
    stock = bert(architecture, tie_word_embeddings=layout != "untied")
    source = written(tmp_path / "stock", change(stock.state_dict()), stock.config, [architecture])
    before = contents(source)
    convert(source, tmp_path / "out")
    model = load(architecture, tmp_path / "out")
    assert_same_outputs(stock, model, inputs(architecture))
    assert_equal_tensors(stock_tensors(model), stock.state_dict())
    assert contents(source) == before


def test_layout_of_the_first_uploads(tmp_path):
    """bert-base-uncased: a BertForMaskedLM by its configuration, with a next sentence head and a pooler."""
    stock = bert("BertForPreTraining")
    tensors = gamma_beta(without(DECODER, BIASES[0])(stock.state_dict()))
    source = written(tmp_path / "stock", tensors, stock.config, ["BertForMaskedLM"], model_type=None)
    report = convert(source, tmp_path / "masked")
    batch = inputs()
    masked = load("BertForMaskedLM", tmp_path / "masked")
    assert_same_outputs(stock, masked, batch, names=[("prediction_logits", "logits")])
    dropped = {
        f"{part}.{name}" for part in ("bert.pooler.dense", "cls.seq_relationship") for name in ("weight", "bias")
    }
    assert {step.source for step in report.of_kind("dropped")} == dropped
    assert all(step.note == "not a part of BertForMaskedLM" for step in report.of_kind("dropped"))
    for architecture, twin in (("BertForPreTraining", stock), ("BertModel", stock.bert)):
        convert(source, tmp_path / architecture, architecture=architecture)
        assert_same_outputs(twin, load(architecture, tmp_path / architecture), batch)


def test_missing_pooler_of_an_encoder_starts_afresh_and_reproducibly(tmp_path):
    stock = bert()
    tensors = without("pooler.dense.weight", "pooler.dense.bias")(stock.state_dict())
    source = written(tmp_path / "stock", tensors, stock.config, [])
    report = convert(source, tmp_path / "one")
    torch.manual_seed(1)
    convert(source, tmp_path / "two")
    created = {step.target: step.note for step in report.of_kind("created")}
    assert created["pooler.dense.weight"] == "random, as in Transformers' BERT: the source lacks it"
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert_equal_tensors(one, two)
    assert 0.01 < one["pooler.dense.weight"].std() < 0.03
    states = "last_hidden_state"
    assert_same_outputs(stock, load("BertModel", tmp_path / "one"), inputs(), names=[(states, states)])


def test_an_untied_decoder_of_an_older_release_has_one_bias(tmp_path):
    stock = bert("BertForMaskedLM", tie_word_embeddings=False)
    source = written(tmp_path / "stock", without(BIASES[0])(stock.state_dict()), stock.config, ["BertForMaskedLM"])
    convert(source, tmp_path / "out")
    model = load("BertForMaskedLM", tmp_path / "out")
    assert torch.equal(model.cls.predictions.decoder.bias, stock.cls.predictions.bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_dtype_is_kept(tmp_path, dtype):
    stock, model, report = converted(tmp_path, "BertForMaskedLM", {"dtype": dtype})
    assert report.dtype == str(dtype).removeprefix("torch.") and model.dtype == dtype
    assert_equal_tensors(stock_tensors(model), stock.state_dict())


def test_mixed_dtypes_are_widened(tmp_path):
    stock = bert()
    tensors = {name: t if "dense" in name else t.half() for name, t in stock.state_dict().items()}
    source = written(tmp_path / "stock", tensors, stock.config, dtype="float16")
    assert convert(source, tmp_path / "out").dtype == "float32"
    restored = stock_tensors(load("BertModel", tmp_path / "out"))
    assert_equal_tensors(restored, {name: tensor.float() for name, tensor in tensors.items()})


# --- what lies beside the weights


@pytest.mark.parametrize("form", ["fast", "vocabulary"])
def test_tokenizer(tmp_path, form):
    _, source = saved(tmp_path / "stock")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "##s"]
    (source / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    if form == "fast":
        BertTokenizer.from_pretrained(source).save_pretrained(source)
    report = convert(source, tmp_path / "out")
    assert "vocab.txt" in report.files and ("tokenizer.json" in report.files) == (form == "fast")
    for name in report.files:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("a cats")["input_ids"] == [2, 5, 6, 7, 3]


def test_generation_config_is_kept(tmp_path):
    _, source = saved(tmp_path / "stock", "BertLMHeadModel")
    (source / "generation_config.json").write_text('{"max_length": 17, "pad_token_id": 0}')
    convert(source, tmp_path / "out")
    assert load("BertLMHeadModel", tmp_path / "out").generation_config.max_length == 17


def test_code_of_the_source_is_neither_run_nor_named(tmp_path):
    stock = bert()
    own = {"AutoModel": "own.OwnModel", "AutoConfig": "own.OwnConfig"}
    source = written(tmp_path / "stock", stock.state_dict(), stock.config, auto_map=own)
    (source / "own.py").write_text("raise SystemExit('code of the source was run')")
    convert(source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["auto_map"]["AutoModel"] == "modeling_relpos_bert.RelPosBertModel"
    assert "own" not in json.dumps(config)


def test_fields_of_the_configuration_are_kept(tmp_path):
    labels = {"num_labels": 4, "classifier_dropout": 0.25, "layer_norm_eps": 1e-5}
    stock, model, _ = converted(tmp_path, "BertForSequenceClassification", labels, method="drop")
    for field in ("id2label", "classifier_dropout", "layer_norm_eps", "vocab_size", "max_position_embeddings"):
        assert getattr(model.config, field) == getattr(stock.config, field)


def test_report(tmp_path):
    arguments = {"method": "drop", "position_embedding_type": "shaw"}
    stock, model, report = converted(tmp_path, "BertForMaskedLM", **arguments)
    assert isinstance(report, ConversionReport)
    written_report = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert written_report == json.loads(json.dumps(report.to_dict()))
    totals = report.totals
    table, types = POSITIONS * 24, 2 * 24
    assert totals["reused"]["parameters"] == stock.num_parameters() - table - types
    assert totals["folded"] == {"tensors": 2, "parameters": table + types}
    assert totals["dropped"] == {"tensors": 0, "parameters": 0}
    assert totals["created"]["parameters"] == sum(p.numel() for n, p in model.named_parameters() if is_scheme(n))
    kept = sum(totals[kind]["parameters"] for kind in ("reused", "folded", "created")) - table
    assert kept == model.num_parameters()
    steps = {step.target or step.source: step for step in report.steps}
    assert steps[DECODER].parameters == 0 and steps[DECODER].note == f"the same tensor as {WORD_TABLE}"
    assert steps["bert." + TABLE].shape == (POSITIONS, 24) and "token_type" in steps["bert." + TABLE].note
    assert "2 tensors folded (528 parameters)" in str(report)


# --- what is refused


def edit(**fields):
    """Change config.json; None removes a field."""
    return lambda source: folders.edit(source, **fields)


def edit_weights(change):
    """Change the tensors of model.safetensors."""

    def apply(source):
        tensors = {name: tensor.clone() for name, tensor in load_file(source / "model.safetensors").items()}
        tensors = change(tensors) or tensors
        save_file(tensors, source / "model.safetensors")

    return apply


def put(name, value):
    """Change or add a tensor, to what `value` makes of all."""
    return edit_weights(lambda tensors: tensors.update({name: value(tensors)}))


def set_value(value):
    def change(tensors):
        tensors[QUERY].view(-1)[3] = value

    return edit_weights(change)


QUERY = "bert.encoder.layer.1.attention.self.query.weight"
RELATIVE_TABLE = QUERY.replace("query", "distance_embedding")
# How to spoil a BertForMaskedLM folder, and what the error must say.
SPOILT = {
    "no-weights": (lambda source: (source / "model.safetensors").unlink(), "no model.safetensors", "give a"),
    "t5": (edit(model_type="t5"), "model_type = 't5'", "known: bert"),
    "nezha": (edit(use_relative_position=True), "use_relative_position = True", "NEZHA"),
    "alibi": (edit(position_embedding_type="alibi"), "position_embedding_type = 'alibi'", "'absolute'"),
    "lost-tables": (edit(position_embedding_type="relative_key"), "'relative_key'", "go back to the original files"),
    "tables": (
        put(RELATIVE_TABLE, lambda t: torch.zeros(39, 8)),
        RELATIVE_TABLE,
        "set position_embedding_type in config.json",
    ),
    "quantised-config": (edit(quantization_config={"bits": 8}), "quantization_config", "convert the checkpoint"),
    "quantised-tensor": (put(QUERY, lambda t: t[QUERY].to(torch.int8)), QUERY, "torch.int8", "quantise the result"),
    "unknown-architecture": (edit(architectures=["Bart"]), "architectures = 'Bart'", "architecture='BertModel'"),
    "shape": (put(QUERY, lambda t: t[QUERY][:16].clone()), QUERY, "(16, 24)", "(24, 24)", "config.json"),
    "vocabulary": (edit(vocab_size=61), WORD_TABLE, "(60, 24)", "(61, 24)"),
    "positions": (edit(max_position_embeddings=512), TABLE, "(20, 24)", "(512, 24)"),
    "missing": (edit_weights(without(QUERY)), QUERY, "lack 1 of 44 tensors of BertForMaskedLM", "restore the file ("),
    "missing-head": (
        edit_weights(lambda t: {n: x for n, x in t.items() if "transform" not in n}),
        "cls.predictions.transform.dense.weight",
        "architecture='BertModel'",
    ),
    "missing-pooler-of-a-head": (
        edit(architectures=["BertForNextSentencePrediction"]),
        "bert.pooler.dense.weight",
        "cls.seq_relationship.weight",
    ),
    "another-model": (edit_weights(prefix("other.")), "and 40 more; restore", "other.bert.embeddings"),
    "too-many-layers": (edit(num_hidden_layers=1), "bert.encoder.layer.1.", "not part of a BERT", "num_hidden_layers"),
    "two-spellings": (put("module." + QUERY, lambda t: t[QUERY].clone()), "module." + QUERY, "two spellings"),
    "tie": (put(DECODER, lambda t: t[WORD_TABLE] + 1), DECODER, WORD_TABLE, "tie_word_embeddings"),
    "nan": (set_value(torch.nan), QUERY, "1 values that are NaN or infinite, of 576"),
    "heads": (edit(num_attention_heads=5), "hidden_size = 24", "num_attention_heads = 5", "divides"),
}
# Arguments of convert, and what the error must say.
REFUSED = {
    "architecture": ({"architecture": "GPT2"}, "architecture = 'GPT2'", "BertForMaskedLM"),
    "scheme": ({"position_embedding_type": "bias"}, "position_embedding_type = 'bias'", "shaw"),
    "option": ({"position_options": {"window": 3}}, "position_options['window'] = 3", "no such option", "clip"),
    "option-value": ({"position_options": {"clip": -1}}, "position_options['clip'] = -1", "not accepted"),
    "options-text": ({"position_options": "clip=3"}, "position_options = 'clip=3'", "not a mapping"),
    "option-and-size": ({"position_options": {"clip": 20}}, "position_options['clip'] = 20", "19"),
    "drop-to-absolute": (
        {"position_embedding_type": "absolute", "method": "drop"},
        "position_embedding_type = 'absolute'",
        "the method removes",
    ),
    "method": ({"method": "guess"}, "method = 'guess'", "keep, drop"),
    "method-options-text": ({"method_options": "steps=5"}, "method_options = 'steps=5' is not a mapping"),
    "method-without-text": ({"method": "keep", "texts": ["a cat"]}, "method = 'keep' does not use them"),
    "revision": ({"revision": "main"}, "revision = 'main'", "local folder"),
}


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """A saved BertForMaskedLM, to be copied before it is spoilt."""
    torch.manual_seed(0)
    return saved(tmp_path_factory.mktemp("source") / "stock", "BertForMaskedLM")[1]


@pytest.mark.parametrize("case", [*SPOILT, *REFUSED])
def test_refusals_write_nothing(tmp_path, masked, case):
    source, arguments = Path(shutil.copytree(masked, tmp_path / "stock")), {}
    if case in SPOILT:
        spoil, *words = SPOILT[case]
        spoil(source)
    else:
        arguments, *words = REFUSED[case]
    assert_not_converted(source, tmp_path / "out", *words, **arguments)


@pytest.mark.parametrize("method", ABSOLUTE_METHODS)
@pytest.mark.parametrize("kind", ["relative_key", "relative_key_query"])
def test_a_relative_checkpoint_has_nothing_to_keep_or_drop(tmp_path, kind, method):
    source = FIXTURES / "legacy" / kind / "BertForMaskedLM"
    words = f"requires absolute positions.*position_embedding_type = '{kind}'.*or exact"
    assert_not_converted(source, tmp_path / "out", match=words, method=method)


@pytest.mark.parametrize("method", TO_RELATIVE)
def test_a_scheme_without_a_neutral_start_is_refused(tmp_path, masked, monkeypatch, method):
    monkeypatch.setattr(SCHEMES["shaw"], "zero_init_is_identity", False)
    words = "'shaw': the terms of the scheme cannot start at zero.* supports: .*relative_key"
    assert_not_converted(masked, tmp_path / "out", match=words, position_embedding_type="shaw", method=method)


@pytest.mark.parametrize(
    "source, words",
    {
        "nowhere/at/all": "cannot be a Hub repository",
        "a" * 5000: "source = 'a",
        "user/name": "could not be downloaded.*HF_HUB_OFFLINE.*hf download user/name",
        Path(__file__): "is a file; give the folder",
    }.items(),
)
def test_a_source_that_is_not_there(tmp_path, source, words):
    assert_not_converted(source, tmp_path / "out", match=words)


# --- the folder that is written


def test_out_that_exists(tmp_path, masked):
    out = tmp_path / "out"
    convert(masked, out)
    assert_not_converted(masked, out, match=r"exists; .*overwrite=True \(--overwrite\)", method="drop")


def fail(error, after=None):
    """A function that does its work, then fails."""

    def failing(*args, **kwargs):
        if after is not None:
            after(*args, **kwargs)
        raise error

    return failing


def full():
    return OSError(errno.ENOSPC, "No space left on device")


def half_written(model, folder, **kwargs):
    (Path(folder) / "model.safetensors").write_bytes(b"half")


def rename_failing_second(error):
    """Path.rename that fails where the finished folder is to be put in place."""
    rename = Path.rename

    def failing(self, target):
        if self.name.endswith(".partial"):
            raise error
        return rename(self, target)

    return failing


def stirred_result(conversion, model):
    """In place of the source, a model with other numbers than the result."""
    return stir(copy.deepcopy(model).double())


SAVE = (RelPosBertPreTrainedModel, "save_pretrained")
# what fails, how, and the words of the error; none where it was interrupted
FAILURES = {
    "save-full": (SAVE, fail(full(), half_written), "free some space"),
    "save-safetensors": (
        SAVE,
        fail(SafetensorError("I/O error: No space left on device (os error 28)"), half_written),
        "free some space",
    ),
    "code-full": ((remote_code, "_write_whole"), fail(full()), "free some space"),
    "report-full": ((Path, "write_text"), fail(full()), "free some space"),
    "not-permitted": ((Path, "mkdir"), fail(PermissionError(errno.EACCES, "Permission denied")), "is writable"),
    "rename": ((Path, "rename"), rename_failing_second(PermissionError(errno.EACCES, "no")), "is writable"),
    "outputs": ((verify, "source_model"), stirred_result, "outputs of the result differ from the source's"),
    "save-interrupted": (SAVE, fail(KeyboardInterrupt(), half_written), None),
    "rename-interrupted": ((Path, "rename"), rename_failing_second(KeyboardInterrupt()), None),
}


@pytest.mark.parametrize("existing", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("attribute, failure, words", FAILURES.values(), ids=FAILURES)
def test_a_failure_while_writing_leaves_nothing_behind(
    tmp_path, masked, monkeypatch, attribute, failure, words, existing
):
    out = tmp_path / "out" if existing else tmp_path / "new" / "out"
    if existing:
        convert(masked, out, method="drop")
    before, listed = contents(tmp_path), sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(*attribute, failure)
        with pytest.raises(ConversionError if words else KeyboardInterrupt, match=words) as caught:
            convert(masked, out, overwrite=existing)
    assert words != "free some space" or str(out) in str(caught.value)
    assert contents(tmp_path) == before and sorted(tmp_path.rglob("*")) == listed


@pytest.mark.parametrize("name", [QUERY, QUERY.replace("query", "distance_embedding"), BIASES[1]])
def test_a_file_that_comes_back_different_is_removed(tmp_path, masked, monkeypatch, name):
    save = RelPosBertPreTrainedModel.save_pretrained

    def damaged(model, folder, **kwargs):
        save(model, folder, **kwargs)
        with edit_tensors(Path(folder)) as tensors:
            tensors[name].view(-1)[5] += 1e-7

    monkeypatch.setattr(RelPosBertPreTrainedModel, "save_pretrained", damaged)
    assert_not_converted(masked, tmp_path / "out", "differs from what was written")


def test_a_method_that_changes_more_than_it_says_is_caught(tmp_path, masked, monkeypatch):
    def apply(model, source):
        model.state_dict()[QUERY].view(-1)[5] += 1e-7
        return {}

    monkeypatch.setitem(APPLY, "drop", apply)
    assert_not_converted(masked, tmp_path / "out", QUERY, method="drop")


# --- the Hub


def test_a_repository_of_the_hub(tmp_path, hub):
    """A pickle is downloaded when it is asked for, and never beside safetensors."""
    stock, source = saved(tmp_path / "stock", "BertForMaskedLM")
    (source / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    others = {"pytorch_model.bin": b"a pickle", "own.py": "raise SystemExit", "onnx/x.model": b"other"}
    commit = hub.put("user/stock", {**files, **others})
    folder = pickled(tmp_path / "pickled", stock.state_dict(), source / "config.json", sharded=True)
    hub.put("user/pickled", contents(folder))
    hub.run(
        f"""
        import pytest
        from hf_relpos.conversion import ConversionError, convert

        report = convert("user/stock", {str(tmp_path / "out")!r})
        assert report.source == "user/stock" and report.revision == {commit!r}, report.revision
        for arguments, words in (
            (("user/none",), "no such Hub repository that you may read"),
            (("user/stock", "v9"), "no such Hub repository at revision 'v9'"),
            (("user/pickled",), "allow_pickle=True"),
        ):
            with pytest.raises(ConversionError, match=words):
                convert(arguments[0], "out", revision=(arguments + (None,))[1])
        convert("user/stock", "both", allow_pickle=True)
        convert("user/pickled", {str(tmp_path / "other")!r}, allow_pickle=True)
        """,
        without=(),
    )
    fetched = {request.path for request in hub.requests if request.method == "GET" and "/resolve/" in request.path}
    assert fetched and not any(path.endswith(".py") or "onnx" in path for path in fetched)
    assert all("user/pickled" in path for path in fetched if path.endswith(".bin"))  # when asked for, and in need
    for name in ("out", "other"):
        assert_same_outputs(stock, load("BertForMaskedLM", tmp_path / name), inputs())
    assert (tmp_path / "out" / "vocab.txt").exists()
