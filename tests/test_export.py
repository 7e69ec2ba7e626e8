"""From `tables` to a smaller scheme: exact where it can be, and told how inexact where it cannot."""

import pytest
import torch
from oracles import tiny_config, tiny_model

from hf_relpos import RelPosBertForMaskedLM
from hf_relpos.convert import ConversionError, export_tables


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
        ("shaw", {"clip": 4, "per_head": True}, {"terms": "AV", "reach": 4}),
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
    """The mean over heads is the closest table; its loss is worked out anew here; letters without a place are lost."""
    model = source(terms="ABcV", storage="rows")
    smaller, report = export_tables(model, "relative_key")
    assert report.lost["B"] == report.lost["c"] == report.lost["V"] == 1.0
    missed = whole = 0.0
    for one, other in zip(model.bert.encoder.layer, smaller.bert.encoder.layer, strict=True):
        rows = one.attention.self.distance_embedding.A.detach().double()
        weight = other.attention.self.distance_embedding.weight.detach().double()
        for r in range(-15, 16):
            for head in range(3):
                missed += (rows[head, r + 15] - weight[15 - r]).square().sum().item()
                whole += rows[head, r + 15].square().sum().item()
    assert report.lost["A"] == pytest.approx(missed / whole, rel=1e-5)
    assert 0.1 < report.lost["A"] < 1
    assert (logits(smaller) - logits(model)).abs().max() > 1e-2


def test_other_sources_and_targets_are_refused():
    with pytest.raises(ConversionError, match="'alibi' is no target"):
        export_tables(source(), "alibi")
    with pytest.raises(ConversionError, match="only models with 'tables'"):
        export_tables(RelPosBertForMaskedLM(tiny_config("shaw")), "relative_key")
