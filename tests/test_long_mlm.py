"""scripts/long_mlm.py: a whole run, which is not repeated."""

import json

import pytest
from launching import import_script

from hf_relpos.data.records import read_lines
from hf_relpos.demo import HERE


@pytest.fixture(scope="module")
def script():
    return import_script("long_mlm")


def test_runs(tmp_path, script, capsys):
    text = "\n".join(read_lines(HERE / "text" / "eval.txt.xz")[:60])
    for name in ("train", "test"):
        (tmp_path / name).write_text(text, encoding="utf-8")
    files = ["--train", tmp_path / "train", "--test", tmp_path / "test", "--out", tmp_path / "out"]
    sizes = "--length 16 --steps 2 --batch 2 --lengths 16 40 --windows 4 --tokens 400 --variants deberta-v1 alibi"
    arguments = [str(each) for each in ["--name", "made-up", *files, "--work", tmp_path / "work", *sizes.split()]]
    script.main(arguments)
    entry = json.loads((tmp_path / "out" / "results.json").read_text())["made-up"]
    assert list(entry["runs"]) == ["deberta-v1/0", "alibi/0"]
    figures = entry["runs"]["alibi/0"]["result"]["figures"]
    assert figures["None"]["40"] != figures["4"]["40"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| `alibi` | 4 |" in card and str(tmp_path) not in card
    script.main(arguments)
    assert "alibi/0: there already" in capsys.readouterr().out
