"""The command line: what it prints, its exit codes, and that it does what the function does."""

import inspect
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
import typer
from folders import edit
from launching import run_code, run_command as run
from oracles import tiny_sizes
from rich.cells import cell_len
from rich.console import Console
from transformers import AutoModel, BertConfig, BertForMaskedLM, BertModel

import hf_relpos
from hf_relpos import RelPosBertConfig, RelPosBertModel
from hf_relpos.cli import app, parse_options
from hf_relpos.console import plain_warnings, progress_bar, spinner
from hf_relpos.conversion import METHODS
from hf_relpos.families.registry import FAMILIES
from hf_relpos.schemes import SCHEMES


SIZES = tiny_sizes(vocab_size=60, max_position_embeddings=20)


@pytest.fixture(autouse=True)
def width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A saved tiny BERT."""
    folder = tmp_path_factory.mktemp("source") / "stock"
    torch.manual_seed(0)
    BertModel(BertConfig(**SIZES)).save_pretrained(folder)
    return folder


def started(*arguments, **settings):
    """The command in a process of its own."""
    command = [sys.executable, "-m", "hf_relpos", *map(str, arguments)]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **settings)


SLOW = [pytest.param(command, marks=pytest.mark.slow) for command in ("schemes", "schemes --json -")]
some_commands = pytest.mark.parametrize("command", ["convert --help", *SLOW])


@pytest.mark.skipif(sys.platform != "linux", reason="writes to /dev/full, which only Linux has")
@some_commands
def test_output_that_cannot_be_written_is_said_in_one_line(command):
    with open("/dev/full", "w") as full:
        done = started(*command.split(), stdout=full)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and "No space left" in done.stderr.splitlines()[-1]


@some_commands
def test_terminals_without_unicode(command):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = started(*command.split(), stdout=subprocess.PIPE, env=environment)
    assert done.returncode == 0, done.stderr
    if "--json" in command:
        assert json.loads(done.stdout)["xlnet"]["source"] == SCHEMES["xlnet"].source


def test_convert(source, tmp_path):
    out = tmp_path / "out"
    options = "--position-embedding-type shaw --position-options clip=4 --method drop".split()
    result = run("convert", source, out, *options)
    assert result.exit_code == 0, result.output
    config = AutoModel.from_pretrained(out).config
    assert config.position_embedding_type == "shaw" and config.position_options == {"clip": 4}
    assert not config.has_absolute_table
    said = ["RelPosBertModel", "(clip = 4)", str(out), "from_pretrained"]  # and no option that was not given
    for words in (*said, "until you train it", f"compare {source} {out}", f"hf upload USER/NAME {out}"):
        assert words in result.output
    assert "Traceback" not in result.output and "Loading weights" not in result.output


def test_convert_by_default_keeps_and_says_how_exactly(source, tmp_path):
    result = run("convert", source, tmp_path / "out")
    assert result.exit_code == 0, result.output
    difference = json.loads((tmp_path / "out" / "conversion.json").read_text())["difference"]
    assert "keep" in result.output and "relative_key" in result.output and f"{difference:.1e}" in result.output


ERRORS = [
    (["--position-embedding-type", "bias"], "--position-embedding-type 'bias'"),
    (["--position-options", "clip=-1"], "--position-options clip=-1"),
    (["--position-options", "clip"], "--position-options 'clip'"),
    (["--method", "guess"], "--method 'guess'"),
    (["--method-options", "steps"], "--method-options 'steps'"),
    (["--method-options", "steps=3"], "--method-options steps=3: it is an option of method = 'distil'"),
    (["--position-embedding-type", "t5"] * 2, "--position-embedding-type is given more than once"),
    (["--position-options", "clip=3"] * 2, "--position-options clip= is given more than once"),
    (["--method", "distil"], "--method 'distil' requires `texts` (--texts"),
    (["--method", "keep", "--texts", "some.txt"], "--texts 'some.txt': there is no such file"),
    (["--method", "keep", "--texts", __file__], "ends in '.py'"),
    (["--method", "distil", "--texts", ""], "--texts '' is not a path"),
    (["--architecture", "GPT2"], "--architecture 'GPT2'"),
    (["--revision", "main"], "--revision 'main'"),
    (["--position-embedding-type", "relativekey"], "did you mean 'relative_key'?"),
    (["--position-embedding-type", "shaw", "--position-options", "clib=4"], "did you mean 'clip'?"),
    (["--method", "distill"], "did you mean 'distil'?"),
    (["--method", "distil", "--texts", ".", "--method-options", "step=9"], "did you mean 'steps'?"),
]


@pytest.mark.parametrize("arguments, words", ERRORS)
def test_errors_are_text_and_exit_code_2(source, tmp_path, arguments, words):
    result = run("convert", source, tmp_path / "out", *arguments)
    assert result.exit_code == 2 and not result.stdout
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1 and words in result.stderr
    assert not any(tmp_path.iterdir())


def test_parse_options():
    parsed = parse_options(["clip=32", "mode=log", "none=null", "yes=true", "empty=", "equal=a=b"])
    assert parsed == {"clip": 32, "mode": "log", "none": None, "yes": True, "empty": "", "equal": "a=b"}


@pytest.mark.parametrize("name", ["convert", "export", "benchmark", "run", "compare"])
def test_the_help_has_examples_that_are_read_and_two_groups(name, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    for file in ("stsb.tsv", "docs.tsv", "queries.tsv", "queries.txt", "passages.jsonl"):
        (tmp_path / file).touch()
    shown = run(name, "--help").output
    command = typer.main.get_command(app).commands[name]
    examples = [line for line in command.help.splitlines() if line.startswith("hf-relpos ")]
    assert "Advanced options" in shown and len(examples) in (2, 3)
    assert name != "convert" or METHODS.keys() <= {*re.findall(r"\w+", shown)}
    for example in examples:
        assert any(line.strip(" │") == example for line in shown.splitlines()), example  # whole, on a line
        program, called, *words = shlex.split(example)
        assert (program, called) == ("hf-relpos", name) and command.make_context(name, words)


def test_warnings_are_one_line_each(capfd):
    with plain_warnings():
        warnings.warn("twenty\n tokens are [few]", stacklevel=1)
        with pytest.warns(DeprecationWarning):
            warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert capfd.readouterr().err == "Warning: twenty tokens are [few]\n"
    assert warnings.showwarning.__name__ != "show_plainly"


def test_a_bar_for_each_stage_in_a_terminal_and_lines_half_a_minute_apart_elsewhere(capfd, monkeypatch):
    terminal = io.StringIO()
    with progress_bar(Console(file=terminal, force_terminal=True, width=60)) as progress:
        for stage in ("reading", "writing"):
            progress(stage, 1, 2)
    shown = terminal.getvalue()
    assert shown.index("starting") < shown.index("reading") < shown.index("writing")
    now = iter([100.0, 100.0, 120.0, 132.0, 132.0, 145.0])
    monkeypatch.setattr("hf_relpos.console.time", SimpleNamespace(monotonic=lambda: next(now)))
    with spinner("writing"), progress_bar(Console(stderr=True)) as progress:
        for stage, completed in (("reading", 1), ("reading", 2), ("comparing", 1), ("comparing", 2), ("comparing", 4)):
            progress(stage, completed, 4)
    assert capfd.readouterr() == ("", "reading: 25 %\ncomparing: 25 %\n")


def test_schemes(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = run("schemes")
    assert result.exit_code == 0
    rows = [line for line in result.output.splitlines() if line.strip() and line.split()[0] in SCHEMES]
    assert [row.split()[0] for row in rows][:2] == ["harmonic", "relative_key"]  # by use
    said = {row.split()[0]: row for row in rows}
    assert re.search("yes +computed +yes", said["harmonic"]) and re.search("yes +last row +yes", said["relative_key"])
    assert re.search(r"no +computed +no", said["alibi"]) and re.search(r"yes +error +no", said["absolute"])
    assert all(scheme.summary and scheme.source not in result.output for scheme in SCHEMES.values())
    assert set(SCHEMES) <= {line.split()[0] for line in result.output.splitlines() if line.strip()}
    for name, scheme in SCHEMES.items():
        shown = run("schemes", name)
        assert shown.exit_code == 0 and "backends: relpos" in shown.output and scheme.summary in shown.output
        assert " ".join(scheme.source.split()) in " ".join(shown.output.split())
        assert set(scheme.options) <= {line.split()[0] for line in shown.output.splitlines() if line.strip()}
    wrong = run("schemes", "relativ_key")
    assert wrong.exit_code == 2 and "'relativ_key' is unknown (did you mean 'relative_key'?)" in wrong.stderr


WITHOUT_TORCH = [
    ("--help", 0, "schemes"),
    ("convert no/such/folder OUT", 2, "source = 'no/such/folder': there is no such folder"),
    ("inspect ~nobody/bert", 2, "source = '~nobody/bert': there is no such folder"),
    ("compare a/b c/d --texts no.txt", 2, "--texts 'no.txt': there is no such file"),
    ("export . .", 2, "Error: out = '.' exists"),
    ("convert a/b .", 2, "Error: out = '.' exists"),
    ("demo --out .", 2, "Error: --out '.' exists"),
    ("schemes --json no/such/file.json", 2, "no/such"),
]


@pytest.mark.parametrize("arguments, status, words", WITHOUT_TORCH)
def test_help_and_mistyped_paths_need_neither_torch_nor_transformers(arguments, status, words):
    call = f"import sys\nfrom hf_relpos.cli import app\ntry:\n    app({arguments.split()})\n"
    code = call + "finally:\n    assert not {'torch', 'transformers'} & set(sys.modules)"
    done = run_code(code, status=status)
    assert words in done.stdout + done.stderr


def test_interrupted_says_so(source, tmp_path):
    """A SIGINT while a source is read, which waits for it: exit code 130, a line, and no files."""
    code = (
        "import signal\n"
        "import hf_relpos.conversion as conversion\n"
        "from hf_relpos.cli import app\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # shells ignore it for jobs in the background
        "conversion.convert = lambda *a, **k: signal.raise_signal(signal.SIGINT)\n"
        f"app(['convert', {str(source)!r}, 'OUT'])"
    )
    done = run_code(code, status=130, cwd=tmp_path)
    assert done.stderr.splitlines()[-1].startswith("Interrupted: ") and not list(tmp_path.iterdir())


def test_version():
    assert run("--version").output == f"{hf_relpos.__version__}\n"


def test_inspect(source, tmp_path):
    """What it is, what stock Transformers makes of it, and a command that works."""
    found = json.loads(run("inspect", source, "--json", "-").stdout)
    assert found["family"] == "bert" and found["architecture"] == "BertModel" and found["trained_length"] == 20
    assert found["positions"] == "absolute: position_embedding_type = 'absolute'"
    assert found["tables"] == ["embeddings.position_embeddings.weight"] and "loads it as it is" in found["elsewhere"]
    assert found["command"] == f"hf-relpos convert {source} OUT --texts FILE"

    RelPosBertModel(RelPosBertConfig(**SIZES)).save_pretrained(tmp_path / "ours")
    found = json.loads(run("inspect", tmp_path / "ours", "--json", "-").stdout)
    assert found["family"] == "relpos_bert" and found["positions"].startswith("relative_key")
    (tmp_path / "ours" / "sentence_bert_config.json").write_text('{"max_seq_length": 128}')
    assert json.loads(run("inspect", tmp_path / "ours", "--json", "-").stdout)["max_seq_length"] == 128
    assert len(found["tables"]) == 2 and not found["command"] and "import hf_relpos" in found["elsewhere"]

    old = tmp_path / "old"  # as Transformers 4.57 wrote it
    shutil.copytree(tmp_path / "ours", old)
    edit(old, model_type="bert", architectures=["BertModel"], position_embedding_type="relative_key")
    shown = run("inspect", old)
    assert shown.exit_code == 0, shown.output
    assert "leaves out its relative positions" in shown.output
    assert re.search(r"^tables +encoder.layer.0.*distance_embedding.weight and 1 more$", shown.output, re.MULTILINE)
    load = re.search(r"^load +(.*)$", shown.output, re.MULTILINE)[1]
    assert "distance_embedding" in " ".join(eval(load, {"hf_relpos": hf_relpos}).state_dict())
    command = re.search(r"^run +hf-relpos (.*)$", shown.output, re.MULTILINE)[1].replace("OUT", str(tmp_path / "out"))
    assert run(*command.split()).exit_code == 0

    assert run("inspect", tmp_path).exit_code == 2


def test_an_old_folder_without_a_class_and_with_a_pickle(tmp_path):
    """What packages of 2019 hold: `inspect` names the flag that is needed, and a head is not left out silently."""
    model = BertForMaskedLM(BertConfig(**SIZES))
    model.save_pretrained(tmp_path / "old")
    edit(tmp_path / "old", architectures=None, model_type=None)
    (tmp_path / "old" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "old" / "pytorch_model.bin")
    command = json.loads(run("inspect", tmp_path / "old", "--json", "-").stdout)["command"]
    assert command == f"hf-relpos convert {tmp_path / 'old'} OUT --texts FILE --allow-pickle"
    convert = ["convert", tmp_path / "old", tmp_path / "out", "--allow-pickle"]
    assert "not converted: cls (config.json names no class" in " ".join(run(*convert).output.split())
    assert "left out" not in run(*convert, "--overwrite", "--architecture", "BertForMaskedLM").output


def test_json_of_every_command(source, tmp_path):
    """To a file, with the text where it was; to standard output, with the text on standard error."""
    commands = {
        "schemes": (["schemes"], set(SCHEMES)),
        "one scheme": (["schemes", "shaw"], {"name", "source", "backends", "options"}),
        "families": (["families"], set(FAMILIES)),
        "inspect": (["inspect", source], {"family", "positions", "command"}),
        "convert": (["convert", source, tmp_path / "out", "--overwrite"], {"method", "steps", "versions"}),
    }
    for name, (command, keys) in commands.items():
        printed = run(*command, "--json", "-")
        assert printed.exit_code == 0 and printed.stderr, (name, printed.output)
        assert keys <= set(json.loads(printed.stdout)), name
        written = run(*command, "--json", tmp_path / "out.json")
        assert written.exit_code == 0 and written.stdout, (name, written.output)
        assert not written.stderr, name
        found = json.loads((tmp_path / "out.json").read_text())
        if name != "convert":  # which says how long it took
            assert found == json.loads(printed.stdout), name


def test_every_command_has_json_and_help_says_the_exit_codes():
    commands = [command.callback for command in app.registered_commands if command.callback.__name__ != "run"]
    assert commands and all("json_file" in inspect.signature(command).parameters for command in commands)
    assert all(f" {code} " in run("--help").output for code in (0, 1, 2, 3))


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("command", [["schemes"], ["schemes", "deberta"], ["families"], ["doctor"]])
def test_tables_fit_the_terminal(command, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    result = run(*command)
    assert result.exit_code == 0, result.output
    assert max(map(cell_len, result.output.splitlines())) <= columns
    assert "…" not in result.output  # what was cut off


def test_the_nearest_name_is_said(source, tmp_path):
    none = str(tmp_path / "[none]")
    wrong, missing = ["convert", source, none, "--position-embeding-type", "t5"], ["convert", none, tmp_path / "out"]
    for arguments, words in ((wrong, "--position-embedding-type"), (["convrt"], "convert"), (missing, none)):
        result = run(*arguments)
        assert result.exit_code == 2 and words in result.stderr
