"""The folder `hf_relpos/models` travels: saved beside the weights, it runs where hf_relpos is not installed."""

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from elsewhere import run_without_package
from oracles import extra_inputs, padding, tiny_model
from safetensors.torch import load_file, save_file
from selection import chosen
from transformers.dynamic_module_utils import get_imports, get_relative_import_files, get_relative_imports

import hf_relpos.models
from hf_relpos import SCHEMES, RelPosBertForMaskedLM, RelPosBertModel
from hf_relpos.models.modeling_relpos_bert import HEADS


ROOM = Path(hf_relpos.models.__file__).parent
FILES = sorted(file for file in ROOM.glob("*.py") if file.name != "__init__.py")
ENTRY = ROOM / "modeling_relpos_bert.py"
CLASSES = {
    "AutoConfig": "configuration_relpos_bert.RelPosBertConfig",
    **{auto: f"modeling_relpos_bert.{head.__name__}" for auto, head in HEADS.items()},
}


# What Transformers' scanner sees ---------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_relative_imports_are_siblings(file):
    """The scanner reads text: a line of a docstring that looks like an import counts."""
    siblings = {sibling.stem for sibling in FILES}
    assert set(get_relative_imports(file)) <= siblings


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_absolute_imports_are_available_everywhere(file):
    everywhere = {"torch", "transformers", "huggingface_hub", "safetensors", *sys.stdlib_module_names}
    assert set(get_imports(file)) <= everywhere


def test_every_file_is_reached():
    """A file that the entry does not reach would stay behind."""
    found = {Path(file).resolve() for file in get_relative_import_files(ENTRY)} | {ENTRY.resolve()}
    assert found == {file.resolve() for file in FILES}
    assert not [path for path in ROOM.iterdir() if path.is_dir() and path.name != "__pycache__"]


# What is saved ---------------------------------------------------------------------------------------------------


def saved_code(folder: Path) -> set[str]:
    return {file.name for file in folder.glob("*.py")}


def saved_map(folder: Path) -> dict | None:
    return json.loads((folder / "config.json").read_text()).get("auto_map")


@pytest.mark.parametrize("auto", HEADS)
def test_code_and_complete_map_are_saved(auto, tmp_path):
    tiny_model(HEADS[auto], "shaw", is_decoder=auto == "AutoModelForCausalLM").save_pretrained(tmp_path)
    assert saved_map(tmp_path) == CLASSES
    assert saved_code(tmp_path) == {file.name for file in FILES}
    assert all((tmp_path / file.name).read_bytes() == file.read_bytes() for file in FILES)


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
            assert saved_map(folder) == CLASSES
            assert saved_code(folder) == {file.name for file in FILES}


def test_map_of_someone_else_is_replaced(tmp_path):
    """A map that points to another repository's code would be loaded instead of ours."""
    model = tiny_model(RelPosBertModel, "shaw")
    model.config.auto_map = {"AutoModel": "someone/else--modeling_x.X"}
    model.save_pretrained(tmp_path)
    assert saved_map(tmp_path) == CLASSES


# What is loaded elsewhere ----------------------------------------------------------------------------------------


ELSEWHERE = """
import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

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
    with torch.no_grad():
        output = model.eval()(**load_file(job["inputs"]))[0]
    save_file({"output": output.contiguous()}, job["output"])
    if job.get("save"):
        model.save_pretrained(job["save"])
print("done", len(jobs))
"""


def run_elsewhere(jobs: list[dict], folder: Path) -> list[torch.Tensor]:
    """Load, run and save in a process that cannot import hf_relpos.

    Args:
        jobs: each with auto, load (a folder) and optionally save (another), in the order in which they are done.

    Returns:
        First output of each job, in their order.
    """
    folder.mkdir(exist_ok=True)
    for place, job in enumerate(jobs):
        job["output"] = str(folder / f"{place}.safetensors")
    (folder / "jobs.json").write_text(json.dumps(jobs, default=str))
    printed = run_without_package(ELSEWHERE, folder, str(folder / "jobs.json"))
    assert printed.splitlines()[-1] == f"done {len(jobs)}"
    return [load_file(job["output"])["output"] for job in jobs]


def write_inputs(folder: Path, name: str = "shaw") -> tuple[dict, Path]:
    real = padding([9, 5], 9)
    inputs = {"input_ids": torch.randint(1, 50, (2, 9)) * real, "attention_mask": real.long()}
    inputs |= {key: tensor.contiguous() for key, tensor in extra_inputs(name, 2, 9).items()}
    save_file(inputs, folder / f"inputs-{name}.safetensors")
    return inputs, folder / f"inputs-{name}.safetensors"


@torch.no_grad()
def first_output(model, inputs):
    return model(**inputs)[0]


def close(one, other):
    return one.shape == other.shape and (one - other).abs().max() <= 1e-6


@pytest.mark.heavy
def test_every_scheme_runs_without_the_package(tmp_path):
    """Saved here, loaded there, saved there, loaded there and here."""
    models = {name: tiny_model(RelPosBertForMaskedLM, name) for name in chosen(SCHEMES)}
    jobs = []
    for name, model in models.items():
        model.save_pretrained(tmp_path / f"{name}-1")
        _, file = write_inputs(tmp_path, name)
        paths = [tmp_path / f"{name}-{number}" for number in (1, 2, 3)]
        jobs += [
            {"auto": "AutoModelForMaskedLM", "load": paths[0], "inputs": file, "save": paths[1]},
            {"auto": "AutoModelForMaskedLM", "load": paths[1], "inputs": file, "save": paths[2]},
            {"auto": "AutoModel", "load": paths[2], "inputs": file},
        ]
    outputs = run_elsewhere(jobs, tmp_path / "run")
    for place, (name, model) in enumerate(models.items()):
        inputs = load_file(tmp_path / f"inputs-{name}.safetensors")
        expected = first_output(model, inputs)
        first, second, bare = outputs[3 * place : 3 * place + 3]
        assert close(first, expected) and close(second, expected), name
        assert close(bare, first_output(model.bert, inputs)), name
        for number in (2, 3):
            folder = tmp_path / f"{name}-{number}"
            assert saved_code(folder) == {file.name for file in FILES}
            assert saved_map(folder) == CLASSES
            assert close(first_output(RelPosBertForMaskedLM.from_pretrained(folder), inputs), expected), name


def test_every_head_runs_without_the_package(tmp_path):
    """Each head, saved here and loaded there by its Auto class."""
    inputs, file = write_inputs(tmp_path)
    choices = {key: tensor[:, None].repeat(1, 2, 1) for key, tensor in inputs.items()}
    save_file(choices, tmp_path / "choices.safetensors")
    models, jobs = {}, []
    for auto, head in HEADS.items():
        models[auto] = tiny_model(head, "relative_key_query", is_decoder=auto == "AutoModelForCausalLM")
        models[auto].save_pretrained(tmp_path / auto)
        read = tmp_path / "choices.safetensors" if auto == "AutoModelForMultipleChoice" else file
        jobs.append({"auto": auto, "load": tmp_path / auto, "inputs": read})
    outputs = run_elsewhere(jobs, tmp_path / "run")
    for (auto, model), output in zip(models.items(), outputs, strict=True):
        assert close(output, first_output(model, choices if auto == "AutoModelForMultipleChoice" else inputs)), auto


def test_code_left_out_does_not_load_elsewhere(tmp_path):
    """The guard of these tests works: without its code the model is unknown there."""
    _, file = write_inputs(tmp_path)
    model = tiny_model(RelPosBertForMaskedLM, "shaw", save_code=False)
    model.save_pretrained(tmp_path / "bare")
    with pytest.raises(AssertionError, match="relpos_bert"):
        run_elsewhere([{"auto": "AutoModelForMaskedLM", "load": tmp_path / "bare", "inputs": file}], tmp_path / "run")
