"""Checkpoints with random damage: they load with the same numbers, or are refused by name."""

import json
import shutil
import struct

import pytest
import torch
from fuzzing import attempt, examples
from hypothesis import given, strategies as st
from test_fuzz_texts import JSON

from hf_relpos import RelPosBertForMaskedLM
from hf_relpos.conversion import ConversionError, convert
from hf_relpos.evaluation.loading import load_model


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NAMES = st.sampled_from(["../../etc/passwd", "/etc/passwd", "..", ".", "", "a\0b", INDEX, "config.json", "nothing"])
DTYPES = st.sampled_from(["F32", "F16", "BF16", "F64", "I32", "I64", "BOOL", "U8", "F8_E4M3", "F4", "X", ""])
AREA = "files of checkpoints"


@st.composite
def byte_damage(draw):
    """Some bytes cut out of a file and others put in, or its end cut off."""
    start, gone, new = draw(st.floats(0, 1)), draw(st.integers(0, 50)), draw(st.binary(max_size=20))
    ends = draw(st.booleans())

    def spoil(path):
        content = path.read_bytes()
        at = int(start * min(len(content), 4000 if draw_early else len(content)))
        path.write_bytes(content[:at] + (b"" if ends else new + content[at + gone :]))

    draw_early = draw(st.booleans())  # where the header of a safetensors file is
    return spoil


@st.composite
def header_damage(draw):
    """Entries of the header of a safetensors file that are changed, doubled or gone."""
    which, field = draw(st.floats(0, 0.99)), draw(st.sampled_from(["dtype", "shape", "data_offsets", "name", "all"]))
    values = {"dtype": DTYPES, "name": st.text(max_size=5), "all": JSON}
    values["shape"] = st.lists(st.integers(-2, 2**63), max_size=3)
    values["data_offsets"] = st.lists(st.integers(-1, 2**64), min_size=1, max_size=3)
    value = draw(values[field])
    size = draw(st.none() | st.integers(0, 2**64 - 1))

    def spoil(path):
        content = path.read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + length])
        names = [name for name in header if name != "__metadata__"]
        name = names[int(which * len(names))]
        if field == "name":
            header[value] = header.pop(name)
        elif field == "all":
            header[name] = value
        else:
            header[name][field] = value
        changed = json.dumps(header).encode()
        stated = len(changed) if size is None else size
        path.write_bytes(struct.pack("<Q", stated) + changed + content[8 + length :])

    return spoil


@st.composite
def index_damage(draw):
    """An index with another file for a tensor, without one, or with anything in its place."""
    which, file, whole = draw(st.floats(0, 0.99)), draw(st.one_of(NAMES, JSON)), draw(st.integers(0, 4))
    other = draw(JSON)

    def spoil(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        names = sorted(content["weight_map"])
        name = names[int(which * len(names))]
        if whole == 0:
            content = other
        elif whole == 1:
            content["weight_map"] = other
        elif whole == 2:
            del content["weight_map"][name]
        else:
            content["weight_map"][name] = file
        path.write_text(json.dumps(content), encoding="utf-8")

    return spoil


def outputs(model):
    """Of the head, if config.json still names a class with one."""
    with torch.no_grad():
        return model.eval()(torch.arange(6)[None])[0]


def check_loading(folder, checkpoints, whole, kind, exact):
    """Load it in three ways; the numbers are those of the whole checkpoint where nothing of them can have changed."""
    ours = kind == "ours"
    names = str(folder)
    with attempt(AREA, ValueError, names=names):
        found = load_model(folder)
        assert not exact or torch.equal(outputs(found), whole[kind])
        assert outputs(found).isfinite().all()
    if ours:
        with attempt(AREA, ValueError, names=names):
            RelPosBertForMaskedLM.from_pretrained(folder)
    else:
        out = folder.parent / "out"
        shutil.rmtree(out, ignore_errors=True)
        with attempt(AREA, ConversionError, names=names):
            convert(folder, out, position_embedding_type="tables")
            result = outputs(RelPosBertForMaskedLM.from_pretrained(out))
            assert not exact or (result - whole[kind]).abs().max() < 1e-5
            shutil.rmtree(out)
        assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name], "something is left behind"


@pytest.fixture(scope="module")
def whole(checkpoints):
    return {kind: outputs(load_model(checkpoints / kind)) for kind in ("stock", "ours")}


@pytest.mark.parametrize("kind", ["stock", "ours"])
@pytest.mark.parametrize("damage", ["bytes", "header", "config", "index"])
def test_damaged_checkpoints(tmp_path, checkpoints, whole, kind, damage):
    name = {"config": "config.json", "index": INDEX}.get(damage, WEIGHTS)
    spoilt = {"bytes": byte_damage(), "header": header_damage(), "config": byte_damage(), "index": index_damage()}
    source = checkpoints / (f"{kind}-shards" if damage == "index" else kind)

    @examples(few=8, share=0.2)
    @given(spoilt[damage])
    def run(spoil):
        folder = tmp_path / "checkpoint"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        spoil(folder / name)
        check_loading(folder, checkpoints, whole, kind, exact=damage == "index")

    run()
