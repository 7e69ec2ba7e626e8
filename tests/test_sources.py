"""Checkpoints with absolute positions of other families than BERT: what each computes is kept, head by head."""

import json
import os

import pytest
import torch
import transformers
from folders import assert_not_converted, edit
from oracles import tiny_sizes
from safetensors.torch import load_file, save_file
from stock import random_model
from test_legacy import LEGACY, check_old_outputs
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast, RobertaTokenizer

import hf_relpos
from hf_relpos import RelPosBertConfig, RelPosBertForMaskedLM, RelPosBertModel
from hf_relpos.conversion import convert, verify
from hf_relpos.conversion.card import command
from hf_relpos.families.family import COUNTERPARTS
from hf_relpos.families.names import is_scheme
from hf_relpos.families.registry import FAMILIES


WORDS, POSITIONS, LENGTH = 50, 20, 9
ABSOLUTE = [name for name in FAMILIES if name not in ("bert", "nezha") and not FAMILIES[name].read_directly]
PADDED = [name for name in ABSOLUTE if FAMILIES[name](FAMILIES[name].all_defaults()).cut]
HEADS = [(family, suffix) for family in ABSOLUTE for suffix in FAMILIES[family].suffixes]
SIZES = tiny_sizes(hidden_size=16, num_attention_heads=2, intermediate_size=24, max_position_embeddings=POSITIONS)
OWN = {
    "distilbert": {"dim": 16, "n_heads": 2, "n_layers": 2, "hidden_dim": 24},
    "electra": {"embedding_size": 16},
    "albert": {"embedding_size": 12, "num_hidden_layers": 4, "num_hidden_groups": 2},
    "ernie": {"use_task_id": True},
}
BERT_ONLY = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")


def saved(folder, family, suffix="Model", **fields):
    """A tiny stock model, every parameter of which has an effect, and the folder it was saved to."""
    sizes = {name: value for name, value in SIZES.items() if family != "distilbert" or name not in BERT_ONLY}
    decoder = {"is_decoder": True} if suffix == "ForCausalLM" else {}
    fields = {**sizes, **OWN.get(family, {}), **decoder, **fields}
    return random_model(family, FAMILIES[family].class_prefixes[0] + suffix, folder, spread=0.3, **fields), folder


def batch(family, decoder=False, multiple=False):
    """Rows of two lengths, padded on the right as the family's tokenizer does; no token types."""
    padding = 1 if family in PADDED else 0
    ids = torch.randint(2, WORDS, (2, LENGTH))
    mask = torch.ones_like(ids)
    ids[1, 6:], mask[1, 6:] = padding, 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if multiple:
        inputs = {name: tensor[None] for name, tensor in inputs.items()}
    return {**inputs, "use_cache": False} if decoder else inputs


@torch.no_grad()
def assert_same_outputs(stock, model, inputs, tolerance=2e-6):
    """At the tokens that are not padding; in float32."""
    wanted, found = stock(**inputs), model(**inputs)
    real = inputs["attention_mask"].bool()
    assert wanted.keys() <= found.keys()
    for name in wanted:
        one, other = wanted[name], found[name]
        if one.shape[: real.dim()] == real.shape:
            one, other = one[real], other[real]
        assert (one - other).abs().max() / one.abs().max() <= tolerance, name


def load(folder, report):
    return getattr(hf_relpos, report.converted_to).from_pretrained(folder).eval()


def converted(folder, family, suffix="Model", arguments=None, **fields):
    """A tiny stock model with these fields, what it is converted to, and the report."""
    stock, source = saved(folder / "stock", family, suffix, **fields)
    report = convert(source, folder / "out", **arguments or {})
    return stock, load(folder / "out", report), report


@pytest.mark.covering(1)
@pytest.mark.parametrize("family, suffix", HEADS)
def test_every_head(tmp_path, family, suffix):
    """The converter's own comparison is in float64, with token types; this one as a user would run both."""
    stock, model, report = converted(tmp_path, family, suffix, {"position_embedding_type": "relative_key"})
    assert report.method == "keep" and report.difference <= (1e-6 if family == "ernie" else 1e-12)
    assert report.architecture == FAMILIES[family].class_prefixes[0] + suffix
    assert report.converted_to == "RelPos" + COUNTERPARTS[suffix]
    inputs = batch(family, suffix == "ForCausalLM", suffix == "ForMultipleChoice")
    assert_same_outputs(stock, model, inputs)
    assert type(AutoModel.from_pretrained(tmp_path / "out")) is RelPosBertModel
    counted = sum(step.parameters for step in report.steps if step.source and step.kind != "created")
    shared = {"albert": 2}.get(family, 1)
    layers = sum(p.numel() for name, p in stock.named_parameters() if "albert_layer_groups" in name)
    assert counted == stock.num_parameters() + (shared - 1) * layers


@pytest.mark.parametrize("family", ABSOLUTE)
def test_drop_is_purely_relative_and_has_no_limit(tmp_path, family):
    arguments = {"method": "drop", "position_embedding_type": "relative_key"}
    stock, model, _ = converted(tmp_path, family, "ForMaskedLM", arguments)
    assert model.bert.embeddings.position_embeddings is None
    with torch.no_grad():
        assert model(torch.randint(2, WORDS, (1, 3 * POSITIONS))).logits.isfinite().all()
        table = stock.base_model.embeddings.position_embeddings.weight
        cut = 2 if family in PADDED else 0
        table.copy_(table[cut:].mean(0, keepdim=True).expand_as(table))
    assert_same_outputs(stock, model, batch(family), tolerance=1e-5)


@pytest.mark.parametrize("family", ABSOLUTE)
def test_shards_and_other_names(tmp_path, family):
    """Shards, and one file with the old names of tensors; an encoder stored bare, and with the prefix of a head's."""
    stock, _ = saved(tmp_path / "stock", family, "ForMaskedLM")
    stock.save_pretrained(tmp_path / "shards", max_shard_size="4KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2

    def renamed(name, model, rename):
        model.save_pretrained(tmp_path / name)
        path = tmp_path / name / "model.safetensors"
        save_file({rename(key): tensor for key, tensor in load_file(path).items()}, path, {"format": "pt"})

    def old(name):
        norm = name.rsplit(".", 2)[-2].lower().endswith("norm")
        return "module." + (name.replace(".weight", ".gamma").replace(".bias", ".beta") if norm else name)

    renamed("old", stock, old)
    renamed("bare", stock.base_model, str)
    renamed("prefixed", stock.base_model, lambda name: f"{stock.base_model_prefix}.{name}")
    for one, other, head in (("shards", "old", "ForMaskedLM"), ("bare", "prefixed", "Model")):
        reports = [convert(tmp_path / name, tmp_path / f"{name}-out") for name in (one, other)]
        assert {report.converted_to for report in reports} == {f"RelPosBert{head}"}
        first, second = (load_file(tmp_path / f"{name}-out" / "model.safetensors") for name in (one, other))
        assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert any(name.endswith(".gamma") for name in load_file(tmp_path / "old" / "model.safetensors"))
    assert_same_outputs(stock, RelPosBertForMaskedLM.from_pretrained(tmp_path / "old-out").eval(), batch(family))


@pytest.mark.parametrize("family", PADDED)
def test_rows_of_padding_are_cut_off(tmp_path, family):
    """514 rows are 512 positions; both numbers and the rows that go are in the report."""
    stock, model, report = converted(tmp_path, family)
    table = stock.embeddings.position_embeddings.weight
    assert model.config.max_position_embeddings == POSITIONS - 2
    assert torch.equal(model.embeddings.position_embeddings.weight, table[2:])
    (step,) = report.of_kind("dropped")
    assert step.shape == (2, 16) and step.parameters == 32 and step.note.startswith("rows 0 to 1")
    with pytest.raises(ValueError, match=f"max_position_embeddings = {POSITIONS - 2}"):
        model(torch.full((1, POSITIONS - 1), 5))


@pytest.mark.parametrize("family", ["roberta", "mpnet"])
def test_the_comparison_sees_positions_that_are_off_by_one(tmp_path, monkeypatch, family):
    _, source = saved(tmp_path / "stock", family)
    original = verify.source_model

    def shifted(conversion, model):
        stock = original(conversion, model)
        with torch.no_grad():
            table = stock.embeddings.position_embeddings.weight
            table.copy_(table.roll(1, 0))
        return stock

    monkeypatch.setattr("hf_relpos.conversion.verify.source_model", shifted)
    assert_not_converted(source, tmp_path / "out", "outputs of the result differ from the source's")


def test_token_types_that_a_source_lacks_are_zero(tmp_path):
    """So that a tokenizer may pass none, or zeros, or ones."""
    _, model, report = converted(tmp_path, "distilbert")
    types = model.embeddings.token_type_embeddings.weight
    assert types.shape == (2, 16) and not types.any()
    assert {step.note for step in report.of_kind("created") if "token_type" in step.target} == {"zero"}
    inputs = batch("distilbert")
    with torch.no_grad():
        plain = model(**inputs).last_hidden_state
        assert torch.equal(plain, model(**inputs, token_type_ids=torch.ones(2, LENGTH).long()).last_hidden_state)


@pytest.mark.parametrize("suffix", ["ForSequenceClassification", "ForMultipleChoice"])
def test_heads_with_another_pooler_are_refused(tmp_path, suffix):
    """DistilBERT's goes through a ReLU, ours through tanh."""
    _, source = saved(tmp_path / "stock", "distilbert", suffix)
    words = rf"DistilBert{suffix}' has no .*architecture='DistilBertModel'"
    assert_not_converted(source, tmp_path / "out", match=words)
    report = convert(source, tmp_path / "out", architecture="DistilBertModel")
    assert {step.note for step in report.of_kind("dropped")} == {"not a part of BertModel"}


# --- MPNet, which is relative and absolute


def test_mpnet_keeps_its_bias(tmp_path):
    stock, model, report = converted(tmp_path, "mpnet", max_position_embeddings=162)
    assert report.position_embedding_type == "t5" and report.difference <= 1e-12
    assert (report.position_options["buckets"], report.position_options["max_distance"]) == (32, 128)
    bias = model.encoder.distance_embedding.relative_attention_bias.weight
    assert torch.equal(bias, stock.encoder.relative_attention_bias.weight)
    ids = torch.randint(2, WORDS, (1, 160))  # distances past all its buckets
    assert_same_outputs(stock, model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    source = tmp_path / "stock"
    dropped = convert(source, tmp_path / "relative", method="drop")
    assert dropped.position_embedding_type == "t5"  # all that is left of its positions
    both = convert(source, tmp_path / "both", position_embedding_type="shaw", position_options={"clip": 3})
    assert both.position_embedding_type == ["t5", "shaw"] and both.difference <= 1e-12
    assert both.position_options["shaw"]["clip"] == 3 and both.position_options["t5"]["buckets"] == 32
    combined = load(tmp_path / "both", both)
    assert torch.equal(combined.encoder.distance_embedding.parts[0].relative_attention_bias.weight, bias)
    assert_same_outputs(stock, combined, batch("mpnet"))
    origin = {step.source: step.kind for step in both.steps if step.source}
    assert origin["encoder.relative_attention_bias.weight"] == "reused"


# --- embeddings of a width of their own


@pytest.mark.parametrize("family", ["electra", "albert"])
def test_projected_embeddings(tmp_path, family):
    stock, model, report = converted(tmp_path, family, "ForMaskedLM", embedding_size=12)
    assert report.difference <= 1e-12 and model.config.embedding_size == model.config.input_size == 12
    assert model.bert.embeddings.embeddings_project.weight.shape == (16, 12)
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert_same_outputs(stock, model, batch(family))
    model.resize_token_embeddings(WORDS + 3)
    assert model(torch.full((1, 4), WORDS + 2)).logits.shape == (1, 4, WORDS + 3)


def test_a_stray_embedding_size_of_a_bert_is_not_read():
    """Some files of stock BERT have the field, which nothing reads."""
    bert = transformers.BertConfig(**SIZES, embedding_size=128)
    assert RelPosBertConfig.from_bert(bert).embedding_size is None
    ours = RelPosBertConfig(**SIZES, embedding_size=12)
    assert RelPosBertConfig.from_bert(ours, hidden_act="relu").embedding_size == 12


@pytest.mark.parametrize("groups, inner", [(1, 1), (4, 1), (2, 2)])
def test_layers_that_albert_shares(tmp_path, groups, inner):
    stock, model, report = converted(tmp_path, "albert", num_hidden_groups=groups, inner_group_num=inner)
    assert len(model.encoder.layer) == 4 * inner
    assert_same_outputs(stock, model, batch("albert"))
    origins = [step.source for step in report.steps if "attention.self.query.weight" in (step.target or "")]
    assert len(origins) == 4 * inner and len(set(origins)) == groups * inner


BUCKETS = {"position_embedding_type": "t5", "position_options": {"buckets": 8}}
REFUSED = {
    "albert": ("albert", {"embedding_size": 16}, {}, "embedding_size = hidden_size = 16"),
    "mpnet": ("mpnet", {"relative_attention_num_buckets": 40}, {}, "relative_attention_num_buckets = 40"),
    "other buckets": (
        "mpnet",
        {},
        BUCKETS,
        r"position_options = \{'buckets': 8\}: the source has \{'buckets': 32.*leave them out",
    ),
    "exact": ("roberta", {}, {"method": "exact"}, "has absolute ones .* choose keep or drop"),
}


@pytest.mark.parametrize("family, fields, arguments, words", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(tmp_path, family, fields, arguments, words):
    _, source = saved(tmp_path / "stock", family, **fields)
    assert_not_converted(source, tmp_path / "out", match=words, **arguments)


# --- tokenizers


@pytest.mark.parametrize("family", ["roberta", "distilbert", "albert", "mpnet"])
def test_the_tokenizer_of_another_family(tmp_path, family):
    """AutoTokenizer reads from its own files which one it is, and what it passes is what the model takes."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    _, source = saved(tmp_path / "stock", family)
    words = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 4, "cat": 5}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if FAMILIES[family].token_types else [])]
    named = {"pad_token": "<pad>", "unk_token": "<unk>", "model_input_names": inputs}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(source)
    convert(source, tmp_path / "out")
    found = AutoTokenizer.from_pretrained(tmp_path / "out")
    encoded = found(["a cat", "cat"], padding=True, return_tensors="pt")
    assert encoded["input_ids"].tolist() == [[4, 5], [5, 1]] and ("token_type_ids" in encoded) == (len(inputs) == 3)
    assert RelPosBertModel.from_pretrained(tmp_path / "out")(**encoded).last_hidden_state.shape == (2, 2, 16)


@pytest.mark.parametrize("named", [True, False], ids=["named", "not named"])
@pytest.mark.parametrize("files", [("vocab.json", "merges.txt"), ("tokenizer.json",)], ids=["vocabulary", "fast"])
def test_a_tokenizer_whose_files_do_not_name_it(tmp_path, named, files):
    """roberta-base: config.json alone says that it is RoBERTa's."""
    _, source = saved(tmp_path / "stock", "roberta")
    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *"acts", "\u0120", "ca", "cat", "\u0120cat"]
    vocabulary = {word: number for number, word in enumerate(words)}
    merges = [("c", "a"), ("ca", "t"), ("\u0120", "cat")]
    RobertaTokenizer(vocab=vocabulary, merges=merges).save_pretrained(source)
    if not named:
        edit(source, "tokenizer_config.json", tokenizer_class=None)
    if "vocab.json" in files:
        (source / "tokenizer.json").unlink()
        (source / "vocab.json").write_text(json.dumps(vocabulary))
        (source / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, merges)) + "\n")
    report = convert(source, tmp_path / "out")
    assert set(files) <= set(report.files)
    one, two = (AutoTokenizer.from_pretrained(folder) for folder in (source, tmp_path / "out"))
    assert type(one) is type(two) is RobertaTokenizer
    assert one("cat cats")["input_ids"] == two("cat cats")["input_ids"] == [0, 11, 12, 8, 2]


# --- pickles


def pickled(folder, tensors, config, sharded):
    """A folder as Transformers wrote it before safetensors: `pytorch_model.bin`, or shards and their index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(config.read_bytes())
    if not sharded:
        torch.save(tensors, folder / "pytorch_model.bin")
        return folder
    index = {name: f"pytorch_model-0000{1 + number % 2}-of-00002.bin" for number, name in enumerate(tensors)}
    for file in set(index.values()):
        torch.save({name: tensors[name] for name in tensors if index[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("kind", ["relative_key", "relative_key_query"])
def test_a_pickled_relative_checkpoint_keeps_its_tables(tmp_path, kind, sharded):
    """The converter reads it when asked, `from_pretrained` as Transformers does; both give the old outputs."""
    legacy = LEGACY / kind / "BertForMaskedLM"
    tensors = load_file(legacy / "model.safetensors")
    source = pickled(tmp_path / "source", tensors, legacy / "config.json", sharded)
    words = r"Pickles are not read unasked.*allow_pickle=True \(--allow-pickle\)"
    assert_not_converted(source, tmp_path / "out", match=words)
    report = convert(source, tmp_path / "out", allow_pickle=True)
    assert report.method == "exact" and report.difference <= 1e-12 and report.arguments["allow_pickle"] is True
    assert command(report).endswith("allow_pickle=True)")
    found = load_file(tmp_path / "out" / "model.safetensors")
    tables = [name for name in tensors if is_scheme(name)]
    assert len(tables) == 2 and all(torch.equal(found[name], tensors[name]) for name in tables)
    for folder in (tmp_path / "out", source):
        check_old_outputs(RelPosBertForMaskedLM.from_pretrained(folder), legacy)


class Code:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return os._exit, (3,)


PICKLES_REFUSED = {
    "code": (Code(), "could run code"),
    "code in a tensor's place": ({"embeddings.word_embeddings.weight": Code()}, "could run code"),
    "a list": ([torch.zeros(2)], "holds a list"),
    "nested": ({"epoch": 3, "state_dict": {}}, "'epoch', 'state_dict': not a plain tensor"),
    "sparse": ({"embeddings.word_embeddings.weight": torch.eye(3).to_sparse()}, "not a plain tensor"),
    "garbage": (b"garbage", "corrupt"),
    "cut short": (None, "corrupt"),
}


@pytest.mark.parametrize("content, words", PICKLES_REFUSED.values(), ids=PICKLES_REFUSED)
def test_pickles_of_other_things_are_refused(tmp_path, content, words):
    legacy = LEGACY / "relative_key" / "BertModel"
    tensors = load_file(legacy / "model.safetensors")
    source = pickled(tmp_path / "source", content or tensors, legacy / "config.json", sharded=False)
    path = source / "pytorch_model.bin"
    if content is None or isinstance(content, bytes):
        path.write_bytes(content or path.read_bytes()[:-9])
    assert_not_converted(source, tmp_path / "out", match=words, allow_pickle=True)
