"""The demo: what it says of the models is what they are."""

import json

import pytest
from launching import run_command
from transformers import AutoModelForMaskedLM

from hf_relpos.conversion import ConversionError
from hf_relpos.demo import run_demo


@pytest.mark.heavy
def test_demo(tmp_path):
    out = tmp_path / "out"
    result = run_command("demo", "--out", out, "--json", tmp_path / "rows")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "rows").read_text())
    source, converted = rows["source"], rows["converted"]
    # the shipped BERT knows something, refuses more than it reads, and cannot find what lies past that
    assert source["masked"] > 25 and "masked, long" not in source and source["found"] < 10
    assert "129 tokens" in " ".join(result.stdout.split()) and "Error: " in result.stdout
    # the converted one knows about as much, also in rows of four times the length, and finds
    assert min(converted["masked"], converted["masked, long"]) > 0.9 * source["masked"]
    assert converted["found"] > 3 * source["found"] and converted["found"] > 25
    assert AutoModelForMaskedLM.from_pretrained(out).config.max_position_embeddings == 128
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rows"]
    with pytest.raises(ConversionError, match="exists"):
        run_demo(out=out)


def test_a_checkpoint_that_cannot_be_had(tmp_path):
    result = run_command("demo", "--checkpoint", tmp_path / "nothing", "--out", tmp_path / "out")
    assert result.exit_code == 2 and "no such folder" in result.stderr and not (tmp_path / "out").exists()
