"""scripts/bench_calibrated.py: its variants can be built, its table marks the front, and it resumes."""

import json

import pytest
from launching import import_script

from hf_relpos import RelPosBertConfig


@pytest.fixture(scope="module")
def bench():
    return import_script("bench_calibrated")


def row(cosine, seconds):
    return {
        "sentence": {str(length): cosine for length in (16, 64, 128, 256, 512)},
        "token": {"16": cosine},
        "other": {"16": cosine},
        "sts": {"a": -0.25, "b": 0.05},
        "times": {str(length): {"source": 1.0, "variant": seconds} for length in (128, 512)},
        "fit_cpu_seconds": 1.0,
    }


def test_every_variant_is_a_scheme_with_options(bench):
    for variant in bench.variants().values():
        RelPosBertConfig(position_embedding_type=variant.scheme, position_options=dict(variant.options))


def test_the_front(bench):
    """Closer and quicker than another variant: that one is not on the front."""
    rows = {"quick": row(0.9, 1.1), "close": row(0.98, 1.9), "behind": row(0.89, 1.5)}
    assert [bench.on_the_front(rows, name) for name in rows] == [True, True, False]
    results = {"variants": {name: {"result": each} for name, each in rows.items()}}
    ((_, columns, lines),) = bench.tables(results)
    assert [line[:2] for line in lines] == [["quick", "•"], ["behind", ""], ["close", "•"]]
    assert all(len(line) == len(columns) for line in lines)
    assert lines[0][2:8] == ["1.10", "1.10", ".900", ".900 .900 .900 .900 .900", ".900", "-0.10"]


def test_a_variant_with_the_same_settings_is_not_measured_again(bench, tmp_path, monkeypatch):
    measured = []

    def measure(variant, reference, texts, fields):
        measured.append(variant.options["terms"])
        return row(0.95, 1.2)

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "draw", lambda results, path: None)
    monkeypatch.setattr(bench, "load_encoder", lambda *arguments, **options: None)
    arguments = ["--source", "model", "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--variants"]
    bench.main([*arguments, "tables c"])
    bench.main([*arguments, "tables c", "tables Ac"])
    assert measured == ["c", "Ac"]
    bench.main([*arguments, "tables c", "--tokens", "700"])
    assert measured == ["c", "Ac", "c"]
    assert list(json.loads((tmp_path / "out" / "calibrated.json").read_text())["variants"]) == ["tables c"]


def test_a_pattern_that_fits_nothing(bench, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--source", "x", "--data", "y", "--variants", "tabels"])
    assert "fits none" in capsys.readouterr().err
