"""The script that compares a model on long inputs with its source read in windows."""

import json
import sys
from pathlib import Path

import pytest
from launching import import_script
from test_convert import bert
from transformers import AutoTokenizer

from hf_relpos.conversion import convert


@pytest.fixture(scope="module")
def script():
    return import_script("compare_long_inputs")


def test_the_script(script, tmp_path, monkeypatch, capsys):
    fixture = Path(__file__).parents[1] / "hf_relpos" / "demo"
    tokenizer = AutoTokenizer.from_pretrained(next(fixture.rglob("tokenizer_config.json")).parent)
    source, out, text = tmp_path / "stock", tmp_path / "out", tmp_path / "text.txt"
    bert(vocab_size=len(tokenizer)).save_pretrained(source)
    tokenizer.save_pretrained(source)
    convert(source, out, method="hierarchical")
    text.write_text("It was the best of times, it was the worst of times, it was the age of wisdom.\n" * 90)
    arguments = [str(source), str(out), "--texts", str(text), "--documents", "2", "--length"]
    monkeypatch.setattr(sys, "argv", ["script", *arguments, "20"])
    script.main()
    # within the source's length it is the source
    assert json.loads(capsys.readouterr().out)["quarters"] == [1.0] * 4
    monkeypatch.setattr(sys, "argv", ["script", *arguments, "60", "--set", "attention_window=5"])
    script.main()
    report = json.loads(capsys.readouterr().out)
    assert report["attention_window"] == 5 and report["documents"] == 2 and max(report["quarters"]) < 0.999
    monkeypatch.setattr(sys, "argv", ["script", *arguments, "5000"])
    with pytest.raises(SystemExit, match="too little text for 2 documents of 5000 tokens"):
        script.main()
