"""docs/schemes.md says what the schemes say."""

import pytest
from launching import import_script


@pytest.fixture(scope="module")
def report():
    return import_script("scheme_report")


def test_tables_are_current(report):
    assert not report.stale(), "run: make schemes"


def test_stale_files_are_seen(report, tmp_path, monkeypatch):
    (tmp_path / "card").write_text(
        report.CARD.read_text(encoding="utf-8").replace("| `shaw` |", "| `show` |"), "utf-8"
    )
    monkeypatch.setattr(report, "CARD", tmp_path / "card")
    monkeypatch.setattr(report, "PICTURES", tmp_path)
    monkeypatch.setattr(report, "SCHEMES", {"shaw": report.SCHEMES["shaw"]})
    assert report.stale() == ["docs/schemes.md", "docs/schemes/shaw.png"]


def test_numbers(report):
    assert report.added_parameters("absolute") == 512 * 768
    assert report.added_parameters("relative_key") == 12 * 1023 * 64
    assert report.added_parameters("t5") == 32 * 12  # shared by the layers
    assert report.added_parameters("rope") == 0
    assert [report.rounded_up(x) for x in (None, 0.0, 2.1e-7, 9.2e-7)] == ["–", "0", "3e-07", "1e-06"]


def test_errors_are_measured(report):
    assert 0 < report.error("alibi") <= 1e-6
    assert report.error("huang_m1") is None


def test_errors_do_not_make_a_file_stale(report):
    row = "| `t5` | Raffel | c' | 384 | clip | sdpa | {} | transformers |\n"
    assert report.without_errors(row.format("2e-07")) == report.without_errors(row.format("0")) == row.format("*")
    assert report.without_errors(row.format("–")) == row.format("–")
