"""The code blocks of docs/extending.md run as they stand."""

import re
from pathlib import Path

import pytest
import torch
from oracles import tiny_model

from hf_relpos import RelPosBertModel, explain_backend
from hf_relpos.attention import dispatch as backends
from hf_relpos.schemes.scheme import SCHEMES, Scheme


PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
SCHEME, BACKEND, FAMILY = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)


def test_the_scheme():
    known = dict(SCHEMES)
    try:
        exec(SCHEME, {})
        ids = torch.randint(1, 50, (2, 9))
        ours, page = (tiny_model(RelPosBertModel, name) for name in ("alibi", "plain_alibi"))
        page.load_state_dict(ours.state_dict())
        with torch.no_grad():
            assert torch.equal(ours(ids).last_hidden_state, page(ids).last_hidden_state)
    finally:
        SCHEMES.clear()
        SCHEMES.update(known)


def test_the_backend(monkeypatch):
    monkeypatch.setattr(backends, "BACKENDS", list(backends.BACKENDS))
    model, ids = tiny_model(RelPosBertModel, "shaw"), torch.randint(1, 50, (2, 9))
    with torch.no_grad():
        before = model(ids).last_hidden_state
        exec(BACKEND, {})
        after = model(ids).last_hidden_state
    assert "takes reference" in explain_backend(model)
    assert "not reference: it is for inference" in explain_backend(model, gradients=True)
    assert 0 < (before - after).abs().max() <= 1e-5


def test_the_family():
    names = {}
    exec(FAMILY, names)
    family = names["MyBert"]({})
    assert family.heads()["MyBertForMaskedLM"] == "BertForMaskedLM" and family.positions.scheme == "alibi"
    found = family.rename("bert.encoder.layer.1.self_attention.q.weight", base=False)
    assert found == ["bert.encoder.layer.1.attention.self.query.weight"]


def test_a_scheme_needs_a_name_and_what_is_made_of_one_does_not():
    """FSDP2 and parametrizations give a module a class of their own, made of its class."""
    with pytest.raises(TypeError, match=r"Nameless has no name; give it one: class Nameless\(Scheme, name="):
        type("Nameless", (Scheme,), {})
    known = dict(SCHEMES)
    with pytest.raises(TypeError, match=r"Undeclared has no source; the docstring of Scheme"):
        type("Undeclared", (Scheme,), {}, name="undeclared")
    made = type("FSDPALiBi", (SCHEMES["alibi"],), {})
    assert made.name == "alibi" and known == SCHEMES
