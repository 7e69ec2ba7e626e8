"""The demo, with one step of training: what it says of the models is what they are."""

import pytest
from transformers import AutoModelForMaskedLM

from hf_relpos.conversion import ConversionError
from hf_relpos.demo import run_demo


@pytest.mark.heavy
def test_demo(tmp_path):
    out = tmp_path / "out"
    rows = run_demo(out=out, steps=1)
    assert set(rows) == {"source", "keep", "drop", "calibrate", "fine-tuned"}
    assert rows["keep"] == rows["source"]
    # the shipped BERT knows something, owes it to word order, and loses it with its positions
    assert rows["source"]["in order"] > 25 and rows["source"]["shuffled"] < 8
    assert rows["drop"]["in order"] < 10 and "long" not in rows["source"] and "long" in rows["drop"]
    # what calibration brings back of it, without training, and with a window also past the source's limit
    assert rows["calibrate"]["in order"] > 0.9 * rows["source"]["in order"]
    assert rows["calibrate"]["windowed"] > 0.75 * rows["source"]["in order"]
    assert sorted(path.name for path in out.iterdir()) == ["calibrate", "drop", "fine-tuned", "keep"]
    assert AutoModelForMaskedLM.from_pretrained(out / "drop").config.position_embedding_type == "transformer_xl"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(ConversionError, match="exists"):
        run_demo(out=out)
