"""Pictures of schemes: the numbers behind them, and that every scheme has one."""

import logging
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from oracles import tiny_model
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, BertTokenizer
from typer.testing import CliRunner

from hf_relpos import SCHEMES, RelPosBertForMaskedLM, RelPosBertModel
from hf_relpos.cli import app
from hf_relpos.evaluation.plot import fidelity_figure, plot_checkpoint, plot_model, save_figure
from hf_relpos.evaluation.position_scores import offset_curves, record_calls, score_map
from hf_relpos.extras import PACKAGES


R = torch.arange(16) - torch.arange(16)[:, None]  # j − i, L = P = 16


def calls_of(scheme, **settings):
    return record_calls(tiny_model(RelPosBertModel, scheme, **settings))[0]


def test_alibi_is_a_cone():
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])
    call = calls_of("alibi", num_attention_heads=4)[0]
    assert (score_map(call) + slopes[:, None, None] * R.abs()).abs().max() <= 1e-6


def test_tables_are_shown_for_the_mean_query():
    model = tiny_model(RelPosBertModel, "shaw", position_options={"clip": 3})
    call = record_calls(model)[0][1]
    rows = model.encoder.layer[1].attention.self.distance_embedding.key[R.clamp(-3, 3) + 3]  # (L, L, d)
    expected = torch.einsum("hd,ijd->hij", call.query.mean((0, 2)), rows) / 8**0.5
    assert (score_map(call) - expected).abs().max() <= 1e-6


def test_rotation_favours_the_same_place():
    added = score_map(calls_of("rope")[0])[0]
    cosines = torch.cos(R[..., None] * 10000.0 ** -(torch.arange(4) / 4)).mean(-1)
    assert (added - (cosines - 1) / 8**0.5).abs().max() <= 1e-6


def test_a_gain_of_one_adds_nothing():
    model = tiny_model(RelPosBertModel, "huang_m1")
    for parameter in model.encoder.layer[0].attention.self.distance_embedding.parameters():
        torch.nn.init.ones_(parameter)
    assert score_map(record_calls(model)[0][0]).abs().max() <= 1e-6


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_hidden_keys(direction):
    added = score_map(calls_of("disan", position_options={"direction": direction})[0])
    hidden = added.isnan()
    assert not added[~hidden].any()
    assert hidden[0].equal(R >= 0) != hidden[0].equal(R <= 0)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_has_a_picture(name):
    """A panel and its scale for what is added to the scores, and for what is added to the input."""
    model = tiny_model(RelPosBertModel, name)
    calls, added = record_calls(model)
    curves = offset_curves(calls)
    assert curves.shape == (2, 3, 16) and not curves.isinf().any()
    panels = bool(curves.any()) + (added is not None)
    figure = plot_model(model)
    assert name in figure.get_suptitle() and panels >= 1 and len(figure.axes) == 2 * panels


def test_input_vectors():
    image = plot_model(tiny_model(RelPosBertModel, "sinusoidal")).axes[0].images[0].get_array()
    assert abs(image.diagonal() - 1).max() <= 1e-6 and abs(image - image.T).max() <= 1e-6
    assert image[0, 1] > image[0, 8]
    hybrid = tiny_model(RelPosBertModel, ["relative_key", "alibi"], absolute_position_embeddings=True)
    assert len(plot_model(hybrid).axes) == 4


def test_leaves_the_model_as_it_was():
    model = tiny_model(RelPosBertForMaskedLM, "t5").train()
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    first, again = (offset_curves(record_calls(model)[0]) for _ in range(2))
    assert model.training and first.equal(again)
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


def test_checkpoint(tmp_path, monkeypatch):
    tiny_model(RelPosBertForMaskedLM, "relative_key").save_pretrained(tmp_path / "model")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("the cat sat the cat " * 9)
    out = plot_checkpoint(tmp_path / "model", tmp_path / "a.png", text=tmp_path / "text.txt")
    assert out.read_bytes().startswith(b"\x89PNG")
    monkeypatch.chdir(tmp_path)
    assert plot_checkpoint("model").name == "model.png"
    (tmp_path / "text.txt").write_text(" ")
    with pytest.raises(ValueError, match=r"text.txt: the tokenizer finds no tokens"):
        plot_checkpoint("model", text="text.txt")


def test_what_cannot_be_drawn_or_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--out .*a\.foo: no picture ends in '\.foo'; use \.png"):
        plot_checkpoint(tmp_path, tmp_path / "a.foo")
    with pytest.raises(ValueError, match=r"--out .*its folder does not"):
        plot_checkpoint(tmp_path, tmp_path / "file" / "a.png")
    with pytest.raises(ValueError, match=r"has no config\.json, so this is not a checkpoint folder"):
        plot_checkpoint(tmp_path, tmp_path / "a.png")
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 24}
    BertModel(BertConfig(**sizes)).save_pretrained(tmp_path / "stock")
    with pytest.raises(ValueError, match="model_type = 'bert': only models"):
        plot_checkpoint(tmp_path / "stock", tmp_path / "a.png")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "stock"}


def test_the_command_says_where_it_wrote(tmp_path, caplog):
    """And nothing of a head of the model that it has no use for."""
    tiny_model(RelPosBertForMaskedLM, "alibi").save_pretrained(tmp_path / "model")
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        result = CliRunner().invoke(app, ["plot", str(tmp_path / "model"), "--out", str(tmp_path / "a.png")])
    finally:
        logger.removeHandler(caplog.handler)
    assert result.exit_code == 0 and not caplog.records
    assert result.stderr in ("", "drawing …\n")  # what a slow machine is doing
    assert result.stdout.replace("\n", "") == f"written to {tmp_path / 'a.png'}"


def test_a_file_without_some_weights(tmp_path):
    tiny_model(RelPosBertModel, "t5").save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    save_file({name: t for name, t in load_file(path).items() if "intermediate" not in name}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"model: the weights lack .*intermediate"):
        plot_checkpoint(tmp_path / "model", tmp_path / "a.png")


def test_a_row_for_every_head():
    model = tiny_model(RelPosBertModel, "tables", position_options={"terms": "c"})
    curves = offset_curves(record_calls(model)[0])
    r = torch.arange(16) - 8
    for layer, block in enumerate(model.encoder.layer):
        scheme = block.attention.self.distance_embedding
        assert (curves[layer] - scheme.expand(scheme.c, r) / 8**0.5).abs().max() < 1e-6
    image = plot_model(model).axes[0].images[0]
    assert image.get_array().shape == (6, 16)  # layers times heads, offsets
    assert abs(image.get_array().mean(1)).max() < 1e-6
    assert tuple(image.get_extent()) == (-8.5, 7.5, 5.5, -0.5)


def test_fidelity_by_length(tmp_path):
    entry = {"token_cosine": 0.9, "sentence_cosine": 0.95, "ceiling": {"token_cosine": 0.98, "sentence_cosine": 0.99}}
    past = {**entry, "length": 128, "ceiling": None}
    report = {"teacher_limit": 64, "lengths": [{**entry, "length": 16}, past], "as_it_is": {"lengths": [past]}}
    figure = fidelity_figure(report)
    drawn = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines}
    assert drawn["tokens"] == [[16, 0.9], [128, 0.9]] and drawn["tokens, teacher shifted"] == [[16, 0.98]]
    assert drawn["sentence vectors, as it is"] == [[128, 0.95]]
    assert save_figure(figure, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="the report holds no lengths"):
        fidelity_figure({"lengths": []})


def test_what_an_extra_installs_is_what_is_said():
    """A command that works wherever the package came from, as the extra says it."""
    extras = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))
    extras = extras["project"]["optional-dependencies"]
    for name, said in PACKAGES.items():
        lines = [line.partition(";")[0] for line in extras[name]]
        lines = [more for line in lines for more in (extras["plot"] if line == "hf-relpos[plot]" else [line])]
        assert shlex.split(said) == lines


def test_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'matplotlib>=3\.8'"):
        plot_model(tiny_model(RelPosBertModel, "alibi"))
