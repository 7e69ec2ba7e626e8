"""What travels to a Hub names no path, user or token of the machine, is readable as the umask says, and is known."""

import json
import os
import stat

import pytest
from folders import edit
from launching import run_command
from oracles import tiny_sizes
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, BertTokenizer, Trainer, TrainingArguments

from hf_relpos import RelPosBertForMaskedLM
from hf_relpos.checkpoints.privacy import last_name, without_local_paths
from hf_relpos.conversion import convert
from hf_relpos.evaluation.loading import load_encoder
from hf_relpos.files import write_json


USER, TOKEN = "jane-q-example", "hf_" + "x7" * 17
# Few enough for a test.
OPTIONS = {"steps": 2, "batch_tokens": 256, "distil_tokens": 600}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *"abcdefghijklmnopqrstuvwxyz"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The home of somebody, who is logged in at the Hub."""
    folder = tmp_path / "home" / USER
    folder.mkdir(parents=True)
    for name, value in {"HOME": folder, "USER": USER, "LOGNAME": USER, "HF_TOKEN": TOKEN}.items():
        monkeypatch.setenv(name, str(value))
    return folder


@pytest.fixture
def source(home):
    """A tiny BERT with a tokenizer and a text, whose files were written on somebody's machine."""
    folder = home / "models" / "stock"
    sizes = tiny_sizes(vocab_size=len(WORDS), hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    BertForMaskedLM(BertConfig(**sizes)).save_pretrained(folder)
    (home / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizer(str(home / "vocab.txt")).save_pretrained(folder)
    edit(folder, _name_or_path=str(folder), data_dir=f"/home/{USER}/data", name_or_path="bert-base")
    files = {"special_tokens_map_file": f"/home/{USER}/.cache/special_tokens_map.json"}
    files |= {"tokenizer_file": f"C:\\Users\\{USER}\\tokenizer.json"}
    edit(folder, "tokenizer_config.json", name_or_path=str(folder), **files)
    sentences = [" ".join(WORDS[6 + (5 * n + k * k) % 26] for k in range(9)) + "." for n in range(400)]
    (home / "texts.txt").write_text("\n\n".join(sentences))
    return folder


def assert_private(folder, *more):
    """No file below holds the name of the user or of the folder of this test, or the token."""
    words = [USER, TOKEN, *more]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        content = path.read_bytes()
        for word in words:
            for encoding in ("utf-8", "utf-16-le"):
                assert word.encode(encoding) not in content, f"{path.relative_to(folder)} holds {word}"


BY_METHOD = {"keep": {}, "drop": {"method": "drop"}, "distil": {"method": "distil", "method_options": OPTIONS}}


@pytest.mark.parametrize("arguments", BY_METHOD.values(), ids=BY_METHOD)
def test_a_conversion(source, home, tmp_path, arguments):
    if arguments.get("method") == "distil":
        arguments = {**arguments, "texts": home / "texts.txt"}
    out = home / "results" / "out"
    report = convert(source, out, **arguments)
    assert_private(out, str(tmp_path))
    # the caller is told, and what names no machine is kept
    assert report.source == str(source) and report.out == str(out)
    assert json.loads((out / "conversion.json").read_text())["source"] == "stock"
    assert json.loads((out / "config.json").read_text()).get("data_dir") is None
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "BertTokenizer" and "name_or_path" not in config
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("a b").input_ids == AutoTokenizer.from_pretrained(source)("a b").input_ids


def test_a_checkpoint_of_the_trainer_but_for_its_own_pickle(source, home, tmp_path):
    """`training_args.bin` is the Trainer's, and names the output folder as it was given."""
    convert(source, home / "out")
    model, tokenizer = RelPosBertForMaskedLM.from_pretrained(home / "out"), AutoTokenizer.from_pretrained(home / "out")
    rows = [{"input_ids": [2, 7, 8, 3], "labels": [2, 7, 8, 3]}] * 2
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(str(home / "run"), max_steps=1, save_steps=1, **quiet)
    trainer = Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    for path in (home / "run").rglob("training_args.bin"):
        path.unlink()
    assert_private(home / "run", str(tmp_path))


HOMES = ["/home/jo/x", "/Users/jo/x", "/root/x", "~/x", "C:\\Users\\jo", "file:///home/jo"]


@pytest.mark.parametrize("value", [*HOMES, "hf_" + "a1" * 17])
def test_homes_and_tokens_go_in_any_field(value):
    assert without_local_paths({"data": value, "task": {"inner": value, "num": 3}}) == {"task": {"num": 3}}


def test_which_fields_name_a_machine():
    machine = {"name_or_path": "/a/b", "vocab_file": "~/v", "cache_dir": "C:\\x", "run_dir": "../x", "b_file": "\\\\a"}
    kept = {"name_or_path": "user/bert", "vocab_file": "vocab.txt", "unk_token": "/", "num": 3, "some_path": None}
    assert without_local_paths(machine) == {} and without_local_paths({**kept, "_file": 1}) == {**kept, "_file": 1}
    assert last_name("/a/b/") == "b" and last_name("/") == "source"


# --- permissions


@pytest.fixture
def mask():
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def assert_modes(folder, mask):
    for path in [folder, *folder.rglob("*")]:
        wanted = (0o777 if path.is_dir() else 0o666) & ~mask
        assert stat.S_IMODE(path.stat().st_mode) == wanted, f"{path}: {path.stat().st_mode:o}"


def test_files_are_readable_as_the_umask_says(source, home, tmp_path, mask):
    report = convert(source, home / "out", method="distil", texts=home / "texts.txt", method_options=OPTIONS)
    assert report.files
    assert_modes(home / "out", mask)
    model = RelPosBertForMaskedLM.from_pretrained(home / "out")
    model.save_pretrained(home / "sharded", max_shard_size="2KB")
    assert len(list((home / "sharded").glob("model-*.safetensors"))) > 1
    assert_modes(home / "sharded", mask)
    (home / "more").mkdir()
    write_json(home / "more" / "x.json", {})
    assert_modes(home / "more", mask)


# --- what is copied


def test_only_files_that_are_known_are_copied(source, home):
    others = [".env", "id_rsa", "own.py", "secrets.json", "my.model", "pytorch_model.bin", ".git/config", "README.md"]
    for name in others:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(TOKEN)
    result = run_command("convert", source, home / "out")
    assert result.exit_code == 0, result.output
    assert_private(home / "out")


# --- code of others


@pytest.fixture
def mined(source):
    """A checkpoint with code of its own for everything, which must not run."""
    (source / "own.py").write_text("raise SystemExit('code of the source was run')")
    auto = {"AutoConfig": "own.C", "AutoModel": "own.M", "AutoModelForMaskedLM": "own.M"}
    edit(source, model_type="own", auto_map=auto)
    edit(source, "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map={"AutoTokenizer": ["own.T", None]})
    return source


COMMANDS = ["compare SOURCE SOURCE --texts TEXT", "convert SOURCE OUT", "demo --checkpoint SOURCE --out OUT"]


@pytest.mark.parametrize("command", COMMANDS)
def test_code_of_a_checkpoint_is_neither_run_nor_offered(mined, home, command, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *given: pytest.fail("asked whether to run code"))
    paths = {"SOURCE": mined, "OUT": home / "out", "TEXT": home / "texts.txt"}
    result = run_command(*(paths.get(word, word) for word in command.split()), input="y\n")
    assert result.exit_code == 2, (result.output, result.exception)
    assert "Do you wish to run" not in result.output
    assert "its own code is not run" in result.stderr or "model_type = 'own'" in result.stderr


def test_code_of_a_tokenizer_is_neither_run_nor_offered(mined, home, monkeypatch):
    """Of a plain BERT with a tokenizer of its own, the tokenizer that Transformers has is taken."""
    monkeypatch.setattr("builtins.input", None)
    edit(mined, model_type="bert", auto_map={})
    convert(mined, home / "out", method="distil", texts=home / "texts.txt", method_options=OPTIONS)
    assert type(load_encoder(mined).tokenizer).__module__.startswith("transformers.")
    assert not list((home / "out").glob("own.py"))
