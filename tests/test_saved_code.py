"""The code that is saved beside the weights: two files, made for a configuration, that run without hf_relpos."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from elsewhere import run_without_package
from launching import run_code
from oracles import extra_inputs, padding, tiny_config, tiny_model
from safetensors.torch import load_file, save_file
from selection import chosen
from transformers.dynamic_module_utils import get_imports, get_relative_imports

from hf_relpos import RelPosBertForMaskedLM, RelPosBertLMHeadModel, RelPosBertModel
from hf_relpos.models.modeling_relpos_bert import AUTO_MAP, HEADS
from hf_relpos.models.saved_code import bundle as bundler, stand_ins
from hf_relpos.models.saved_code.bundle import BundleError, bundle
from hf_relpos.models.saved_code.remote_code import CONFIGURATION, MODELING
from hf_relpos.schemes import SCHEMES, Scheme, Terms


FILES = {CONFIGURATION, MODELING}
COMBINATION = ["shaw", "t5"]
EVERYWHERE = {"torch", "transformers", "huggingface_hub", "safetensors", *sys.stdlib_module_names}
YARN = {"rope_type": "yarn", "factor": 4.0}
LAYERED = {"rope_parameters": {"a": YARN, "b": {"rope_theta": 50.0}}, "layer_types": ["a", "b"]}
EVERY_CODE = [*SCHEMES, COMBINATION]


def name_of(scheme):
    return scheme if isinstance(scheme, str) else "+".join(scheme)


# The two files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", EVERY_CODE, ids=name_of)
def test_imports_are_found_everywhere_and_no_name_is_undefined_or_unused(scheme, tmp_path):
    """Transformers reads text: a line of a docstring that looks like a relative import counts."""
    files = bundle(tiny_config(scheme))
    assert set(files) == FILES
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        assert set(get_imports(tmp_path / name)) <= EVERYWHERE
    assert get_relative_imports(tmp_path / CONFIGURATION) == []
    assert get_relative_imports(tmp_path / MODELING) == [CONFIGURATION.removesuffix(".py")]
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", "--no-cache", str(tmp_path)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_only_the_schemes_of_the_configuration():
    text = "".join(bundle(tiny_config("shaw")).values())
    assert "class Shaw(" in text and "class LearnedPositions(" not in text
    others = [scheme for scheme in SCHEMES.values() if f"class {scheme.__name__}(" in text]
    assert others == [SCHEMES["shaw"]]
    hybrid = bundle(tiny_config("shaw", absolute_position_embeddings=True))[CONFIGURATION]
    assert "class Absolute(" in hybrid and "class LearnedPositions(" in hybrid
    both = bundle(tiny_config(COMBINATION))[CONFIGURATION]
    assert "class Shaw(" in both and "class T5(" in both


def test_what_makes_the_package_fast_stays_there():
    text = "".join(text for scheme in EVERY_CODE for text in bundle(tiny_config(scheme)).values())
    for name in ("ToeplitzTerms", "SlidingWindowMask", "Widened", "Chunked", "FlexAttention"):
        assert f"class {name}" not in text, name


def test_every_stand_in_is_used():
    text = "".join(text for scheme in SCHEMES for text in bundle(tiny_config(scheme)).values())
    unused = [each.names for each in bundler._module(stand_ins.__name__).definitions if each.source not in text]
    assert not unused


def test_the_same_text_in_every_process():
    script = (
        "from hf_relpos import RelPosBertConfig\n"
        "from hf_relpos.models.saved_code.bundle import bundle\n"
        "print([bundle(RelPosBertConfig(position_embedding_type=each)) for each in ('deberta', ['shaw', 't5'])])\n"
    )
    printed = {run_code(script, env={**os.environ, "PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")}
    assert len(printed) == 1


MOST_LINES = 3620


def test_names_in_annotations_that_are_strings_count():
    assert {"Thing", "Other"} <= set(bundler._names(ast.parse('def f(x: "Thing") -> "list[Other]": ...')))


def test_length():
    """Who trusts the code can read it."""
    lines = {scheme: sum(text.count("\n") for text in bundle(tiny_config(scheme)).values()) for scheme in SCHEMES}
    assert max(lines.values()) <= MOST_LINES, lines


TWICE = {"a": "def size(): pass\n", "b": "from .a import size\nfrom .c import other\nboth = size, other\n"}
UNJOINABLE = {
    "twice": (TWICE, "size"),
    "alias": ({"b": "from .a import size as other\nboth = other\n", "a": "size = 1\n"}, "from .module import name"),
    "module": ({"b": "from . import a\nboth = a\n", "a": "size = 1\n"}, "from .module import name"),
    "builtin": ({"b": "def max(): pass\nboth = max\n"}, "builtin"),
}


@pytest.mark.parametrize("modules, words", UNJOINABLE.values(), ids=UNJOINABLE)
def test_modules_that_cannot_be_joined_are_refused(modules, words, tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    modules.setdefault("c", "def size(): return 2\ndef other(): return size()\n")
    for name, text in modules.items():
        (tmp_path / "models" / f"{name}.py").write_text(text)
    monkeypatch.setattr(bundler, "ROOT", tmp_path)
    bundler._module.cache_clear()

    entry = f"{bundler.PACKAGE}.models.b"
    monkeypatch.setitem(sys.modules, entry, type("Entry", (), {"__all__": ["both", "max"]}))
    try:
        with pytest.raises(BundleError, match=words):
            bundler._file("B", bundler._closure(bundler._public(entry), {}), set(), entry, {})
    finally:
        bundler._module.cache_clear()


# What is saved ---------------------------------------------------------------------------------------------------


def saved_code(folder: Path) -> set[str]:
    return {file.name for file in folder.glob("*.py")}


def saved_map(folder: Path) -> dict | None:
    return json.loads((folder / "config.json").read_text()).get("auto_map")


@pytest.mark.parametrize("auto", HEADS)
def test_code_and_complete_map_are_saved(auto, tmp_path):
    """In place of a map that points to another repository's code, which would be loaded instead of ours."""
    model = tiny_model(HEADS[auto], "shaw", is_decoder=auto == "AutoModelForCausalLM")
    model.config.auto_map = {"AutoModel": "someone/else--modeling_x.X"}
    model.save_pretrained(tmp_path)
    assert saved_map(tmp_path) == AUTO_MAP
    assert {name: (tmp_path / name).read_text() for name in saved_code(tmp_path)} == bundle(model.config)


def test_code_can_be_left_out(tmp_path):
    model = tiny_model(RelPosBertModel, "shaw")
    model.save_pretrained(tmp_path / "with")
    model.config.save_code = False
    model.save_pretrained(tmp_path / "without")
    assert not saved_code(tmp_path / "without") and saved_map(tmp_path / "without") is None
    again = RelPosBertModel.from_pretrained(tmp_path / "without")
    again.save_pretrained(tmp_path / "again")
    assert not saved_code(tmp_path / "again") and saved_map(tmp_path / "again") is None


def test_no_map_without_its_files(tmp_path):
    """A folder with code, loaded by the installed classes and saved again, must not promise code it lacks."""
    tiny_model(RelPosBertForMaskedLM, "shaw").save_pretrained(tmp_path / "first")
    for auto in ("AutoModelForMaskedLM", "AutoModel", "AutoModelForSequenceClassification"):
        for trust in (None, True):
            model = getattr(transformers, auto).from_pretrained(tmp_path / "first", trust_remote_code=trust)
            assert type(model) is HEADS[auto]
            folder = tmp_path / f"{auto}-{trust}"
            model.save_pretrained(folder)
            assert saved_map(folder) == AUTO_MAP
            assert saved_code(folder) == FILES


def test_checkpoints_of_a_trainer_have_no_code(tmp_path):
    """The folder above has it, and config.json of the checkpoint the map: the Trainer pushes these two together."""
    tiny_model(RelPosBertModel, "shaw").save_pretrained(tmp_path / "checkpoint-3")
    assert saved_code(tmp_path / "checkpoint-3") == set() and saved_code(tmp_path) == FILES
    assert saved_map(tmp_path / "checkpoint-3") == AUTO_MAP
    for trust in (None, True):
        loaded = transformers.AutoModel.from_pretrained(tmp_path / "checkpoint-3", trust_remote_code=trust)
        assert type(loaded) is RelPosBertModel


def test_a_scheme_of_a_user_has_no_code(tmp_path):
    try:

        class Mine(Scheme, name="mine"):
            source, out_of_range = "me", ("extrapolate",)

            def forward(self, context):
                return Terms()

        model = tiny_model(RelPosBertModel, "mine")
        with pytest.warns(UserWarning, match="'mine'"):
            model.save_pretrained(tmp_path)
        assert saved_map(tmp_path) is None and not saved_code(tmp_path)
        assert isinstance(RelPosBertModel.from_pretrained(tmp_path), RelPosBertModel)
    finally:
        SCHEMES.pop("mine", None)


# What is loaded elsewhere ----------------------------------------------------------------------------------------


JOBS = """
import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file


def compute(model, job, inputs):
    # what a job asks for, by name
    for name, value in job.get("set", {}).items():
        setattr(model.config, name, value)
    model = model.eval().to(getattr(torch, job.get("dtype", "float32")))
    kind = job.get("kind", "forward")
    if kind == "generate":
        made = model.generate(**inputs, max_new_tokens=5, do_sample=False, return_dict_in_generate=True,
                              output_logits=True, pad_token_id=0, eos_token_id=None)
        return {"tokens": made.sequences, "logits": torch.stack(made.logits)}
    if kind == "memory":
        first = model(**inputs)
        second = model(**inputs, memory=first.memory)
        return {"first": first[0], "output": second[0]}
    if kind == "weights":
        output = model(**inputs, output_attentions=True)
        return {"output": output[0], **{str(n): each for n, each in enumerate(output.attentions)}}
    output = model(**inputs)[0]
    results = {"output": output}
    if kind in ("gradients", "train"):
        torch.manual_seed(1)
        (output * torch.randn(output.shape, dtype=torch.float64).to(output.dtype)).sum().backward()
        results |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if kind == "train":
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
        results = {"output": model(**inputs)[0]}
    return results


def run(model, job):
    with torch.set_grad_enabled(job.get("kind") in ("gradients", "train")):
        results = compute(model, job, load_file(job["inputs"]))
    return {name: tensor.detach().contiguous().clone() for name, tensor in results.items()}
"""

LOADED_THERE = """
torch.set_num_threads(1)
jobs = json.loads(Path(sys.argv[1]).read_text())
for job in jobs:
    auto = getattr(transformers, job["auto"])
    try:
        auto.from_pretrained(job["load"], trust_remote_code=False)
    except ValueError:
        pass
    else:
        raise SystemExit("loaded without its code")
    model, info = auto.from_pretrained(job["load"], trust_remote_code=True, output_loading_info=True)
    module = type(model).__module__
    assert module.startswith("transformers_modules."), module
    assert not info["mismatched_keys"] and not info["error_msgs"], info
    assert all(key.startswith("pooler.") for key in info["missing_keys"]), info  # a masked LM has none
    save_file(run(model, job), job["output"])
    if job.get("save"):
        model.save_pretrained(job["save"])
print("done", len(jobs))
"""


def run_elsewhere(jobs: list[dict], folder: Path) -> list[dict[str, torch.Tensor]]:
    """Load, run and save in one process that cannot import hf_relpos.

    Args:
        jobs: each with auto, load (a folder) and inputs (a file), and optionally kind, dtype, set (fields of the
            configuration) and save (another folder), in the order in which they are done.

    Returns:
        Results of each job, in their order.
    """
    folder.mkdir(exist_ok=True)
    for place, job in enumerate(jobs):
        job["output"] = str(folder / f"{place}.safetensors")
    (folder / "jobs.json").write_text(json.dumps(jobs, default=str))
    printed = run_without_package(JOBS + LOADED_THERE, folder, str(folder / "jobs.json"))
    assert printed.splitlines()[-1] == f"done {len(jobs)}"
    return [load_file(job["output"]) for job in jobs]


run_here: dict = {}
exec(JOBS, run_here)


def check_jobs(jobs: list[dict], folder: Path) -> None:
    """Every job has the same results elsewhere and here."""
    found = run_elsewhere(jobs, folder)
    for job, there in zip(jobs, found, strict=True):
        model = HEADS[job["auto"]].from_pretrained(job["load"])
        here = run_here["run"](model, job)
        most = 1e-12 if job.get("dtype") == "float64" else 1e-5
        assert here.keys() == there.keys(), job
        for name, expected in here.items():
            scale = max(1.0, float(expected.abs().max())) if expected.is_floating_point() else 1.0
            assert expected.shape == there[name].shape, (job, name)
            assert (expected - there[name]).abs().max() <= most * scale, (job, name)


def write_inputs(folder: Path, scheme: str | list[str], name: str = "padded", **more: torch.Tensor) -> Path:
    """Two rows of 9 tokens, of which the second ends earlier, or what `more` says instead."""
    real = padding([9, 5], 9)
    inputs = {"input_ids": torch.randint(1, 50, (2, 9)) * real, "attention_mask": real.long()}
    if isinstance(scheme, str):
        inputs |= {key: tensor.contiguous() for key, tensor in extra_inputs(scheme, 2, 9).items()}
    file = folder / f"inputs-{name_of(scheme)}-{name}.safetensors"
    save_file({**inputs, **more} if name != "ids" else {"input_ids": inputs["input_ids"].clamp(min=1)}, file)
    return file


@pytest.mark.heavy
def test_every_scheme_runs_without_the_package(tmp_path):
    """Saved here, loaded there, saved there, loaded there and here; and in float64, and under a window."""
    jobs = []
    for scheme in [*chosen(SCHEMES), COMBINATION]:
        name = name_of(scheme)
        model = tiny_model(RelPosBertForMaskedLM, scheme, position_options=LAYERED if scheme == "rope" else None)
        first, second, third = (tmp_path / f"{name}-{number}" for number in (1, 2, 3))
        model.save_pretrained(first)
        file = write_inputs(tmp_path, scheme)
        masked = {"auto": "AutoModelForMaskedLM", "inputs": file}
        jobs += [
            {**masked, "load": first, "save": second},
            {**masked, "load": second, "save": third, "dtype": "float64"},
            {**masked, "load": first, "kind": "gradients", "dtype": "float64"},
            {**masked, "load": first, "set": {"attention_window": 2}, "dtype": "float64"},
            {"auto": "AutoModel", "inputs": file, "load": first},
        ]
    check_jobs(jobs, tmp_path / "run")
    for job in jobs:
        if "save" in job:
            assert saved_code(job["save"]) == FILES and saved_map(job["save"]) == AUTO_MAP
            code = {name: (job["load"] / name).read_bytes() for name in FILES}
            assert {name: (job["save"] / name).read_bytes() for name in FILES} == code


REPRESENTATIVES = ["relative_key_query", "tables", "transformer_xl", "deberta", "t5", "rope", "harmonic"]


@pytest.mark.heavy
def test_features_run_without_the_package(tmp_path):
    """Packed rows, caches, memories, windows, attention weights and training."""
    jobs = []
    for scheme in REPRESENTATIVES:
        folder = tmp_path / scheme
        folder.mkdir()
        tiny_model(RelPosBertModel, scheme).save_pretrained(folder / "model")
        tiny_model(RelPosBertLMHeadModel, scheme, is_decoder=True).save_pretrained(folder / "decoder")
        tiny_model(RelPosBertModel, scheme, feed_forward_type="glu", embedding_size=8).save_pretrained(folder / "glu")
        tiny_model(RelPosBertModel, scheme, conv_kernel_size=3).save_pretrained(folder / "convolution")
        padded = write_inputs(folder, scheme)
        starts = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6]])
        packed = write_inputs(folder, scheme, "packed", position_ids=starts, attention_mask=torch.ones(2, 9).long())
        encoder = {"auto": "AutoModel", "load": folder / "model", "dtype": "float64"}
        jobs += [
            {**encoder, "inputs": packed},
            {**encoder, "inputs": padded, "set": {"attention_window": 2, "global_tokens": [0, 3]}},
            {**encoder, "inputs": packed, "set": {"attention_window": 1}},
            {**encoder, "inputs": padded, "load": folder / "convolution"},
            {**encoder, "inputs": padded, "load": folder / "glu"},
            {**encoder, "inputs": padded, "set": {"_attn_implementation": "eager"}, "kind": "weights"},
            {**encoder, "inputs": padded, "kind": "train"},
        ]
        decoder = {"auto": "AutoModelForCausalLM", "load": folder / "decoder", "dtype": "float64"}
        ids = write_inputs(folder, scheme, "ids")
        jobs += [
            {**decoder, "inputs": ids, "kind": "generate"},
            {**decoder, "inputs": ids, "kind": "generate", "set": {"attention_window": 2}},
            {**decoder, "inputs": ids, "kind": "gradients"},
        ]
        if SCHEMES[scheme].memory_unsupported_reason(SCHEMES[scheme].defaults()) is None:
            tiny_model(RelPosBertModel, scheme, memory_length=6).save_pretrained(folder / "memory")
            memory = {**encoder, "load": folder / "memory", "kind": "memory"}
            window = {"attention_window": 2, "global_tokens": []}
            jobs += [{**memory, "inputs": padded}, {**memory, "inputs": ids, "set": window}]
    check_jobs(jobs, tmp_path / "run")


CHANGED = """
import torch
from transformers import AutoModel

model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
try:
    model(torch.ones(1, 5, dtype=torch.long), attention_masks=None)
except TypeError as error:
    print(error)
model.config.memory_length = 4
print(model(torch.ones(1, 5, dtype=torch.long)).memory.length)
print(type(model.config)().position_embedding_type)
try:
    AutoModel.from_pretrained(sys.argv[1], position_embedding_type="transformer_xl", trust_remote_code=True)
except ValueError as error:
    print(" ".join(str(error).split()))
"""


def test_what_the_code_lacks(tmp_path):
    """An unknown keyword and another scheme are refused by name; a field changed after loading has its code."""
    tiny_model(RelPosBertModel, "shaw").save_pretrained(tmp_path / "model")
    keyword, memory, default, scheme = run_without_package(CHANGED, tmp_path, str(tmp_path / "model")).splitlines()
    assert "did you mean 'attention_mask'?" in keyword
    assert memory == "4"
    assert default == "shaw"
    assert "position_embedding_type" in scheme and "known schemes: shaw;" in scheme and "pip install" in scheme
