"""Pictures of schemes: the numbers behind them, and that every scheme has one."""

import pytest
import torch
from launching import import_script
from oracles import tiny_model

from hf_relpos import RelPosBertModel
from hf_relpos.schemes import SCHEMES


SCORES = import_script("scheme_scores")
R = torch.arange(16) - torch.arange(16)[:, None]  # j − i, L = P = 16


def calls_of(scheme, **settings):
    return SCORES.record_calls(tiny_model(RelPosBertModel, scheme, **settings))[0]


def test_alibi_is_a_cone():
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])
    call = calls_of("alibi", num_attention_heads=4)[0]
    assert (SCORES.score_map(call) + slopes[:, None, None] * R.abs()).abs().max() <= 1e-6


def test_tables_are_shown_for_the_mean_query():
    model = tiny_model(RelPosBertModel, "shaw", position_options={"clip": 3})
    call = SCORES.record_calls(model)[0][1]
    rows = model.encoder.layer[1].attention.self.distance_embedding.key[R.clamp(-3, 3) + 3]  # (L, L, d)
    expected = torch.einsum("hd,ijd->hij", call.query.mean((0, 2)), rows) / 8**0.5
    assert (SCORES.score_map(call) - expected).abs().max() <= 1e-6


def test_rotation_favours_the_same_place():
    added = SCORES.score_map(calls_of("rope")[0])[0]
    cosines = torch.cos(R[..., None] * 10000.0 ** -(torch.arange(4) / 4)).mean(-1)
    assert (added - (cosines - 1) / 8**0.5).abs().max() <= 1e-6


def test_a_gain_of_one_adds_nothing():
    model = tiny_model(RelPosBertModel, "huang_m1")
    for parameter in model.encoder.layer[0].attention.self.distance_embedding.parameters():
        torch.nn.init.ones_(parameter)
    assert SCORES.score_map(SCORES.record_calls(model)[0][0]).abs().max() <= 1e-6


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_hidden_keys(direction):
    added = SCORES.score_map(calls_of("disan", position_options={"direction": direction})[0])
    hidden = added.isnan()
    assert not added[~hidden].any()
    assert hidden[0].equal(R >= 0) != hidden[0].equal(R <= 0)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_has_a_picture(name):
    """A panel and its scale for what is added to the scores, and for what is added to the input."""
    model = tiny_model(RelPosBertModel, name, num_hidden_layers=1)
    (call,), added = SCORES.record_calls(model)
    scores = SCORES.score_map(call)
    assert scores.shape == (3, 16, 16) and not scores.isinf().any()
    panels = bool(scores[:, 8].any()) + (added is not None)
    figure = SCORES.plot_layer(model)
    assert name in figure.get_suptitle() and panels >= 1 and len(figure.axes) == 2 * panels


def test_input_vectors():
    image = SCORES.plot_layer(tiny_model(RelPosBertModel, "sinusoidal", num_hidden_layers=1)).axes[0].images[0]
    cosines = image.get_array()
    assert abs(cosines.diagonal() - 1).max() <= 1e-6 and abs(cosines - cosines.T).max() <= 1e-6
    assert cosines[0, 1] > cosines[0, 8]
