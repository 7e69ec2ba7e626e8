"""Names of before 0.1.0: each works, and warns of the new one."""

import json
import os

import pytest
import torch
from encoders import build
from launching import run_command

import hf_relpos
from hf_relpos import deprecation
from hf_relpos.autoload import UNPAD
from hf_relpos.evaluation import compare_models
from hf_relpos.products.cpu_gemm import VALUES, _setting


def warns(*words):
    return pytest.warns(FutureWarning, match=".*".join(words))


@pytest.mark.parametrize("old, new", hf_relpos._OLD_NAMES.items())
def test_old_names_of_the_package(old, new):
    with warns(rf"hf_relpos\.{old} is now hf_relpos\.{new};"):
        found = getattr(hf_relpos, old)
    owner = hf_relpos.schemes if "." in new else hf_relpos
    assert found is getattr(owner, new.rpartition(".")[2]) and old not in hf_relpos.__all__
    with warns("undo_optimize"):
        assert hf_relpos.live.restore_attention is hf_relpos.undo_optimize and not hasattr(hf_relpos.live, "restored")


@pytest.mark.parametrize("dtype", [torch.bfloat16, "torch.bfloat16", "bfloat16"])
@pytest.mark.parametrize("old, new", [("stock", False), ("zeros", True), ("mask", "attention_mask")])
def test_rename_arguments_of_optimize(dtype, old, new):
    """With their values; one that is given by both names is an error."""
    report = hf_relpos.optimize(build("BERT", torch.float32), dtype, new)
    with warns("precision", "dtype='bfloat16'"), warns("padding", "unpad="):
        renamed = hf_relpos.optimize(build("BERT", torch.float32), precision="bfloat16", padding=old)
    assert str(renamed) == str(report) and "12 linear layers in bfloat16" in str(report)
    with warns("skipped"):
        assert report.left == report.skipped
    assert json.loads(json.dumps(report.to_dict()))["skipped"] == [vars(each) for each in report.skipped]
    with warns("padding"), pytest.raises(TypeError, match="unpad"):
        hf_relpos.optimize(report, padding=old, unpad=True)


def test_rename_arguments_of_others():
    with warns("mend", "repair=True"), pytest.raises(TypeError, match="Linear"):
        hf_relpos.verify_weights(torch.nn.Linear(2, 2), mend=True)
    with warns("text", "texts=3"), pytest.raises(ValueError, match="texts = 3"):
        compare_models("a", "b", text=3)


@pytest.mark.parametrize("old, value", [("0", "off"), ("linear", "linear"), ("unpacked", "no-prepack"), ("1", "on")])
def test_variable_by_its_old_name(old, value, monkeypatch):
    monkeypatch.setenv("HF_RELPOS_FAST_PRODUCTS", old)
    with warns(f"HF_RELPOS_FAST_PRODUCTS={old}", f"HF_RELPOS_ONEDNN={value}"):
        assert _setting() == value in VALUES
    monkeypatch.setenv("HF_RELPOS_ONEDNN", "on")
    assert _setting() == "on"
    monkeypatch.setenv("HF_RELPOS_PADDING", "mask")
    with warns("HF_RELPOS_PADDING"):
        assert deprecation.variable(UNPAD) == "attention_mask" and "HF_RELPOS_UNPAD" not in os.environ


def test_options_by_their_old_names():
    """Options of the command line have the names of arguments; help shows those alone."""
    old = "--scheme shaw --option=clip=a --method-option steps=2 --text no.txt --method distil".split()
    done = run_command("convert", "no-folder", "out", *old)
    assert done.exit_code == 2 and "Error: --texts 'no.txt'" in done.output, done.output
    for name, new in (("--option", "--position-options"), ("--text", "--texts"), ("--scheme", "--position-emb")):
        assert f"Warning: {name} is now {new}" in done.output
    done = run_command("optimize", "no/folder", "--text", "no.txt", "--precision", "int8", "--padding", "zeros")
    assert "hf-relpos benchmark" in done.output and "Warning: --padding is now --unpad" in done.output
    assert "Error: --texts 'no.txt'" in done.output and done.exit_code == 2
    assert "is not one of pad_token" in run_command("run", "--unpad", "zero", "true").output
    shown = run_command("--help").output + run_command("benchmark", "--help").output
    assert "│ benchmark " in shown and "--dtype" in shown
    assert not any(f"{name} " in shown for name in ("│ optimize", *deprecation.OPTIONS.values()))
