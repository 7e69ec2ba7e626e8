"""Several schemes at once: the sum of their terms."""

import contextlib
import inspect
import math
import re

import pytest
import torch
from errors import raises
from oracles import ON_TOKENS, REAL, array, extra_context, layer_error, tiny_attention, tiny_config, tiny_model
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_relpos import RelPosBertModel
from hf_relpos.models.capabilities import supported_implementations
from hf_relpos.schemes import SCHEMES, Table, Terms
from hf_relpos.schemes.registry import combined, position_bias
from hf_relpos.schemes.scheme import Scheme


# As an argument of its own: from Transformers 5.24 on.
TAKES_BIAS = "position_bias" in inspect.signature(ALL_ATTENTION_FUNCTIONS["sdpa"]).parameters


def test_relative_key_and_alibi(hidden):
    layer = tiny_attention(["relative_key", "alibi"])
    table = array(layer.distance_embedding.parts[0].weight)
    slopes = [1 / 16, 1 / 256, 1 / 4]  # of three heads: those of two, and the first of four

    def score(q, k, h, i, j):
        return (q @ k + q @ table[i - j + 15]) / math.sqrt(8) - slopes[h] * abs(i - j)

    assert layer_error(layer, hidden, REAL, score) <= 1e-10


@torch.no_grad()
def test_tupe_and_disan(hidden):
    """A shared module and a scale of one, a mask of the other."""
    layer = tiny_attention(["tupe", "disan"], position_options={"disan": {"direction": "forward"}})
    bias, nothing = layer.shared_distance_embedding(extra_context(["tupe", "disan"], 2, 9))
    assert nothing is None
    bias = array(bias)[0]

    def score(q, k, h, i, j):
        return q @ k / 4 + bias[h, i, j] if j < i else -math.inf

    assert layer_error(layer, hidden, REAL, score) <= 1e-10


def test_order_does_not_matter(hidden):
    one, other = tiny_attention(["shaw", "t5"]), tiny_attention(["t5", "shaw"])
    turned = {"parts.0": "parts.1", "parts.1": "parts.0"}
    renamed = {re.sub(r"parts\.\d", lambda part: turned[part[0]], key): each for key, each in one.state_dict().items()}
    other.load_state_dict(renamed, strict=True)
    assert (one(hidden)[0] - other(hidden)[0]).abs().max() <= 1e-12


def test_gains_multiply(hidden):
    layer = tiny_attention(["huang_m1", "huang_m2", "shaw"], position_options={"shaw": {"clip": 2}})
    near, far, shaw = layer.distance_embedding.parts
    gains, signed, key, value = (array(table) for table in (near.weight, far.weight, shaw.key, shaw.value))

    def score(q, k, h, i, j):
        clipped = max(-2, min(2, j - i)) + 2
        return (q @ k * gains[abs(i - j)] * signed[j - i + 15] + q @ key[clipped]) / math.sqrt(8)

    def averaged(v, h, i, j):
        return v + value[max(-2, min(2, j - i)) + 2]

    assert layer_error(layer, hidden, REAL, score, averaged) <= 1e-10


def test_each_scheme_has_its_options(tmp_path):
    options = {"shaw": {"clip": 3}, "relation": {"num_relations": 4}}
    config = tiny_config(["shaw", "disan", "relation"], position_options=options)
    RelPosBertModel(config).save_pretrained(tmp_path)
    model = RelPosBertModel.from_pretrained(tmp_path)
    assert model.config.position_options == options and model.config.position_scheme_name == "shaw+disan+relation"
    shaw, disan, relation = model.encoder.layer[0].attention.self.distance_embedding.parts
    assert tuple(shaw.key.shape) == (7, 8) and disan.settings["direction"] == "split"
    assert tuple(relation.key.shape) == (4, 8)
    assert supported_implementations(config) == ["relpos", "sdpa", "eager"] and config._attn_implementation == "relpos"


REFUSED_OPTIONS = [
    (["shaw", "disan"], {"clip": 3}, r"position_options\['clip'\].*dict for each.*shaw, disan"),
    (["shaw", "disan"], {"alibi": {}}, r"position_options\['alibi'\].*shaw, disan"),
    (["shaw", "disan"], {"shaw": 3}, r"position_options\['shaw'\].*dict for each"),
    (["shaw", "disan"], {"shaw": {"clip": 0}}, r"position_options\['clip'\] = 0.*'shaw'"),
    (["shaw", "disan"], {"disan": {"clip": 3}}, r"position_options\['clip'\] = 3.*'disan' has no such option"),
    *((names, None, "position_embedding_type") for names in ([], ["shaw", "shaw"], ["shaw", "no_such"])),
]


@pytest.mark.parametrize("names, options, says", REFUSED_OPTIONS, ids=str)
def test_combinations_that_are_refused(names, options, says):
    with pytest.raises(ValueError, match=says):
        tiny_config(names, position_options=options)


@pytest.fixture
def others():
    """Two schemes that exist for one test: a second rotation, and a second module at the input."""

    class Twist(Scheme, name="twist"):
        source, out_of_range = "a test", ("extrapolate",)

        def rotate(self, vectors, positions):
            return vectors

        def forward(self, context):
            return Terms(rotate=self.rotate)

    class Ramp(Scheme, name="ramp"):
        source, out_of_range = "a test", ("extrapolate",)

        @classmethod
        def input_module(cls, config, settings):
            return nn.Identity()

    yield
    del SCHEMES["twist"], SCHEMES["ramp"]


REFUSED = [
    (["tener", "deberta"], "tener.*deberta.*two schemes that both set `scale`"),
    (["rope", "twist"], "two schemes that both set `rotate`"),
    (["rope", "shaw"], "rope.*shaw.*a rotation cannot be combined with vectors"),
    (["transformer_xl", "rope"], "a rotation cannot be combined with vectors"),
    (["rope", "harmonic"], "a rotation cannot be combined with vectors"),
    (["absolute", "ramp"], "absolute and ramp both act on the input"),
]


@pytest.mark.parametrize("names, says", REFUSED, ids=str)
@pytest.mark.usefixtures("others")
def test_what_does_not_combine(names, says):
    with pytest.raises(ValueError, match=says):
        RelPosBertModel(tiny_config(names))


@torch.no_grad()
def test_padding_on_the_left_changes_nothing_beside_a_rotation():
    """Rotations by absolute positions cancel in the scores of whatever combination there may be."""
    tried = []
    for other in ON_TOKENS:
        with contextlib.suppress(ValueError):
            tiny_config(["rope", other])
            tried += [other] if SCHEMES[other].relative else []
    assert {"alibi", "t5", "disan"} <= set(tried)
    ids, mask = torch.randint(1, 50, (1, 6)), torch.tensor([[0] * 4 + [1] * 6])
    for other in tried:
        model = tiny_model(RelPosBertModel, ["rope", other]).double()
        padded = model(nn.functional.pad(ids, (4, 0)), attention_mask=mask).last_hidden_state
        assert (padded[:, 4:] - model(ids).last_hidden_state).abs().max() <= 1e-10, other


def test_only_one_gain_by_feature():
    terms = Terms(feature_gain=Table(torch.ones(1, 3, 4), lambda r: r.clamp(-1, 1) + 1))
    with raises(ValueError, "feature_gain"):
        combined(terms, terms)


@pytest.mark.parametrize("name", ["alibi", "fire", "kerple", "sandwich", "t5", "tupe", ["t5", "fire"]], ids=str)
@torch.no_grad()
def test_position_bias_in_the_attention_of_others(name, hidden):
    layer = tiny_attention(name)
    scheme, shared = layer.distance_embedding, layer.shared_distance_embedding
    bias = position_bias(scheme, 9, 9, shared, dtype=hidden.dtype)
    query, key, value = map(layer._split_heads, layer._project(hidden, hidden))
    scale = getattr(scheme, "scale", 8**-0.5)
    mask = {"attention_mask": None, "position_bias" if TAKES_BIAS else "attention_mask": bias[None]}
    outs = [ALL_ATTENTION_FUNCTIONS["sdpa"](layer, query, key, value, **mask, scaling=scale, is_causal=False)[0]]
    outs.append(scaled_dot_product_attention(query, key, value, bias, scale=scale).transpose(1, 2))
    assert all((out.flatten(2) - layer(hidden)[0]).abs().max() <= 1e-12 for out in outs)
    assert (position_bias(scheme, 2, 9, shared, dtype=hidden.dtype) - bias[:, -2:]).abs().max() <= 1e-12


@pytest.mark.parametrize(
    "name", ["absolute", "cable", "deberta", "disan", "pope", "relation", ["t5", "rope"]], ids=str
)
def test_position_bias_refuses_what_is_more(name):
    layer = tiny_attention(name)
    with raises(ValueError, "position_bias", name if isinstance(name, str) else "t5 + rope", "attend"):
        position_bias(layer.distance_embedding, 5, 5, layer.shared_distance_embedding)
    with raises(ValueError, "t5", "shared"):
        position_bias(tiny_attention("t5").distance_embedding, 5, 5)
