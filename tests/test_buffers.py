"""Buffers of remote code that Transformers 5 leaves unfilled, against the model that was saved."""

import warnings

import pytest
import torch
import transformers
from errors import raises
from oracles import tiny_model
from sentence_transformers import CrossEncoder, SentenceTransformer, models as st
from torch import nn
from transformers import AutoModel, BertConfig, BertModel, PreTrainedConfig, PreTrainedModel
from typer.testing import CliRunner

import hf_relpos
from hf_relpos import RelPosBertModel, registration
from hf_relpos.cli import app
from hf_relpos.families import buffers


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
            words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
            (place / "vocab.txt").write_text("\n".join(words))
            transformers.BertTokenizer(str(place / "vocab.txt")).save_pretrained(place / kind.__name__)
            saved[kind.__name__] = model
    return place, saved


def load(folder, **options):
    return AutoModel.from_pretrained(folder[0] / "RemoteModel", trust_remote_code=True, **options).eval()


@pytest.mark.filterwarnings("ignore:.*remote code")
@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}], ids=str)
@torch.no_grad()
def test_every_table_is_named_and_filled(folder, options):
    model, sound = load(folder, **options), folder[1]["RemoteModel"]
    for name in TABLES - {"slopes"}:  # whatever the memory held: no luck may hide a table
        buffer = model.get_buffer(name)
        buffer.copy_(torch.full_like(buffer, 7) if buffer.dtype != torch.bool else ~sound.causal)
    found = hf_relpos.unfilled_buffers(model)
    assert set(found) == TABLES
    for name, right in found.items():
        assert torch.equal(right, dict(sound.named_buffers()).get(name, sound.slopes))
    assert set(hf_relpos.fill_buffers(model)) == TABLES and hf_relpos.unfilled_buffers(model) == {}
    bound = 1e-6 if model.dtype == torch.float32 else 0.2
    assert (model(IDS)[0].float() - sound(IDS)[0]).abs().max() <= bound


@torch.no_grad()
def test_sentence_transformers_and_cross_encoders(folder):
    place, saved = folder
    trusted = {"trust_remote_code": True}
    body = st.Transformer(str(place / "RemoteModel"), model_kwargs=trusted, config_kwargs=trusted)
    encoder = SentenceTransformer(modules=[body, st.Pooling(32, "cls")])
    assert hf_relpos.fill_buffers(encoder) and hf_relpos.unfilled_buffers(encoder) == {}
    tokens = encoder.tokenize(["a b c"])
    found = encoder.encode(["a b c"], convert_to_tensor=True)
    assert torch.allclose(found[0], saved["RemoteModel"](tokens["input_ids"])[0][0, 0], atol=1e-6)
    reranker = CrossEncoder(str(place / "RemoteClassifier"), trust_remote_code=True)
    names = hf_relpos.fill_buffers(reranker)
    assert {name.partition("body.")[2] for name in names} <= TABLES and hf_relpos.unfilled_buffers(reranker) == {}
    tokens = reranker.tokenizer([("a", "b c")], return_tensors="pt")
    expected = saved["RemoteClassifier"](tokens["input_ids"]).logits.sigmoid()
    assert torch.allclose(torch.tensor(reranker.predict([("a", "b c")])), expected[:, 0], atol=1e-6)


def test_a_load_warns_once(folder, monkeypatch):
    monkeypatch.setattr(registration, "_warned", set())
    with pytest.warns(UserWarning, match=r"remote code.*hf_relpos\.fill_buffers\(model\)") as seen:
        load(folder)
        load(folder)
    assert sum("fill_buffers" in str(each.message) for each in seen) == 1
    assert "test_buffers" in next(each.filename for each in seen if "fill_buffers" in str(each.message))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder[1]["RemoteModel"].__class__(folder[1]["RemoteModel"].config)  # not by a load


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny_model(RelPosBertModel, "harmonic"),
        lambda: BertModel(BertConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, vocab_size=50)),
        lambda: transformers.ModernBertModel(
            transformers.ModernBertConfig(
                hidden_size=32, num_attention_heads=2, num_hidden_layers=2, vocab_size=50, pad_token_id=0
            )
        ),
    ],
    ids=["own", "BERT", "ModernBERT"],
)
def test_a_sound_model_is_unchanged(make, tmp_path):
    make().save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    assert hf_relpos.unfilled_buffers(model) == {} and hf_relpos.fill_buffers(model) == []
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore:.*remote code")
def test_inspect_names_them_where_it_may_run_the_code(folder):
    done = CliRunner().invoke(app, ["inspect", str(folder[0] / "RemoteModel"), "--trust-remote-code"])
    assert "rotation.inv_freq" in done.output and "fill_buffers" in done.output
    plain = CliRunner().invoke(app, ["inspect", str(folder[0] / "RemoteModel")])
    assert "unfilled" not in plain.output


class Strange(PreTrainedModel):
    config_class = PreTrainedConfig
    is_random = True

    def __init__(self, config, needed=None):
        super().__init__(config)
        if needed is None:
            raise OSError("no file of tables")
        self.weight = nn.Parameter(torch.ones(3))
        made = torch.rand(4) if self.is_random else torch.arange(4.0)
        self.register_buffer("table", made, persistent=False)


def test_what_cannot_be_rebuilt_is_refused_in_words(monkeypatch):
    model = Strange(PreTrainedConfig(), needed=1)
    with raises(ValueError, "Strange", "no file of tables"):
        hf_relpos.fill_buffers(model)
    monkeypatch.setattr(Strange.__init__, "__defaults__", (1,))
    model.table = torch.full((4,), 7.0)
    with raises(ValueError, "table", "random"):
        hf_relpos.fill_buffers(model)
    monkeypatch.setattr(Strange, "is_random", False)
    model.table = torch.full((9,), 7.0)  # a forward made it longer
    with raises(ValueError, "table", "(9,)"):
        hf_relpos.fill_buffers(model)
    model.table = torch.arange(9.0)
    assert hf_relpos.unfilled_buffers(model) == {}
    with raises(TypeError, "PreTrainedModel", "Linear"):
        hf_relpos.fill_buffers(nn.Linear(2, 2))
    with raises(TypeError, "torch.nn.Module", "dict"):
        hf_relpos.unfilled_buffers({})


def test_a_model_that_is_built_again_takes_no_second_copy_of_the_weights():
    model = BertModel(BertConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, vocab_size=50))
    fresh = buffers._built_again(model)
    assert all(parameter.is_meta for parameter in fresh.parameters())
    assert all(torch.equal(buffer, dict(fresh.named_buffers())[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("module, is_read", [("Alibaba_hyphen_NLP.new_hyphen_impl", True), ("a.b", False)])
def test_the_warning_names_the_way_around_code_that_is_not_needed(module, is_read):
    kind = type("RotaryTable", (torch.nn.Module,), {"__module__": f"transformers_modules.{module}.c0ffee.modeling"})
    with torch.device("meta"), pytest.warns(UserWarning, match=r"run hf_relpos\.fill_buffers\(model\)") as caught:
        kind().register_buffer("cos_cached", torch.zeros(3), persistent=False)
    assert ("inside hf_relpos.patch_transformers()" in str(caught[0].message)) == is_read
