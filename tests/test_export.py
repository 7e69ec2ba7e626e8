"""From one scheme made of tables to another, or range: exact where it can be, and told how inexact elsewhere."""

import numpy as np
import pytest
import torch
from oracles import tiny_config, tiny_model

from hf_relpos import RelPosBertForMaskedLM
from hf_relpos.conversion import ConversionError, export_tables, resize_tables
from hf_relpos.conversion.refit import table_rows


def source(**options):
    return tiny_model(RelPosBertForMaskedLM, "tables", position_options=options)


def logits(model):
    with torch.no_grad():
        return model(torch.arange(1, 13)[None]).logits


@pytest.mark.parametrize(
    "target, options, tables",
    [
        ("relative_key", {}, {"terms": "A", "per_head": False}),
        ("relative_key", {}, {"terms": "A", "per_head": False, "storage": "rows"}),
        ("shaw", {"clip": 15}, {"terms": "AV", "per_head": False}),
        ("shaw", {"clip": 15, "per_head": True}, {"terms": "AV"}),
        ("shaw", {"clip": 4, "per_head": True}, {"terms": "AV", "max_distance": 4}),
    ],
)
def test_exact_where_the_target_can_hold_it(target, options, tables):
    model = source(**tables)
    smaller, report = export_tables(model, target, options)
    assert smaller.config.position_embedding_type == target
    assert max(report.lost.values()) <= 1e-12
    assert (logits(smaller) - logits(model)).abs().max() <= 1e-5


def test_one_table_for_both_sides():
    model = source(terms="AB", per_head=False)
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            scheme = layer.attention.self.distance_embedding
            scheme.B.copy_(scheme.A)
    smaller, report = export_tables(model, "relative_key_query")
    assert max(report.lost.values()) <= 1e-12
    assert (logits(smaller) - logits(model)).abs().max() <= 1e-5


def test_what_is_lost():
    """The mean over heads is the closest table; its loss is worked out anew here; letters without a place are lost.

    In a row of 16 tokens, 16 − |r| pairs are r apart.
    """
    model = source(terms="ABcV", storage="rows")
    smaller, report = export_tables(model, "relative_key")
    assert report.lost["B"] == report.lost["c"] == report.lost["V"] == 1.0
    missed = whole = 0.0
    for one, other in zip(model.bert.encoder.layer, smaller.bert.encoder.layer, strict=True):
        rows = one.attention.self.distance_embedding.A.detach().double()
        weight = other.attention.self.distance_embedding.weight.detach().double()
        for r in range(-15, 16):
            for head in range(3):
                missed += (16 - abs(r)) * (rows[head, r + 15] - weight[15 - r]).square().sum().item()
                whole += (16 - abs(r)) * rows[head, r + 15].square().sum().item()
    assert report.lost["A"] == pytest.approx(missed / whole, rel=1e-5)
    assert 0.1 < report.lost["A"] < 1
    assert (logits(smaller) - logits(model)).abs().max() > 1e-2


T5 = {"buckets": 8, "max_distance": 9}
SOURCES = {
    "relative_key": {},
    "relative_key clipped": {"clip": 4},
    "relative_key albert": {"scaling": "albert"},
    "relative_key_query": {},
    "relative_key_query esm": {"scaling": "esm"},
    "shaw": {"clip": 4, "out_of_range": "zero"},
    "shaw per head": {"clip": 9, "per_head": True},
    "music": {"values": True},
    "music causal": {"causal": True, "max_relative_position": 5},
    "nezha": {"max_relative_position": 6},
    "t5": T5,
    "alibi": {},
    "sandwich": {},
    "tables": {"terms": "ABcV"},
}


@pytest.mark.parametrize("options", SOURCES.values(), ids=SOURCES)
def test_tables_hold_every_scheme_that_is_made_of_them(options, request):
    scheme = request.node.callspec.id.split()[0]
    model = tiny_model(RelPosBertForMaskedLM, scheme, position_options=options)
    whole, report = export_tables(model, "tables", {"terms": "ABcV", "storage": "rows"})
    assert max(report.lost.values()) <= 1e-11
    assert (logits(whole) - logits(model)).abs().max() <= 2e-5
    again, report = export_tables(whole, "tables", {"terms": "ABcV", "storage": "rows", "per_head": True})
    assert max(report.lost.values()) <= 1e-11 and (logits(again) - logits(model)).abs().max() <= 2e-5


def test_a_combination_becomes_one_scheme():
    model = tiny_model(RelPosBertForMaskedLM, ["relative_key", "t5"], position_options={"t5": T5})
    whole, report = export_tables(model, "tables", {"terms": "Ac", "storage": "rows"})
    assert report.lost.keys() == {"A", "c"} and max(report.lost.values()) <= 1e-11
    assert (logits(whole) - logits(model)).abs().max() <= 2e-5


def test_distances_that_share_a_row_get_their_weighted_mean():
    model = source(terms="A", storage="rows")
    smaller, _ = export_tables(model, "shaw", {"clip": 3, "per_head": True})
    rows = model.bert.encoder.layer[0].attention.self.distance_embedding.A
    key = smaller.bert.encoder.layer[0].attention.self.distance_embedding.key
    weights = torch.tensor([16.0 - r for r in range(3, 16)])
    expected = (rows[:, 18:] * weights[:, None]).sum(1) / weights.sum()
    torch.testing.assert_close(key[:, 6], expected)
    torch.testing.assert_close(key[:, 5], rows[:, 17])


def test_knots_are_a_least_squares_fit():
    """Against NumPy's, of the hat functions written out."""
    model = source(terms="c", storage="rows")
    smaller, report = export_tables(model, "tables", {"terms": "c", "dense": 2, "per_octave": 1})
    scheme = smaller.bert.encoder.layer[1].attention.self.distance_embedding
    r = np.arange(-15, 16)
    hats = np.stack([np.interp(r, scheme.knots, unit) for unit in np.eye(len(scheme.knots))], axis=1)
    root = np.sqrt(16.0 - np.abs(r))
    wanted = model.bert.encoder.layer[1].attention.self.distance_embedding.c.detach().double().numpy()
    best = np.linalg.lstsq(root[:, None] * hats, root[:, None] * wanted.T, rcond=None)[0]
    assert np.abs(best.T - scheme.c.detach().numpy()).max() <= 1e-5
    assert 0.1 < report.lost["c"] < 0.9


# --- another range


RESIZED = {"relative_key": {}, "relative_key_query": {}, "shaw": {"clip": 15}, "music": {"values": True}}
RESIZED |= {"tables": {"terms": "ABcV", "storage": "rows"}}


@pytest.mark.parametrize("scheme", RESIZED)
@pytest.mark.parametrize("fill", ["clip", "interpolate"])
def test_longer_and_back(scheme, fill):
    """Inside the old range nothing changes with "clip"; stretched and compressed again, every row comes back."""
    model = tiny_model(RelPosBertForMaskedLM, scheme, position_options=RESIZED[scheme])
    longer, report = resize_tables(model, 45, fill)
    far = table_rows(longer, 45)
    old = table_rows(model, 15)
    for one, other in zip(old, far, strict=True):
        for letter, rows in one.items():
            step = 3 if fill == "interpolate" else 1
            middle = other[letter][:, 45 - 15 * step : 46 + 15 * step : step]
            torch.testing.assert_close(middle, rows, rtol=0, atol=1e-6)
            torch.testing.assert_close(other[letter][:, -1], rows[:, -1], rtol=0, atol=1e-6)
    if fill == "clip":
        assert max(report.lost.values()) <= 1e-12 and (logits(longer) - logits(model)).abs().max() <= 1e-5
    else:
        assert min(report.lost.values()) > 0.01
    back, report = resize_tables(longer, 15, fill)
    for (name, one), other in zip(model.named_parameters(), back.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6, msg=name)
    assert back.config.max_position_embeddings == 16 or scheme != "relative_key"


@pytest.mark.parametrize("scheme", RESIZED)
def test_shorter_is_clipped(scheme):
    """Near rows stay bit for bit; what the far ones were is lost, and said."""
    model = tiny_model(RelPosBertForMaskedLM, scheme, position_options=RESIZED[scheme])
    shorter, report = resize_tables(model, 4)
    for one, other in zip(table_rows(model, 4), table_rows(shorter, 4), strict=True):
        assert all(torch.equal(one[letter], other[letter]) for letter in one)
    assert all(0.2 < share < 2 for share in report.lost.values())  # one far row for many is worse than none
    short = torch.arange(1, 6)[None]
    with torch.no_grad():
        assert (model(short).logits - shorter(short).logits).abs().max() <= 1e-5


def test_a_clip_inside_the_table_is_the_range():
    """What lies past it is not read, and does not come back."""
    model = tiny_model(RelPosBertForMaskedLM, "relative_key", position_options={"clip": 4})
    longer, report = resize_tables(model, 30)
    assert "clip" not in longer.config.position_options and longer.config.max_position_embeddings == 31
    assert report.lost["A"] <= 1e-12 and (logits(longer) - logits(model)).abs().max() <= 1e-5


def test_what_cannot_be_resized():
    model = source()
    for max_distance in (0, -3, 2.5, True, None):
        with pytest.raises(ConversionError, match=r"max_distance = .*"):
            resize_tables(model, max_distance)
    with pytest.raises(ConversionError, match="fill = 'zero'"):
        resize_tables(model, 8, "zero")
    for scheme in ("alibi", "t5", "nezha", "harmonic", ["relative_key", "alibi"]):
        with pytest.raises(ConversionError, match=r"only one of music, relative_key, .* to resize"):
            resize_tables(tiny_model(RelPosBertForMaskedLM, scheme), 8)
    hybrid = tiny_model(RelPosBertForMaskedLM, "relative_key", absolute_position_embeddings=True)
    with pytest.raises(ConversionError, match="absolute_position_embeddings = True"):
        resize_tables(hybrid, 8)


def test_other_sources_and_targets_are_refused():
    with pytest.raises(ConversionError, match="'alibi' is no target"):
        export_tables(source(), "alibi")
    with pytest.raises(ConversionError, match=r"'clip'.*reaches past"):
        export_tables(source(), "relative_key", {"clip": 99})
    for scheme, words in {
        "rope": "adds a rotation, which tables",
        "transformer_xl": "adds u, which",
        "disan": "adds hidden keys",
        "deberta": "adds a scale",
        "tupe": "adds a scale, a dense bias",
        "huang_m1": "adds a gain",
        "absolute": "adds nothing to the attention",
    }.items():
        with pytest.raises(ConversionError, match=words):
            export_tables(RelPosBertForMaskedLM(tiny_config(scheme)), "tables")


def test_waves_take_the_tables_that_they_hold():
    """Those of a harmonic model become the same waves among others; heads that share coefficients get their mean."""
    options = {"waves": 4, "period": 32}
    model = tiny_model(RelPosBertForMaskedLM, "harmonic", position_options=options)
    rows, _ = export_tables(model, "tables", {"storage": "rows"})
    back, report = export_tables(rows, "harmonic", options)
    assert max(report.lost.values()) <= 1e-12
    assert (logits(back) - logits(model)).abs().max() <= 1e-5
    for one, other in zip(scheme_parameters(model), scheme_parameters(back), strict=True):
        assert (one - other).abs().max() <= 1e-5


def test_waves_are_a_weighted_least_squares_fit():
    """Worked out anew with NumPy's lstsq, of the offsets of 16 tokens, each as often as it occurs."""
    model = source(terms="A", per_head=False, storage="rows")
    fitted, report = export_tables(model, "harmonic", {"waves": 3, "period": 32, "terms": "A", "per_head": False})
    offsets = np.arange(-15, 16)
    weights = np.sqrt(16.0 - np.abs(offsets))[:, None]
    angles = offsets[:, None] * np.geomspace(2 * np.pi / 32, 0.85 * np.pi, 3)
    design = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    missed = whole = 0.0
    for one, other in zip(scheme_parameters(model), scheme_parameters(fitted), strict=True):
        rows = one[0].detach().double().numpy()
        expected = np.linalg.lstsq(weights * design, weights * rows, rcond=None)[0]
        assert np.abs(other[0].detach().double().numpy() - expected).max() <= 1e-5
        missed += np.square(weights * (rows - design @ expected)).sum()
        whole += np.square(weights * rows).sum()
    assert report.lost["A"] == pytest.approx(missed / whole, rel=1e-4)


def test_many_waves_that_are_nearly_alike_keep_small_coefficients():
    model = source(terms="A", storage="rows")
    fitted, report = export_tables(model, "harmonic", {"waves": 24, "period": 4096, "terms": "A"})
    assert max(parameter.abs().max() for parameter in scheme_parameters(fitted)) <= 1e3
    assert report.lost["A"] <= 0.5


def scheme_parameters(model):
    return [parameter for name, parameter in model.named_parameters() if "distance_embedding" in name]
