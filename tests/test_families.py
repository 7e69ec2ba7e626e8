"""Relative checkpoints of other architectures: whole models become ours, and attention layers of the others too.

Folders and their contents: scripts/maintenance/golden/families.py. The layers are those of tests/schemes.
"""

import itertools
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from folders import assert_not_converted, edit, edit_tensors
from oracles import stir, tiny_sizes
from safetensors.torch import load_file
from stock import older_than
from test_legacy import check_old_outputs
from transformers import CONFIG_MAPPING, AutoModel, BertConfig

import hf_relpos
from hf_relpos import RelPosBertConfig, RelPosBertModel
from hf_relpos.conversion import convert
from hf_relpos.families.family import COUNTERPARTS
from hf_relpos.families.names import is_scheme
from hf_relpos.families.recognition import recognise
from hf_relpos.families.registry import FAMILIES
from hf_relpos.families.table import example
from hf_relpos.families.tensors import DTYPES


FIXTURES = Path(__file__).parent / "fixtures"
FAMILY_FOLDERS = sorted(path for path in (FIXTURES / "families").iterdir())
BERT_FOLDERS = sorted(FIXTURES.glob("legacy/*/Bert*"))
# of each folder: the prefix and the suffix of the class that wrote it, the scheme
EXPECTED = {
    "nezha": ("Nezha", "ForPreTraining", "nezha"),
    "nezha-original": ("Bert", "ForPreTraining", "nezha"),
    "roberta-relative_key": ("Roberta", "ForMaskedLM", "relative_key"),
    "roberta-relative_key_query": ("Roberta", "ForSequenceClassification", "relative_key_query"),
    "electra-relative_key": ("Electra", "ForMaskedLM", "relative_key"),
    "electra-relative_key_query": ("Electra", "Model", "relative_key_query"),
    "ernie-relative_key": ("Ernie", "ForPreTraining", "relative_key"),
    "ernie-relative_key_query": ("Ernie", "ForMaskedLM", "relative_key_query"),
}


def name_of(folder):
    return folder.name


def load(folder, report, **arguments):
    """The result, by the class that the report names."""
    return getattr(hf_relpos, report.converted_to).from_pretrained(folder, **arguments)


# --- whole models


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("folder", FAMILY_FOLDERS, ids=name_of)
def test_old_outputs(folder, backend, tmp_path):
    report = convert(folder, tmp_path / "out")
    prefix, head, scheme = EXPECTED[folder.name]
    assert report.architecture == prefix + head and report.converted_to == f"RelPosBert{head}"
    assert report.position_embedding_type == scheme
    assert report.method == "exact" and report.difference <= (1e-6 if folder.name == "ernie-relative_key" else 1e-12)
    if scheme == "nezha" and backend == "sdpa":
        backend = None  # the value term is beyond it
    model = load(tmp_path / "out", report, attn_implementation=backend)
    assert not model.config.has_absolute_table and model.config.model_type == "relpos_bert"
    check_old_outputs(model, folder, missing=["logits"] if head == "Model" else ())
    assert type(AutoModel.from_pretrained(tmp_path / "out")) is RelPosBertModel


@pytest.mark.parametrize("folder", BERT_FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_bert_of_the_old_library(folder, tmp_path):
    """Its scheme is ours: nothing but the dead table of absolute positions goes."""
    report = convert(folder, tmp_path / "out")
    assert report.method == "exact" and report.difference <= 1e-12
    assert {step.kind for step in report.steps if not step.note} == {"reused"}
    assert [step.note for step in report.of_kind("dropped")] == ["unused with relative positions"]
    model = load(tmp_path / "out", report)
    check_old_outputs(model, folder)
    direct = type(model).from_pretrained(folder).state_dict()
    assert direct.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, direct[name]) for name, tensor in model.state_dict().items())


def relative(folder, family, suffix, kind, dtype=torch.float32, **fields):
    """A stock model of Transformers v5 as 4.57 would have saved it with relative positions."""
    sizes = tiny_sizes(hidden_size=16, num_attention_heads=2, intermediate_size=24, max_position_embeddings=20)
    sizes |= {"embedding_size": 16} if family == "electra" else {}
    config = CONFIG_MAPPING[family](**sizes, is_decoder=suffix in ("ForCausalLM", "LMHeadModel"), **fields)
    architecture = FAMILIES[family].class_prefixes[0] + suffix
    stir(getattr(transformers, architecture)(config), 0.3).to(dtype).save_pretrained(folder)
    with edit_tensors(folder) as tensors:
        for name in [name for name in tensors if name.endswith("attention.self.query.weight")]:
            tensors[name.replace("query", "distance_embedding")] = torch.randn(39, 8).to(dtype)
    edit(folder, position_embedding_type=kind)
    return folder


RELATIVE = [name for name, family in FAMILIES.items() if family.legacy_types and name != "nezha"]
HEADS = [(family, suffix) for family in RELATIVE for suffix in FAMILIES[family].suffixes]
if older_than("5.24"):  # Transformers 5.5 builds it without the pooler that its forward reads
    HEADS.remove(("camembert", "ForMultipleChoice"))


@pytest.mark.covering(1)
@pytest.mark.parametrize("family, suffix", HEADS, ids=lambda value: str(value))
def test_every_head(tmp_path, family, suffix):
    """The converter compares with the family's own class, into which the old attention was put."""
    kind = "relative_key_query" if len(suffix) % 2 else "relative_key"
    source = relative(tmp_path / "stock", family, suffix, kind)
    report = convert(source, tmp_path / "out")
    assert report.difference <= 1e-12
    assert report.architecture == FAMILIES[family].class_prefixes[0] + suffix
    assert report.converted_to == "RelPos" + COUNTERPARTS[suffix]
    assert not [step for step in report.of_kind("dropped") if "position_embeddings" not in step.source]
    created = [step.target for step in report.of_kind("created")]
    assert all("pooler" in name for name in created) and bool(created) == (family == "electra" and suffix == "Model")


IGNORING = [name for name, each in FAMILIES.items() if "is_decoder" in each.ignored_fields(())]
if older_than("5.14"):  # MPNet's own class reads the field there
    IGNORING.remove("mpnet")


@pytest.mark.parametrize("kind", IGNORING)
def test_fields_that_the_family_ignores(tmp_path, kind):
    """They have no effect, as in the family's own class, which the converter compares with."""
    source = tmp_path / "stock"
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
    more = {"albert": {"embedding_size": 8}, "xlnet": {"d_head": 8}, "deberta": relative, "deberta-v2": relative}
    AutoModel.from_config(CONFIG_MAPPING[kind](**sizes, **more.get(kind, {}))).save_pretrained(source)
    edit(source, is_decoder=True, attention_window=1, feed_forward_type="glu", classifier_dropout=0.5)
    assert convert(source, tmp_path / "out").difference <= 1e-5
    folders = [tmp_path / "out", *([source] if FAMILIES[kind].read_directly else [])]
    for folder in folders:
        config = RelPosBertModel.from_pretrained(folder).config
        assert (config.is_decoder, config.attention_window, config.feed_forward_type) == (False, None, "mlp")


@pytest.mark.parametrize("suffix", FAMILIES["nezha"].suffixes)
def test_every_head_of_nezha(tmp_path, suffix):
    """A stock BERT with the names of NEZHA, and without its table of positions."""
    source, prefix = relative(tmp_path / "stock", "bert", suffix, None), "nezha." if suffix == "Model" else ""
    buffer = "nezha.encoder.layer.0.attention.self.relative_positions_encoding.positions_encoding"
    with edit_tensors(source) as tensors:
        for name in [*tensors]:
            tensor = tensors.pop(name)
            if "position_embeddings" not in name and not is_scheme(name):
                tensors[prefix + name.replace("bert.", "nezha.")] = tensor
        tensors[buffer] = torch.zeros(4, 4, 8)
    edit(source, model_type="nezha", architectures=[f"Nezha{suffix}"], max_relative_position=None, embedding_size=128)
    report = convert(source, tmp_path / "out")
    assert report.difference <= 1e-12 and report.position_options["max_relative_position"] == 64
    assert [step.note for step in report.of_kind("dropped")] == ["a buffer of an older release"]
    assert load(tmp_path / "out", report).config.embedding_size is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_task_types_are_folded(tmp_path, dtype):
    """What no task_type_ids stand for; the sum is rounded to the dtype of the weights."""
    source = relative(tmp_path / "stock", "ernie", "Model", "relative_key", dtype, use_task_id=True)
    tensors = load_file(source / "model.safetensors")
    report = convert(source, tmp_path / "out")
    types, tasks = (tensors[f"embeddings.{name}_type_embeddings.weight"] for name in ("token", "task"))
    model = RelPosBertModel.from_pretrained(tmp_path / "out", dtype="auto")
    expected = (types.double() + tasks[0].double()).to(dtype)
    assert torch.equal(model.embeddings.token_type_embeddings.weight, expected)
    folded = {step.source: step.note for step in report.of_kind("folded")}
    assert folded == {
        "embeddings.token_type_embeddings.weight": "plus the vector of task type 0",
        "embeddings.task_type_embeddings.weight": "into embeddings.token_type_embeddings.weight",
    }
    assert not hasattr(model.config, "use_task_id")


def test_rows_of_roberta(tmp_path):
    """514 positions, of which real tokens never took the first two: 1027 rows, none of them in use differently."""
    source = relative(tmp_path / "stock", "roberta", "Model", "relative_key", type_vocab_size=1)
    with edit_tensors(source) as tensors:
        for name in filter(is_scheme, tensors):
            tensors[name] = torch.randn(1027, 8)
        tensors["embeddings.position_embeddings.weight"] = torch.randn(514, 16)
    convert(edit(source, max_position_embeddings=514), tmp_path / "out")
    model = RelPosBertModel.from_pretrained(tmp_path / "out")
    assert model.encoder.layer[0].attention.self.distance_embedding.weight.shape == (1027, 8)
    assert (model.config.pad_token_id, model.embeddings.word_embeddings.padding_idx) == (1, 1)
    assert model.state_dict()["embeddings.token_type_embeddings.weight"].shape == (1, 16)


def test_heads_that_bert_does_not_have(tmp_path):
    """One of pre-training is left behind, and one of a task is refused."""
    report = convert(relative(tmp_path / "pre", "electra", "ForPreTraining", "relative_key"), tmp_path / "encoder")
    assert report.converted_to == "RelPosBertModel" and report.difference <= 1e-12
    notes = {step.note for step in report.of_kind("dropped") if "position" not in step.source}
    assert notes == {"the head of ElectraForPreTraining, which BERT does not have"}
    source = relative(tmp_path / "stock", "electra", "ForSequenceClassification", "relative_key")
    assert_not_converted(source, tmp_path / "out", "no counterpart here; ", "pass architecture='ElectraModel'")
    report = convert(source, tmp_path / "out", architecture="ElectraModel")
    assert report.converted_to == "RelPosBertModel" and report.difference <= 1e-12


@pytest.mark.parametrize("family", ["roberta", "electra"])
def test_a_language_head_with_another_activation(tmp_path, family):
    """These heads apply GELU in any case, BERT's the configuration's function: with another one they differ."""
    source = relative(tmp_path / "stock", family, "ForMaskedLM", "relative_key", hidden_act="relu")
    report = convert(source, tmp_path / "out")
    assert report.converted_to == "RelPosBertModel" and report.difference <= 1e-12
    head = "BertForMaskedLM"
    assert_not_converted(source, tmp_path / "other", f"architecture = '{head}' has no counterpart", architecture=head)


@pytest.mark.parametrize("asked", ["RobertaModel", "BertModel"])
def test_the_encoder_alone(tmp_path, asked):
    report = convert(ROBERTA, tmp_path / "out", architecture=asked)
    assert (report.architecture, report.converted_to) == ("RobertaModel", "RelPosBertModel")


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in CONFIG_MAPPING and name != "bert"])
def test_every_field_of_the_library_is_known(family):
    """A configuration that leaves a field out means its own family's default; a new field has to be looked at."""
    own, bert, ours = CONFIG_MAPPING[family]().to_dict(), BertConfig().to_dict(), FAMILIES[family].all_defaults()
    differing = {name: value for name, value in own.items() if name in bert and value != bert[name]}
    assert differing.items() <= {**ours, "model_type": own["model_type"]}.items()
    known = {*FAMILIES[family].ignored_fields(own), *FAMILIES[family].renamed_fields}
    assert own.keys() - bert.keys() - RelPosBertConfig().to_dict().keys() <= known


@pytest.mark.parametrize("name", FAMILIES)
def test_recognise_fields_of_wrong_types(name):
    family = FAMILIES[name]
    config = {**example(name).config, "model_type": family.marks if family.marker else name}
    foreign = {field for other in FAMILIES.values() for field in other.types} - family.types.keys() - config.keys()
    assert recognise(Path("folder"), {**config, **dict.fromkeys(foreign)}).fields
    for field, value in itertools.product({*config, *family.types}, ("x", ["x"], {"x": 1}, 3.5, -2)):
        try:
            assert recognise(Path("folder"), {**config, field: value}).fields
        except ValueError as error:
            assert field in str(error) or field == family.marker


NEZHA = FIXTURES / "families" / "nezha"
ROBERTA, ERNIE, ELECTRA = (FIXTURES / "families" / f"{name}-relative_key" for name in ("roberta", "ernie", "electra"))
KIND = "position_embedding_type"
AS_NEZHA = {"model_type": "nezha", KIND: None, "architectures": None}
# source, what to change in config.json, arguments of convert, what the error must say
REFUSED = {
    "keep": (NEZHA, {}, {"method": "keep"}, ["method = 'keep'", "requires absolute positions", "'nezha'"]),
    "scheme": (ROBERTA, {}, {KIND: "alibi"}, [f"{KIND} = 'alibi'", "method = 'distil' learns another"]),
    "option of the source": (NEZHA, {"max_relative_position": 0}, {}, ["config.json", "max_relative_position", "0"]),
    "no tables": (NEZHA, {"model_type": "roberta", KIND: "relative_key", "architectures": None}, {}, ["like NEZHA"]),
    "with tables": (ROBERTA, AS_NEZHA, {}, ["model_type = 'nezha'", "roberta.embeddings.position_embeddings.weight"]),
    "nezha and another": (NEZHA, {KIND: "relative_key"}, {}, ["'nezha'", "correct config.json"]),
    "nezha with cross-attention": (NEZHA, {"add_cross_attention": True}, {}, ["add_cross_attention = True"]),
    "default embedding size": (ELECTRA, {"embedding_size": None}, {}, ["lack 2 of 47", "embeddings_project.weight"]),
    "task types not declared": (ERNIE, {"use_task_id": False}, {}, ["task_type_embeddings", "not part of a BERT"]),
    "positions": (ROBERTA, {"max_position_embeddings": 20}, {}, ["distance_embedding.weight", "(27, 8)", "(39, 8)"]),
    "head": (ROBERTA, {}, {"architecture": "BertForPreTraining"}, ["'BertForPreTraining'", "RobertaForMaskedLM"]),
    "never relative": (ROBERTA, {"model_type": "mpnet"}, {}, ["'relative_key'", "'mpnet'", "'absolute'"]),
}


@pytest.mark.parametrize("folder, fields, arguments, words", REFUSED.values(), ids=REFUSED)
def test_refusals_write_nothing(tmp_path, folder, fields, arguments, words):
    source = edit(Path(shutil.copytree(folder, tmp_path / "source")), **fields)
    assert_not_converted(source, tmp_path / "out", *words, **arguments)
