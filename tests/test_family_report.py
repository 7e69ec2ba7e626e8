"""README.md and docs/families.md say what the families say."""

import pytest
from launching import import_script
from transformers import CONFIG_MAPPING, MODEL_MAPPING

from hf_relpos.families.registry import FAMILIES
from hf_relpos.families.table import heads


@pytest.fixture(scope="module")
def report():
    return import_script("family_report")


def test_tables_are_current(report):
    assert not report.stale(), "run: make families"


def test_stale_files_are_seen(report, tmp_path, monkeypatch):
    for name in ("README", "PAGE"):
        text = getattr(report, name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace("RoFormer", "RoFarmer"), encoding="utf-8")
        monkeypatch.setattr(report, name, tmp_path / name)
    assert report.stale() == ["README.md", "docs/families.md"]


def test_a_probe_that_is_not_refused_is_seen(report, monkeypatch):
    monkeypatch.setitem(report.PROBES, "roformer", [{"hidden_act": "relu"}])
    with pytest.raises(SystemExit, match=r"PROBES\['roformer'\].*not refused any more"):
        report.refusals("roformer")


@pytest.mark.parametrize("kind", ["modernbert", "nomic_bert", "gte", "eurobert", "jina_embeddings_v3", "esm"])
def test_transformers_does_these_well_itself(report, kind):
    assert kind in report.NATIVE
    if kind in CONFIG_MAPPING:  # the oldest release that is supported has no GTE
        model = MODEL_MAPPING[CONFIG_MAPPING[kind]]
        assert model._supports_sdpa and model._supports_flash_attn


def test_heads_that_are_left_out_are_listed(report):
    assert "RoFormerForMultipleChoice" in report.refusals("roformer")[-1]
    assert "Model" in heads(FAMILIES["jinabert"], report.example("jinabert"))
