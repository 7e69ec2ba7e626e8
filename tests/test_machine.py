"""`self_check` and `hf-relpos doctor --check`: right here, and wrong where something is."""

import json
import subprocess
import sys

import pytest
import torch
from launching import run_command

from hf_relpos import machine
from hf_relpos.attention.backends import chunked
from hf_relpos.host import declarations
from hf_relpos.schemes import SCHEMES


def only(monkeypatch):
    """Few schemes and encoders, and no process that runs saved code."""
    monkeypatch.setattr(machine, "_saved_code", lambda: "")
    monkeypatch.setattr(machine, "SCHEMES", {name: SCHEMES[name] for name in ("t5", "shaw")})
    monkeypatch.setattr(machine, "STOCK", {name: machine.STOCK[name] for name in ("bert", "deberta-v2")})


def failures(monkeypatch) -> dict[str, str]:
    only(monkeypatch)
    return {f"{check.kind} {check.name}": check.detail for check in machine.self_check(["cpu"]) if not check.passed}


@pytest.mark.slow
def test_all_is_right_here(tmp_path):
    done = run_command("doctor", "--check", "--json", tmp_path / "checks.json")
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "checks.json").read_text())
    kinds = {each["kind"] for each in content["checks"]}
    assert kinds == {"host", "attention", "cache", "live", "saved code"}
    assert all(each["passed"] for each in content["checks"]) and "transformers" in content["versions"]
    names = {each["name"] for each in content["checks"]}
    assert {f"{scheme}, cpu" for scheme in SCHEMES} | set(machine.STOCK) <= names
    assert done.output.count("ok ") == len(content["checks"])


def test_every_backend_of_this_machine_has_its_turn():
    said = " ".join(machine._attention(scheme, "cpu") for scheme in ("t5", "shaw", "relation"))
    assert "sdpa" in said and "chunked" in said and "eager" in said and "in a window" in said


def test_a_wrong_backend_is_found(monkeypatch):
    run = chunked.Chunked.run

    def wrong(self, call):
        out, weights = run(self, call)
        return out * 1.001, weights

    monkeypatch.setattr(chunked.Chunked, "run", wrong)
    found = failures(monkeypatch)
    assert set(found) == {"attention t5, cpu", "attention shaw, cpu"}
    assert "chunked" in found["attention t5, cpu"] and "of the largest value" in found["attention t5, cpu"]


def test_a_live_encoder_that_is_wrong_is_found(monkeypatch):
    optimize = machine.optimize

    def wrong(model, **settings):
        handle = optimize(model, **settings)
        with torch.no_grad():
            next(model.parameters()).mul_(1.01)
        return handle

    monkeypatch.setattr(machine, "optimize", wrong)
    assert set(failures(monkeypatch)) == {"live bert", "live deberta-v2"}


def test_what_the_host_lacks_and_exceptions_are_lines(monkeypatch):
    gone = declarations.Need("transformers:gone", since="5.0", without="nothing works")
    monkeypatch.setattr(declarations, "NEEDS", (*declarations.NEEDS, gone))
    monkeypatch.setattr(machine, "optimize", lambda model, **settings: 1 / 0)
    only(monkeypatch)
    done = run_command("doctor", "--check")
    assert done.exit_code == 1 and "3 FAILED" in done.output
    assert "has no transformers:gone; without it, nothing works" in done.output
    assert "ZeroDivisionError: division by zero" in done.output


@pytest.mark.parametrize("found", [float("nan"), 1.1])
def test_what_is_not_a_number_is_wrong(found):
    with pytest.raises(machine.WrongError):
        machine._compare([torch.tensor([found])], [torch.tensor([1.0])], "x")


@pytest.mark.slow
def test_it_may_be_what_is_asked_for_first():
    subprocess.run([sys.executable, "-c", "import hf_relpos; hf_relpos.self_check"], check=True)
