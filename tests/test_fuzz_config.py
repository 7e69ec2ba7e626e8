"""Configurations with anything in any field: a model that works, or an error that names the field."""

import json

import pytest
import torch
from errors import raises
from fuzzing import attempt, examples, memory_limit
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, strategies as st
from oracles import extra_inputs, tiny_config

from hf_relpos import RelPosBertConfig, RelPosBertForSequenceClassification, RelPosBertModel
from hf_relpos.models.checks import ARGUMENTS, FIELDS
from hf_relpos.schemes import SCHEMES


NAMES = sorted({*FIELDS, *ARGUMENTS, *RelPosBertConfig.__annotations__})
ERRORS = (ValueError, StrictDataclassError)
LARGEST = 2_000_000  # parameters of a model that is made here; larger ones are made without data


@pytest.fixture(scope="module", autouse=True)
def limited_memory():
    """A size that is taken at its word fails the test that gives it."""
    with memory_limit(12):
        yield


numbers = st.integers(-3, 40) | st.floats(0, 100) | st.sampled_from([10**4, 2**24, 2**31, 10**12, 10**25])
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.sampled_from([10**4, 2**24, 2**31, 10**9, 10**12, 2**63, 10**25, -(10**25)])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["none", "log", "gelu", "eager", "sdpa", "clip", "regression", "float16", "0"])
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["0", "1", "a"]), inner, max_size=3),
    max_leaves=5,
)


DEFAULTS = {**tiny_config("absolute").to_dict(), "num_labels": 2}


def value_of(name):
    """Anything, and more often what is at least of the right type."""
    default = DEFAULTS.get(name)
    if isinstance(default, bool):
        return st.booleans() | anything
    if isinstance(default, float):
        return st.floats(0, 1) | numbers | anything
    return st.integers(1, 48) | numbers | anything


def use(config):
    """Make a model, without data where it is large, and check what a small one computes and that it can be saved."""
    parameters = (config.vocab_size + config.type_vocab_size + config.num_labels) * config.hidden_size
    parameters += config.num_hidden_layers * config.hidden_size * (4 * config.hidden_size + config.intermediate_size)
    with torch.device("meta"):
        scheme = RelPosBertModel(RelPosBertConfig.from_bert(config, num_hidden_layers=1))
    parameters += (config.num_hidden_layers + 1) * sum(each.numel() for each in scheme.parameters())
    reloaded = RelPosBertConfig.from_dict(json.loads(config.to_json_string()))
    assert all(getattr(reloaded, name) == getattr(config, name) for name in RelPosBertConfig.__annotations__)
    length = min(8, config.max_position_embeddings)
    whole = not config.chunk_size_feed_forward or length % config.chunk_size_feed_forward == 0
    if parameters <= LARGEST and config.num_hidden_layers <= 4 and whole:
        model = RelPosBertForSequenceClassification(config).eval()
        inputs = extra_inputs(config.position_embedding_type, 2, length)
        ids = torch.arange(length).expand(2, -1) % config.vocab_size
        with torch.no_grad():
            outputs = model(ids, **inputs, return_dict=True)
        assert outputs.logits.isfinite().all()


@st.composite
def changes(draw):
    """Some fields of a configuration, of which one or two hold anything."""
    scheme = draw(st.sampled_from(sorted(SCHEMES)))
    fields = {"position_embedding_type": scheme}
    wrong = []
    if draw(st.booleans()):
        options = list(SCHEMES[scheme].options)
        option = draw(st.sampled_from(options))
        accepted = SCHEMES[scheme].options[option].accepts
        fields["position_options"] = {option: draw(value_of(option).filter(accepted) | value_of(option))}
        wrong.append(option)
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=not wrong, max_size=2, unique=True)):
        fields[name] = draw(value_of(name))
        wrong.append(name)
    return fields, wrong


@examples(few=60)
@given(changes(), st.sampled_from(["constructor", "from_dict", "from_pretrained"]))
def test_configuration_works_or_says_what_is_wrong(tmp_path_factory, drawn, way):
    fields, wrong = drawn
    content = {**tiny_config("absolute", num_hidden_layers=1).to_dict(), **fields}
    with attempt("configurations", *ERRORS, names=wrong):
        if way == "constructor":
            content.pop("model_type", None)
            config = RelPosBertConfig(**content)
        elif way == "from_dict":
            config = RelPosBertConfig.from_dict(content)
        else:
            folder = tmp_path_factory.getbasetemp() / "fuzzed"
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
            config = RelPosBertConfig.from_pretrained(folder)
        use(config)


# What used to end in another error, a model that is never finished, or no error at all.
WRONG = {
    **dict.fromkeys(("hidden_size", "max_position_embeddings", "conv_groups"), (0,)),
    **dict.fromkeys(("intermediate_size", "classifier_dropout", "chunk_size_feed_forward"), (-1,)),
    **dict.fromkeys(("embedding_size", "attention_window", "memory_length"), (10**25,)),
    **dict.fromkeys(("hidden_act", "dtype", "torch_dtype", "problem_type"), ("x",)),
    **dict.fromkeys(("pooler_hidden_act", "conv_act"), ("nothing",)),
    **dict.fromkeys(("pooler_dropout", "conv_kernel_size"), (2,)),
    **dict.fromkeys(("attention_probs_dropout_prob", "layer_norm_eps"), (float("nan"),)),
    **dict.fromkeys(("attn_implementation", "add_cross_attention"), (True,)),
    "num_hidden_layers": [10**12, -1],
    "pad_token_id": [50, -51],
    "type_vocab_size": [-1, 10**25],
    "embedding_projection": ["before"],
    "attention_biases": [["queries"]],
    "vocab_size": [0, 10**25],
    "global_tokens": [list(range(10**5))],
    "hidden_dropout_prob": [1.5],
    "initializer_range": [float("inf")],
    "id2label": [True, {"a": "b"}],
    "num_labels": [10**12, None],
    "_attn_implementation": [3],
}


@pytest.mark.parametrize("way", ["constructor", "from_pretrained"])
@pytest.mark.parametrize("name", WRONG)
def test_error_names_field_and_value(tmp_path, name, way):
    for value in WRONG[name]:
        content = {**tiny_config("shaw").to_dict(), name: value}
        with pytest.raises(ValueError, match=name) as caught:
            if way == "constructor":
                content.pop("model_type", None)
                RelPosBertConfig(**content)
            else:
                (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
                RelPosBertConfig.from_pretrained(tmp_path)
        assert len(str(caught.value)) < 1500
        if not isinstance(value, list | dict):
            assert repr(value) in str(caught.value) or str(value)[:10] in str(caught.value)


def test_a_table_beside_a_scheme_on_the_input_is_named():
    with raises(ValueError, "'sinusoidal'", "absolute_position_embeddings = True"):
        tiny_config("sinusoidal", absolute_position_embeddings=True)


def test_many_entries():
    many = {str(index): "a" for index in range(10**5)}
    with raises(ValueError, "position_options['0']") as caught:
        tiny_config("shaw", position_options=many)
    assert len(str(caught.value)) < 500
    assert tiny_config("shaw", id2label=many).num_labels == 10**5
