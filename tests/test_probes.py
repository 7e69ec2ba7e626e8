"""The probes ask what they say they ask, and run."""

import json

import pytest
import torch
from launching import import_script


PAD, CLS, SEP, A, B = range(5)


@pytest.fixture(scope="module")
def probe():
    return import_script("probe_schemes")


@pytest.mark.parametrize("length", [8, 17, 64])
def test_labels(probe, length):
    ids = probe.rows(6, length, torch.Generator().manual_seed(length))
    labels = {task: label.tolist() for task, label in probe.labels(ids).items()}
    for b, row in enumerate(ids.tolist()):
        assert row[0] == CLS and row[-1] == SEP and row.count(A) == row.count(B) == 1
        assert all(token > B or token in (A, B) for token in row[1:-1])
        for i, token in enumerate(row):
            edge = i in (0, length - 1)
            assert labels["back"][b][i] == (-100 if edge else row[i - 3] if i >= 3 else PAD)
            assert labels["reverse"][b][i] == (-100 if edge else row[length - 1 - i])
            assert labels["first"][b][i] == (-100 if edge or token in (A, B) else int(token not in row[:i]))
            assert labels["order"][b][i] == (int(row.index(A) < row.index(B)) if token in (A, B) else -100)


def test_accuracy(probe):
    target = torch.tensor([1, 0, 0, 0, -100])
    assert probe.accuracy("order", torch.tensor([1, 0, 1, 1, 1]), target) == 0.5
    assert probe.accuracy("first", torch.tensor([1, 0, 1, 1, 1]), target) == pytest.approx((1 + 1 / 3) / 2)


def test_the_control_has_no_positions(probe):
    args = probe.parse(["--steps", "3", "--hidden", "16", "--batch", "4"])
    model = probe.train("none", 0, list(probe.CLASSES), args)
    ids = probe.rows(2, 12, torch.Generator().manual_seed(0))
    shuffled = torch.randperm(12)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits[:, shuffled], model(ids[:, shuffled]).logits)


def test_every_model_has_a_claim(probe):
    assert all(probe.claim(name) for name in probe.known())
    assert set(probe.VARIANT_CLAIMS) == set(probe.VARIANTS) - set(probe.SCHEMES)


def test_a_small_run(probe, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(probe, "TEST_TOKENS", 1024)
    out, card = tmp_path / "results.json", tmp_path / "README.md"
    options = ["--steps", "2", "--hidden", "16", "--batch", "4", "--out", str(out), "--card", str(card)]
    runs = probe.main(["--schemes", "t5", "--seeds", "1", *options])
    assert "| `t5` |" in capsys.readouterr().out and "| `t5` |" in card.read_text(encoding="utf-8")
    assert json.loads(out.read_text(encoding="utf-8"))["runs"] == runs
    assert set(runs[0]["accuracy"]) == {"back", "reverse", "first", "order"}
    assert all(0 <= value <= 1 for task in runs[0]["accuracy"].values() for value in task.values())
    again = probe.main(["--schemes", "t5", "--seeds", "2", *options])  # the first seed is not run again
    assert again[0] == runs[0] and [run["seed"] for run in again] == [0, 1]
    assert probe.main(["--schemes", "t5", "--seeds", "3", "--minutes", "0", *options]) == again
