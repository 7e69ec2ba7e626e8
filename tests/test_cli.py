"""The command line: what it prints, its exit codes, and that it does what the function does."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, BertConfig, BertModel
from typer.testing import CliRunner

from hf_relpos import SCHEMES, cli
from hf_relpos.cli import app, parse_options
from hf_relpos.console import plain_warnings
from hf_relpos.conversion import METHODS


@pytest.fixture(autouse=True)
def width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A saved tiny BERT."""
    folder = tmp_path_factory.mktemp("source") / "stock"
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=60, max_position_embeddings=20, **sizes)).save_pretrained(folder)
    return folder


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_convert(source, tmp_path):
    out = tmp_path / "out"
    result = run("convert", source, out, "--scheme", "shaw", "--option", "clip=4", "--method", "drop")
    assert result.exit_code == 0, result.output
    config = AutoModel.from_pretrained(out).config
    assert config.position_embedding_type == "shaw" and config.position_options == {"clip": 4}
    assert not config.has_absolute_table
    report = json.loads((out / "conversion.json").read_text())
    for words in (
        "layer.*.attention.self.distance_embedding.key",
        "plus the mean of the position vectors",
        "BertModel → RelPosBertModel, method drop, scheme shaw (clip = 4, ",
        f"{report['totals']['reused']['parameters']:,} parameters",
        f"written to {out}",
    ):
        assert words in result.output
    assert "Traceback" not in result.output and "Loading weights" not in result.output


def test_convert_by_default_keeps_and_says_how_exactly(source, tmp_path):
    result = run("convert", source, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "method keep, scheme relative_key (clip = None, " in result.output
    assert "largest difference of an output to the source's, relative: " in result.output


def test_overwrite(source, tmp_path):
    assert run("convert", source, tmp_path / "out").exit_code == 0
    refused = run("convert", source, tmp_path / "out")
    assert refused.exit_code == 2 and "--overwrite" in refused.stderr
    assert run("convert", source, tmp_path / "out", "--overwrite", "--method", "drop").exit_code == 0


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--scheme", "bias"], "position_embedding_type = 'bias' is unknown"),
        (["--option", "clip=-1"], "position_options['clip'] = -1 is not accepted"),
        (["--option", "clip"], "--option 'clip' is not of the form KEY=VALUE"),
        (["--method", "guess"], "method = 'guess' is unknown"),
        (["--method-option", "steps"], "--method-option 'steps' is not of the form KEY=VALUE"),
        (["--method-option", "steps=3"], "method_options['steps'] = 3: method = 'keep' has no such option"),
        (["--method", "calibrate+distil"], "texts = None: method = 'calibrate+distil' learns from text"),
        (["--text", "some.txt"], "texts were given, but method = 'keep' reads none"),
        (["--plots"], "method = 'keep' measures nothing that could be drawn"),
        (["--architecture", "GPT2"], "architecture = 'GPT2' has no counterpart here"),
        (["--revision", "main"], "revision = 'main'"),
    ],
)
def test_errors_are_text_and_exit_code_2(source, tmp_path, arguments, words):
    result = run("convert", source, tmp_path / "out", *arguments)
    assert result.exit_code == 2 and not result.stdout
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1 and words in result.stderr
    assert not any(tmp_path.iterdir())


def test_a_source_that_is_not_there(tmp_path):
    result = run("convert", tmp_path / "[none]", tmp_path / "out")
    assert result.exit_code == 2 and f"{tmp_path / '[none]'}" in result.stderr


def test_parse_options():
    parsed = parse_options(["clip=32", "mode=log", "none=null", "yes=true", "empty=", "equal=a=b"])
    assert parsed == {"clip": 32, "mode": "log", "none": None, "yes": True, "empty": "", "equal": "a=b"}


def test_the_help_names_every_method():
    result = run("convert", "--help")
    assert result.exit_code == 0
    for name in METHODS:
        assert re.search(rf"\b{re.escape(name)}\b", result.output), name


def test_warnings_are_one_line_each(capfd):
    with plain_warnings():
        warnings.warn("twenty\n tokens are [few]", stacklevel=1)
        with pytest.warns(DeprecationWarning):
            warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert capfd.readouterr().err == "Warning: twenty tokens are [few]\n"
    assert warnings.showwarning.__name__ != "show_plainly"


def test_schemes():
    result = run("schemes")
    assert result.exit_code == 0
    for name, scheme in SCHEMES.items():
        assert name in result.output
        for option in scheme.options:
            assert f"{option} = " in result.output
    assert "eager" in result.output and "flex_attention" in result.output


def test_help_needs_neither_torch_nor_transformers():
    """cli.py and what it imports at the top; `__init__.py` of the package is another matter."""
    code = (
        "import importlib, sys, types\n"
        "package = sys.modules['hf_relpos'] = types.ModuleType('hf_relpos')\n"
        "package.__path__ = [sys.argv[1]]\n"
        "assert importlib.import_module('hf_relpos.cli').__file__ == sys.argv[2]\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(Path(cli.__file__).parent), cli.__file__], check=True)
    result = run("--help")
    assert result.exit_code == 0 and "convert" in result.output and "schemes" in result.output


def test_a_text_without_a_name_is_not_this_folder(source, tmp_path):
    result = run("convert", source, tmp_path / "out", "--method", "calibrate", "--text", "")
    assert result.exit_code == 2 and "Error: --text '': is empty" in result.stderr
