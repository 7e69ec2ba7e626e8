"""BERT checkpoints of Transformers ≤ 4.57 with relative positions: our heads read them and give the old outputs.

Folders and their contents are described in tests/fixtures/README.md.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from errors import raises
from folders import edit
from launching import run_code
from oracles import tiny_sizes
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    RobertaConfig,
    RobertaModel,
    T5Config,
)

import hf_relpos
from hf_relpos import RelPosBertConfig, RelPosBertForMaskedLM, RelPosBertModel, patch_transformers
from hf_relpos.demo import CHECKPOINT
from hf_relpos.models.modeling_relpos_bert import HEADS


LEGACY = Path(__file__).parent / "fixtures" / "legacy"
FOLDERS = sorted(path for path in LEGACY.glob("*/*") if path.is_dir())
DECODERS = [path for path in FOLDERS if "LMHead" in path.name]
KINDS = ["relative_key", "relative_key_query"]
TOLERANCE = {"rtol": 0.0, "atol": 1e-5}


def name_of(folder: Path) -> str:
    """Readable test ids."""
    return f"{folder.parent.name}/{folder.name}"


def stock_name(folder: Path) -> str:
    """The BERT class that wrote the folder."""
    return folder.name.partition("-")[0]


def our_class(folder: Path) -> type:
    """Its counterpart here."""
    return getattr(hf_relpos, f"RelPos{stock_name(folder)}")


def read(file: Path) -> tuple[dict, dict]:
    """Arguments of the old call (inputs and labels), and its outputs by flat names such as `hidden_states.0`."""
    parts = {"input": {}, "label": {}, "output": {}}
    for name, tensor in load_file(file).items():
        part, _, rest = name.partition(".")
        parts[part][rest] = tensor
    return {**parts["input"], **parts["label"]}, parts["output"]


@torch.no_grad()
def run(model, arguments: dict) -> dict:
    """Outputs under the flat names of the fixtures, and the attention weights where the backend holds them."""
    if model.config.is_decoder:
        arguments = {"use_cache": False, **arguments}
    detailed = model.config._attn_implementation == "eager"
    flat = {}
    for field, value in model(**arguments, output_hidden_states=True, output_attentions=detailed).items():
        parts = {f"{field}.{n}": part for n, part in enumerate(value)} if isinstance(value, tuple) else {field: value}
        flat.update(parts)
    return flat


def check_old_outputs(model, folder: Path, missing: Sequence[str] = ()) -> None:
    """Everything the old call returned, from every file of the folder, is returned again.

    Args:
        missing: outputs of a head that the model does not have.
    """
    assert not model.training
    for file in sorted(folder.glob("io*.safetensors")):
        arguments, expected = read(file)
        found = run(model, arguments)
        if model.config._attn_implementation != "eager":
            expected = {name: tensor for name, tensor in expected.items() if "attentions" not in name}
        expected = {name: tensor for name, tensor in expected.items() if name.partition(".")[0] not in missing}
        assert len(expected) >= 3 and set(expected) <= set(found)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


def check_same(one: dict, other: dict) -> None:
    """Two results of `run` by the same operations; products may round differently with the alignment in memory."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        message = f"{name}: {{}}".format
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=2e-6, msg=message)


def test_every_head_is_there():
    ours = {head.__name__.removeprefix("RelPos") for head in HEADS.values()}
    for kind in KINDS:
        assert ours <= {folder.name for folder in FOLDERS if folder.parent.name == kind}


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_old_outputs(folder, backend, warnings_heard, recwarn):
    """Loaded without a word."""
    model, info = our_class(folder).from_pretrained(folder, attn_implementation=backend, output_loading_info=True)
    assert not any(info.values()), info
    assert warnings_heard == []
    assert [str(warning.message) for warning in recwarn] == []
    assert model.config._attn_implementation == backend
    assert model.config.position_embedding_type == folder.parent.name
    check_old_outputs(model, folder)


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_saved_in_our_format(folder, tmp_path, warnings_heard):
    model = our_class(folder).from_pretrained(folder)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["position_embedding_type"]) == ("relpos_bert", folder.parent.name)
    assert not any("position_embeddings" in name for name in load_file(tmp_path / "model.safetensors"))

    again, info = our_class(folder).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert warnings_heard == []
    after = again.state_dict()
    assert all(torch.equal(tensor, after.pop(name)) for name, tensor in model.state_dict().items()) and not after
    check_old_outputs(again, folder)


def test_pickled_weights_with_position_ids(tmp_path, warnings_heard):
    """Uploads of 2020 and 2021: a `.bin` file that also holds the buffer of position numbers."""
    folder = LEGACY / "relative_key_query" / "BertForMaskedLM"
    tensors = load_file(folder / "model.safetensors")
    tensors["bert.embeddings.position_ids"] = torch.arange(12)[None]
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    model = RelPosBertForMaskedLM.from_pretrained(tmp_path)
    assert warnings_heard == []
    check_old_outputs(model, folder)


@pytest.mark.parametrize("steps", [[12], [5, 4, 1, 2]], ids=str)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("folder", DECODERS, ids=name_of)
def test_decoder_with_a_cache(folder, backend, steps):
    """The cached calls give what the old full call gave; 4.57.6 itself got them wrong (issue 19045)."""
    model = our_class(folder).from_pretrained(folder, attn_implementation=backend)
    arguments, expected = read(folder / "io.safetensors")
    encoder = {name: arguments[name] for name in arguments if name.startswith("encoder")}
    cache, start, logits = None, 0, []
    for step in steps:
        stop = start + step
        given = {name: arguments[name][:, start:stop] for name in ("input_ids", "token_type_ids")}
        mask = arguments["attention_mask"][:, :stop]
        with torch.no_grad():
            output = model(**given, attention_mask=mask, past_key_values=cache, use_cache=True, **encoder)
        cache, start = output.past_key_values, stop
        logits.append(output.logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), expected["logits"], **TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_lost_by_stock_transformers(kind, tmp_path, warnings_heard):
    """Loaded and saved by stock v5 the configuration still claims what the weights no longer have."""
    BertForMaskedLM.from_pretrained(LEGACY / kind / "BertForMaskedLM").save_pretrained(tmp_path)
    assert any("distance_embedding" in message for message in warnings_heard)  # it would have heard ours
    assert json.loads((tmp_path / "config.json").read_text())["position_embedding_type"] == kind
    for head in (RelPosBertForMaskedLM, RelPosBertModel):
        with pytest.raises(ValueError, match=rf"position_embedding_type = '{kind}'.* lack .*distance_embedding"):
            head.from_pretrained(tmp_path)
    # the way out that the message names
    model = RelPosBertForMaskedLM.from_pretrained(tmp_path, position_embedding_type="shaw")
    assert model.config.position_embedding_type == "shaw"


def test_other_architectures_are_refused(tmp_path):
    T5Config(d_model=24, d_kv=8, num_heads=3, d_ff=32, num_layers=1).save_pretrained(tmp_path / "t5")
    for reader in (RelPosBertConfig, RelPosBertModel):
        with pytest.raises(ValueError, match=r"'t5'.*hf-relpos families"):
            reader.from_pretrained(tmp_path / "t5")


SINUSOIDS = "encoder.layer.0.attention.self.relative_positions_encoding.positions_encoding"
# Fields of config.json, those that are left out, and a buffer in the file.
NEZHA = {
    "class": ({"model_type": "nezha", "architectures": ["NezhaModel"]}, (), False),
    "Huawei's": ({"use_relative_position": True}, ("model_type", "architectures"), True),
    "Huawei's with a type": ({"use_relative_position": True}, (), False),
    "BERT's, with buffers": ({}, (), True),
    "BERT's": ({}, (), False),
}


def nezha_folder(form, folder):
    """A BERT as NEZHA: without tables, in one of the forms above."""
    fields, left_out, buffer = NEZHA[form]
    shutil.copytree(LEGACY / "relative_key" / "BertModel", folder)
    edit(folder, **dict.fromkeys(("position_embedding_type", *left_out)), **fields)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: value for name, value in tensors.items() if "position_emb" not in name and "distance" not in name}
    if buffer:
        tensors[SINUSOIDS] = torch.zeros(9, 8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("form", NEZHA)
def test_from_pretrained_refuses_nezha_with_the_remedy(form, tmp_path):
    source = nezha_folder(form, tmp_path / "source")
    with patch_transformers():
        for load in (RelPosBertModel.from_pretrained, BertModel.from_pretrained, AutoModel.from_pretrained):
            with raises(ValueError, "NEZHA", "hf-relpos convert") as raised:
                load(source)
            assert "config.json says" not in str(raised.value)


@pytest.fixture(scope="module")
def absolute(tmp_path_factory) -> Path:
    """A stock absolute BERT, saved by the Transformers under test; its field reads as 4.57 wrote it."""
    folder = tmp_path_factory.mktemp("absolute")
    torch.manual_seed(0)
    config = BertConfig.from_pretrained(LEGACY / "relative_key" / "BertModel", position_embedding_type="absolute")
    config.initializer_range = 0.2
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("named", [True, False])
def test_absolute_checkpoints(absolute, tmp_path, backend, named, warnings_heard):
    folder = shutil.copytree(absolute, tmp_path / "source")
    assert json.loads((folder / "config.json").read_text())["position_embedding_type"] == "absolute"
    if not named:  # as v5 writes it
        edit(folder, position_embedding_type=None)
    stock = BertModel.from_pretrained(folder, attn_implementation=backend)
    ours = RelPosBertModel.from_pretrained(folder, attn_implementation=backend)
    assert ours.config.position_embedding_type == "absolute"
    assert warnings_heard == []
    arguments, _ = read(LEGACY / "relative_key" / "BertModel" / "io.safetensors")
    check_same(run(ours, arguments), run(stock, arguments))


@pytest.mark.slow
def test_importing_changes_nothing(absolute, tmp_path):
    """Stock classes and Auto classes do what they do in a process without the package, silent mistakes included."""
    legacy = LEGACY / "relative_key" / "BertModel"
    program = """if True:
        import sys
        import torch
        from safetensors.torch import load_file, save_file
        from transformers import AutoModel

        *folders, io, result = sys.argv[1:]
        names = ("input_ids", "attention_mask", "token_type_ids")
        arguments = {name: load_file(io)[f"input.{name}"] for name in names}
        with torch.no_grad():
            states = [AutoModel.from_pretrained(folder)(**arguments).last_hidden_state for folder in folders]
        save_file(dict(zip(folders, states)), result)
        assert "hf_relpos" not in sys.modules
    """
    result = tmp_path / "without.safetensors"
    run_code(program, absolute, legacy, legacy / "io.safetensors", result)
    without = load_file(result)

    arguments, expected = read(legacy / "io.safetensors")
    for folder in (absolute, legacy):
        model = AutoModel.from_pretrained(folder)
        assert type(model) is BertModel
        check_same({"state": run(model, arguments)["last_hidden_state"]}, {"state": without[str(folder)]})
    assert (without[str(legacy)] - expected["last_hidden_state"]).abs().max() > 1e-2
    assert type(AutoModelForMaskedLM.from_pretrained(LEGACY / "relative_key" / "BertForMaskedLM")) is BertForMaskedLM


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stock", ["BertForMaskedLM", "BertModel"])
def test_a_stock_class_warns_of_the_tables_that_it_leaves_out(kind, stock):
    auto = {"BertForMaskedLM": AutoModelForMaskedLM, "BertModel": AutoModel}[stock]
    with pytest.warns(UserWarning, match=f"(?s)distance_embedding.*RelPos{stock}.*patch_transformers") as found:
        model = auto.from_pretrained(LEGACY / kind / stock)
    assert type(model).__name__ == stock and len(found) == 1 and found[0].filename == __file__


def test_a_class_without_one_of_ours_names_the_converter(tmp_path):
    model = RobertaModel(RobertaConfig(**tiny_sizes()))
    table = {"encoder.layer.0.attention.self.distance_embedding.weight": torch.zeros(9, 8)}
    model.save_pretrained(tmp_path, state_dict={**model.state_dict(), **table})
    with pytest.warns(UserWarning, match="hf-relpos convert"):
        RobertaModel.from_pretrained(tmp_path)


def test_no_warning_where_nothing_is_left_out(recwarn):
    """Our classes, the stock ones under the patch, and an absolute checkpoint whose head is new."""
    folder = LEGACY / "relative_key" / "BertForMaskedLM"
    RelPosBertModel.from_pretrained(folder)
    with hf_relpos.patch_transformers():
        AutoModel.from_pretrained(folder)
    BertForSequenceClassification.from_pretrained(CHECKPOINT)
    assert not [each for each in recwarn if "distance_embedding" in str(each.message)]
