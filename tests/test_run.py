"""`hf-relpos run`, `HF_RELPOS_OPTIMIZE` and what they wrap: programs that do not know of this package."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from launching import free_port, run_code, run_command
from transformers import AutoModel, AutoModelForSequenceClassification, BertModel, PreTrainedModel, pipeline
from wording import TEXTS, classifier, save_with_tokenizer, tokenizer

from hf_relpos import optimize
from hf_relpos.autoload import Autoload, start
from hf_relpos.cli.run import UNPAD as OFFERED, Dtype
from hf_relpos.host import cores
from hf_relpos.live.levels import UNPAD
from hf_relpos.live.optimize import DTYPES


RUN = (sys.executable, "-m", "hf_relpos", "run")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random classifier with a tokenizer, which loads as an encoder, too."""
    return classifier(tmp_path_factory.mktemp("model"))


@pytest.fixture
def autoload():
    handle = Autoload()
    yield handle
    handle.undo()


def lines_of(capsys) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-relpos")]


def run(*command: object, status: int = 0, options: tuple[str, ...] = (), **settings) -> subprocess.CompletedProcess:
    """A command below `hf-relpos run`."""
    words = [*RUN, *options, "--", *map(str, command)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120, **settings)
    assert done.returncode == status, done.stdout + done.stderr
    return done


# The wrapper ---------------------------------------------------------------------------------------------------------


def test_autoload_optimizes_each_model_once(autoload, folder, capsys):
    model = AutoModel.from_pretrained(folder)
    (line,) = lines_of(capsys)
    for words in ("BertModel of ...", f"{folder[-4:]}: ", "padding kept: code may read it (--unpad pad_token)"):
        assert words in line
    classify = pipeline("text-classification", folder, device="cpu")
    head, _ = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    lines = lines_of(capsys)
    assert [line.split()[1] for line in lines] == ["BertForSequenceClassification"] * 2
    assert all("padding removed (level contract)" in line and len(line) < 120 for line in lines)
    autoload.undo()
    assert "from_pretrained" in vars(PreTrainedModel) and not hasattr(PreTrainedModel.from_pretrained, "__wrapped__")
    inputs = tokenizer(Path(folder))(TEXTS, padding=True, return_tensors="pt")
    stock, real = AutoModelForSequenceClassification.from_pretrained(folder), inputs["attention_mask"] == 1
    assert not lines_of(capsys)
    with torch.no_grad():
        logits = stock(**inputs).logits
        assert (head(**inputs).logits - logits).abs().max() < 1e-5
        assert (classify.model(**inputs).logits - logits).abs().max() < 1e-5
        assert (model(**inputs)[0] - stock.bert(**inputs)[0]).abs().max() < 1e-5 and not real.all()


@pytest.mark.ecosystem
def test_autoload_of_sentence_transformers(autoload, folder, capsys):
    """The outer object is optimized: another module of it may read padding, and CrossEncoder asks for `nn.Linear`."""
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from sentence_transformers.sentence_transformer import modules as models

    sentences = SentenceTransformer(folder, device="cpu")
    pairs = [(TEXTS[0], text) for text in TEXTS]
    reranker = CrossEncoder(folder, device="cpu")
    lines = lines_of(capsys)
    assert [line.split()[1] for line in lines] == ["SentenceTransformer", "CrossEncoder"]
    assert all("padding removed (level contract)" in line for line in lines)
    words = models.Transformer(folder)  # an encoder by itself, then around it modules of the program
    convolution = models.CNN(words.get_embedding_dimension(), out_channels=8)
    SentenceTransformer(modules=[words, convolution, models.Pooling(24)], device="cpu").save(f"{folder}/convolved")
    lines_of(capsys)
    convolved = SentenceTransformer(f"{folder}/convolved", device="cpu")
    assert "depend on hidden states" in lines_of(capsys)[0]
    found = sentences.encode(TEXTS), convolved.encode(TEXTS), reranker.predict(pairs)
    autoload.undo()
    stock = [SentenceTransformer(each, device="cpu").encode(TEXTS) for each in (folder, f"{folder}/convolved")]
    for ours, theirs in zip(found, (*stock, CrossEncoder(folder, device="cpu").predict(pairs)), strict=True):
        assert abs(ours - theirs).max() < 1e-5
    assert not lines_of(capsys)


def test_autoload_waits_for_the_outermost_load(autoload, folder, capsys):
    class Outer(BertModel):
        @classmethod
        def from_pretrained(cls, *args, **kwargs):
            return super().from_pretrained(*args, **kwargs)

        def __init__(self, config):
            with torch.device("cpu"):
                super().__init__(config)
                self.inner = transformers.BertModel.from_pretrained(folder)
            assert not lines_of(capsys)

    Outer.from_pretrained(folder)
    (line,) = lines_of(capsys)
    assert line.startswith("hf-relpos: Outer of ") and f"{folder[-8:]}: " in line
    with pytest.raises(OSError):
        BertModel.from_pretrained(f"{folder}/nothing")
    assert not lines_of(capsys)
    AutoModel.from_pretrained(folder)
    assert len(lines_of(capsys)) == 1


def test_autoload_after_an_error_of_optimize(autoload, folder, capsys, monkeypatch):
    """Also one that begins when a part of the model is changed already."""
    monkeypatch.setattr(sys.modules[optimize.__module__], "_change_products", lambda *args: 1 / 0)
    model = AutoModel.from_pretrained(folder)
    (line,) = lines_of(capsys)
    assert "left as it is (ZeroDivisionError: division by zero)" in line
    assert {type(each).__module__.partition(".")[0] for each in model.modules()} <= {"torch", "transformers"}
    assert type(model) is BertModel and not vars(model).get("_hf_relpos")


# Programs ------------------------------------------------------------------------------------------------------------


def test_run_options_are_those_of_optimize():
    assert (*Dtype,) == DTYPES and OFFERED == UNPAD
    wrong = (["--dtype", "int4", "--", "true"], ["--threads", "0", "--", "true"])
    for arguments in (*wrong, ["--", "no-such-program"], ["--"]):
        assert run_command("run", *arguments).exit_code == 2


# Files of control groups, by name, and the processors that they give; of version 2, of 1, and of 1 in a container.
GROUPS = [
    ("0::/", {}, None),
    ("0::/", {"cpu.max": "max 100000"}, None),
    ("0::/a/b", {"cpu.max": "300000 100000", "a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
    ("4:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, None),
    ("5:memory:/b\n4:cpu:/b", {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
]


@pytest.mark.parametrize("own, files, processors", GROUPS)
def test_quota_of_a_container(tmp_path, own, files, processors):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "own").write_text(f"{own}\n")
    assert cores.quota(tmp_path, tmp_path / "own") == processors


def test_threads_of_a_container(monkeypatch):
    monkeypatch.setattr(cores, "seen", lambda: 8)
    for limit, threads in ((None, None), (8.0, None), (3.7, 3), (0.5, 1)):
        monkeypatch.setattr(cores, "quota", lambda limit=limit: limit)
        assert cores.threads_of("auto") == threads and cores.cores() == (threads or 8)
    assert cores.threads_of("4") == 4 and cores.threads_of("") is None


@pytest.mark.ecosystem
def test_run_sets_threads_and_joins(folder):
    code = "import sys, torch; from transformers import BertModel; print(torch.get_num_threads()); "
    code += "print('_hf_relpos_joined' in vars(BertModel.from_pretrained(sys.argv[1])))"
    options = ("--threads", "3", "--join", "--padding", "zeros")
    done = run(sys.executable, "-c", code, folder, options=options, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.stdout.split() == ["3", "True"] and "; calls joined" in done.stderr


def test_run_fails_as_the_program(tmp_path):
    """The same exit codes, output and traceback, by a file, a module and a signal."""
    script = tmp_path / "failing.py"
    script.write_text("import os, sys\nprint(sys.argv, sys.path)\nsys.argv[1:] and sys.exit(int(sys.argv[1]))\n1 / 0")
    for command in ((script,), (script, "3", "--help"), ("-c", "import os; os.kill(os.getpid(), 15)"), ("-m", "no")):
        command = (sys.executable, *map(str, command))
        alone = subprocess.run(command, capture_output=True, text=True, check=False)
        below = run(*command, status=alone.returncode)
        assert alone.returncode and (below.stdout, below.stderr) == (alone.stdout, alone.stderr)


def test_run_keeps_the_program_its_sitecustomize(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.mine = __name__, __file__")
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": paths}
    code = "import sys, sitecustomize; print(sys.mine, sitecustomize.__file__, 'hf_relpos' in sys.modules)"
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True)"
    file = str(tmp_path / "sitecustomize.py")
    for program in (code, inner):
        done = run(sys.executable, "-c", program, env=environment)
        assert done.stdout.strip() == f"{('sitecustomize', file)} {file} True" and not done.stderr
    for isolated in ("-E", "-I"):
        assert run(sys.executable, isolated, "-c", "import sys; print(sys.flags)").stderr == ""


POOLS = """
import sys, torch
from transformers import AutoModel, AutoModelForTokenClassification, AutoTokenizer, pipeline
from sentence_transformers import SentenceTransformer

texts = ["the cat sat on the big house .", "a dog ran ."] * 8
tokens = AutoTokenizer.from_pretrained(sys.argv[1])(texts, padding=True, return_tensors="pt")
with torch.no_grad():
    found = {"mean": AutoModel.from_pretrained(sys.argv[1])(**tokens).last_hidden_state.mean(1)}
    found["logits"] = AutoModelForTokenClassification.from_pretrained(sys.argv[2])(**tokens).logits.mean(1)
states = pipeline("feature-extraction", sys.argv[1], device="cpu")(texts, batch_size=16, return_tensors=True)
found["pipeline"] = torch.stack([each[0].mean(0) for each in states])
words = pipeline("token-classification", sys.argv[2], device="cpu")(texts, batch_size=16)
found["words"] = torch.tensor([each["score"] for text in words for each in text])
found["sentences"] = SentenceTransformer(sys.argv[1], device="cpu").encode(texts, convert_to_tensor=True)
torch.save(found, sys.argv[3])
"""


@pytest.mark.ecosystem
def test_run_keeps_outputs_at_padding(folder, tmp_path):
    """Means over padding are those without `run`; it is removed where sentence-transformers or a pipeline reads."""
    (tmp_path / "pools.py").write_text(POOLS)
    torch.manual_seed(0)
    config = transformers.BertConfig.from_pretrained(folder, id2label={0: "A", 1: "B"})
    save_with_tokenizer(transformers.BertForTokenClassification(config), tmp_path / "words")
    command = [sys.executable, tmp_path / "pools.py", folder, tmp_path / "words"]
    subprocess.run([*map(str, command), tmp_path / "alone"], check=True, capture_output=True, timeout=120)
    below = run(*command, tmp_path / "below")
    lines = [line.split(":", 1)[1] for line in below.stderr.splitlines() if line.startswith("hf-relpos")]
    where = ["kept", "kept", "kept", "removed", "removed"]
    assert [re.findall("padding (kept|removed)", line) for line in lines] == [[each] for each in where]
    assert all(len(line) < 120 - len("hf-relpos:") and "GFLOP" not in line for line in lines)
    alone, found = torch.load(tmp_path / "alone"), torch.load(tmp_path / "below")
    for name, expected in alone.items():
        assert (found[name] - expected).abs().max() < 1e-5 * expected.abs().max(), name
    mean = torch.load(tmp_path / "below")["mean"]
    told = run(*command, tmp_path / "zeros", options=("--unpad", "pad_token", "--verbose", "--capture"))
    assert all(each in told.stderr for each in ("hidden states at padding are zeros", "GFLOP/s", "captured graph"))
    assert "calls:" not in below.stderr and re.search(r"BertModel: calls: 1 by contract; \d+ of \d+", told.stderr)
    assert (torch.load(tmp_path / "zeros")["mean"] - mean).abs().max() > 1e-2


FORKS = """
import os, sys, torch
from transformers import AutoModel, AutoTokenizer

torch.manual_seed(0)
model, tokenizer = AutoModel.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
number = torch.rand(1).item()
child = os.fork()
inputs = tokenizer(["the cat sat on the big house ."] + ["a dog"] * 31, padding=True, return_tensors="pt")
with torch.no_grad():
    states = model(**inputs)[0]
line = f"{number} {states[:, 0].double().sum().item()} {states[-1, -1].abs().sum().item() > 0}"
os.write(1, f"{line}\\n".encode())  # at once, since both processes write
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.ecosystem
def test_run_and_a_process_that_forks(folder, tmp_path):
    """With several threads, which the parent must not have started; random numbers are those of the program."""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    (tmp_path / "forks.py").write_text(FORKS)
    command = (sys.executable, str(tmp_path / "forks.py"), folder)
    alone = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=120)
    below = run(*command, env=environment, options=("--unpad", "pad_token"))
    assert below.stderr.count("(level contract") == 1
    (number, total, at_padding), *others = [line.split() for line in alone.stdout.splitlines()]
    assert others == [[number, total, at_padding]] and at_padding == "True"
    found = [line.split() for line in below.stdout.splitlines()]
    assert len(found) == 2 and all(each[::2] == [number, "False"] for each in found)
    assert all(abs(float(each[1]) - float(total)) < 1e-3 for each in found)


@pytest.mark.ecosystem
def test_environment_variable_optimizes_what_is_loaded(folder):
    code = "import sys, hf_relpos; from transformers import BertModel; BertModel.from_pretrained(sys.argv[1])"
    done = run_code(code, folder, env=os.environ | {"HF_RELPOS_OPTIMIZE": "bfloat16"})
    assert re.search("^hf-relpos: BertModel of .* layers in bfloat16$", done.stderr, re.MULTILINE)


def test_environment_variable_values(folder, capsys, monkeypatch):
    for value, said in (("1", "padding kept"), ("int4", "left as it is (ValueError: dtype = 'int4'")):
        monkeypatch.setenv("HF_RELPOS_OPTIMIZE", value)
        handle = start()
        assert start() is handle
        AutoModel.from_pretrained(folder)
        handle.undo()
        assert said in lines_of(capsys)[0]
    code = "import sys, hf_relpos; sys.exit('hf_relpos.autoload' in sys.modules)"
    for value in ("", "0"):
        run_code(code, env=os.environ | {"HF_RELPOS_OPTIMIZE": value})


SERVER = """
import os
from fastapi import FastAPI
from sentence_transformers import SentenceTransformer

app = FastAPI()
encoder = SentenceTransformer(os.environ["FOLDER"], device="cpu")


@app.get("/")
def total():
    texts = ["the cat sat on the big house .", "a dog ran .", "the old bird saw the red sun and the sky was blue ."]
    return float(abs(encoder.encode(texts * 8)).sum())
"""


@pytest.mark.ecosystem
def test_run_a_server_that_is_terminated(folder, tmp_path):
    """Uvicorn below `hf-relpos run`: it answers as the model by itself, and ends in its own way by a signal."""
    from sentence_transformers import SentenceTransformer

    (tmp_path / "server.py").write_text(SERVER)
    log, port, until = tmp_path / "log", free_port(), time.monotonic() + 90
    command = [*RUN, "--", sys.executable, "-m", "uvicorn", "server:app", "--port", str(port)]
    with open(log, "w") as out:
        settings = {"stdout": out, "stderr": out, "env": os.environ | {"FOLDER": folder}, "cwd": tmp_path}
        server = subprocess.Popen(command, **settings)
    try:
        while "running on http" not in log.read_text():
            assert time.monotonic() < until and server.poll() is None, log.read_text()
            time.sleep(0.1)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as answer:
            found = json.loads(answer.read())
        server.terminate()
        assert server.wait(30) == -signal.SIGTERM
    finally:
        server.kill()
    expected = SentenceTransformer(folder, device="cpu").encode(TEXTS * 8)
    assert found == pytest.approx(float(abs(expected).sum()), rel=1e-5) and found > 1
    said = log.read_text()
    assert said.count("hf-relpos:") == 1 and "(level contract" in said and "Finished server process" in said


def small(name: str, folder: str) -> PreTrainedModel:
    """A random model of two layers, with the vocabulary of a folder."""
    words = transformers.BertConfig.from_pretrained(folder).vocab_size
    sizes = {"vocab_size": words, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    t5 = {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "vocab_size": words}
    fields = {**sizes, "num_key_value_heads": 2} if name == "Qwen3" else t5
    return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**fields))


ENCODERS = {"BertModel": BertModel.from_pretrained, "Qwen3Model": partial(small, "Qwen3")}
ENCODERS["T5Stack"] = partial(small, "T5")


# The command optimize ------------------------------------------------------------------------------------------------


@pytest.mark.ecosystem
@pytest.mark.parametrize("kind", ["BertModel", "SentenceTransformer", "CrossEncoder", "Qwen3Model", "T5Stack"])
def test_optimize_command(kind, folder, tmp_path):
    """The class that the folder is of, and what a call of it returns before and after; nothing is written."""
    from sentence_transformers import SentenceTransformer

    if kind in ENCODERS:
        save_with_tokenizer(ENCODERS[kind](folder), tmp_path / "model")
    else:
        model = SentenceTransformer(folder, device="cpu") if kind == "SentenceTransformer" else None
        model.save(str(tmp_path / "model")) if model else shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "a.txt").write_text("\n".join(TEXTS * 20 + [""]))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    arguments = ["benchmark", tmp_path / "model", "--texts", tmp_path / "a.txt", "--json", "-"]
    for options in ((), ("--dtype", "auto")):
        result = run_command(*arguments, *options)
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert found["texts"] == 60 and found["model"].endswith(f"({kind})")
        assert "is removed" in found["report"] and ("30 sequences of the given" in found["report"]) == bool(options)
        is_unpadded = "as unpadding sets them to zero" in found["report"]  # a call that asks for no cache
        assert is_unpadded or not options or kind not in ENCODERS
        assert "tokens are computed" in found["calls"] and found["calls"] in result.stderr
        assert found["before"] > 0 < found["after"] and found["least"] <= found["cosine"] <= 1 + 1e-9
        assert f"{found['before'] / found['after']:.2f}× faster" in result.stderr
        assert (found["difference"] < 1e-5 or options) and found["cosine"] > 0.9
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_optimize_command_refuses_models_without_text(tmp_path):
    config = transformers.ViTConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    (tmp_path / "a.txt").write_text("a text")
    result = run_command("benchmark", tmp_path, "--texts", tmp_path / "a.txt")
    assert result.exit_code == 2 and "ViTModel takes no tokens of text" in result.stderr


def test_optimize_command_refuses(folder, tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    for name, text in ((folder, tmp_path / "empty.txt"), (folder, tmp_path / "none.txt"), (tmp_path, "empty.txt")):
        result = run_command("benchmark", name, "--texts", text)
        assert result.exit_code == 2 and result.stderr.startswith("Error: ")
