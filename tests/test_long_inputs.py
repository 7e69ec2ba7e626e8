"""The script that compares a model on long inputs with its source read in windows."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from test_convert import bert
from transformers import AutoTokenizer

from hf_relpos.convert import convert


SCRIPT = Path(__file__).parents[1] / "scripts" / "compare_long_inputs.py"


@pytest.fixture(scope="module")
def script():
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("compare_long_inputs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("tokens, size", [(40, 10), (41, 10), (10, 10), (11, 10), (3, 10), (23, 7), (5, 1)])
def test_every_place_is_taken_from_where_it_is_most_central(script, tokens, size):
    found = script.windows(tokens, size)
    middles = [start + (size - 1) / 2 for start, _, _ in found]
    place = 0
    for number, (start, first, end) in enumerate(found):
        assert first == place and start <= first < end <= max(start + size, tokens)
        for place in range(first, end):
            assert abs(place - middles[number]) == min(abs(place - middle) for middle in middles)
        place = end
    assert place == tokens and all(start + size <= max(tokens, size) for start, _, _ in found)


def test_the_vectors_are_those_of_the_windows(script):
    model, ids = bert(), torch.randint(1, 60, (53,))
    vectors = script.read_in_windows(model, ids, 20)
    assert vectors.shape == (52, 24)
    rest = ids[1:]
    with torch.no_grad():
        for start, first, end in script.windows(52, 19):
            whole = model(torch.cat([ids[:1], rest[start : start + 19]])[None]).last_hidden_state[0]
            for place in range(first, end):
                assert torch.equal(vectors[place], whole[1 + place - start])
        short = model(ids[None, :20]).last_hidden_state[0, 1:]
        assert torch.equal(script.read_in_windows(model, ids[:20], 20), short)


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
