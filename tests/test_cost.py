"""What attention costs: counts of work, and `hf-relpos doctor --model`."""

import pytest
import torch
from errors import raises
from oracles import tiny_config
from torch import nn
from typer.testing import CliRunner

import hf_relpos
from hf_relpos import SCHEMES, RelPosBertConfig, RelPosBertModel
from hf_relpos.cli import app
from hf_relpos.conversion.cost import (
    CountWork,
    measure_rates,
    model_costs,
    predicted,
    read_configuration,
    with_scheme,
    with_window,
)


def counted(run):
    with CountWork() as counting:
        run()
    return counting.work


def test_products_are_counted_in_multiplications():
    one, other, out = torch.ones(5, 7), torch.ones(7, 3), torch.zeros(5, 3)
    assert counted(lambda: one @ other) == {"calls": 1, "linear": 5 * 7 * 3}
    assert counted(lambda: nn.functional.linear(one, other.T, torch.ones(3)))["linear"] == 5 * 7 * 3
    assert counted(lambda: out.addmm_(one, other))["products"] == 5 * 7 * 3
    batched = torch.ones(2, 5, 7), torch.ones(2, 7, 3)
    for run in (lambda: torch.bmm(*batched), lambda: torch.zeros(2, 5, 3).baddbmm_(*batched)):
        assert counted(run)["products"] == 2 * 5 * 7 * 3
    vectors = torch.ones(2, 4, 6, 8)
    attention = counted(lambda: nn.functional.scaled_dot_product_attention(vectors, vectors, vectors))
    assert attention["fused"] == 2 * (2 * 4 * 6 * 6 * 8)


def test_the_rest_is_counted_in_bytes_and_entries():
    small, large = torch.ones(1 << 10), torch.ones(1 << 20)
    assert counted(lambda: small + small) == {"calls": 1, "cached": 3 * small.nbytes}
    assert counted(lambda: large.add_(1)) == {"calls": 1, "memory": 2 * large.nbytes}
    index = torch.zeros(3, dtype=torch.long)
    assert counted(lambda: small[index]) == {"calls": 1, "indexed": 3}
    assert counted(lambda: small.softmax(0)) == {"calls": 1, "transcendental": 1 << 10}
    assert not counted(lambda: small.view(2, -1).transpose(0, 1))


def test_a_prediction_is_the_sum_of_work_over_rates():
    assert predicted({"linear": 6, "calls": 2}, {"linear": 3, "calls": 4, "memory": 1}) == 2.5
    rates = measure_rates(tiny_config("shaw"), 1, 16, torch.device("cpu"), torch.float32)
    assert predicted(dict.fromkeys(rates, 1), rates) > 0


def test_every_scheme_has_its_costs():
    """The work of a scheme is that of its own terms: more than that of absolute attention, on every backend."""
    config = tiny_config("relative_key", num_hidden_layers=1)
    costs = model_costs(config, 12, batch=2, schemes=[name for name in SCHEMES if name != "absolute"], rounds=1)
    assert [(cost.scheme, cost.backend) for cost in costs[:2]] == [("absolute", "sdpa"), ("relative_key", "relpos")]
    assert {cost.scheme for cost in costs} == set(SCHEMES)
    for cost in costs:
        assert 0 < cost.attention <= cost.model and 0 < cost.predicted_attention <= cost.predicted_model
    added = [cost for cost in costs[1:] if cost.scheme not in ("cape", "sinusoidal")]
    assert all(cost.predicted_attention >= costs[0].predicted_attention for cost in added)


def test_one_backend_on_request():
    costs = model_costs(tiny_config("shaw"), 8, backends=["eager"], rounds=1)
    assert [cost.backend for cost in costs] == ["sdpa", "eager"]
    with raises(ValueError, "'flash_attention_2'", "'shaw'", "relpos"):
        model_costs(tiny_config("shaw"), 8, backends=["flash_attention_2"])


def work_of(length, window):
    config = tiny_config("shaw", attention_window=window, num_hidden_layers=1, max_position_embeddings=length)
    model = RelPosBertModel(config).eval()
    ids = torch.zeros(2, length, dtype=torch.long)
    with torch.no_grad():
        return counted(lambda: model(ids))


def test_work_under_a_window_grows_with_the_length():
    """Twice the tokens are twice the products under a window, and four times without one."""
    short, long = (work_of(length, 16)["products"] for length in (1024, 2048))
    assert 1.8 * short < long < 2.2 * short
    assert work_of(2048, None)["products"] > 4 * long


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
    rows = [line.split()[:2] for line in result.output.splitlines() if "(" in line]
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
