"""Pictures of schemes: the numbers behind them, and that every scheme has one."""

import logging
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from oracles import tiny_config, tiny_model
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertTokenizer
from typer.testing import CliRunner

from hf_relpos import SCHEMES, RelPosBertForMaskedLM, RelPosBertModel
from hf_relpos.cli import app
from hf_relpos.evaluation.plot import (
    fidelity_figure,
    plot_checkpoint,
    plot_fidelity,
    plot_model,
    plot_scheme,
)
from hf_relpos.evaluation.position_scores import input_map, offset_curves, record_layer, score_map
from hf_relpos.extras import PACKAGES


R = torch.arange(16) - torch.arange(16)[:, None]  # j − i, L = P = 16


def test_alibi_is_a_cone():
    call = record_layer(tiny_config("alibi", num_attention_heads=4))
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])
    assert call.letters == ["c'"]
    assert (score_map(call) + slopes[:, None, None] * R.abs()).abs().max() <= 1e-6


def test_tables_are_shown_for_the_mean_query():
    model = tiny_model(RelPosBertModel, "shaw", position_options={"clip": 3})
    call = record_layer(model, layer=1)
    assert call.letters == ["A", "V"]
    rows = model.encoder.layer[1].attention.self.distance_embedding.key[R.clamp(-3, 3) + 3]  # (L, L, d)
    expected = torch.einsum("hd,ijd->hij", call.query.mean((0, 2)), rows) / 8**0.5
    assert (score_map(call) - expected).abs().max() <= 1e-6


def test_rotation_favours_the_same_place():
    added = score_map(record_layer(tiny_config("rope")))[0]
    cosines = torch.cos(R[..., None] * 10000.0 ** -(torch.arange(4) / 4)).mean(-1)
    assert (added - (cosines - 1) / 8**0.5).abs().max() <= 1e-6


def test_a_gain_of_one_adds_nothing():
    config = tiny_config("huang_m1")
    model = RelPosBertModel(config)
    for parameter in model.encoder.layer[0].attention.self.distance_embedding.parameters():
        torch.nn.init.ones_(parameter)
    assert score_map(record_layer(model)).abs().max() <= 1e-6


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_hidden_keys(direction):
    added = score_map(record_layer(tiny_config("disan", position_options={"direction": direction})))
    hidden = added.isnan()
    assert not added[~hidden].any()
    assert hidden[0].equal(R >= 0) != hidden[0].equal(R <= 0)


def test_input_vectors():
    assert input_map(record_layer(tiny_config("alibi"))) is None
    cosine = input_map(record_layer(tiny_config("sinusoidal")))
    assert (cosine.diagonal() - 1).abs().max() <= 1e-6 and (cosine - cosine.T).abs().max() <= 1e-6
    assert cosine[0, 1] > cosine[0, 8]


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme(name):
    config = tiny_config(name)
    call = record_layer(config)
    assert call.letters
    assert score_map(call).shape == (3, 16, 16) and not score_map(call).isinf().any()
    figure = plot_scheme(config, layer=1, head=2)
    assert name in figure.get_suptitle() and len(figure.axes) >= 3  # map, its scale, curves


def test_combinations_and_hybrids():
    config = tiny_config(["relative_key", "alibi"], absolute_position_embeddings=True)
    assert record_layer(config).letters == ["A", "c'", "input"]
    assert len(plot_scheme(config).axes) == 6


def test_leaves_the_model_as_it_was():
    model = tiny_model(RelPosBertForMaskedLM, "t5").train()
    hooks = [len(module._forward_hooks) for module in model.modules()]
    first, again = record_layer(model), record_layer(model)
    assert model.training and score_map(first).equal(score_map(again))
    assert hooks == [len(module._forward_hooks) for module in model.modules()]
    assert "forward" not in vars(model.bert.encoder.layer[0].attention.self.distance_embedding)


def test_checkpoint(tmp_path, monkeypatch):
    tiny_model(RelPosBertForMaskedLM, "relative_key").save_pretrained(tmp_path / "model")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("the cat sat the cat " * 9)
    out = plot_checkpoint(tmp_path / "model", tmp_path / "a.png", layer=1, head=2, text=tmp_path / "text.txt")
    assert out.read_bytes().startswith(b"\x89PNG")
    monkeypatch.chdir(tmp_path)
    assert plot_checkpoint("model").name == "model-layer0-head0.png"
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
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "kind, arguments, words",
    [
        ("absolute", ["--all"], "'absolute' adds nothing to the score, only vectors to the input; give a layer"),
        ("alibi", ["--all", "--layer", "1"], "--layer 1 with --all, which draws every layer: leave one of them out"),
        ("alibi", ["--all", "--head", "0"], "--head 0 with --all, which draws every head: leave one of them out"),
        ("stock", ["--all"], "model_type = 'bert': only models"),
    ],
)
def test_the_command_refuses(tmp_path, kind, arguments, words):
    if kind == "stock":
        BertConfig().save_pretrained(tmp_path / "model")
    else:
        tiny_model(RelPosBertModel, kind).save_pretrained(tmp_path / "model")
    result = CliRunner().invoke(app, ["plot", str(tmp_path / "model"), "--out", str(tmp_path / "a.png"), *arguments])
    assert result.exit_code == 2 and result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    assert words in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_command_says_where_it_wrote(tmp_path, caplog):
    """And nothing of a head that it has no use for."""
    tiny_model(RelPosBertForMaskedLM, "alibi").save_pretrained(tmp_path / "model")
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        result = CliRunner().invoke(app, ["plot", str(tmp_path / "model"), "--out", str(tmp_path / "a.png"), "--all"])
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


def test_a_whole_model(tmp_path):
    model = tiny_model(RelPosBertModel, "tables", position_options={"terms": "c"})
    curves = offset_curves(model)
    r = torch.arange(16) - 8
    for layer, block in enumerate(model.encoder.layer):
        scheme = block.attention.self.distance_embedding
        assert (curves[layer] - scheme.expand(scheme.c, r) / 8**0.5).abs().max() < 1e-6
    image = plot_model(model).axes[0].images[0]
    assert image.get_array().shape == (6, 16)  # layers times heads, offsets
    assert abs(image.get_array().mean(1)).max() < 1e-6
    assert tuple(image.get_extent()) == (-8.5, 7.5, 5.5, -0.5)
    model.save_pretrained(tmp_path / "model")
    out = plot_checkpoint(tmp_path / "model", tmp_path / "all.png", layer=None)
    assert out.read_bytes().startswith(b"\x89PNG")


def test_fidelity_by_length(tmp_path):
    ceiling = {"token_cosine": 0.98, "sentence_cosine": 0.99}
    entry = {"token_cosine": 0.9, "sentence_cosine": 0.95, "divergence": [0.2, 0.1], "ceiling": ceiling}
    report = {"teacher_limit": 64, "lengths": [{**entry, "length": 16}, {**entry, "length": 64, "ceiling": None}]}
    past = {**entry, "length": 128, "divergence": None, "ceiling": None}
    figure = fidelity_figure({**report, "lengths": [*report["lengths"], past]})
    cosines, divergence = figure.axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in cosines.lines}
    assert drawn["tokens"] == [[16, 0.9], [64, 0.9], [128, 0.9]] and drawn["tokens, teacher shifted"] == [[16, 0.98]]
    assert [line.get_label() for line in divergence.lines] == ["16 tokens", "64 tokens"]
    assert plot_fidelity(report, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert len(fidelity_figure({"lengths": [past]}).axes) == 1
    with pytest.raises(ValueError, match="the report holds no lengths"):
        plot_fidelity({"lengths": []}, tmp_path / "b.png")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_refuses():
    config = tiny_config("alibi")
    with pytest.raises(ValueError, match="layer = 2: the model has layers 0 to 1"):
        plot_scheme(config, layer=2)
    with pytest.raises(ValueError, match="head = -1: the model has heads 0 to 2"):
        plot_scheme(config, head=-1)


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
        plot_scheme(tiny_config("alibi"))
