"""Checkpoints written before names of options changed: same numbers, and today's names when saved again."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM

import hf_relpos


FOLDER = Path(__file__).parent / "fixtures" / "converted"  # by scripts/maintenance/golden/converted.py


def test_a_converted_checkpoint_gives_the_same_numbers(tmp_path):
    stored = load_file(FOLDER / "outputs.safetensors")
    model = AutoModelForMaskedLM.from_pretrained(FOLDER).eval()
    assert type(model) is hf_relpos.RelPosBertForMaskedLM
    with torch.no_grad():
        logits = model(input_ids=stored["input_ids"], attention_mask=stored["attention_mask"]).logits
    real = stored["attention_mask"].bool()
    torch.testing.assert_close(logits[real], stored["logits"][real], atol=1e-6, rtol=1e-5)
    model.save_pretrained(tmp_path)
    options = json.loads((tmp_path / "config.json").read_text())["position_options"]
    assert options == {"out_of_range": "zero", "dense": 4, "max_distance": 12}
