"""Buffers of remote code that Transformers 5 leaves uninitialised, against the model that was saved."""

import copy
import json
import warnings

import pytest
import torch
import transformers
from errors import raises
from launching import run_command
from oracles import tiny_sizes
from sentence_transformers import CrossEncoder, SentenceTransformer, models as st
from torch import nn
from transformers import AutoModel, BertConfig, BertModel, PreTrainedConfig, PreTrainedModel
from wording import tokenizer

from hf_relpos import initialize_buffers, registration, uninitialized_buffers
from hf_relpos.loaded import buffers


CODE = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput


class RemoteConfig(PreTrainedConfig):
    model_type = "remote_tables"

    def __init__(self, hidden_size=32, positions=64, vocab_size=60, **kwargs):
        super().__init__(**kwargs)
        self.hidden_size, self.positions, self.vocab_size = hidden_size, positions, vocab_size


class Rotation(nn.Module):
    def __init__(self, size, positions):
        super().__init__()
        inverse = 1.0 / 10000 ** (torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(positions).float(), inverse)
        self.register_buffer("inv_freq", inverse, persistent=False)
        self.register_buffer("cos_cached", angles.cos(), persistent=False)
        self.register_buffer("sin_cached", angles.sin(), persistent=False)


class RemoteModel(PreTrainedModel):
    config_class = RemoteConfig

    def __init__(self, config):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.rotation = Rotation(config.hidden_size, config.positions)
        self.register_buffer("position_ids", torch.arange(config.positions)[None], persistent=False)
        self.register_buffer("causal", torch.ones(8, 8).tril().bool(), persistent=False)
        self.slopes = torch.tensor([2.0**-power for power in range(4)])
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(0.0, 0.5)

    def forward(self, input_ids, attention_mask=None, **kwargs):
        length = input_ids.shape[1]
        angles = self.rotation.cos_cached[:length] + self.rotation.sin_cached[self.position_ids[0, :length]]
        states = self.dense(self.embeddings(input_ids)) * torch.cat([angles, angles], -1).to(self.dtype)
        return BaseModelOutput(last_hidden_state=states * self.slopes.sum() + self.causal.sum())


class RemoteClassifier(PreTrainedModel):
    config_class = RemoteConfig

    def __init__(self, config):
        super().__init__(config)
        self.body = RemoteModel(config)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, **kwargs):
        return SequenceClassifierOutput(logits=self.classifier(self.body(input_ids)[0][:, 0]))
"""
TABLES = {"rotation.inv_freq", "rotation.cos_cached", "rotation.sin_cached", "position_ids", "causal", "slopes"}
IDS = torch.arange(3, 13)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of remote code with a tokenizer, as it is saved for the Hub."""
    place = tmp_path_factory.mktemp("remote")
    (place / "tables_of_remote_code.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(place))
        import tables_of_remote_code as code

        code.RemoteConfig.register_for_auto_class()
        code.RemoteModel.register_for_auto_class("AutoModel")
        code.RemoteClassifier.register_for_auto_class("AutoModelForSequenceClassification")
        saved = {}
        for kind in (code.RemoteModel, code.RemoteClassifier):
            torch.manual_seed(0)
            model = kind(code.RemoteConfig()).eval()
            model.save_pretrained(place / kind.__name__, max_shard_size="3KB")
            tokenizer(place).save_pretrained(place / kind.__name__)
            saved[kind.__name__] = model
    return place, saved


def load(folder, **options):
    return AutoModel.from_pretrained(folder[0] / "RemoteModel", trust_remote_code=True, **options).eval()


@pytest.fixture(params=[0.0, 7.0, float("nan")], ids=str)
def memory(request, monkeypatch):
    """What new memory holds: no luck may hide a table."""
    allocate = torch.empty_like

    def used(*arguments, **options):
        tensor = allocate(*arguments, **options)
        return tensor if tensor.is_meta else tensor.fill_(request.param if tensor.is_floating_point() else 0)

    monkeypatch.setattr(torch, "empty_like", used)
    return request.param


@pytest.mark.filterwarnings("ignore:.*remote code")
@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}], ids=str)
@torch.no_grad()
def test_fill_buffers_every_table(folder, options, memory):
    model, sound = load(folder, **options), folder[1]["RemoteModel"]
    found = uninitialized_buffers(model)
    assert set(found) == TABLES
    for name, right in found.items():
        assert torch.equal(right, dict(sound.named_buffers()).get(name, sound.slopes))
    assert set(initialize_buffers(model)) == TABLES and uninitialized_buffers(model) == {}
    bound = 1e-6 if model.dtype == torch.float32 else 0.2
    assert (model(IDS)[0].float() - sound(IDS)[0]).abs().max() <= bound


@torch.no_grad()
def test_sentence_transformers_and_cross_encoders(folder):
    place, saved = folder
    trusted = {"trust_remote_code": True}
    body = st.Transformer(str(place / "RemoteModel"), model_kwargs=trusted, config_kwargs=trusted)
    encoder = SentenceTransformer(modules=[body, st.Pooling(32, "cls")])
    assert initialize_buffers(encoder) and uninitialized_buffers(encoder) == {}
    tokens = encoder.tokenize(["a b c"])
    found = encoder.encode(["a b c"], convert_to_tensor=True)
    assert torch.allclose(found[0], saved["RemoteModel"](tokens["input_ids"])[0][0, 0], atol=1e-6)
    reranker = CrossEncoder(str(place / "RemoteClassifier"), trust_remote_code=True)
    names = initialize_buffers(reranker)
    assert {name.partition("body.")[2] for name in names} <= TABLES and uninitialized_buffers(reranker) == {}
    tokens = reranker.tokenizer([("a", "b c")], return_tensors="pt")
    expected = saved["RemoteClassifier"](tokens["input_ids"]).logits.sigmoid()
    assert torch.allclose(torch.tensor(reranker.predict([("a", "b c")])), expected[:, 0], atol=1e-6)


def test_a_load_warns_once(folder, monkeypatch):
    monkeypatch.setattr(registration, "_warned", set())
    with pytest.warns(UserWarning, match=r"remote code.*hf_relpos\.initialize_buffers\(model\)") as seen:
        load(folder)
        load(folder)
    assert sum("initialize_buffers" in str(each.message) for each in seen) == 1
    assert "test_buffers" in next(each.filename for each in seen if "initialize_buffers" in str(each.message))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder[1]["RemoteModel"].__class__(folder[1]["RemoteModel"].config)  # not by a load


@pytest.mark.filterwarnings("ignore:.*remote code")
def test_inspect_names_them_where_it_may_run_the_code(folder, memory):
    place = folder[0] / "RemoteModel"
    done = run_command("inspect", place, "--trust-remote-code")
    assert done.exit_code == 0, done.output
    assert "initialize_buffers(model)" in done.output and "uninitialised" in done.output, done.output
    plain = run_command("inspect", place, "--json", "-")
    assert plain.exit_code == 0 and "--trust-remote-code" in json.loads(plain.stdout)["elsewhere"]
    found = json.loads(run_command("inspect", place, "--trust-remote-code", "--json", "-").stdout)
    assert TABLES == set(found["differences"]) and found["family"] == "remote_tables"


class TablesConfig(PreTrainedConfig):
    model_type = "tables_of_a_test"
    num_layers: int = 3
    table: str = "slope"


class Tables(PreTrainedModel):
    """Layers with one buffer each, as code of others makes it."""

    config_class = TablesConfig
    MADE = {
        "slope": lambda layer, number: torch.full((4,), 2.0**-number),
        "frequency": lambda layer, number: 1e6 ** -(torch.arange(8.0) / 8),
        "mask": lambda layer, number: torch.full((4,), torch.finfo(torch.get_default_dtype()).min),
        "weight": lambda layer, number: layer.weight.detach().sum(1),
        "random": lambda layer, number: torch.rand(4),
    }

    def __init__(self, config, needed=None):
        super().__init__(config)
        if config.table == "argument" and needed is None:
            raise OSError("no file of tables")
        self.layers = nn.ModuleList(nn.Linear(3, 4) for _ in range(config.num_layers))
        for number, layer in enumerate(self.layers):
            table = self.MADE.get(config.table, self.MADE["slope"])(layer, number)
            layer.register_buffer("table", table, persistent=config.table == "persistent")
        self.post_init()

    def _init_weights(self, module):
        pass


def loaded(folder, table, left_out="", **options):
    """The model with that table, saved and loaded; without some tensors in its file."""
    model = Tables(TablesConfig(table=table))
    kept = {name: value for name, value in model.state_dict().items() if not left_out or left_out not in name}
    model.save_pretrained(folder, state_dict=kept)
    return Tables.from_pretrained(folder, **options)


CHANGES = {
    "data": lambda module: module.table.data.fill_(3.0),
    "in place": lambda module: module.table.fill_(3.0),
    "another tensor": lambda module: setattr(module, "table", torch.full((4,), 3.0)),
    "longer": lambda module: module.register_buffer("table", torch.full((9,), 3.0), persistent=False),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(
    "then", [copy.deepcopy, lambda model: model.half(), lambda model: model], ids=["copy", "half", "same"]
)
@torch.no_grad()
def test_fill_buffers_leaves_what_was_changed(change, then, memory, tmp_path):
    model = loaded(tmp_path, "slope")
    initialize_buffers(model)
    for layer in model.layers:
        change(layer)
    model = then(model)
    before = [layer.table.clone() for layer in model.layers]
    assert len(uninitialized_buffers(model)) == 3
    with pytest.warns(UserWarning, match=r"layers\.1\.table \(changed"):
        assert initialize_buffers(model) == []
    assert all(torch.equal(layer.table, kept) for layer, kept in zip(model.layers, before, strict=True))
    with warnings.catch_warnings(record=True) as left:
        warnings.simplefilter("always")
        assert initialize_buffers(model, force=["layers.1.table"]) == ["layers.1.table"]
    assert model.layers[1].table.tolist() == [0.5] * 4 and "layers.1.table" not in str(left[0].message)
    with raises(ValueError, "layers.7.table"):
        initialize_buffers(model, force=["layers.7.table"])


@torch.no_grad()
def test_fill_buffers_of_layers_that_were_cut_off(memory, tmp_path):
    model = loaded(tmp_path, "slope")
    model.layers, model.config.num_layers = model.layers[1:], 2
    assert len(initialize_buffers(model)) == 2
    assert [layer.table[0].item() for layer in model.layers] == [0.5, 0.25]
    assert uninitialized_buffers(model) == {}
    cut = Tables(TablesConfig())
    cut.layers, cut.config.num_layers = cut.layers[1:], 2
    with pytest.warns(UserWarning, match=r"layers\.0\.table"):
        assert initialize_buffers(cut) == []


@pytest.mark.parametrize("share", [0.0, 4 / 3])
@pytest.mark.parametrize("element", [0, -1])
@torch.no_grad()
def test_unfilled_buffers_sees_one_frequency(share, element, tmp_path):
    model = loaded(tmp_path, "frequency")
    initialize_buffers(model)
    model.layers[2].table[element] *= share
    assert list(uninitialized_buffers(model)) == ["layers.2.table"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@torch.no_grad()
def test_unfilled_buffers_in_other_precisions(dtype, memory, tmp_path):
    model = loaded(tmp_path, "mask", dtype=dtype)
    assert len(initialize_buffers(model)) == 3
    assert model.layers[0].table.tolist() == [torch.finfo(dtype).min] * 4
    cast = Tables(TablesConfig(table="mask")).to(dtype)
    assert uninitialized_buffers(cast) == {}


@torch.no_grad()
def test_fill_buffers_persistent_ones_in_no_file(memory, tmp_path):
    model = loaded(tmp_path, "persistent", left_out="layers.1.table")
    assert initialize_buffers(model) == ["layers.1.table"] and model.layers[1].table[0] == 0.5
    model.layers[0].table.fill_(9.0)  # it is in the file, as statistics of training are
    assert uninitialized_buffers(copy.deepcopy(model)) == {}


@pytest.mark.parametrize("table, reason", [("weight", "computed from a weight"), ("random", "drawn at random")])
@torch.no_grad()
def test_fill_buffers_names_what_nobody_can_know(table, reason, memory, tmp_path):
    model = loaded(tmp_path, table)
    state = torch.get_rng_state()
    assert set(uninitialized_buffers(model).values()) == {None} and torch.equal(torch.get_rng_state(), state)
    with pytest.warns(UserWarning, match=reason):
        assert initialize_buffers(model) == []
    with raises(ValueError, "layers.0.table", reason):
        initialize_buffers(model, force=["layers.0.table"])
    for layer in model.layers:
        layer.table.normal_()
    again = Tables(TablesConfig(table=table))
    assert uninitialized_buffers(model) == {} == uninitialized_buffers(again)


SIZES = tiny_sizes(vocab_size=60, hidden_size=32, num_attention_heads=4, intermediate_size=48)
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}
LONGROPE = {"rope_type": "longrope", "rope_theta": 100.0, "factor": 4.0, **FACTORS}
KINDS = [("llama", DYNAMIC), ("llama", LONGROPE)]
KINDS += [("gte", DYNAMIC)] if "gte" in transformers.CONFIG_MAPPING else []


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind, rope", KINDS)
@torch.no_grad()
def test_fill_buffers_leaves_transformers_own_tables(kind, rope):
    """A long call has changed them, and the class knows the length."""
    config = transformers.AutoConfig.for_model(kind, pad_token_id=0, rope_parameters=dict(rope), **SIZES)
    model = AutoModel.from_config(config).eval()
    first = model.rotary_emb.inv_freq.clone()
    model(torch.arange(5, 60)[None])
    changed = model.rotary_emb.inv_freq.clone()
    assert not torch.equal(first, changed)
    assert initialize_buffers(model) == [] and torch.equal(model.rotary_emb.inv_freq, changed)
    assert uninitialized_buffers(model) == {} == uninitialized_buffers(copy.deepcopy(model))
    model.rotary_emb.inv_freq *= 1.01
    assert list(uninitialized_buffers(model)) == ["rotary_emb.inv_freq"]


def emptied(dtype=torch.float32, **more):
    """A Llama that was built on the meta device and got memory, and its weights, as for FSDP; and a sound one."""
    config = transformers.LlamaConfig(**SIZES, **more)
    sound = transformers.LlamaModel(config).eval().to(dtype)
    with torch.device("meta"):
        model = transformers.LlamaModel(config).eval().to(dtype)
    model.to_empty(device="cpu").load_state_dict(sound.state_dict())
    for buffer in model.buffers():
        buffer.data.fill_(7)
    return model, sound


ROTATIONS = ["rotary_emb.inv_freq", "rotary_emb.original_inv_freq"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_fill_buffers_after_to_empty(dtype):
    model, sound = emptied(dtype)
    assert list(uninitialized_buffers(model)) == ROTATIONS
    assert initialize_buffers(model) == ROTATIONS and initialize_buffers(model) == []
    assert torch.equal(model(IDS)[0], sound(IDS)[0])
    assert uninitialized_buffers(model) == {} == uninitialized_buffers(sound.half().float())


@torch.no_grad()
def test_fill_buffers_after_to_empty_leaves_what_was_written():
    model, _ = emptied()
    model.rotary_emb.inv_freq.copy_(torch.ones(4))
    model.rotary_emb.original_inv_freq = torch.ones(4)
    assert list(uninitialized_buffers(model)) == ROTATIONS
    with pytest.warns(UserWarning, match=r"original_inv_freq \(changed"):
        assert initialize_buffers(model) == []


@torch.no_grad()
def test_unfilled_buffers_whose_load_nobody_saw(monkeypatch):
    """What is not of the class is named, and so is what cannot be compared; what was seen to be given is believed."""
    (model, _), random = emptied(), Tables(TablesConfig(table="random"))
    assert uninitialized_buffers(random) == {}
    monkeypatch.setattr(buffers, "allocations", {})
    assert list(uninitialized_buffers(model)) == ROTATIONS
    assert set(uninitialized_buffers(random).values()) == {None}
    with pytest.warns(UserWarning, match="filled where nobody saw it, and drawn at random"):
        assert initialize_buffers(random) == []

    def build(*arguments, **options):
        raise ValueError("needs a file")

    monkeypatch.setattr(buffers, "_build", build)
    assert uninitialized_buffers(model) == dict.fromkeys(ROTATIONS)


def test_unfilled_buffers_of_what_cannot_be_built():
    with raises(ValueError, "Tables", "no file of tables"):
        uninitialized_buffers(Tables(TablesConfig(table="argument"), needed=1))
    with raises(TypeError, "PreTrainedModel", "Linear"):
        initialize_buffers(nn.Linear(2, 2))
    with raises(TypeError, "torch.nn.Module", "dict"):
        uninitialized_buffers({})


def test_a_model_that_is_built_again_takes_no_second_copy_of_the_weights():
    model = BertModel(BertConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, vocab_size=50))
    fresh = buffers._build(BertModel, model.config, torch.float32)
    assert all(parameter.is_meta for parameter in fresh.parameters())
    assert all(torch.equal(buffer, dict(fresh.named_buffers())[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("module, is_read", [("Alibaba_hyphen_NLP.new_hyphen_impl", True), ("a.b", False)])
def test_the_warning_names_the_way_around_code_that_is_not_needed(module, is_read, monkeypatch):
    kind = type("RotaryTable", (torch.nn.Module,), {"__module__": f"transformers_modules.{module}.c0ffee.modeling"})
    monkeypatch.setattr(registration, "note_allocation", lambda *buffer: True)
    with pytest.warns(UserWarning, match=r"run hf_relpos\.initialize_buffers\(model\)") as caught:
        registration.watch_buffers(kind(), "cos_cached", torch.zeros(3))
    assert ("inside hf_relpos.patch_transformers()" in str(caught[0].message)) == is_read
