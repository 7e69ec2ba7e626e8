"""scripts/bench_window.py: a tiny run from end to end, which an interruption does not make begin anew."""

import json

import pytest
from launching import import_script


@pytest.fixture
def bench(monkeypatch):
    module = import_script("bench_window")
    monkeypatch.setattr(module, "WINDOW", 8)
    monkeypatch.setattr(module, "PIECE", 16)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)  # of the process that runs the tests
    monkeypatch.setattr(module, "run_worker", lambda *request: 2.5)  # a fresh process has the real sizes
    return module


def test_an_interrupted_run_goes_on(bench, tmp_path, monkeypatch):
    """Every variant is timed once at every length and pass, and written before the next."""
    timed, time_in_turns = [], bench.time_in_turns

    def time(calls, rounds):
        if len(timed) == 1:
            timed.append(None)
            raise KeyboardInterrupt
        timed.append(sorted(calls))
        return time_in_turns(calls, rounds)

    monkeypatch.setattr(bench, "time_in_turns", time)
    arguments = ["bench_window.py", "--schemes", "relative_key", "--lengths", "32", "48", "--rounds", "1"]
    monkeypatch.setattr("sys.argv", [*arguments, "--out", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        bench.main()
    results = tmp_path / "cpu-window.json"
    first = json.loads(results.read_text())
    assert len(first["times"]) == len(bench.VARIANTS) and not first["complete"]
    bench.main()
    assert timed == [sorted(bench.VARIANTS), None, *[sorted(bench.VARIANTS)] * 3]
    found = json.loads(results.read_text())
    assert found["complete"] and found["times"][: len(first["times"])] == first["times"]
    assert len(found["memory"]) == 2 * len(bench.VARIANTS) and found["difference"]["relative_key"] <= 1e-11
    assert "| window |" in (tmp_path / "cpu-window.md").read_text() and (tmp_path / "cpu-window.png").exists()


def test_whole_models_are_in_the_card(bench, tmp_path, monkeypatch):
    """A source in pieces and a student in a window, by both backends, against the goal; no path is stored."""
    from transformers import BertConfig, BertModel

    from hf_relpos import RelPosBertConfig, RelPosBertModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    sizes.update(vocab_size=50, max_position_embeddings=16)
    BertModel(BertConfig(**sizes)).save_pretrained(tmp_path / "original")
    RelPosBertModel(RelPosBertConfig(**sizes)).save_pretrained(tmp_path / "made")
    monkeypatch.setattr(bench, "MODEL_LENGTHS", [32])
    arguments = ["bench_window.py", "--schemes", "relative_key", "--lengths", "32", "--rounds", "1"]
    folders = [str(tmp_path / name) for name in ("original", "made")]
    monkeypatch.setattr("sys.argv", [*arguments, "--out", str(tmp_path), "--models", *folders])
    bench.main()
    found = json.loads((tmp_path / "cpu-window.json").read_text())
    assert [row["variant"] for row in found["models"]] == [bench.SOURCE, *bench.STUDENTS]
    assert found["model_names"] == ["original", "made"] and str(tmp_path) not in json.dumps(found)
    text = (tmp_path / "cpu-window.md").read_text()
    assert "Forward: original and made" in text and "student, window, sdpa, 32 tokens" in text


def test_lengths_are_whole_pieces(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench_window.py", "--lengths", "40", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        bench.main()
    assert "--lengths 40: give multiples of 16" in capsys.readouterr().err and not list(tmp_path.iterdir())
