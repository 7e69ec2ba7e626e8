"""What attention costs: `hf-relpos doctor --model`."""

import pytest
import torch
from errors import raises
from oracles import tiny_config
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import hf_relpos
from hf_relpos import SCHEMES, RelPosBertConfig, RelPosBertModel
from hf_relpos.cli import app
from hf_relpos.conversion.cost import (
    model_costs,
    read_configuration,
    with_scheme,
    with_window,
)


def test_every_scheme_has_its_costs():
    config = tiny_config("relative_key", num_hidden_layers=1)
    costs = model_costs(config, 12, batch=2, schemes=[name for name in SCHEMES if name != "absolute"], rounds=1)
    assert [(cost.scheme, cost.backend) for cost in costs[:2]] == [("absolute", "sdpa"), ("relative_key", "relpos")]
    assert {cost.scheme for cost in costs} == set(SCHEMES)
    assert all(0 < cost.attention <= cost.model for cost in costs)


def test_one_backend_on_request():
    costs = model_costs(tiny_config("shaw"), 8, backends=["eager"], rounds=1)
    assert [cost.backend for cost in costs] == ["sdpa", "eager"]
    with raises(ValueError, "'flash_attention_2'", "'shaw'", "relpos"):
        model_costs(tiny_config("shaw"), 8, backends=["flash_attention_2"])


def products_of(length, window):
    """Floating-point operations of the attention's products in one forward pass."""
    config = tiny_config("shaw", attention_window=window, num_hidden_layers=1, max_position_embeddings=length)
    model = RelPosBertModel(config).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, length, dtype=torch.long))
    counts = counter.get_flop_counts()["Global"]
    return sum(
        count for operation, count in counts.items() if operation not in (torch.ops.aten.mm, torch.ops.aten.addmm)
    )


def test_work_under_a_window_grows_with_the_length():
    """Twice the tokens are twice the products under a window, and four times without one."""
    short, long = (products_of(length, 16) for length in (1024, 2048))
    assert 1.8 * short < long < 2.2 * short
    assert products_of(2048, None) > 4 * long


@pytest.mark.slow
def test_costs_under_a_window():
    config = tiny_config("shaw", attention_window=4, num_hidden_layers=1)
    costs = model_costs(config, 700, backends=["relpos", "sdpa", "eager"], rounds=1)
    assert [(cost.taken, cost.in_window) for cost in costs] == [
        ("sdpa", True),
        ("chunked", True),
        ("sdpa", True),
        ("eager", False),
    ]
    all_keys = model_costs(with_window(config, 0), 700, backends=["relpos"], rounds=1)
    assert not any(cost.in_window for cost in all_keys)


def test_a_window_on_request():
    config = tiny_config("shaw", attention_window=4, global_tokens=[0, 2])
    wider = with_window(config, 8)
    assert (wider.attention_window, wider.global_tokens) == (8, [0, 2])
    assert with_window(config, 0).attention_window is None
    with raises(ValueError, "attention_window = -1"):
        with_window(config, -1)
    with raises(ValueError, "memory_length = 8", "attention_window = 4", "global_tokens=[]"):
        with_window(tiny_config("transformer_xl", memory_length=8), 4)


def test_configurations_are_read_without_weights(tmp_path):
    RelPosBertConfig(hidden_size=24, position_embedding_type="shaw").save_pretrained(tmp_path)
    assert read_configuration(tmp_path).hidden_size == 24
    config = with_scheme(read_configuration(tmp_path), "tables", 700)
    assert (config.position_embedding_type, config.max_position_embeddings) == ("tables", 700)
    with raises(ValueError, "position_embedding_type = 'shav'", "'shaw'"):
        with_scheme(config, "shav", 8)


@pytest.mark.slow
def test_doctor_compares_with_absolute_positions(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    RelPosBertModel(tiny_config("shaw")).save_pretrained(tmp_path)
    arguments = ["doctor", "--model", str(tmp_path), "--length", "16", "--scheme", "t5"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert hf_relpos.__version__ in result.output and "1 × 16 tokens" in result.output
    rows = [line.split()[:2] for line in result.output.splitlines() if line.strip()]
    assert ["absolute", "sdpa"] in rows and ["shaw", "eager"] in rows and ["t5", "relpos:"] in rows


@pytest.mark.slow
def test_doctor_has_the_window(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    RelPosBertModel(tiny_config("shaw", attention_window=4)).save_pretrained(tmp_path)
    arguments = ["doctor", "--model", str(tmp_path), "--length", "16", "--backend", "relpos"]
    for more, said in ([], "attention_window = 4"), (["--window", "6"], "attention_window = 6"):
        result = CliRunner().invoke(app, [*arguments, *more])
        assert result.exit_code == 0, result.output
        assert said in " ".join(result.output.split()) and "keys" in result.output
    result = CliRunner().invoke(app, [*arguments, "--window", "0"])
    assert result.exit_code == 0 and "attention_window" not in result.output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--scheme", "shaw"], "--scheme shaw compares schemes at the sizes of a model; add --model"),
        (["--backend", "sdpa"], "--backend sdpa measures a model with that backend; add --model"),
        (["--model", "FOLDER", "--scheme", "shav"], "'shav' is unknown"),
        (["--model", "FOLDER/none"], "there is no such folder"),
    ],
)
def test_doctor_says_what_is_wrong(tmp_path, arguments, message):
    RelPosBertModel(tiny_config("shaw")).save_pretrained(tmp_path)
    arguments = [each.replace("FOLDER", str(tmp_path)) for each in arguments]
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())
