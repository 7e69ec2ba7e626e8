"""The level of each text model of Transformers is that of docs/results/levels.json, and its outputs stay."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from text_models import batches, build, call, difference, measure, named

from hf_relpos import optimize


STORED = json.loads((Path(__file__).parents[1] / "docs" / "results" / "levels.json").read_text(encoding="utf-8"))
CLASSES = STORED["classes"]
EACH = 12  # one of so many in the fast tier


def cases():
    """Names by level, so that the fast tier has some of each."""
    names = sorted(CLASSES, key=lambda name: (CLASSES[name]["level"], name))
    return [name if n % EACH == 0 else pytest.param(name, marks=pytest.mark.slow) for n, name in enumerate(names)]


@pytest.mark.parametrize("name", cases())
def test_level_of_text_model(name):
    found = measure(name)
    assert found.pop("difference") <= 2e-5
    assert found == {key: CLASSES[name][key] for key in found}


@pytest.mark.slow
def test_text_models_are_those_of_transformers():
    """With the releases that the figures are of; new ones have new classes."""
    assert STORED["about"]["transformers"] == transformers.__version__
    assert {*CLASSES} | {*STORED["others"]} == {name for _, name in named()}


WHOLE_WHILE_SHORT = [("DogeModel", {"keep_window_size": 18}, 18)]
WHOLE_WHILE_SHORT += [("BigBirdModel", {"block_size": 2, "num_random_blocks": 1}, 14)]


@pytest.mark.parametrize("name, fields, longest", WHOLE_WHILE_SHORT)
def test_optimize_attention_that_chooses_keys(name, fields, longest):
    """Which ones depends on padding, in batches longer than the rows of the check."""
    model = build(name, **fields)
    inputs = {side: given for side, given in batches(model.config).items() if side in ("right", "left")}
    expected = {side: call(model, *given) for side, given in inputs.items()}
    assert f"not from {longest + 1} tokens on" in str(optimize(model))
    for side, (ids, mask) in inputs.items():
        assert difference(call(model, ids, mask), expected[side], mask) <= 2e-5


@torch.no_grad()
def test_optimize_entities_beside_tokens():
    """As many of them: they are no tokens, and stay where the text has its padding."""
    model = build("LukeModel")
    ids, mask = batches(model.config)["right"]
    given = {"input_ids": ids, "attention_mask": mask.long(), "entity_ids": torch.ones_like(ids)}
    given |= {"entity_position_ids": torch.zeros(*ids.shape, 1, dtype=torch.long)}
    expected = model(**given)[0]
    optimize(model)
    assert torch.equal(model(**given)[0], expected)


def test_optimize_reason_names_the_levels_that_were_tried():
    (left,) = optimize(build("YosoModel")).skipped  # without the attention functions that "contract" replaces
    assert "(difference: by length" in left.reason


def test_optimize_encoder_that_is_slow(monkeypatch):
    monkeypatch.setattr("hf_relpos.live.check.SLOW", 0)
    (left,) = optimize(build("BertModel")).skipped
    assert "takes 0 s for a few tokens" in left.reason
