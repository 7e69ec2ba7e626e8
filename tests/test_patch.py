"""`patch_transformers`: what it reroutes, what it leaves alone, and that nothing of it remains."""

import pytest
import torch
import transformers
from errors import raises
from oracles import tiny_sizes
from test_legacy import FOLDERS, LEGACY, check_old_outputs, check_same, name_of, our_class, read, run, stock_name
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    BertPreTrainedModel,
    EncoderDecoderModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
)
from transformers.models.bert import modeling_bert

from hf_relpos import RelPosBertConfig, RelPosBertForMaskedLM, RelPosBertLMHeadModel, RelPosBertModel
from hf_relpos.models.modeling_relpos_bert import HEADS
from hf_relpos.models.patch import STOCK_HEADS, patch_transformers
from hf_relpos.schemes import SCHEMES


MASKED_LM = LEGACY / "relative_key_query" / "BertForMaskedLM"
SIZES = tiny_sizes(num_hidden_layers=1, max_position_embeddings=12)
AUTO_OF = {head.__name__.removeprefix("RelPos"): getattr(transformers, auto) for auto, head in HEADS.items()}


def attributes() -> dict:
    """Every attribute of the stock heads and their bases, but those that Transformers fills when asked."""
    classes = {*STOCK_HEADS, BertPreTrainedModel, PreTrainedModel}
    found = {(owner, name): value for owner in classes for name, value in vars(owner).items()}
    return {key: value for key, value in found.items() if not key[1].endswith("_cached_value")}


def same_objects(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(value is other[key] for key, value in one.items())


@pytest.fixture(autouse=True)
def nothing_remains():
    """After each test every attribute is the very object that it was before."""
    before = attributes()
    yield
    assert same_objects(attributes(), before)


def test_all_stock_heads_are_covered():
    heads = {getattr(modeling_bert, name) for name in modeling_bert.__all__ if name.startswith("BertFor")}
    assert set(STOCK_HEADS) == heads | {BertModel, modeling_bert.BertLMHeadModel}
    assert all(issubclass(ours, stock) for stock, ours in STOCK_HEADS.items())


@pytest.mark.parametrize("through", ["class", "auto", "class with config", "auto with config"])
@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_from_pretrained(folder, through):
    door = AUTO_OF[stock_name(folder)] if "auto" in through else getattr(transformers, stock_name(folder))
    arguments = {"config": AutoConfig.from_pretrained(folder)} if "config" in through else {}
    with patch_transformers():
        model, info = door.from_pretrained(folder, output_loading_info=True, **arguments)
    assert type(model) is our_class(folder)
    assert type(model.config) is RelPosBertConfig
    assert model.config.name_or_path == str(folder)
    assert not any(info.values()), info
    check_old_outputs(model, folder)
    if arguments:
        assert type(arguments["config"]) is BertConfig  # a copy was converted


@pytest.mark.parametrize("door", [BertForMaskedLM, AutoModelForMaskedLM])
def test_keyword_arguments_arrive(door):
    with patch_transformers():
        model = door.from_pretrained(MASKED_LM, attn_implementation="eager", dtype=torch.bfloat16)
        assert model.config._attn_implementation == "eager"
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert door.from_pretrained(MASKED_LM, hidden_dropout_prob=0.25).config.hidden_dropout_prob == 0.25
        with raises(ValueError, "flash_attention_2"):
            door.from_pretrained(MASKED_LM, attn_implementation="flash_attention_2")
        config = BertConfig.from_pretrained(MASKED_LM, attn_implementation="eager")
        assert door.from_pretrained(MASKED_LM, config=config).config._attn_implementation == "eager"
        with raises(OSError, "no/such/folder"):
            door.from_pretrained("no/such/folder")


def test_config_given_by_its_path(tmp_path):
    """The configuration that counts is the one given, not the one beside the weights."""
    (tmp_path / "model.safetensors").write_bytes((MASKED_LM / "model.safetensors").read_bytes())
    BertConfig(**SIZES).save_pretrained(tmp_path)
    with patch_transformers():
        model = BertForMaskedLM.from_pretrained(tmp_path, config=str(MASKED_LM))
    assert type(model) is RelPosBertForMaskedLM
    check_old_outputs(model, MASKED_LM)


@pytest.mark.parametrize("door", [BertForMaskedLM, AutoModelForMaskedLM])
def test_scheme_by_keyword(door, tmp_path):
    """`position_embedding_type=` overrides the files, either way; our other fields are accepted too."""
    BertForMaskedLM(BertConfig(**SIZES)).save_pretrained(tmp_path)
    with patch_transformers():
        fresh = door.from_pretrained(tmp_path, position_embedding_type="shaw", position_options={"clip": 3})
        stock = door.from_pretrained(MASKED_LM, position_embedding_type="absolute")
        clipped = door.from_pretrained(MASKED_LM, position_options={"clip": 3}, attn_implementation="eager")
    assert type(stock) is BertForMaskedLM
    assert (type(fresh), fresh.config.position_embedding_type) == (RelPosBertForMaskedLM, "shaw")
    assert fresh.config.position_options == clipped.config.position_options == {"clip": 3}
    assert clipped.config._attn_implementation == "eager"


@pytest.mark.covering(1)
@pytest.mark.parametrize("scheme", sorted(set(SCHEMES) - {"absolute"}))
@pytest.mark.parametrize("stock", STOCK_HEADS, ids=lambda stock: stock.__name__)
def test_construction(stock, scheme):
    config = BertConfig(**SIZES, position_embedding_type=scheme, attn_implementation="eager", num_labels=4)
    with patch_transformers():
        models = [stock(config), stock(config=config), AUTO_OF[stock.__name__].from_config(config)]
    for model in models:
        assert type(model) is STOCK_HEADS[stock]
        assert (model.config.position_embedding_type, model.config.num_labels) == (scheme, 4)
        assert model.config._attn_implementation == "eager"
    assert type(config) is BertConfig


def test_construction_details():
    config = BertConfig(**SIZES, position_embedding_type="shaw", position_options={"clip": 3}, is_decoder=True)
    with patch_transformers():
        model = BertModel(config, add_pooling_layer=False)
        assert model.pooler is None and model.config.position_options == {"clip": 3} and model.config.is_decoder
        half = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
        assert type(half) is RelPosBertLMHeadModel and half.dtype == torch.float16
        ours = RelPosBertConfig(**SIZES)
        assert type(BertModel(ours)) is RelPosBertModel and BertModel(ours).config is ours
        with raises(ValueError, "position_options['clap']"):
            BertModel(BertConfig(**SIZES, position_embedding_type="shaw", position_options={"clap": 3}))
        with raises(TypeError, "config"):
            BertModel()
    assert type(BertModel(config)) is BertModel


@pytest.mark.parametrize("door", [BertForMaskedLM, AutoModelForMaskedLM])
def test_our_own_format(door, tmp_path):
    RelPosBertForMaskedLM.from_pretrained(MASKED_LM).save_pretrained(tmp_path)
    with patch_transformers():
        model = door.from_pretrained(tmp_path)
    assert type(model) is RelPosBertForMaskedLM
    check_old_outputs(model, MASKED_LM)


@pytest.mark.parametrize("scheme", ["absolute", None, "relative_kye"])
def test_absolute_stays_stock(scheme, tmp_path):
    config = BertConfig(**SIZES, **({} if scheme is None else {"position_embedding_type": scheme}))
    BertModel(config).save_pretrained(tmp_path)
    arguments, _ = read(LEGACY / "relative_key" / "BertModel" / "io.safetensors")
    expected = run(BertModel.from_pretrained(tmp_path), arguments)
    with patch_transformers():
        models = [door.from_pretrained(tmp_path) for door in (BertModel, AutoModel)]
        built = [BertModel(config), AutoModel.from_config(config)]
    for model in models:
        check_same(run(model, arguments), expected)
    assert {type(model) for model in models + built} == {BertModel}
    assert built[0].config is config


def test_other_architectures(tmp_path):
    config = RobertaConfig(**SIZES, position_embedding_type="relative_key")
    RobertaModel(config).save_pretrained(tmp_path)
    with patch_transformers():
        assert type(AutoModel.from_pretrained(tmp_path)) is RobertaModel
        assert type(RobertaModel(config)) is RobertaModel
        # stock BERT reads such files, with a warning and without the tables; ours must not pretend to
        with raises(ValueError, "'roberta'"):
            BertModel.from_pretrained(tmp_path)


class UserModel(BertModel):
    """A third party's subclass."""


class UserConfig(BertConfig):
    """A third party's configuration."""


class UserMaskedLM(BertForMaskedLM):
    """A third party's subclass of a head: the stock class builds the body."""


class UserHead(BertPreTrainedModel):
    """A third party's head, built the usual way."""

    def __init__(self, config):
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.score = torch.nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(self, input_ids, **kwargs):
        return self.score(self.bert(input_ids, **kwargs).last_hidden_state)


def test_subclasses_stay():
    folder = LEGACY / "relative_key" / "BertModel"
    arguments, _ = read(folder / "io.safetensors")
    expected = run(BertModel.from_pretrained(folder), arguments)
    with patch_transformers():
        model = UserModel.from_pretrained(folder)
        built = UserModel(BertConfig(**SIZES, position_embedding_type="relative_key"))
        other = BertModel(UserConfig(**SIZES, position_embedding_type="relative_key"))
    assert (type(model), type(built), type(other)) == (UserModel, UserModel, BertModel)
    assert not any("distance_embedding" in name for name, _ in (*model.named_parameters(), *built.named_parameters()))
    check_same(run(model, arguments), expected)


@pytest.mark.parametrize("head", [UserHead, UserMaskedLM])
def test_stock_model_inside_a_users_head(head, tmp_path):
    """The class is the user's, the `BertModel(config)` inside is a stock class of a relative configuration."""
    arguments, expected = read(MASKED_LM / "io.safetensors")
    del arguments["labels"]
    with patch_transformers():
        model = head.from_pretrained(MASKED_LM)
        model.save_pretrained(tmp_path)
        again = head.from_pretrained(tmp_path)
    for user in (model, again):
        assert (type(user), type(user.config), type(user.bert)) == (head, BertConfig, RelPosBertModel)
        found = run(user.bert, arguments)["last_hidden_state"]
        torch.testing.assert_close(found, expected["hidden_states.2"], rtol=0.0, atol=1e-5)


def test_encoder_decoder(tmp_path):
    """Other code that builds BERTs through the Auto classes gets ours, and reloads them without the patch."""
    encoder = LEGACY / "relative_key_query" / "BertModel"
    decoder = LEGACY / "relative_key_query" / "BertLMHeadModel-cross-attention"
    with patch_transformers():
        model = EncoderDecoderModel.from_encoder_decoder_pretrained(encoder, decoder).eval()
    model.save_pretrained(tmp_path)
    ids = read(encoder / "io.safetensors")[0]["input_ids"]
    states = run(RelPosBertModel.from_pretrained(encoder), {"input_ids": ids})["last_hidden_state"]
    alone = RelPosBertLMHeadModel.from_pretrained(decoder)
    expected = run(alone, {"input_ids": ids, "encoder_hidden_states": states})["logits"]
    for pair in (model, EncoderDecoderModel.from_pretrained(tmp_path)):
        assert (type(pair.encoder), type(pair.decoder)) == (RelPosBertModel, RelPosBertLMHeadModel)
        with torch.no_grad():
            found = pair(input_ids=ids, decoder_input_ids=ids).logits
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5)


def is_patched() -> bool:
    return type(BertModel(BertConfig(**SIZES, position_embedding_type="relative_key"))) is RelPosBertModel


def test_nesting():
    before = attributes()
    first, second = patch_transformers(), patch_transformers()
    patched = attributes()
    first.undo()
    first.undo()
    assert is_patched() and same_objects(attributes(), patched)
    with patch_transformers():
        assert same_objects(attributes(), patched)
    assert is_patched()
    with second:
        assert is_patched()
    second.undo()
    assert same_objects(attributes(), before) and not is_patched()
    with pytest.raises(ZeroDivisionError), patch_transformers(), patch_transformers():
        assert is_patched()
        raise ZeroDivisionError
    assert same_objects(attributes(), before)


def test_wrapped_by_another(monkeypatch):
    """Someone else's wrapper around ours is left in place, and ours does nothing below it."""
    stock = BertModel.__init__
    patch = patch_transformers()
    ours = BertModel.__init__
    monkeypatch.setattr(BertModel, "__init__", lambda self, *args, **kwargs: ours(self, *args, **kwargs))
    theirs = BertModel.__init__
    assert is_patched()
    patch.undo()
    assert BertModel.__init__ is theirs and not is_patched()
    monkeypatch.undo()
    assert BertModel.__init__ is ours and not is_patched()
    BertModel.__init__ = stock


def test_a_relative_subclass_of_the_body_is_warned_of(caplog):
    with patch_transformers():
        UserModel(BertConfig(**SIZES))
        assert "UserModel" not in caplog.text
        UserModel(BertConfig(**SIZES, position_embedding_type="kerple"))
    words = "UserModel is a subclass of BertModel, so it ignores position_embedding_type = 'kerple'"
    assert words in caplog.text
